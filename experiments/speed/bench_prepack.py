"""Cost of a forward of 1 to 17 tokens on a CPU, with plain and with prepacked linear layers.

The ratio that matters is 5 tokens over 1: a verification of four drafted tokens against a plain step. Both variants of
a model run in turn, round by round; medians. Prints a table, ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from statistics import median
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm

from experiments.common.environment import describe, note_pair
from experiments.common.script import run_script
from spec_stack import PrefillConfig
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.attention import install
from spec_stack.hf.model import CachedModel

NUM_TOKENS = (1, 2, 3, 5, 9, 17)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="target model (default: the embedded pair)")
    parser.add_argument("--draft", help="draft model")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--cached", type=int, nargs="+", default=[256, 1640], help="tokens in the cache (%(default)s)")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    note_pair(arguments.target, arguments.draft)
    rows: list[dict[str, Any]] = []
    print("median ms            cached  prefill " + "".join(f"{n:>7d}" for n in NUM_TOKENS) + "   5 over 1")
    for precision in arguments.precisions:
        pairs = {
            packs: ModelPair.load(
                arguments.target,
                arguments.draft,
                precision=precision,
                draft_precision=precision,
                device="cpu",
                prepack_linears=packs,
            )
            for packs in (False, True)
        }
        for role in ("target", "draft"):
            models = {packs: getattr(pair, role) for packs, pair in pairs.items()}
            for num_cached in arguments.cached:
                times: dict[tuple[bool, int], list[float]] = defaultdict(list)
                caches = {}
                vocab = pairs[False].target.config.vocab_size
                prompt = torch.randint(vocab, (num_cached,), generator=torch.Generator().manual_seed(0)).tolist()
                for packs, model in models.items():
                    install(model)
                    caches[packs] = CachedModel(model, PrefillConfig.prefill_chunk)
                    caches[packs].forward(prompt, range(num_cached), 1)
                for turn in tqdm(range(arguments.rounds + 1), leave=False):
                    for packs, model in models.items():
                        fresh = CachedModel(model, PrefillConfig.prefill_chunk)
                        started = perf_counter()
                        if turn % 5 == 0:
                            fresh.forward(prompt, range(num_cached), 1)
                            times[packs, 0].append(perf_counter() - started)
                        for num in NUM_TOKENS:
                            started = perf_counter()
                            caches[packs].forward(prompt[:num], range(num_cached, num_cached + num), num)
                            if turn:
                                times[packs, num].append(perf_counter() - started)
                            caches[packs].rollback(num)
                for packs in models:
                    ms = {num: median(times[packs, num]) * 1e3 for num in (0, *NUM_TOKENS)}
                    row = {"precision": precision, "role": role, "cached": num_cached, "prepacked": packs, "ms": ms}
                    rows.append(row | {"five_over_one": ms[5] / ms[1]})
                    label = f"{precision} {role} {'prepacked' if packs else 'plain'}"
                    cells = "".join(f"{ms[num]:7.2f}" for num in NUM_TOKENS)
                    print(f"{label:22s}{num_cached:5d} {ms[0]:8.1f} {cells} {ms[5] / ms[1]:10.2f}")
    print(json.dumps({"experiment": "bench_prepack", **describe(), "rows": rows}))


if __name__ == "__main__":
    run_script(main)
