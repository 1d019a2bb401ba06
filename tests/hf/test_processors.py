"""Logits processors under speculation: the tokens, and the law, of plain generation with the same processors."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import (
    ExponentialDecayLengthPenalty,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.bench.demo import hide_fact
from spec_stack.hf.processors import is_shareable
from tests.support import reference
from tests.support.enumeration import assert_law, tiny_pair
from tests.support.forwards import forwards_of, positions_of
from tests.support.models import disturbed, make_model, random_prompt
from tests.support.nightly import others_nightly

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Counting:
    """Forbids a fifth of the vocabulary, another one at every call; keeps the lengths of what it was shown."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(scores.shape[-1])
        forbidden = ids % 5 == (len(self.lengths) + int(input_ids[0, -1])) % 5
        self.lengths.append(input_ids.shape[1])
        return scores.masked_fill(forbidden, -torch.inf)


def closed_over() -> Processor:
    """The same as a function with its state in a closure; writes on what it is given."""
    calls = [0]

    def forbid(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        scores[:, calls[0] % 5 :: 5] = -torch.inf
        return scores

    return forbid


def far_from_the_last(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    near = (torch.arange(scores.shape[-1]) - input_ids[0, -1]) % scores.shape[-1] < scores.shape[-1] // 2
    return scores.masked_fill(near, -torch.inf)


PROCESSORS: dict[str, Callable[[], list[Processor]]] = {
    "library": lambda: [RepetitionPenaltyLogitsProcessor(1.4), NoRepeatNGramLogitsProcessor(2)],
    "list": lambda: LogitsProcessorList([ExponentialDecayLengthPenalty((22, 1.3), [5, 6], 20)]),
    "counting": lambda: [Counting()],
    "closure": lambda: [closed_over()],
    "function": lambda: [far_from_the_last],
}
POLICIES: dict[str, dict[str, Any]] = {
    "fixed": {"gamma": 5},
    "throughput": {"policy": "throughput"},
    "heuristic": {"policy": "heuristic"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processors", "policy"),
    others_nightly(
        [*((name, "fixed") for name in PROCESSORS), *(("library", name) for name in POLICIES if name != "fixed")],
        usual=[(name, "fixed") for name in PROCESSORS],
    ),
)
def test_greedy_tokens_are_those_of_transformers_with_the_same_processors(
    processors: str, policy: str, target: PreTrainedModel
) -> None:
    generator, plain = SpecStackGenerator(target, disturbed(target, 0.02)), make_model(seed=1)
    prompt = random_prompt(20)
    made = LogitsProcessorList(PROCESSORS[processors]())
    expected = reference.greedy(plain, prompt, 40, logits_processor=made)
    assert expected != reference.greedy(plain, prompt, 40)
    options: dict[str, Any] = {"logits_processor": PROCESSORS[processors](), "max_tokens": 40, **POLICIES[policy]}
    result = generator.generate(input_ids=prompt, **options)
    assert result.token_ids == expected
    if policy == "fixed":
        assert result.metrics.num_proposed > result.metrics.num_accepted > 0
    assert ("may keep state" in result.metrics.decode_reason) == (processors in ("counting", "closure"))


@pytest.mark.slow
def test_the_options_are_those_of_transformers(target: PreTrainedModel) -> None:
    generator, plain = SpecStackGenerator(target, disturbed(target, 0.02)), make_model(seed=1)
    for ours, theirs in (
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"bad_words_ids": [[7], [3, 9]]}, {"bad_words_ids": [[7], [3, 9]]}),
        ({"logit_bias": {4: 3.0, 9: -5}}, {"sequence_bias": {(4,): 3.0, (9,): -5.0}}),
        (
            {"repetition_penalty": 1.2, "bad_words_ids": [[3]], "logit_bias": {4: 2.5}},
            {"repetition_penalty": 1.2, "bad_words_ids": [[3]], "sequence_bias": {(4,): 2.5}},
        ),
    ):
        prompt = random_prompt(20)
        options: dict[str, Any] = {"max_tokens": 30, "gamma": 4, **ours}
        result = generator.generate(input_ids=prompt, **options)
        assert result.token_ids == reference.greedy(plain, prompt, 30, **theirs)


def test_a_stateful_processor_is_driven_as_in_plain_generation(target: PreTrainedModel) -> None:
    processor, prompt = Counting(), random_prompt(20)
    result = SpecStackGenerator(target, disturbed(target, 0.02)).generate(
        input_ids=prompt, max_tokens=30, gamma=4, logits_processor=processor
    )
    assert result.metrics.num_proposed > result.metrics.num_accepted
    # Every prefix once and in order, whatever was proposed and rejected.
    assert processor.lengths == list(range(20, 20 + len(processor.lengths)))
    assert 30 <= len(processor.lengths) <= 30 + 5


def test_a_processor_is_asked_nothing_after_the_end_token(target: PreTrainedModel) -> None:
    prompt = random_prompt(20)
    plain = SpecStackGenerator(target, target)
    tokens = plain.generate(input_ids=prompt, max_tokens=30, logits_processor=Counting(), gamma=0).token_ids
    end = tokens[6]
    processor = Counting()
    result = plain.generate(input_ids=prompt, max_tokens=30, gamma=8, logits_processor=processor, stop_token_ids=[end])
    assert result.token_ids == tokens[: tokens.index(end) + 1]
    assert result.finish_reason == "stop"
    assert len(processor.lengths) == len(result.token_ids)


def test_the_draft_goes_by_the_stateless_processors_too(target: PreTrainedModel) -> None:
    """A draft equal to the target is always right only where its rows go through the same processors."""
    generator = SpecStackGenerator(target, target)
    for made in (RepetitionPenaltyLogitsProcessor(1.5), far_from_the_last):
        result = generator.generate(input_ids=random_prompt(20), max_tokens=40, gamma=4, logits_processor=made)
        assert result.metrics.acceptance_rate == 1.0
    without = generator.generate(input_ids=random_prompt(20), max_tokens=40, gamma=4, logits_processor=Counting())
    assert (without.metrics.acceptance_rate or 0) < 1.0
    assert "Counting" in without.metrics.decode_reason


def test_what_may_keep_state_is_not_shared() -> None:
    free = closed_over()
    assert not is_shareable(free)
    free.stateless = True  # type: ignore[attr-defined]
    for processor in (free, far_from_the_last, RepetitionPenaltyLogitsProcessor(1.5)):
        assert is_shareable(processor)
    for stateful in (Counting(), Counting().__call__, partial(far_from_the_last)):
        assert not is_shareable(stateful)


def forbid_row(prefix: list[int], row: np.ndarray) -> np.ndarray:
    """Not the last token again, and half as likely (by logits) what the text has: by the whole prompt and text."""
    row = np.where(row > 0, row / 1.5, row * 1.5) * np.isin(np.arange(len(row)), prefix[:10]) + row * ~np.isin(
        np.arange(len(row)), prefix[:10]
    )
    row[prefix[-1]] = -np.inf
    return row


class Forbidding:
    """The same in torch."""

    stateless = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        first = input_ids[:, :10].unique()[None]
        chosen = scores.gather(1, first)
        scores = scores.scatter(1, first, torch.where(chosen > 0, chosen / 1.5, chosen * 1.5))
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


def positions_read(generator: SpecStackGenerator, **options: Any) -> list[int]:
    """Positions of the prompt that the target prefills."""
    with forwards_of(generator.target) as fed:
        generator.generate(**options)
    return [position for position in positions_of(fed) if position < len(options["input_ids"])]


def test_after_sparse_prefill_processors_see_the_whole_prompt(target: PreTrainedModel) -> None:
    config = SpecStackConfig(PrefillConfig(granularity="chunks", keep_rate=0.3, chunk_size=8))
    generator, prompt = SpecStackGenerator(target, disturbed(target, 0.02), config=config), random_prompt(120)
    options: dict[str, Any] = {
        "input_ids": prompt,
        "sparse_prefill": "on",
        "logits_processor": Forbidding(),
        "max_tokens": 30,
        "gamma": 4,
    }
    positions = positions_read(generator, **options)
    assert 20 < len(positions) < 60
    kept = [prompt[position] for position in positions]
    expected = reference.shaped_greedy(make_model(seed=1), prompt, kept, positions, 30, forbid_row)
    assert generator.generate(**options).token_ids == expected


def test_in_a_session_processors_see_the_whole_conversation(target: PreTrainedModel) -> None:
    generator, plain = SpecStackGenerator(target, disturbed(target, 0.02)), make_model(seed=1)
    session, prompt = generator.session(), random_prompt(40)
    for turn in range(3):
        made = PROCESSORS["library"]()
        expected = reference.greedy(plain, prompt, 20, logits_processor=LogitsProcessorList(made))
        result = session.generate(
            input_ids=prompt, max_tokens=20, gamma=4, sparse_prefill="off", logits_processor=PROCESSORS["library"]()
        )
        assert result.token_ids == expected
        prompt = [*prompt, *result.token_ids, *random_prompt(10, turn)]
    assert result.metrics.num_cached_tokens > 60


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pruned", "kind"),
    [
        pytest.param(False, "same", marks=pytest.mark.nightly),
        (True, "same"),
        pytest.param(False, "other", marks=pytest.mark.nightly),
    ],
)
def test_sampled_tokens_have_the_enumerated_law_with_processors(pruned: bool, kind: str) -> None:
    """Vocabulary 5, three tokens, every cell. The draft's rows go through the processors too, and another tokenizer's
    draft proposes what both vocabularies have."""
    generator, prompt = tiny_pair(kind)
    options: dict[str, Any] = {
        "input_ids": prompt,
        "sparse_prefill": "on" if pruned else "off",
        "max_tokens": 3,
        "gamma": 2,
        "temperature": 1.0,
        "logits_processor": Forbidding(),
    }
    positions = positions_read(generator, seed=0, **options)
    assert len(positions) == (16 if pruned else 40)
    kept = [prompt[position] for position in positions]
    law = reference.shaped_law(generator.target, prompt, kept, positions, forbid_row, 3)
    num_draws = 200
    results = [generator.generate(seed=seed, **options) for seed in range(num_draws)]
    assert sum(result.metrics.num_accepted for result in results) > num_draws / 4
    counts = Counter(tuple(result.token_ids) for result in results)
    assert_law(counts, law)


