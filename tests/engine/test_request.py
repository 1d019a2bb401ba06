"""What a planned request makes of its options."""

from __future__ import annotations

import warnings

import pytest
from transformers import PreTrainedModel

from spec_stack import SpecStackGenerator
from spec_stack.config import DEFAULT_MAX_TOKENS
from spec_stack.engine.request import Call
from tests.support.models import random_prompt


def test_a_keep_rate_that_is_not_applied_says_so_once(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    generator, prompt = SpecStackGenerator(target, draft), random_prompt(100)
    with pytest.warns(UserWarning, match=r"keep_rate=0\.2 is not applied \(off: the prompt is shorter"):
        generator.generate(input_ids=prompt, keep_rate=0.2, max_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generator.generate(input_ids=prompt, keep_rate=0.2, max_tokens=2)
        SpecStackGenerator(target, draft).generate(input_ids=prompt, keep_rate=0.2, max_tokens=2, sparse_prefill="off")


def test_max_tokens_by_default_is_what_there_are_positions_for(embedded: SpecStackGenerator) -> None:
    limit = min(embedded.pair.max_positions)
    for room in (1, 20):
        prompt = random_prompt(limit - room, vocab=4096)
        request = embedded.engine.plan(Call(input_ids=prompt))
        assert request.params.max_tokens == room
        with pytest.raises(ValueError, match="positions"):
            embedded.stream(input_ids=prompt, max_tokens=room + 1)
    with pytest.raises(ValueError, match="positions"):
        embedded.stream(input_ids=random_prompt(limit, vocab=4096))
    assert embedded.engine.plan(Call(input_ids=[5])).params.max_tokens == DEFAULT_MAX_TOKENS
    assert embedded.engine.plan(Call(input_ids=[5], min_tokens=300)).params.max_tokens == 300
