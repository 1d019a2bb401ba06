"""Conversations as load: people who share a system prompt, bring a document each, read the reply, and ask again.

Conversations begin at Poisson arrivals. A turn is sent when the reply before it is there and has been thought about, so
one that is late delays its own conversation and nobody else's. Who waits longer than the timeout for the next piece of
a reply hangs up and leaves, and the turns that are never asked count as not answered.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http.client import HTTPException
from time import perf_counter, sleep
from typing import Any

from experiments.serving.client import Answer, Client, Prompts
from experiments.serving.load import OUTPUT_TOKENS, Reply
from spec_stack.cli.demo import hide_fact

NOT_ANSWERED = Reply(math.inf, math.inf, 0, False)


@dataclass(frozen=True)
class Plan:
    """One conversation. follow_ups: what comes after each reply but the last; thinking_s: before each of them."""

    first_ids: tuple[int, ...]
    fact: str
    follow_ups: tuple[tuple[int, ...], ...]
    thinking_s: tuple[float, ...]
    num_new: tuple[int, ...]


@dataclass(frozen=True)
class Conversations:
    """Their sizes. lengths: shortest and longest document of a first turn; thinking_s: mean of an exponential."""

    lengths: tuple[int, int]
    system_tokens: int
    num_turns: int
    thinking_s: float
    seed: int

    def __post_init__(self) -> None:
        if self.num_turns < 2:
            raise ValueError(f"--turns must be 2 or more, got {self.num_turns}; one turn is the other workload")
        if self.system_tokens < 1 or not self.thinking_s > 0:
            raise ValueError("--system-tokens must be 1 or more, and --thinking over 0")

    def plans(self, tokenizer: Any, count: int, variant: int) -> list[Plan]:
        """The same lengths in every variant, about other documents; the system prompt is the same for all."""
        rng, prompts = random.Random(self.seed), Prompts(tokenizer)
        system = {"role": "system", "content": prompts.text(self.system_tokens, seed=self.seed)}
        plans = []
        for index in range(count):
            number = (variant + 1) * 10_000 + 5_000 + index
            fact = hide_fact(tokenizer, rng.randint(*self.lengths), number)
            fact = replace(fact, document=f"Document {number}:\n{fact.document}")
            later = range(self.num_turns - 1)
            plans.append(
                Plan(
                    tuple(prompts.chat([system, *fact.messages])),
                    fact.answer,
                    tuple(tuple(prompts.follow_up(number + turn)) for turn in later),
                    tuple(rng.expovariate(1 / self.thinking_s) for _ in later),
                    tuple(rng.randint(*OUTPUT_TOKENS) for _ in range(self.num_turns)),
                )
            )
        return plans


def converse(
    plan: Plan, ask: Callable[[Sequence[int], int], Answer], decode: Callable[[Sequence[int]], str]
) -> list[Reply]:
    """Hold one conversation; a reply per turn of the plan. ask raises OSError where no whole answer comes in time."""
    history, replies = list(plan.first_ids), []
    for turn, num_new in enumerate(plan.num_new):
        if turn:
            sleep(plan.thinking_s[turn - 1])
            history += plan.follow_ups[turn - 1]
        try:
            answer = ask(history, num_new)
        except (OSError, HTTPException):
            break
        if len(answer.output_ids) < num_new:
            break
        # The first turn alone asks for something that can be right or wrong.
        right = turn == 0 and plan.fact in decode(answer.output_ids)
        latency_s = answer.chunk_times[-1] - answer.started
        replies.append(Reply(answer.ttft_s, latency_s, len(answer.output_ids), right))
        history += answer.output_ids
    return replies + [NOT_ANSWERED] * (len(plan.num_new) - len(replies))


def hold_all(
    plans: Sequence[Plan], starts_s: Sequence[float], port: int, timeout_s: float, tokenizer: Any
) -> list[Reply]:
    """Begin every conversation at its time, side by side; the replies of all of their turns."""
    client, begun = Client(port, limit_s=timeout_s), perf_counter()

    def hold(plan: Plan, start_s: float) -> list[Reply]:
        sleep(max(0.0, begun + start_s - perf_counter()))
        return converse(plan, client.ask, tokenizer.decode)

    with ThreadPoolExecutor(len(plans)) as pool:
        return [reply for replies in pool.map(hold, plans, starts_s) for reply in replies]
