"""The requests of a serving benchmark, and what its replies amount to. No SGLang here."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spec_stack.cli.demo import hide_fact

SHORT_TOKENS = 200
OUTPUT_TOKENS = (32, 64)
PERCENTILES = (50, 90, 99)
GOAL = 0.99


@dataclass(frozen=True)
class Question:
    """One request. num_tokens: the document's; max_tokens: how many it gets."""

    messages: Sequence[Mapping[str, str]]
    answer: str
    num_tokens: int
    max_tokens: int

    def as_row(self) -> dict[str, Any]:
        """A line of SGLang's dataset format "openai"; special tokens are shown, so that every token makes a chunk."""
        return {
            "messages": list(self.messages),
            "max_tokens": self.max_tokens,
            "stream_options": {"include_usage": True},
            "skip_special_tokens": False,
        }


@dataclass(frozen=True)
class Workload:
    """The requests, whatever the mode. lengths: shortest and longest document, in tokens, of the long requests."""

    lengths: tuple[int, int]
    short_share: float
    seconds: float
    fewest: int
    seed: int

    def __post_init__(self) -> None:
        if not 0 < self.lengths[0] <= self.lengths[1]:
            raise ValueError(f"--tokens must be a shortest and a longest length, got {self.lengths}")
        if not 0 <= self.short_share < 1:
            raise ValueError(f"--short-share must be in [0, 1), got {self.short_share}")
        if not self.seconds > 0 or self.fewest < 1:
            raise ValueError("--seconds must be over 0, and --fewest 1 or more")

    def count(self, rate: float) -> int:
        """Requests to send at a rate; all at once is the fewest."""
        return self.fewest if math.isinf(rate) else max(self.fewest, math.ceil(rate * self.seconds))

    def questions(self, tokenizer: Any, count: int, variant: int) -> list[Question]:
        """The same documents, lengths and token counts in every variant, under other headings and with other facts."""
        rng = random.Random(self.seed)
        found = []
        for index in range(count):
            num_tokens = SHORT_TOKENS if rng.random() < self.short_share else rng.randint(*self.lengths)
            number = (variant + 1) * 10_000 + index
            fact = hide_fact(tokenizer, num_tokens, number)
            fact = replace(fact, document=f"Document {number}:\n{fact.document}")
            found.append(Question(fact.messages, fact.answer, num_tokens, rng.randint(*OUTPUT_TOKENS)))
        return found


@dataclass(frozen=True)
class Reply:
    """Seconds are infinite where the request did not get all its tokens."""

    ttft_s: float
    latency_s: float
    num_tokens: int
    right: bool

    @property
    def seconds_per_token(self) -> float:
        if math.isinf(self.latency_s) or self.num_tokens < 2:
            return math.inf
        return (self.latency_s - self.ttft_s) / (self.num_tokens - 1)


def arrival_times(rate: float, count: int, seed: int) -> list[float]:
    """When SGLang's benchmark sends each request, in seconds: at once, then after exponential intervals."""
    if math.isinf(rate):
        return [0.0] * count
    intervals = np.random.RandomState(seed).exponential(1 / rate, count - 1)
    return [0.0, *np.cumsum(intervals).tolist()]


def parse_replies(result: Mapping[str, Any], questions: Sequence[Question]) -> list[Reply]:
    """Replies out of a line of SGLang's output file, written with --output-details.

    Raises ValueError where it is not about these questions.
    """
    columns = [result[name] for name in ("ttfts", "itls", "output_lens", "generated_texts", "errors")]
    if {len(column) for column in columns} != {len(questions)}:
        raise ValueError(f"SGLang's benchmark reports {len(columns[0])} requests, {len(questions)} were sent")
    replies = []
    for question, ttft_s, gaps, num_tokens, text, error in zip(questions, *columns, strict=True):
        # An aborted reply is no error to the client, and a request without any text has a TTFT of 0.
        complete = not error and ttft_s > 0 and num_tokens >= question.max_tokens
        latency_s = ttft_s + sum(gaps) if complete else math.inf
        first_s = ttft_s if not error and ttft_s > 0 else math.inf
        replies.append(Reply(first_s, latency_s, num_tokens if complete else 0, complete and question.answer in text))
    return replies


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` per cent of all are no greater than; may be infinite."""
    return sorted(values)[max(math.ceil(percent / 100 * len(values)), 1) - 1]


def figures(replies: Sequence[Reply], timeout_s: float) -> dict[str, float]:
    """The account of one server at one rate. Seconds are infinite where that many requests were not answered."""
    columns = {
        "ttft_s": [reply.ttft_s for reply in replies],
        "seconds_per_token": [reply.seconds_per_token for reply in replies],
        "latency_s": [reply.latency_s for reply in replies],
    }
    found = {
        f"{name}_p{percent}": percentile(column, percent) for name, column in columns.items() for percent in PERCENTILES
    }
    found["share_in_time"] = sum(reply.latency_s <= timeout_s for reply in replies) / len(replies)
    found["num_right"] = sum(reply.right for reply in replies)
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
