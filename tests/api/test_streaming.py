"""Streams for transformers' streamers and for code that awaits, prompts with a mask, and several prompts."""

from __future__ import annotations

import asyncio
import random
import threading

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, TextIteratorStreamer, TextStreamer

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator, StepOutput
from tests.support.models import make_model, random_prompt
from tests.support.nightly import others_nightly

PROMPT = "def read_lines(path):\n"


def test_a_text_streamer_prints_what_the_result_holds(
    embedded: SpecStackGenerator, capsys: pytest.CaptureFixture[str]
) -> None:
    result = embedded.generate(PROMPT, max_tokens=24, streamer=TextStreamer(embedded.tokenizer, skip_prompt=True))
    assert result.text
    assert capsys.readouterr().out == result.text + "\n"


def test_a_text_iterator_streamer_has_prompt_and_text_and_ends_with_the_stream(embedded: SpecStackGenerator) -> None:
    streamer = TextIteratorStreamer(embedded.tokenizer, timeout=60, skip_special_tokens=True)
    thread = threading.Thread(target=embedded.generate, args=(PROMPT,), kwargs={"max_tokens": 24, "streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == PROMPT + embedded.generate(PROMPT, max_tokens=24).text


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


async def _collect(generator: SpecStackGenerator, prompt: list[int]) -> list[StepOutput]:
    return [output async for output in generator.astream(input_ids=prompt, max_tokens=20)]


def test_awaited_steps_are_those_of_the_stream_and_leave_the_loop_free(
    target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    generator, prompts = SpecStackGenerator(target, draft), [random_prompt(20, seed) for seed in range(3)]

    async def both() -> list[list[StepOutput]]:
        return list(await asyncio.gather(*(_collect(generator, prompt) for prompt in prompts)))

    for prompt, outputs in zip(prompts, asyncio.run(both()), strict=True):
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


@pytest.mark.parametrize(("before", "behind"), [(3, 0), (0, 2), (2, 2)])
def test_padding_at_either_end_is_left_out(
    target: PreTrainedModel, draft: PreTrainedModel, before: int, behind: int
) -> None:
    generator, prompt = SpecStackGenerator(target, draft), random_prompt(20)
    ids = torch.tensor([[0] * before + prompt + [0] * behind])
    mask = torch.tensor([[0] * before + [1] * 20 + [0] * behind])
    expected = generator.generate(input_ids=prompt, max_tokens=8).token_ids
    assert generator.generate(input_ids=ids, attention_mask=mask, max_tokens=8).token_ids == expected


def test_prompts_come_in_every_shape_of_one_row(embedded: SpecStackGenerator) -> None:
    ids = embedded.tokenizer(PROMPT).input_ids
    expected = embedded.generate(PROMPT, max_tokens=4).token_ids
    shapes = [ids, tuple(ids), np.array(ids), torch.tensor(ids), torch.tensor([ids])]
    assert all(embedded.generate(input_ids=shape, max_tokens=4).token_ids == expected for shape in shapes)
    inputs = embedded.tokenizer(PROMPT, return_tensors="pt")
    assert embedded.generate(**inputs, max_tokens=4).token_ids == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "zeros before or behind"),
        ({"input_ids": [1, 2, 3], "attention_mask": [0, 0, 0]}, "zeros before or behind"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 1]}, "of shape"),
        ({"input_ids": [[1, 2], [3, 4]], "attention_mask": [[1, 1], [1, 1]]}, "once for each"),
        ({"input_ids": [[1, 2], [3, 4]]}, "once for each"),
        ({"input_ids": torch.ones(2, 4, dtype=torch.long)}, "once for each"),
        ({"prompt": ["a", "b"], "attention_mask": [1]}, "goes with input_ids"),
        ({"prompt": "a", "attention_mask": [1]}, "goes with input_ids"),
    ],
)
def test_a_mask_or_a_batch_that_is_none_is_refused(
    embedded: SpecStackGenerator, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        embedded.generate(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", others_nightly(range(4), usual=[0]))
def test_no_answer_of_several_prompts_hangs_on_the_others(seed: int) -> None:
    config = SpecStackConfig(PrefillConfig(granularity="chunks", keep_rate=0.3, chunk_size=8, min_prompt_tokens=24))
    generator = SpecStackGenerator(make_model(seed=1), make_model(seed=2), config=config)
    rng = random.Random(seed)
    document = random_prompt(90, seed=seed)
    prompts = [[*document[: rng.randrange(20, 90)], *random_prompt(20, seed=index)] for index in range(25)]
    expected = [generator.generate(input_ids=prompt, max_tokens=3, gamma=0).token_ids for prompt in prompts]
    order = rng.sample(range(25), 25)
    results = [generator.generate(input_ids=prompts[index], max_tokens=3, gamma=0) for index in order]
    assert [result.token_ids for result in results] == [expected[index] for index in order]
