"""How much of the package stands between a call and its first token."""

from __future__ import annotations

from spec_stack import SpecStackGenerator
from tests.support.call_path import call_path

MOST_FILES, MOST_FUNCTIONS = 31, 155


def test_a_short_prompt_reaches_its_first_token_through_few_functions(embedded: SpecStackGenerator) -> None:
    def first_step() -> None:
        next(embedded.stream("def main():", max_tokens=8))

    first_step()
    path = call_path(first_step)
    assert len(path.files) <= MOST_FILES
    assert len(path.functions) <= MOST_FUNCTIONS


def test_each_prompt_of_a_list_is_planned_once(embedded: SpecStackGenerator) -> None:
    prompts = ["def main():", "class A:", "import os"]
    path = call_path(lambda: embedded.generate(prompts, max_tokens=2))
    assert path.count("plan_request") == 3


def test_a_prompt_is_read_and_decided_once(embedded: SpecStackGenerator) -> None:
    text = "\n".join(f"x{at} = {at}" for at in range(400))
    path = call_path(lambda: embedded.generate(text, max_tokens=2, sparse_prefill="on"))
    assert [path.count(name) for name in ("plan_turn", "PromptReader.read", "plan_scored")] == [1, 1, 1]
