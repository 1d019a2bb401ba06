"""Requests at a rate, and what the replies of a server at that rate amount to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from time import perf_counter, sleep

import numpy as np

from experiments.serving.client import Answer

PERCENTILES = (50, 90, 99)
GOAL = 0.99
"""Share of the requests that a server must answer in time to carry a rate."""


@dataclass(frozen=True)
class Reply:
    """Seconds are infinite where the request did not get all its tokens."""

    ttft_s: float
    latency_s: float
    is_right: bool


NOT_ANSWERED = Reply(math.inf, math.inf, False)


def arrival_times(rate: float, count: int, seed: int) -> list[float]:
    """Seconds at which requests are sent: at once, then after exponential intervals."""
    intervals = np.random.default_rng(seed).exponential(1 / rate, count - 1)
    return [0.0, *np.cumsum(intervals).tolist()]


def send_all(
    prompts: Sequence[tuple[list[int], str]],
    starts_s: Sequence[float],
    ask: Callable[[list[int]], Answer],
    num_new: int,
    decode: Callable[[Sequence[int]], str],
) -> list[Reply]:
    """Send every prompt at its time, side by side. prompts: token ids, and what a right answer holds."""
    begun = perf_counter()

    def send(prompt: tuple[list[int], str], start_s: float) -> Reply:
        sleep(max(0.0, begun + start_s - perf_counter()))
        try:
            answer = ask(prompt[0])
        except (OSError, HTTPException):
            return NOT_ANSWERED
        if len(answer.output_ids) < num_new:
            return NOT_ANSWERED
        latency_s = answer.chunk_times[-1] - answer.started
        return Reply(answer.ttft_s, latency_s, prompt[1] in decode(answer.output_ids))

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(send, prompts, starts_s))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` per cent of all are no greater than; may be infinite."""
    return sorted(values)[max(math.ceil(percent / 100 * len(values)), 1) - 1]


def figures(replies: Sequence[Reply], timeout_s: float) -> dict[str, float]:
    """The account of one server at one rate. Seconds are infinite where that many requests were not answered."""
    columns = {"ttft_s": [reply.ttft_s for reply in replies], "latency_s": [reply.latency_s for reply in replies]}
    found = {
        f"{name}_p{percent}": percentile(column, percent) for name, column in columns.items() for percent in PERCENTILES
    }
    found["share_in_time"] = sum(reply.latency_s <= timeout_s for reply in replies) / len(replies)
    found["num_right"] = sum(reply.is_right for reply in replies)
    found["num_answered"] = sum(reply.latency_s < math.inf for reply in replies)
    found["num_requests"] = len(replies)
    return found


def highest_rate(shares: Mapping[float, float], goal: float = GOAL) -> float:
    """The highest rate at which, as at every lower one that was tried, the goal's share was in time; 0 if none was."""
    highest = 0.0
    for rate in sorted(shares):
        if shares[rate] < goal:
            break
        highest = rate
    return highest
