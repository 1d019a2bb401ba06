"""How differently do a block of tokens and single ones round, at each precision?

The target takes the same text twice over the same prompt: token by token, and in blocks of --block tokens, as a
verification does. Shown are the largest difference between the logits, how often the best token differs, and how far
apart the two best logits were where it does: what TIE_TOLERANCE must cover. Prints a table, ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from tqdm import tqdm

from experiments.common.environment import describe
from experiments.common.pair_arguments import add_model_arguments, load_generators
from experiments.common.prompt_files import choose_prompts
from experiments.common.script import run_script
from spec_stack import SpecStackGenerator
from spec_stack.config import PRECISIONS
from spec_stack.hf.model import CachedModel
from spec_stack.hf.precision import TIE_TOLERANCE


def read(generator: SpecStackGenerator, prompt: list[int], text: list[int], block: int) -> torch.Tensor:
    """The target's logits (len(text), vocab) after a prompt, `block` tokens at a time."""
    target = CachedModel(generator.target, generator.config.prefill.prefill_chunk)
    target.forward(prompt, range(len(prompt)), 1)
    rows = []
    for start in range(0, len(text), block):
        tokens = text[start : start + block]
        positions = range(len(prompt) + start, len(prompt) + start + len(tokens))
        rows.append(target.forward(tokens, positions, len(tokens)).float())
    return torch.cat(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", help="TASK=FILE or TASK=FILE:CATEGORY (default: the project's own)")
    add_model_arguments(parser)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["fp32", "bf16", "int8", "nf4"])
    parser.add_argument("--per-task", type=int, default=3, help="prompts per task (%(default)s)")
    parser.add_argument("--max-prompt-tokens", type=int, default=512, help="longer ones lose their middle")
    parser.add_argument("--tokens", type=int, default=60, help="tokens read after each prompt (%(default)s)")
    parser.add_argument("--block", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.tokens < 1 or arguments.block < 1:
        raise ValueError("--tokens and --block must be 1 or more")
    prompts = choose_prompts(arguments.prompts, arguments.per_task)
    rows: dict[str, Any] = {}
    print("       tokens  largest |logit|  largest difference  other best token  largest gap there  tolerance")
    for precision, generator in zip(
        arguments.precisions, load_generators(arguments, arguments.precisions), strict=True
    ):
        largest = difference = gap = 0.0
        num_other = 0
        for prompt in tqdm(prompts, desc=precision, leave=False):
            ids = prompt.encode(generator.tokenizer, arguments.max_prompt_tokens)
            text = generator.generate(
                input_ids=ids, max_tokens=arguments.tokens, gamma=0, sparse_prefill="off", ignore_eos=True
            ).token_ids
            single, block = (read(generator, ids, text, size) for size in (1, arguments.block))
            largest = max(largest, float(single.abs().max()))
            difference = max(difference, float((single - block).abs().max()))
            best, other = single.argmax(-1), block.argmax(-1)
            gaps = (single.gather(1, best[:, None]) - single.gather(1, other[:, None]))[best != other]
            num_other += len(gaps)
            gap = max([gap, *gaps[:, 0].tolist()])
        rows[precision] = {
            "tokens": len(prompts) * arguments.tokens,
            "largest_logit": largest,
            "largest_difference": difference,
            "other_best_token": num_other,
            "largest_gap": gap,
            "tolerance": TIE_TOLERANCE[precision],
        }
        print("{:6s} {:6d} {:16.1f} {:19.2g} {:17d} {:18.3g} {:10.3f}".format(precision, *rows[precision].values()))
    print(json.dumps({"experiment": "block_rounding", **describe(), "block": arguments.block, "rows": rows}))


if __name__ == "__main__":
    run_script(main)
