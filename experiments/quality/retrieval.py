"""Does the target still find a hidden fact when it prefills only a share of the prompt?

Seeded prompts: the first tokens of a large standard-library module, one fact on a line of its own at a random
depth, a question about it at the end (as in the demo). For every length the target answers densely and at every
keep_rate; "kept" counts the prompts whose fact lay wholly inside the tokens the draft chose, and "chance" is what a
random choice of as many chunks would have kept. Greedy. Prints a table, ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from tqdm import tqdm

from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.script import run_script
from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.cli.demo import HiddenFact, hide_fact
from spec_stack.hf.prompt import encode_messages


def fact_span(generator: SpecStackGenerator, fact: HiddenFact) -> tuple[int, int]:
    """Token span of the fact's line in the encoded prompt, half open."""
    text = generator.tokenizer.apply_chat_template(fact.messages, tokenize=False, add_generation_prompt=True)
    offsets = generator.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
    end = text.index(f"is {fact.answer}.") + len(f"is {fact.answer}.")
    start = text.rindex("\n", 0, end) + 1
    inside = [index for index, (first, last) in enumerate(offsets) if first < end and last > start]
    return inside[0], inside[-1] + 1


def ask(generator: SpecStackGenerator, fact: HiddenFact, keep_rate: float) -> tuple[bool, bool]:
    """Return whether the answer was right, and whether the target prefilled the whole fact."""
    read: set[int] = set()
    handle = generator.target.register_forward_pre_hook(
        lambda module, args, kwargs: read.update(kwargs["position_ids"][0].tolist()), with_kwargs=True
    )
    result = generator.generate(messages=fact.messages, max_tokens=32, keep_rate=keep_rate, specprefill=True)
    handle.remove()
    start, stop = fact_span(generator, fact)
    return fact.is_answered_by(result.text), read >= set(range(start, stop))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser, threads=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8200], help="document lengths (%(default)s)")
    parser.add_argument("--keep-rates", type=float, nargs="+", default=[0.1, 0.2, 0.3])
    parser.add_argument("--look-ahead", type=int, default=PrefillConfig.look_ahead)
    parser.add_argument("--prompts", type=int, default=20, help="prompts per length (%(default)s)")
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    generator = load_generator(arguments, SpecStackConfig(PrefillConfig(look_ahead=arguments.look_ahead)))
    rows: list[dict[str, Any]] = []
    for num_tokens in arguments.tokens:
        right: dict[float, int] = dict.fromkeys([1.0, *arguments.keep_rates], 0)
        kept: dict[float, int] = dict.fromkeys(right, 0)
        chance: dict[float, float] = dict.fromkeys(right, 0.0)
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.prompts)
        for seed in tqdm(seeds, desc=f"{num_tokens} tokens", leave=False):
            fact = hide_fact(generator.tokenizer, num_tokens, seed)
            start, stop = fact_span(generator, fact)
            num_prompt = len(encode_messages(generator.tokenizer, fact.messages)[0])
            size = PrefillConfig.chunk_size
            num_chunks, touched = math.ceil(num_prompt / size), (stop - 1) // size - start // size + 1
            for keep_rate in right:
                answered, read = ask(generator, fact, keep_rate)
                right[keep_rate] += answered
                kept[keep_rate] += read
                chosen = max(math.ceil(keep_rate * num_chunks), touched)
                chance[keep_rate] += math.comb(num_chunks - touched, chosen - touched) / math.comb(num_chunks, chosen)
        for keep_rate in right:
            rows.append(
                {
                    "tokens": num_tokens,
                    "keep_rate": keep_rate,
                    "prompts": arguments.prompts,
                    "right": right[keep_rate],
                    "kept": kept[keep_rate],
                    "chance": chance[keep_rate],
                }
            )
    print("tokens  keep_rate  answered right  fact kept whole  kept by chance")
    for row in rows:
        label = "dense" if row["keep_rate"] == 1 else f"{row['keep_rate']:.2f}"
        print(
            f"{row['tokens']:6d}  {label:>9s}  {row['right']:8d} of {row['prompts']:2d}  "
            f"{row['kept']:9d} of {row['prompts']:2d}  {row['chance']:14.1f}"
        )
    print(json.dumps({"experiment": "retrieval", **describe(), "look_ahead": arguments.look_ahead, "rows": rows}))


if __name__ == "__main__":
    run_script(main)
