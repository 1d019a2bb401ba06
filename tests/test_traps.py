"""What used to be silently wrong, one test each."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from spec_stack import (
    DecodeConfig,
    Policy,
    PrefillConfig,
    SamplingParams,
    SessionConfig,
    SpecStackConfig,
    SpecStackGenerator,
    StepContext,
)
from spec_stack.config import DEFAULT_MAX_TOKENS
from spec_stack.hf.prepack import PrepackedLinear
from spec_stack.hf.text import WindowedText
from tests.support.models import random_prompt


def test_a_prepacked_target_saves_its_true_weights(embedded: SpecStackGenerator, tmp_path: Path) -> None:
    if not any(isinstance(module, PrepackedLinear) for module in embedded.target.modules()):
        pytest.skip("nothing is prepacked here")
    embedded.target.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    plain = SpecStackGenerator.from_pretrained(device="cpu", precision="fp32", prepack_linears=False).target
    expected = plain.state_dict()
    assert set(saved.state_dict()) == set(expected)
    for name, weight in saved.state_dict().items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("copying", [copy.deepcopy, copy.copy, pickle.dumps])
def test_what_cannot_be_copied_says_why(copying: Any, embedded: SpecStackGenerator) -> None:
    with pytest.raises(TypeError, match="Threads may share one"):
        copying(embedded)
    with pytest.raises(TypeError, match=r"fork\(\) makes another"):
        copying(embedded.session())
    if copying is not copy.copy and any(isinstance(each, PrepackedLinear) for each in embedded.target.modules()):
        with pytest.raises(TypeError, match="prepack_linears=False"):
            copying(embedded.target)


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """A tokenizer whose decoder drops the first space of what it is given, as Llama 2's and Mistral's do."""
    words = ["▁The", "▁quick", "▁brown", "▁fox", "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_a_continuation_keeps_its_first_space(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    tokenizer = sentencepiece_like()
    generator = SpecStackGenerator(target, draft, tokenizer)
    result = generator.generate("The quick", max_tokens=2, logit_bias={2: 1000.0, 3: 900.0}, bad_words_ids=[[2, 2]])
    assert result.token_ids == [2, 3]
    assert result.text == " brown fox"
    windowed = WindowedText(tokenizer.decode, [0, 1])
    assert windowed.push([2]) + windowed.push([3]) + windowed.flush() == " brown fox"


def test_a_keep_rate_that_is_not_applied_says_so_once(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    generator, prompt = SpecStackGenerator(target, draft), random_prompt(100)
    with pytest.warns(UserWarning, match=r"keep_rate=0\.2 is not applied \(off: the prompt is shorter"):
        generator.generate(input_ids=prompt, keep_rate=0.2, max_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generator.generate(input_ids=prompt, keep_rate=0.2, max_tokens=2)
        SpecStackGenerator(target, draft).generate(input_ids=prompt, keep_rate=0.2, max_tokens=2, specprefill=False)


def test_max_tokens_by_default_is_what_there_are_positions_for(embedded: SpecStackGenerator) -> None:
    limit = min(embedded.pair.max_positions)
    for room in (1, 20):
        prompt = random_prompt(limit - room, vocab=4096)
        request = embedded.plan(*_plan(prompt))
        assert request.params.max_tokens == room
        with pytest.raises(ValueError, match="positions"):
            embedded.stream(input_ids=prompt, max_tokens=room + 1)
    with pytest.raises(ValueError, match="positions"):
        embedded.stream(input_ids=random_prompt(limit, vocab=4096))
    assert embedded.plan(*_plan([5])).params.max_tokens == DEFAULT_MAX_TOKENS
    assert embedded.plan(*_plan([5], min_tokens=300)).params.max_tokens == 300


def _plan(prompt: list[int], **params: Any) -> tuple[Any, Any, Any]:
    from spec_stack.engine.request import CallOptions
    from spec_stack.hf.prompt import PromptSource

    return PromptSource(None, None, prompt, (), None, None, {}, False), SamplingParams(**params), CallOptions()


def test_numbers_of_numpy_are_as_good_as_pythons(embedded: SpecStackGenerator) -> None:
    result = embedded.generate(
        input_ids=np.array([5, 6, 7]),
        max_tokens=np.int64(4),
        gamma=np.int32(2),
        top_k=np.int16(3),
        temperature=np.float32(0.5),
        seed=np.uint8(7),
        keep_rate=np.float32(1.0),
        stop_token_ids=[np.int64(9)],
        logit_bias={np.int64(4): np.float32(0.5)},
        logprobs=np.int64(1),
    )
    assert len(result.token_ids) <= 4
    json.dumps(result.metrics.as_dict())
    assert type(PrefillConfig(keep_rate=np.float64(0.5)).keep_rate) is float
    assert type(DecodeConfig(gamma=np.int64(3)).gamma) is int
    assert type(SessionConfig(max_restored_chunks=np.int64(3)).max_restored_chunks) is int


@pytest.mark.parametrize("nonsense", ["x", None, 2.5, float("nan")])
def test_a_policy_that_chooses_nonsense_is_named(
    nonsense: object, target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    class Dreamer(Policy):
        name = "dreamer"

        def choose(self, context: StepContext) -> Any:
            return nonsense

    with pytest.raises(TypeError, match=r"policy 'dreamer' \(Dreamer\) must give a whole number"):
        SpecStackGenerator(target, draft).generate(input_ids=[3, 4], max_tokens=5, policy=Dreamer())


def test_an_unknown_policy_is_refused_where_it_is_configured() -> None:
    for junk in ("nope", 3, None):
        wrong: Any = junk
        with pytest.raises(ValueError, match="unknown policy"):
            DecodeConfig(policy=wrong)
    assert DecodeConfig(policy="fixed").policy == "fixed"


def test_the_configuration_of_a_generator_is_settled(embedded: SpecStackGenerator) -> None:
    with pytest.raises(AttributeError):
        embedded.config = SpecStackConfig()  # type: ignore[misc]


def test_messages_that_can_be_read_only_once_are_refused(embedded: SpecStackGenerator) -> None:
    messages: Any = iter([{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="must be a list"):
        embedded.stream(messages=messages)
