"""What does copying the growing KV cache cost a decode step, and what is left with room set aside?

Both caches run in turn, round by round, with 1 and with 5 new tokens, which are rolled back; medians of the thread's
CPU time. Prints a table, ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from time import thread_time
from typing import Any

import torch
from tqdm import tqdm
from transformers import DynamicCache

from experiments.common.environment import describe, note_pair
from experiments.common.script import run_script
from spec_stack import PrefillConfig
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.attention import install
from spec_stack.hf.cache import new_cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="target model (default: the embedded pair)")
    parser.add_argument("--draft", help="draft model")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--cached", type=int, nargs="+", default=[256, 1640, 8200], help="tokens in the cache")
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    note_pair(arguments.target, arguments.draft)
    rows: list[dict[str, Any]] = []
    print("median ms       cached   1 token: growing    room   saved   5 tokens: growing    room   saved")
    for precision in arguments.precisions:
        pair = ModelPair.load(
            arguments.target, arguments.draft, precision=precision, draft_precision=precision, device="cpu"
        )
        for role, model in (("target", pair.target), ("draft", pair.draft)):
            install(model)
            for num_cached in arguments.cached:
                times = compare(model, num_cached, arguments.rounds)
                cells = []
                for num in (1, 5):
                    growing, room = times["growing", num], times["room", num]
                    cells.append(f"{growing:19.2f} {room:7.2f} {1 - room / growing:7.1%}")
                print(f"{precision:6s}{role:8s}{num_cached:8d}" + " ".join(cells))
                ms = {f"{name} {num}": value for (name, num), value in times.items()}
                rows.append({"precision": precision, "role": role, "cached": num_cached, "ms": ms})
    print(json.dumps({"experiment": "bench_cache", **describe(), "rows": rows}))


def compare(model: Any, num_cached: int, rounds: int) -> dict[tuple[str, int], float]:
    """Median milliseconds by cache and number of new tokens."""
    prompt = torch.randint(model.config.vocab_size, (1, num_cached), generator=torch.Generator().manual_seed(0))
    caches = {"growing": DynamicCache(config=model.config), "room": new_cache(model.config)}

    def forward(cache: DynamicCache, ids: torch.Tensor, start: int) -> None:
        positions = torch.arange(start, start + ids.shape[1])[None]
        model(ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=ids.shape[1])

    times: dict[tuple[str, int], list[float]] = {(name, num): [] for name in caches for num in (1, 5)}
    with torch.inference_mode():
        for cache in caches.values():
            for start in range(0, num_cached, PrefillConfig.prefill_chunk):
                piece = prompt[:, start : start + PrefillConfig.prefill_chunk]
                model(
                    piece,
                    position_ids=torch.arange(start, start + piece.shape[1])[None],
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
        for _ in tqdm(range(rounds), leave=False):
            for num in (1, 5):
                for name, cache in caches.items():
                    started = thread_time()
                    forward(cache, prompt[:, :num], num_cached)
                    times[name, num].append(thread_time() - started)
                    cache.crop(-num)
    return {key: median(values) * 1e3 for key, values in times.items()}


if __name__ == "__main__":
    run_script(main)
