"""Streams for transformers' streamers and for code that awaits, prompts with a mask, and several prompts."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, TextIteratorStreamer, TextStreamer

from spec_stack import SpecStackGenerator, StepOutput
from tests.support.models import random_prompt

PROMPT = "def read_lines(path):\n"


def test_transformers_streamers_have_the_text_and_end_with_the_stream(
    embedded: SpecStackGenerator, capsys: pytest.CaptureFixture[str]
) -> None:
    result = embedded.generate(PROMPT, max_tokens=24, streamer=TextStreamer(embedded.tokenizer, skip_prompt=True))
    assert capsys.readouterr().out == result.text + "\n"
    streamer = TextIteratorStreamer(embedded.tokenizer, timeout=60, skip_special_tokens=True)
    thread = threading.Thread(target=embedded.generate, args=(PROMPT,), kwargs={"max_tokens": 24, "streamer": streamer})
    thread.start()
    assert "".join(streamer) == PROMPT + result.text
    thread.join()


class Recorder:
    """A streamer that fails at the second put where it is told to."""

    def __init__(self, fails: bool = False) -> None:
        self.values: list[list[int]] = []
        self.num_ends, self._fails = 0, fails

    def put(self, value: torch.Tensor) -> None:
        if self._fails and self.values:
            raise OSError("the pipe is closed")
        self.values.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.num_ends += 1


def test_a_streamer_is_put_the_prompt_and_then_every_token_once(
    target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    generator, prompt, streamer = SpecStackGenerator(target, draft), random_prompt(20), Recorder()
    result = generator.generate(input_ids=prompt, max_tokens=30, gamma=4, streamer=streamer)
    assert streamer.values[0] == prompt
    assert [token_id for value in streamer.values[1:] for token_id in value] == result.token_ids
    assert streamer.num_ends == 1


def test_a_streamer_that_fails_ends_the_call_and_is_told_of_the_end(
    target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    generator, streamer = SpecStackGenerator(target, draft), Recorder(fails=True)
    with pytest.raises(OSError, match="the pipe is closed"):
        generator.generate(input_ids=random_prompt(20), max_tokens=30, streamer=streamer)
    assert streamer.num_ends == 1
    assert generator.generate(input_ids=random_prompt(20), max_tokens=3).token_ids


def test_awaited_steps_are_those_of_the_stream_and_leave_the_loop_free(
    target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    generator, prompts = SpecStackGenerator(target, draft), [random_prompt(20, seed) for seed in range(3)]

    async def steps(prompt: list[int]) -> list[StepOutput]:
        return [output async for output in generator.astream(input_ids=prompt, max_tokens=20)]

    async def all_steps() -> list[list[StepOutput]]:
        return list(await asyncio.gather(*map(steps, prompts)))

    for prompt, outputs in zip(prompts, asyncio.run(all_steps()), strict=True):
        expected = generator.generate(input_ids=prompt, max_tokens=20)
        assert [token_id for output in outputs for token_id in output.token_ids] == expected.token_ids
        assert outputs[-1].metrics is not None


def test_an_awaited_stream_refuses_at_once_and_is_closed_with_the_loop(
    target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    generator = SpecStackGenerator(target, draft)
    with pytest.raises(TypeError, match="did you mean max_tokens="):
        generator.astream(input_ids=[1, 2], max_new_tokens=3)  # type: ignore[call-arg]

    session = generator.session()

    async def first() -> StepOutput:
        outputs = session.astream(input_ids=random_prompt(20), max_tokens=50)
        async for output in outputs:
            await outputs.aclose()
            return output
        raise RuntimeError("no step")

    assert asyncio.run(first()).finish_reason is None
    assert len(session.generate(input_ids=random_prompt(20), max_tokens=3).token_ids) == 3


def test_prompts_come_in_every_shape_of_one_row_and_padding_at_either_end_is_left_out(
    embedded: SpecStackGenerator,
) -> None:
    inputs = embedded.tokenizer(PROMPT, return_tensors="pt")
    ids, mask = inputs.input_ids[0].tolist(), inputs.attention_mask[0].tolist()
    shapes = [{"input_ids": each} for each in (ids, tuple(ids), np.array(ids), torch.tensor(ids), inputs.input_ids)]
    paddings = [
        {"input_ids": [[0] * before + ids + [0] * behind], "attention_mask": [[0] * before + mask + [0] * behind]}
        for before, behind in ((3, 0), (0, 2), (2, 2))
    ]
    expected = embedded.generate(PROMPT, max_tokens=4).token_ids
    for given in (*shapes, inputs, *paddings):
        assert embedded.generate(**given, max_tokens=4).token_ids == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "zeros before or behind"),
        ({"input_ids": [1, 2, 3], "attention_mask": [0, 0, 0]}, "zeros before or behind"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 1]}, "of shape"),
        ({"input_ids": [[1, 2], [3, 4]], "attention_mask": [[1, 1], [1, 1]]}, "once for each"),
        ({"prompt": "a", "attention_mask": [1]}, "goes with input_ids"),
    ],
)
def test_a_mask_or_a_batch_that_is_none_is_refused(
    embedded: SpecStackGenerator, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        embedded.generate(**options)  # type: ignore[arg-type]
