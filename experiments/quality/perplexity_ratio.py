"""Perplexity of a text's next tokens after sparse prefill, over that after dense prefill.

After the table of "SpecPrefill on unified memory": the beginning of a document is prefilled whole or in part, and the
tokens that really follow are scored in one forward. The draft's own look-ahead is all that the selection can go by, as
no question is asked. Prints a row per document, means and medians, ends in one JSON line.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from tqdm import tqdm

from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.quality.held_out_texts import MODULES, read_texts
from spec_stack import PrefillConfig
from spec_stack.decode.propose import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.engine.pair import ModelPair
from spec_stack.prefill.scoring import score_prompt


def perplexity(
    pair: ModelPair, context: list[int], positions: Sequence[int], following: list[int], prefill_chunk: int
) -> float:
    """The perplexity of the tokens that follow a context, some positions of which are prefilled."""
    target = pair.open_target(prefill_chunk)
    later = range(len(context), len(context) + len(following) - 1)
    rows = target.forward([*(context[at] for at in positions), *following[:-1]], [*positions, *later], len(following))
    ids = torch.tensor(following, device=rows.device)
    return math.exp(-float(rows.float().log_softmax(dim=-1).gather(1, ids[:, None]).mean()))


def kept(pair: ModelPair, context: list[int], config: PrefillConfig) -> Sequence[int]:
    """Positions that the selection keeps of a context."""
    tokenization, obstacle = pair.tokenize_for_draft(context)
    if obstacle:
        raise ValueError(obstacle)
    draft = pair.open_draft(config.prefill_chunk, tokenization)
    look_ahead = partial(propose, draft, sampler=Sampler(), end_ids=pair.end_ids)
    return score_prompt(draft, context, look_ahead, config, (), tokenization)[0].positions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--tokens", type=int, default=8192, help="of each context (%(default)s)")
    parser.add_argument("--following", type=int, default=256, help="tokens scored after it (%(default)s)")
    parser.add_argument("--documents", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--keep-rates", type=float, nargs="+", default=[0.1, 0.2, 0.3], help="(%(default)s)")
    parser.add_argument("--texts", type=Path, help="a folder of documents (default: standard library modules)")
    add_out_argument(parser)
    arguments = parser.parse_args()
    generator = load_generator(arguments)
    pair, prefill = generator.pair, generator.config.prefill
    names = MODULES if arguments.texts is None else [f"document {index}" for index in range(arguments.documents)]
    rows: list[dict[str, Any]] = []
    needed = arguments.tokens + arguments.following
    for name, text in zip(names, tqdm(read_texts(arguments.texts), leave=False), strict=False):
        ids = pair.tokenizer(text, verbose=False).input_ids[:needed]
        if len(ids) < needed or len(rows) == arguments.documents:
            continue
        context, following = ids[: arguments.tokens], ids[arguments.tokens :]
        measured = partial(perplexity, pair, context, following=following, prefill_chunk=prefill.prefill_chunk)
        row: dict[str, Any] = {"document": name, "dense": measured(positions=range(len(context)))}
        for rate in arguments.keep_rates:
            row[str(rate)] = measured(positions=kept(pair, context, replace(prefill, keep_rate=rate)))
        rows.append(row)
    if not rows:
        raise ValueError(f"no document has {needed} tokens; lower --tokens")
    summary = {}
    for rate in map(str, arguments.keep_rates):
        ratios = [row[rate] / row["dense"] for row in rows]
        summary[rate] = {"mean_ratio": mean(ratios), "median_ratio": median(ratios)}
        cells = "  ".join(f"{row['document']} {row['dense']:.2f}→{row[rate]:.2f}" for row in rows)
        print(f"keep {rate}: perplexity ×{mean(ratios):.3f} (median {median(ratios):.3f})  {cells}")
    line = {
        "experiment": "perplexity_ratio",
        **describe(),
        "tokens": arguments.tokens,
        "rows": rows,
        "summary": summary,
    }
    print_report(line, arguments.out)


if __name__ == "__main__":
    run_script(main)
