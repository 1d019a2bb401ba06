"""How much of the package stands between a call and its first token."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import spec_stack
from spec_stack import SpecStackGenerator

MOST_FILES, MOST_FUNCTIONS = 31, 155
_PACKAGE = str(Path(spec_stack.__file__).parent)


def calls_of(work: Callable[[], object]) -> Counter[tuple[str, int, str]]:
    """How often each function of the package ran, in this thread, by file, line and name."""
    calls: Counter[tuple[str, int, str]] = Counter()

    def enter(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE):
            calls[code.co_filename, code.co_firstlineno, code.co_qualname] += 1

    sys.setprofile(enter)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def count(calls: Counter[tuple[str, int, str]], name: str) -> int:
    return sum(number for (*_, own), number in calls.items() if own == name)


def test_a_short_prompt_reaches_its_first_token_through_few_functions(embedded: SpecStackGenerator) -> None:
    def first_step() -> None:
        next(embedded.stream("def main():", max_tokens=8))

    first_step()
    calls = calls_of(first_step)
    assert len({file for file, *_ in calls}) <= MOST_FILES
    assert len(calls) <= MOST_FUNCTIONS


def test_each_prompt_of_a_list_is_planned_once(embedded: SpecStackGenerator) -> None:
    prompts = ["def main():", "class A:", "import os"]
    calls = calls_of(lambda: embedded.generate(prompts, max_tokens=2))
    assert count(calls, "plan_request") == 3


def test_a_prompt_is_read_and_decided_once(embedded: SpecStackGenerator) -> None:
    text = "\n".join(f"x{at} = {at}" for at in range(400))
    calls = calls_of(lambda: embedded.generate(text, max_tokens=2, sparse_prefill="on"))
    assert [count(calls, name) for name in ("plan_turn", "PromptReader.read", "plan_scored")] == [1, 1, 1]
