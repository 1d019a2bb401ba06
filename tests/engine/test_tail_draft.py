from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator, StoreConfig
from spec_stack.engine.tail_draft import TailDraft
from spec_stack.hf.attention import install
from spec_stack.hf.model import CachedModel
from tests.support import reference
from tests.support.models import make_model, random_prompt

LIMIT = 64


def make_generator(config: SpecStackConfig | None = None) -> SpecStackGenerator:
    """A target with many positions, and itself as a draft with few."""
    target, draft = make_model(seed=1), make_model(seed=1)
    draft.config.max_position_embeddings = LIMIT
    return SpecStackGenerator(target, draft, config=config or SpecStackConfig(PrefillConfig(chunk_size=8)))


@pytest.mark.parametrize("sparse_prefill", [None, "on"])
@pytest.mark.parametrize("num_prompt", [LIMIT - 8, LIMIT - 7, LIMIT, 3 * LIMIT])
@pytest.mark.parametrize("max_tokens", [10, LIMIT])
def test_a_drafts_few_positions_refuse_no_prompt_and_change_no_token(
    sparse_prefill: str | None, num_prompt: int, max_tokens: int
) -> None:
    generator = make_generator()
    prompt = random_prompt(num_prompt)
    options = {"input_ids": prompt, "ignore_eos": True, "max_tokens": max_tokens, "sparse_prefill": sparse_prefill}
    is_long = num_prompt > LIMIT
    if not is_long:
        options["sparse_prefill"] = False
    drafted = generator.generate(**options, gamma=3)
    assert drafted.token_ids == generator.generate(**options, gamma=0).token_ids
    assert drafted.metrics.num_proposed > 0
    assert not drafted.metrics.sparse_prefill
    assert ("sees the end of the prompt alone" in drafted.metrics.decode_reason) == is_long
    if sparse_prefill and is_long:
        assert f"has {num_prompt} tokens, and the draft {LIMIT} positions" in drafted.metrics.sparse_prefill_reason


def test_a_rule_that_asks_no_draft_prunes_what_is_longer_than_the_draft() -> None:
    generator = make_generator(SpecStackConfig(PrefillConfig(scorer="bm25", chunk_size=8)))
    result = generator.generate(input_ids=random_prompt(4 * LIMIT), max_tokens=10, sparse_prefill="on", ignore_eos=True)
    assert result.metrics.sparse_prefill
    assert len(result.token_ids) == 10


def test_only_the_targets_positions_bound_a_request() -> None:
    generator = make_generator()
    generator.target.config.max_position_embeddings = 100
    assert len(generator.generate(input_ids=random_prompt(90), ignore_eos=True, max_tokens=None).token_ids) == 10
    with pytest.raises(ValueError, match="exceed the target's 100 positions"):
        generator.generate(input_ids=random_prompt(90), max_tokens=11)


def test_the_tail_is_seen_as_a_text_of_its_own(target: PreTrainedModel) -> None:
    install(target)
    prompt, start = random_prompt(50), 30
    draft = TailDraft(CachedModel(target, 16), start)
    assert draft.next_position == start
    got = [draft.forward(prompt[start:45], range(start, 45), 1)[-1]]
    got.append(draft.forward(prompt[45:], range(45, 50), 1)[-1])
    draft.rollback(3)
    assert (draft.next_position, draft.num_cached) == (47, 17)
    got.append(draft.forward(prompt[47:], range(47, 50), 1)[-1])
    expected = reference.logits(target, prompt[start:], range(20))
    torch.testing.assert_close(torch.stack(got), expected[[14, 19, 19]], rtol=1e-4, atol=1e-4)


def test_kept_tokens_before_the_tail_are_left_out(target: PreTrainedModel) -> None:
    install(target)
    prompt, start = random_prompt(50), 30
    draft = TailDraft(CachedModel(target, 16), start)
    draft.prefill_kept(prompt, [0, 4, 29, 32, 33, 40])
    logits = draft.forward(prompt[49:], [49], 1)[-1]
    kept = [32, 33, 40, 49]
    expected = reference.logits(target, [prompt[at] for at in kept], [at - start for at in kept])[-1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_conversations_and_remembered_prompts_go_on_past_the_drafts_positions() -> None:
    plain, stored = make_generator(), make_generator(SpecStackConfig(store=StoreConfig(max_tokens=1000)))
    prompt = random_prompt(3 * LIMIT)
    expected = [plain.generate(input_ids=prompt[:end], max_tokens=8, gamma=0).token_ids for end in (100, 150, 192)]
    for end, tokens in zip((100, 150, 192), expected, strict=True):
        assert stored.generate(input_ids=prompt[:end], max_tokens=8, gamma=2).token_ids == tokens
    with plain.session() as session:
        for end, tokens in zip((100, 150, 192), expected, strict=True):
            assert session.generate(input_ids=prompt[:end], max_tokens=8, gamma=2).token_ids == tokens
