"""Agents' loops: the user asks once, and the evidence is in any of the results that follow, at every entry point."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from spec_stack import Pruner, Session, SpecStackGenerator

FACT = "The red code for Greta is 48213.\n"
REQUESTS = ["What is the red code for Greta?", "Give me the red code for Greta."]


def report(rng: random.Random, num_lines: int) -> str:
    words = ("weather", "station", "harbour", "garden", "library")
    return "".join(
        f"The {rng.choice(words)} report of day {rng.randint(1, 999)} says that little was seen near gate {at}.\n"
        for at in range(num_lines)
    )


def loop(request: str, steps: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """A request with the results of each of the assistant's steps."""
    chat = [{"role": "user", "content": request}]
    for results in steps:
        chat += [
            {"role": "assistant", "content": "Let me read it."},
            *({"role": "tool", "content": it} for it in results),
        ]
    return chat


def kept_in(session: Session) -> str:
    ids, dropped = session.conversation.token_ids, set(session.dropped_positions)
    return str(session.engine.pair.tokenizer.decode([each for at, each in enumerate(ids) if at not in dropped]))


@pytest.mark.slow
@pytest.mark.parametrize("request_text", REQUESTS)
def test_the_evidence_is_kept_wherever_the_results_hold_it(embedded: SpecStackGenerator, request_text: str) -> None:
    rng, pruner = random.Random(request_text), Pruner.from_pretrained(device="cpu")
    long, short = report(rng, 40) + FACT + report(rng, 40), [[report(rng, 12)] for _ in range(4)]
    for steps in ([*short, [long]], [[long], *short], [[report(rng, 30), long]]):
        chat = loop(request_text, steps)
        kept = pruner.prune(chat, keep_rate=0.2).messages
        assert any(FACT.strip() in message["content"] for message in kept)
        with embedded.session() as session:
            session.generate(messages=chat, max_tokens=1, keep_rate=0.2, sparse_prefill="on")
            assert FACT.strip() in kept_in(session)


def test_a_later_result_in_a_session_is_pruned_by_the_first_request(embedded: SpecStackGenerator) -> None:
    rng = random.Random(7)
    chat = loop(REQUESTS[1], [[report(rng, 12)]])
    options: dict[str, Any] = {"max_tokens": 1, "keep_rate": 0.2, "sparse_prefill": "on"}
    with embedded.session() as session:
        answer = session.generate(messages=chat, **options).text
        new = [{"role": "tool", "content": report(rng, 40) + FACT + report(rng, 40)}]
        session.generate(messages=[*chat, {"role": "assistant", "content": answer}, *new], **options)
        assert FACT.strip() in kept_in(session)
