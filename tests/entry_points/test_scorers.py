"""Every selection rule, with and without the draft's attention: the same lines at each entry point, also in a second
turn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spec_stack import Pruner, SpecStackConfig, SpecStackGenerator
from spec_stack.config import KNOWN_SCORERS
from tests.entry_points.prompts import PREFILL, ROWS, Reads, lines_of, lines_of_prompt

FIRST = list(ROWS["chat"].messages)
NAMED = ("Carmen", "Farid")


@pytest.mark.parametrize("scorer", KNOWN_SCORERS)
def test_a_conversation_has_the_same_lines(generator: SpecStackGenerator, scorer: str) -> None:
    prefill = replace(PREFILL, scorer=scorer)
    made = SpecStackGenerator(generator.target, generator.draft, generator.tokenizer, config=SpecStackConfig(prefill))
    conversation = Pruner(generator.draft, generator.tokenizer, prefill).conversation()
    reads = Reads(generator)
    with made.session() as session, reads.of():
        answer = session.generate(messages=FIRST, max_tokens=1).text
        first, once = lines_of(reads.text()), conversation.prune(FIRST).messages
        again = [
            *FIRST,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": f"And what is the number of the locker of {NAMED[1]}?"},
        ]
        session.generate(messages=again, max_tokens=1)
        second, twice = lines_of(reads.text()), conversation.prune(again).messages
    assert lines_of_prompt(once) == first
    assert lines_of_prompt(twice) == second
    assert all(any(line.startswith(f"The locker of {name} ") for line in second) for name in NAMED)
