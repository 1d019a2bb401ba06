"""Prompts that are longer than the draft has positions."""

from __future__ import annotations

import pytest

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from tests.support.models import make_model, random_prompt

LIMIT = 64


def make_generator(config: SpecStackConfig | None = None) -> SpecStackGenerator:
    """A target with many positions, and itself as a draft with few."""
    target, draft = make_model(seed=1), make_model(seed=1)
    draft.config.max_position_embeddings = LIMIT
    return SpecStackGenerator(
        target, draft, config=config or SpecStackConfig(PrefillConfig(granularity="chunks", chunk_size=8))
    )


@pytest.mark.parametrize("sparse_prefill", [None, "on"])
@pytest.mark.parametrize("num_prompt", [LIMIT - 8, LIMIT - 7, 3 * LIMIT])
@pytest.mark.parametrize("max_tokens", [10, LIMIT])
def test_a_drafts_few_positions_refuse_no_prompt_and_change_no_token(
    sparse_prefill: str | None, num_prompt: int, max_tokens: int
) -> None:
    generator = make_generator()
    prompt = random_prompt(num_prompt)
    options = {"input_ids": prompt, "ignore_eos": True, "max_tokens": max_tokens, "sparse_prefill": sparse_prefill}
    is_long = num_prompt > LIMIT
    if not is_long:
        options["sparse_prefill"] = "off"
    drafted = generator.generate(**options, gamma=3)
    assert drafted.token_ids == generator.generate(**options, gamma=0).token_ids
    assert (drafted.metrics.num_proposed == 0) == is_long
    assert not drafted.metrics.sparse_prefill
    assert ("so it proposes nothing" in drafted.metrics.decode_reason) == is_long
    if sparse_prefill and is_long:
        assert f"has {num_prompt} tokens, and the draft {LIMIT} positions" in drafted.metrics.sparse_prefill_reason


def test_a_rule_that_asks_no_draft_prunes_what_is_longer_than_the_draft() -> None:
    generator = make_generator(SpecStackConfig(PrefillConfig(granularity="chunks", scorer="bm25", chunk_size=8)))
    result = generator.generate(input_ids=random_prompt(4 * LIMIT), max_tokens=10, sparse_prefill="on", ignore_eos=True)
    assert result.metrics.sparse_prefill
    assert len(result.token_ids) == 10


def test_only_the_targets_positions_bound_a_request() -> None:
    generator = make_generator()
    generator.target.config.max_position_embeddings = 100
    assert len(generator.generate(input_ids=random_prompt(90), ignore_eos=True, max_tokens=None).token_ids) == 10
    with pytest.raises(ValueError, match="exceed the target's 100 positions"):
        generator.generate(input_ids=random_prompt(90), max_tokens=11)


def test_conversations_go_on_past_the_drafts_positions() -> None:
    plain = make_generator()
    prompt = random_prompt(3 * LIMIT)
    expected = [plain.generate(input_ids=prompt[:end], max_tokens=8, gamma=0).token_ids for end in (100, 150, 192)]
    with plain.session() as session:
        for end, tokens in zip((100, 150, 192), expected, strict=True):
            assert session.generate(input_ids=prompt[:end], max_tokens=8, gamma=2).token_ids == tokens
