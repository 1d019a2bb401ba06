"""Several prompts, awaited answers, parsed answers, and what objects say of themselves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from spec_stack import Pruner, SpecStackGenerator

PROMPTS = ["def main():", "class Queue:\n", "import os\n"]


def test_several_prompts_are_answered_in_turn_with_progress(embedded: SpecStackGenerator) -> None:
    told: list[tuple[Any, ...]] = []
    results = embedded.generate(PROMPTS, max_tokens=6, gamma=2, on_progress=lambda *each: told.append(each))
    assert [each.token_ids for each in results] == [
        embedded.generate(prompt, max_tokens=6, gamma=2).token_ids for prompt in PROMPTS
    ]
    assert [each for each in told if each[2] == "prompts"] == [(1, 3, "prompts"), (2, 3, "prompts"), (3, 3, "prompts")]


@pytest.mark.parametrize(("prompts", "message"), [([], "list of prompts is empty"), (["x", ""], "prompt is empty")])
def test_a_bad_prompt_among_several_is_refused_before_any_answer(
    embedded: SpecStackGenerator, prompts: list[str], message: str
) -> None:
    told: list[Any] = []
    with pytest.raises(ValueError, match=message):
        embedded.generate(prompts, max_tokens=2, on_progress=lambda *each: told.append(each))
    assert told == []


def test_an_awaited_answer_is_the_same_and_others_run_meanwhile(embedded: SpecStackGenerator) -> None:
    async def ask() -> list[list[int]]:
        answers = await asyncio.gather(*(embedded.agenerate(prompt, max_tokens=6, gamma=2) for prompt in PROMPTS))
        return [each.token_ids for each in answers]

    assert asyncio.run(ask()) == [each.token_ids for each in embedded.generate(PROMPTS, max_tokens=6, gamma=2)]


def test_a_cancelled_answer_ends(embedded: SpecStackGenerator) -> None:
    begun = asyncio.Event()

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        options: Any = {"on_progress": lambda *_: loop.call_soon_threadsafe(begun.set)}
        task = asyncio.create_task(embedded.agenerate("x = 1\n" * 1000, max_tokens=4000, ignore_eos=True, **options))
        await asyncio.wait_for(begun.wait(), 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 30)

    asyncio.run(ask())
    assert embedded.generate("def main():", max_tokens=2).finish_reason == "length"


def test_a_json_answer_is_parsed_and_another_one_is_named(embedded: SpecStackGenerator) -> None:
    pytest.importorskip("llguidance")
    result = embedded.generate("x", response_format={"type": "regex", "pattern": r'\{"age": [1-9]\}'}, max_tokens=20)
    assert set(result.parsed) == {"age"}
    with pytest.raises(ValueError, match=r"not JSON \(finish_reason 'length'\)"):
        _ = replace(result, content='{"age"', finish_reason="length").parsed


def test_objects_name_their_models_precision_and_device(embedded: SpecStackGenerator) -> None:
    assert repr(embedded).startswith("SpecStackGenerator(")
    assert repr(embedded).endswith("fp32 with fp32 on cpu)")
    assert repr(Pruner.from_pretrained(device="cpu")).endswith("fp32 on cpu)")