def test_what_leaves_no_token_or_another_shape_is_an_error_that_names_it(target: PreTrainedModel) -> None:
    generator = SpecStackGenerator(target, target)

    def nothing(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf)

    def shapeless(input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        return scores[0]

    with pytest.raises(ValueError, match="allow no token"):
        generator.generate(input_ids=[3, 4], logits_processor=nothing)
    with pytest.raises(ValueError, match="NaN"):
        generator.generate(input_ids=[3, 4], logits_processor=lambda ids, scores: scores * torch.nan)
    with pytest.raises(ValueError, match="shapeless must return scores"):
        generator.generate(input_ids=[3, 4], logits_processor=shapeless)
    wrong: Sequence[Any] = (3, "x", [Counting(), None], Counting)
    for junk in wrong:
        with pytest.raises(ValueError, match="logits_processor"):
            generator.generate(input_ids=[3, 4], logits_processor=junk)


def test_a_text_of_at_least_one_token_does_not_begin_with_its_end(embedded: SpecStackGenerator) -> None:
    end = min(embedded.pair.end_ids)
    options: dict[str, Any] = {"prompt": "Give three tips.", "logit_bias": {end: 1e4}, "max_tokens": 4}
    assert embedded.generate(**options).token_ids == [end]
    first, *rest = embedded.generate(**options, min_tokens=1).token_ids
    assert first != end
    assert rest == [end]


def test_special_tokens_and_token_ids_stop_the_text(embedded: SpecStackGenerator) -> None:
    end = embedded.tokenizer.convert_tokens_to_ids("<|end|>")
    messages = hide_fact(embedded.tokenizer, 300, 0).messages
    plain = embedded.generate(messages=messages, max_tokens=60)
    assert plain.token_ids[-1] == end
    for options in ({"stop": ["<|end|>"]}, {"stop_token_ids": [end]}):
        more: dict[str, Any] = {"ignore_eos": True, **options}
        stopped = embedded.generate(messages=messages, max_tokens=60, **more)
        assert stopped.finish_reason == "stop"
        assert (stopped.token_ids, stopped.text) == (plain.token_ids, plain.text)


def test_min_p_leaves_out_what_is_far_less_likely_than_the_likeliest(target: PreTrainedModel) -> None:
    generator, prompt = SpecStackGenerator(target, target), random_prompt(20)
    greedy = generator.generate(input_ids=prompt, max_tokens=20)
    only_best = generator.generate(input_ids=prompt, max_tokens=20, temperature=1.0, min_p=1.0, seed=0)
    assert only_best.token_ids == greedy.token_ids
    seen = generator.generate(input_ids=prompt, max_tokens=40, temperature=3.0, min_p=0.5, seed=0, logprobs=40)
    for each in seen.logprobs or []:
        best = each.warped_top[0][1]
        assert all(value >= best + np.log(0.5) - 1e-4 for _, value in each.warped_top)


def test_a_draft_to_which_everything_is_forbidden_proposes_nothing_and_is_not_called_broken() -> None:
    def pairs_alone(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([0, 1, 2]), -torch.inf)

    generator, prompt = tiny_pair("other")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for temperature in (0.0, 1.0):
            result = generator.generate(
                input_ids=prompt,
                max_tokens=8,
                gamma=3,
                temperature=temperature,
                sparse_prefill="off",
                logits_processor=pairs_alone,
            )
            assert set(result.token_ids) <= {3, 4}
            assert result.metrics.num_proposed == 0
