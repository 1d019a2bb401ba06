"""`python -m tests.goldens.seconds` prints the processor seconds of ten fixed prompts, to compare before and after.

Each is the least of several runs, so that two runs of the same tree agree within 3 % on a quiet core.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import process_time
from typing import Any

import torch

from tests.goldens.test_goldens import (
    CHAT,
    CODE,
    DENSE,
    DRAFT_BUDGET,
    DRAFT_MODEL,
    DRAFT_ONLY,
    NGRAM,
    SPARSE,
    document,
    generator,
    long_chat,
)

REPEATS = 7


def runs() -> dict[str, Callable[[], Any]]:
    plain, budget = generator(), generator(**DRAFT_BUDGET)
    text: dict[str, Any] = {"max_tokens": 96, "ignore_eos": True}
    long: dict[str, Any] = {"messages": long_chat(), "max_tokens": 48, "ignore_eos": True}
    fixed: dict[str, Any] = {"gamma": 4, **DRAFT_MODEL}
    return {
        "plain decoding": lambda: plain.generate(CODE, gamma=0, **text, **DENSE),
        "fixed gamma": lambda: plain.generate(CODE, **fixed, **text, **DENSE),
        "default policy": lambda: plain.generate(CODE, **text, **DENSE),
        "default policy, chat": lambda: plain.generate(messages=CHAT, **text, **DENSE),
        "n-gram lookup": lambda: plain.generate(document(8), gamma=6, **text, **NGRAM, **DENSE),
        "sampled": lambda: plain.generate(CODE, temperature=0.9, top_p=0.9, seed=3, **text, **DENSE),
        "long, dense": lambda: plain.generate(**long, **fixed, **DENSE),
        "long, sparse": lambda: plain.generate(**long, **fixed, **SPARSE),
        "long, sparse, default policy": lambda: plain.generate(**long, **SPARSE),
        "long, draft budget": lambda: budget.generate(**long, **fixed, **DRAFT_ONLY),
    }


def seconds_of(run: Callable[[], Any]) -> float:
    begin = process_time()
    run()
    return process_time() - begin


def main(repeats: int) -> None:
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {}
    for _ in range(repeats + 1):
        for name, run in runs().items():
            seconds.setdefault(name, []).append(seconds_of(run))
    # The first run of each warms up.
    least = {name: min(values[1:]) for name, values in seconds.items()}
    for name, value in least.items():
        print(f"{value:7.3f} s  {name}")
    print(f"{sum(least.values()):7.3f} s  together")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else REPEATS)
