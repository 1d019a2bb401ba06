"""Log-probabilities, several samples of a prompt, and the checkpoint's own settings."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.engine.request import Call
from tests.support import reference
from tests.support.enumeration import assert_law
from tests.support.forwards import forwards_of, sizes_of
from tests.support.models import make_model, random_prompt


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.5}, {"temperature": 0.7, "top_k": 5, "seed": 0}])
@pytest.mark.parametrize("gamma", [0, 4])
def test_logprobs_are_those_of_plain_rows(options: dict[str, Any], gamma: int, target: PreTrainedModel) -> None:
    prompt = random_prompt(20)
    result = SpecStackGenerator(target, target).generate(
        input_ids=prompt, max_tokens=12, gamma=gamma, logprobs=3, **options
    )
    assert result.logprobs is not None
    assert [each.token_id for each in result.logprobs] == result.token_ids
    whole = [*prompt, *result.token_ids]
    rows = reference.logits(make_model(seed=1), whole, range(len(whole)))[len(prompt) - 1 : -1]
    for index, each in enumerate(result.logprobs):
        row = rows[index].double()
        raw = row.log_softmax(-1)
        assert each.logprob == pytest.approx(float(raw[each.token_id]), abs=1e-4)
        assert [token_id for token_id, _ in each.top] == raw.topk(3).indices.tolist()
        assert [value for _, value in each.top] == pytest.approx(raw.topk(3).values.tolist(), abs=1e-4)
        if "repetition_penalty" in options:
            seen = torch.tensor([whole[: len(prompt) + index]])
            row = RepetitionPenaltyLogitsProcessor(1.5)(seen, row[None])[0]
        elif options:
            row = row / 0.7
            row = row.masked_fill(row < row.topk(5).values[-1], -torch.inf)
        warped = row.log_softmax(-1)
        assert each.warped_logprob == pytest.approx(float(warped[each.token_id]), abs=1e-4)
        assert [token_id for token_id, _ in each.warped_top] == warped.topk(3).indices.tolist()


def test_a_streams_logprobs_are_those_of_generate_and_forbidden_tokens_have_none(embedded: SpecStackGenerator) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "gamma": 4, "logprobs": 0}
    outputs = list(embedded.stream("def main():", **options))
    assert all(len(output.logprobs or []) == len(output.token_ids) for output in outputs)
    joined = [each for output in outputs for each in output.logprobs or []]
    assert joined == embedded.generate("def main():", **options).logprobs
    assert joined[0].top == joined[0].warped_top == []
    few = embedded.generate("def main():", max_tokens=4, temperature=1.0, top_k=2, logprobs=5, seed=0)
    assert all(len(each.warped_top) == 2 and len(each.top) == 5 for each in few.logprobs or [])
    assert embedded.generate("def main():", max_tokens=2).logprobs is None


def test_samples_share_the_prefill(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    config = SpecStackConfig(PrefillConfig(granularity="chunks", chunk_size=8, keep_rate=0.3))
    generator, prompt = SpecStackGenerator(target, draft, config=config), random_prompt(300)
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "seed": 5, "n": 4, "gamma": 2}
    for pruned in (False, True):
        with forwards_of(target, draft) as fed:
            result = generator.generate(input_ids=prompt, sparse_prefill="on" if pruned else "off", **options)
        assert len(result.choices) == 4
        assert result.choices[0] is result
        assert len({tuple(choice.token_ids) for choice in result.choices}) > 1
        # The target's prefill and the draft's, each once.
        assert sum(size for size in sizes_of(fed) if size > 20) <= 300 + 310
        assert all(choice.metrics.num_cached_tokens == 299 for choice in result.others)
        kept = {choice.metrics.num_kept_tokens for choice in result.choices}
        assert len(kept) == 1
        assert (kept == {300}) is not pruned


def test_samples_go_by_their_own_seeds_and_share_no_state(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    generator, prompt = SpecStackGenerator(target, draft), random_prompt(40)
    options: dict[str, Any] = {"input_ids": prompt, "max_tokens": 10, "temperature": 1.0, "gamma": 0}
    several = generator.generate(n=3, seed=7, **options)
    for index, choice in enumerate(several.choices):
        alone = generator.generate(seed=7 + index, **options)
        assert choice.token_ids == alone.token_ids
    # In a session the first one is its answer.
    with generator.session() as session:
        first = session.generate(n=3, seed=7, **options)
        longer = [*prompt, *first.token_ids, 5, 6]
        after = session.generate(input_ids=longer, max_tokens=8, gamma=2)
    assert after.metrics.num_cached_tokens == len(prompt) + 9
    assert after.token_ids == reference.greedy(make_model(seed=1), longer, 8)

    def closing(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + len(prompt)

    with pytest.raises(ValueError, match=r"cannot share .*closing"):
        generator.generate(n=2, logits_processor=closing, **options)


@pytest.mark.slow
def test_every_sample_has_the_targets_distribution(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    models = [make_model(seed=seed, vocab=5) for seed in (1, 2)]
    for model in models:
        model.lm_head.weight.data.mul_(0.25)
    generator, prompt = SpecStackGenerator(*models), random_prompt(20, vocab=5)
    law = reference.shaped_law(models[0], prompt, prompt, range(20), lambda prefix, row: row, 2)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(0, 300, 3):
        result = generator.generate(input_ids=prompt, max_tokens=2, temperature=1.0, seed=seed, n=3, gamma=2)
        counts.update(tuple(choice.token_ids) for choice in result.others)
    assert_law(counts, law)


def test_equal_samples_and_junk_are_refused(embedded: SpecStackGenerator) -> None:
    for junk in ({"n": 2}, {"n": 0}, {"n": 1.5}, {"n": 1000, "temperature": 1.0}):
        more: dict[str, Any] = junk
        with pytest.raises(ValueError, match=r"\bn\b"):
            embedded.generate("x", **more)


def test_the_checkpoints_own_settings_are_taken_when_asked_for_and_said_to_be_ignored_else(
    target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    prompt, plain = random_prompt(20), make_model(seed=1)
    target.generation_config.update(repetition_penalty=1.5, max_new_tokens=9, bad_words_ids=[[7], [9]])
    generator = SpecStackGenerator(target, draft)
    with pytest.warns(UserWarning, match=r"repetition_penalty=1\.5"):
        generator.generate(input_ids=prompt, max_tokens=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generator.generate(input_ids=prompt, max_tokens=3)
        own = generator.generate(input_ids=prompt, sampling="model", gamma=3)
    made = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)])
    expected = reference.greedy(plain, prompt, 9, logits_processor=made, bad_words_ids=[[7], [9]])
    assert own.token_ids == expected
    given = generator.generate(input_ids=prompt, sampling="model", max_tokens=5, gamma=3)
    assert given.token_ids == expected[:5]
    target.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9)
    # The plan tells what is drawn from.
    params = generator.engine.plan(Call(input_ids=prompt, sampling="model")).params
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.6, 50, 0.9, 1.5)
    target.generation_config.update(no_repeat_ngram_size=3)
    with pytest.raises(ValueError, match="no_repeat_ngram_size"):
        generator.generate(input_ids=prompt, sampling="model")
