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
