"""Does a draft with another tokenizer still find the hidden fact, and what of its drafting is accepted?

The draft is the pair's own, re-tokenized without training (`retokenize.drop_merges`): merges dropped at random
with all that build on them, the ids left shuffled. So it sees the same text in other and more tokens that it
never saw in those places. Same prompts as `retrieval.py`; "kept" counts the prompts whose fact lay wholly inside the
tokens that the target prefilled. Drafting: greedy, gamma 4, over a file of prompts; "same tokens" counts those whose
text is the one that plain decoding gives. Counts, no times. Prints two tables, ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from experiments.common.environment import describe
from experiments.common.prompt_files import read_prompts
from experiments.common.script import run_script
from experiments.quality.retokenize import drop_merges
from experiments.quality.retrieval import ask
from spec_stack import SpecStackGenerator
from spec_stack.cli.demo import hide_fact
from spec_stack.hf.loading import ASSETS

PROMPTS = Path(__file__).parents[1] / "prompts" / "decode.jsonl"


@contextmanager
def draft_folder(draft: Path, tokenizer: Path, drop: float, seed: int) -> Iterator[Path]:
    """The draft itself for drop 0, else a re-tokenized copy that goes when the block ends."""
    if drop == 0:
        yield draft
        return
    with tempfile.TemporaryDirectory() as folder:
        drop_merges(draft, Path(folder), drop, seed, tokenizer)
        yield Path(folder)


def retrieve(generator: SpecStackGenerator, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for num_tokens in arguments.tokens:
        for keep_rate in arguments.keep_rates:
            facts = [hide_fact(generator.tokenizer, num_tokens, seed) for seed in range(arguments.prompts)]
            asked = [ask(generator, fact, keep_rate) for fact in tqdm(facts, desc=f"{num_tokens}", leave=False)]
            right, kept = (sum(column) for column in zip(*asked, strict=True))
            row = {"tokens": num_tokens, "keep_rate": keep_rate, "prompts": len(facts), "right": right, "kept": kept}
            rows.append(row)
    return rows


def draft_tokens(generator: SpecStackGenerator, arguments: argparse.Namespace) -> dict[str, Any]:
    proposed = accepted = same = 0
    prompts = [prompt.encode(generator.tokenizer) for prompt in read_prompts(arguments.decode_prompts)]
    for input_ids in prompts:
        plain, drafted = (
            generator.generate(input_ids=input_ids, max_tokens=arguments.max_tokens, ignore_eos=True, gamma=gamma)
            for gamma in (0, 4)
        )
        proposed += drafted.metrics.num_proposed
        accepted += drafted.metrics.num_accepted
        same += plain.token_ids == drafted.token_ids
    return {"prompts": len(prompts), "proposed": proposed, "accepted": accepted, "same_tokens": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=ASSETS / "target", help="folder (default: the embedded one)")
    parser.add_argument("--draft", type=Path, default=ASSETS / "draft", help="folder of a Llama")
    parser.add_argument(
        "--tokenizer", type=Path, default=ASSETS / "target", help="folder of its tokenizer, a byte-level BPE"
    )
    parser.add_argument("--drop", type=float, nargs="+", default=[0, 0.1, 0.2, 0.33], help="shares of merges to drop")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 4000, 8000], help="document lengths")
    parser.add_argument("--keep-rates", type=float, nargs="+", default=[0.1, 0.2, 0.3])
    parser.add_argument("--prompts", type=int, default=20, help="prompts per length (%(default)s)")
    parser.add_argument("--decode-prompts", type=Path, default=PROMPTS, help="(%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="per drafted text (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the dropped merges (%(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    drafts = []
    for drop in arguments.drop:
        with draft_folder(arguments.draft, arguments.tokenizer, drop, arguments.seed) as folder:
            generator = SpecStackGenerator.from_pretrained(arguments.target, folder, device="cpu", precision="fp32")
            vocabulary = generator.vocabulary
            drafts.append(
                {
                    "drop": drop,
                    "tokenizer": vocabulary.relation,
                    "num_tokens": vocabulary.num_draft,
                    "num_common": len(vocabulary.common) or vocabulary.num_tokens,
                    "retrieval": retrieve(generator, arguments),
                    "drafting": draft_tokens(generator, arguments),
                }
            )
    print("merges dropped  tokens of the draft  prompt tokens  keep_rate  answered right  fact kept whole")
    for draft in drafts:
        for row in draft["retrieval"]:
            print(
                f"{draft['drop']:14.0%}  {draft['num_tokens']:19d}  {row['tokens']:13d}  {row['keep_rate']:9.2f}  "
                f"{row['right']:8d} of {row['prompts']:2d}  {row['kept']:9d} of {row['prompts']:2d}"
            )
    print("\nmerges dropped  common tokens  drafted  accepted  same tokens as plain decoding")
    for draft in drafts:
        row = draft["drafting"]
        print(
            f"{draft['drop']:14.0%}  {draft['num_common']:13d}  {row['proposed']:7d}  "
            f"{row['accepted'] / row['proposed']:8.1%}  {row['same_tokens']:3d} of {row['prompts']:2d}"
        )
    print(json.dumps({"experiment": "cross_tokenizer", **describe(), "seed": arguments.seed, "drafts": drafts}))


if __name__ == "__main__":
    run_script(main)
