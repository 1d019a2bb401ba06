"""Look-ups: the index against comparing every place, lossless greedy and sampled, and beside the draft."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, product

import pytest
from transformers import PreTrainedModel

from spec_stack import DecodeConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.api.session import Session
from spec_stack.config import MAX_LOOKED_UP
from spec_stack.controller.base import DraftSignals, StepContext, StepRecord
from spec_stack.controller.ngram import NgramPolicy, NgramToken
from spec_stack.controller.simple import Fixed
from spec_stack.controller.tuning import TUNING
from spec_stack.decode.ngram_index import NgramIndex, SharedNgramCache
from spec_stack.decode.sampler import Sampler
from tests.support import reference
from tests.support.clocks import counted_readings
from tests.support.controller_data import step
from tests.support.enumeration import chain_tokens, exact_law
from tests.support.models import make_model, random_prompt
from tests.support.nightly import others_nightly
from tests.support.reference_lookup import chain_law


def repeating_prompt(seed: int = 0) -> list[int]:
    part = random_prompt(20, seed)
    return [*part, *random_prompt(10, seed + 1), *part, *part[:10]]


@pytest.mark.parametrize(
    ("policy", "proposer"),
    others_nightly(
        product(("throughput", "fixed", "confidence", "heuristic", "ema", "speckv"), ("ngram", "both")),
        usual=[
            ("throughput", "ngram"),
            ("fixed", "both"),
            ("throughput", "both"),
            ("speckv", "both"),
            ("ema", "ngram"),
        ],
    ),
)
@pytest.mark.parametrize("seed", [0])
def test_greedy_tokens_are_the_targets_own_whoever_proposes(
    proposer: str, policy: str, seed: int, target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    prompt = repeating_prompt(seed)
    expected = reference.greedy(make_model(seed=1), prompt, 60)
    result = SpecStackGenerator(target, draft).generate(
        input_ids=prompt, max_tokens=60, policy=policy, proposer=proposer, return_records=True
    )
    assert result.token_ids == expected
    records = result.records or []
    metrics = result.metrics
    assert metrics.proposer == proposer
    assert metrics.num_ngram_tokens == sum(record.num_ngram_tokens for record in records) > 0
    for record in records:
        assert record.num_ngram_tokens <= MAX_LOOKED_UP
        assert len(record.signals) == record.num_drafted
        assert (record.proposer == "model") == (record.num_ngram_tokens == 0)
        assert proposer == "both" or record.num_drafted == record.draft_lag == 0


def looping(embedded: SpecStackGenerator) -> list[int]:
    text = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\n"
    return list(embedded.tokenizer(text + text + "def add(a, b):").input_ids)


@pytest.mark.slow
def test_the_embedded_pair_copies_in_fewer_steps_and_loses_nothing(embedded: SpecStackGenerator) -> None:
    prompt = looping(embedded)
    options = {"input_ids": prompt, "max_tokens": 60, "ignore_eos": True, "gamma": 4}
    plain = embedded.generate(**options)  # type: ignore[arg-type]
    untimed = SpecStackGenerator(embedded.target, embedded.draft, embedded.tokenizer)
    with counted_readings():
        both = untimed.generate(proposer="both", **options)  # type: ignore[arg-type]
    assert plain.metrics.proposer == "model"
    assert plain.token_ids == both.token_ids == reference.greedy(embedded.target, prompt, 60)
    assert both.metrics.num_ngram_accepted > 10
    assert both.metrics.num_steps < plain.metrics.num_steps


def test_auto_is_both_under_the_policy_that_goes_by_the_clock_and_the_model_under_others(
    target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    generator = SpecStackGenerator(target, draft)
    prompt = random_prompt(12)

    def proposer(**options: object) -> str:
        return generator.generate(input_ids=prompt, max_tokens=2, **options).metrics.proposer  # type: ignore[arg-type]

    assert proposer() == "both"
    assert proposer(gamma=2) == proposer(policy="confidence") == proposer(temperature=1.0, seed=3) == "model"
    assert proposer(gamma=0, proposer="ngram") == "ngram"
    with pytest.raises(ValueError, match=r"proposer must be one of .*ngram.*, got 'magic'"):
        proposer(proposer="magic")
    with pytest.raises(ValueError, match="proposer"):
        DecodeConfig(proposer="magic")  # type: ignore[arg-type]
    told = SpecStackGenerator(target, draft, config=SpecStackConfig(decode=DecodeConfig(proposer="ngram")))
    assert told.generate(input_ids=prompt, max_tokens=2, gamma=3).metrics.proposer == "ngram"


def test_what_was_dropped_from_the_prompt_can_be_looked_up_all_the_same(embedded: SpecStackGenerator) -> None:
    passage = embedded.tokenizer("The blue heron landed on pier 47319 at dusk, and nobody saw it.\n").input_ids
    other = embedded.tokenizer("import os\nimport sys\n" * 40).input_ids
    prompt = [*other, *passage, *other, *passage[:6]]
    kept = embedded.generate(input_ids=prompt, max_tokens=4, sparse_prefill="on", keep_rate=0.2, proposer="ngram")
    index = NgramIndex()
    index.extend(prompt)
    assert [found.token_id for found in islice(index.continuations()[0], 3)] == passage[6:9]
    assert kept.metrics.sparse_prefill
    plain = embedded.generate(input_ids=prompt, max_tokens=4, sparse_prefill="on", keep_rate=0.2, gamma=0)
    assert kept.token_ids == plain.token_ids


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17])
def test_nothing_is_looked_up_past_max_tokens(max_tokens: int, target: PreTrainedModel, draft: PreTrainedModel) -> None:
    prompt = repeating_prompt()
    result = SpecStackGenerator(target, draft).generate(
        input_ids=prompt, max_tokens=max_tokens, proposer="both", return_records=True
    )
    assert result.token_ids == reference.greedy(make_model(seed=1), prompt, max_tokens)
    left = max_tokens
    for record in result.records or []:
        assert record.gamma <= max(left - 1, 0) or record.is_prefill
        left -= record.num_tokens


def test_a_stop_string_inside_a_look_up_ends_the_text_where_it_ends_it_without(embedded: SpecStackGenerator) -> None:
    prompt = looping(embedded)
    results = [
        embedded.generate(input_ids=prompt, max_tokens=60, stop="def sub", ignore_eos=True, **options)  # type: ignore[arg-type]
        for options in ({"gamma": 0}, {"proposer": "ngram"}, {"proposer": "both"})
    ]
    assert len({(result.text, tuple(result.token_ids), result.finish_reason) for result in results}) == 1


def test_a_draft_that_cannot_propose_leaves_look_ups(target: PreTrainedModel) -> None:
    draft = make_model(seed=2)
    draft.config.max_position_embeddings = 8
    generator = SpecStackGenerator(target, draft)
    prompt = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
    result = generator.generate(input_ids=prompt, max_tokens=20, ignore_eos=True)
    plain = generator.generate(input_ids=prompt, max_tokens=20, ignore_eos=True, gamma=0)
    assert (result.metrics.proposer, plain.metrics.proposer) == ("ngram", "model")
    assert result.token_ids == plain.token_ids
    assert plain.metrics.num_ngram_tokens == 0


TARGET = [[0.25, 0.75, 0.0], [0.5, 0.25, 0.25], [0.5, 0.0, 0.5]]
DRAFT = [[0.5, 0.5, 0.0], [0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]


class StopsWhereInDoubt(Fixed):
    """Drafts no further behind a token that the draft doubts, and sees no further than that token."""

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return signals.confidence[-1] > 0.5


@pytest.mark.parametrize(
    ("proposer", "policy", "num_tokens"),
    [
        ("ngram", Fixed(0), 3),
        ("model", Fixed(2), 3),
        ("both", Fixed(1), 3),
        # A decision about a token after having seen past it would bias this (DSpark, arXiv:2607.05147, appendix A).
        ("model", StopsWhereInDoubt(3), 4),
        pytest.param("both", Fixed(2), 4, marks=pytest.mark.nightly),
    ],
)
def test_sampled_tokens_have_exactly_the_targets_law_whoever_proposes(
    proposer: str, policy: Fixed, num_tokens: int
) -> None:
    prompt = [0, 1, 0, 1, 2, 0, 1]

    def run(sampler: Sampler) -> list[int]:
        return list(chain_tokens((TARGET, DRAFT), proposer, prompt, num_tokens, policy, sampler))

    law = exact_law(run, grid=4)
    expected = chain_law(TARGET, prompt[-1], num_tokens)
    assert set(law) == set(expected)
    for outcome, chance in expected.items():
        assert law[outcome] == pytest.approx(chance, abs=1e-4), outcome


@pytest.mark.slow
def test_drafting_decides_about_no_token_after_having_seen_past_it() -> None:
    """DSpark's counter-example (appendix A of https://arxiv.org/abs/2607.05147): the draft is sure behind a 0 alone. A
    rule that drops a proposal for its second token's confidence has 0 behind the 2 with 0.85."""
    target = [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0.7, 0.3, 0, 0], [0, 0, 1, 0]]
    draft = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 1, 0]]

    def run(sampler: Sampler) -> list[int]:
        # What is drawn after the second token makes more ways, and changes none of its chances.
        return list(islice(chain_tokens((target, draft), "model", [3, 3], 4, Fixed(2), sampler), 1, 2))

    assert exact_law(run, grid=10) == pytest.approx({(0,): 0.7, (1,): 0.3}, abs=1e-3)


SURE = NgramToken(7, 64, 16, 0)


def found(num_tokens: int, length: int = 3, num_seen: int = 1, num_others: int = 0) -> list[NgramToken]:
    return [NgramToken(7, length + place, num_seen, num_others) for place in range(num_tokens)]


def looked_up(num_tokens: int, num_accepted: int, seconds: float = 0.03) -> StepRecord:
    """A step of n-gram tokens alone, a plain one without any."""
    made = step(num_tokens, num_accepted, draft_s=0.0, verify_s=seconds)
    return replace(made, signals=DraftSignals(), num_ngram_tokens=num_tokens, proposer="ngram")


def test_the_gate_learns_which_look_ups_are_right() -> None:
    gate = NgramPolicy()
    before = gate.chance(found(1)[0])
    for _ in range(20):
        gate.offer([found(8)], 8)
        gate.observe(looked_up(8, 0))
    assert gate.chance(found(1)[0]) < before / 2
    assert len(gate.offer([found(64)], 64).found) <= 8
    for _ in range(40):
        gate.offer([found(8)], 8)
        gate.observe(looked_up(8, 8))
    assert gate.chance(found(1)[0]) > 0.5
    assert len(gate.offer([found(64)], 64).found) >= 8


@pytest.mark.parametrize("is_shared", [False, True])
def test_wrong_look_ups_from_one_place_do_not_make_those_from_the_other_doubted(is_shared: bool) -> None:
    gate = NgramPolicy()
    here, there = (found(1)[0]._replace(is_shared=shared) for shared in (is_shared, not is_shared))
    # That the model of all requests learns is not what is asked here: the two places' chances over each other.
    before = gate.chance(there) / gate.chance(here)
    for _ in range(10):
        gate.offer([[here]], 1)
        gate.observe(looked_up(1, 0))
    assert gate.chance(there) / gate.chance(here) > 1.5 * before


def test_longer_more_frequent_and_less_disputed_tokens_are_held_likelier() -> None:
    gate = NgramPolicy()
    for worse, better in (
        (NgramToken(7, 2, 1, 0), NgramToken(7, 16, 1, 0)),
        (NgramToken(7, 2, 1, 0), NgramToken(7, 2, 8, 0)),
        (NgramToken(7, 2, 2, 4), NgramToken(7, 2, 2, 0)),
    ):
        assert gate.chance(worse) < gate.chance(better)


def test_lookup_verifies_two_tokens_or_twice_what_a_step_has() -> None:
    gate = NgramPolicy()
    offered = []
    for gamma in (0, 0, 2, 4, 8):
        offered.append(len(gate.offer([[SURE] * 64], 64).found))
        gate.observe(looked_up(gamma, gamma, 0.1))
    assert offered == [2, 2, 2, 4, 8]


def test_slow_first_steps_do_not_end_lookup() -> None:
    gate = NgramPolicy()
    offered = []
    for number in range(12):
        offered.append(len(gate.offer([[SURE] * 64], 16).found) if number else 0)
        gate.observe(looked_up(offered[-1], offered[-1], 5.0 if number < 2 else 0.1))
    assert offered[-1] >= 8


def test_rejected_lookups_cost_no_more_than_their_allowance() -> None:
    gate = NgramPolicy()
    lost = 0.0
    for _ in range(1000):
        verified = len(gate.offer([[SURE] * 64], 16).found)
        # A verified token costs 0.8 of a plain step.
        gate.observe(looked_up(verified, 0, 0.1 + 0.08 * verified))
        lost += 0.8 * verified
    # Two trials, the start and the share of the time.
    assert 0 < lost <= 2 * 1.6 + TUNING.start_allowance + TUNING.try_share * 1020


def knows_costs(verified_s: float) -> NgramPolicy:
    """A policy that knows steps of up to 16 right tokens, each of which takes so long to verify; a plain step 0.1."""
    gate = NgramPolicy()
    for gamma in (0, 2, 4, 8, 16) * 4:
        gate.observe(step(gamma, gamma, draft_s=0.0, verify_s=0.1 + verified_s * gamma))
    return gate


def test_a_look_up_ends_where_all_of_it_is_too_unlikely_to_be_right() -> None:
    gate, token = knows_costs(0.004), found(1, length=3)[0]
    offered = len(gate.offer([[token] * 64], 64).found)
    chance = gate.chance(token)
    # One more token would pay by itself.
    assert chance > gate.price(offered)
    assert chance**offered > gate.price(offered - 1)
    assert chance ** (offered + 1) <= gate.price(offered)


def test_a_look_up_that_seems_sure_costs_no_more_than_its_allowance() -> None:
    gate = knows_costs(0.02)
    # Of two continuations the better one is offered.
    offered = len(gate.offer([found(8, length=1, num_others=5), [SURE] * 64], 64).found)
    assert gate.chance(SURE) ** 16 > gate.price(15)
    # In plain steps: a token takes a fifth of one.
    assert 1 < offered <= (TUNING.start_allowance + TUNING.try_share * 20) / 0.2 + 1e-9


def test_a_sessions_look_ups_know_earlier_turns_and_a_shared_memory_other_sessions(
    embedded: SpecStackGenerator,
) -> None:
    ids = embedded.tokenizer("def area(width, height):\n    return width * height\n\n\n").input_ids
    memory = SharedNgramCache(4000)

    def known(session: Session) -> list[list[int]]:
        """What is found after the bare prompt: in the session's own text, and in the shared one."""
        lookups = session.conversation.lookups
        lookups.begin(ids)
        return [[found.token_id for found in islice(each, 8)] for each in lookups.continuations()]

    with embedded.session(ngram_cache=memory) as first, embedded.session(ngram_cache=memory) as second:
        answer = first.generate(input_ids=ids, max_tokens=24, proposer="ngram").token_ids
        # The prompt without its answer: an earlier turn that is no part of the text any more.
        assert known(first) == [answer[:8], answer[:8]]
        assert known(second) == [[], answer[:8]]
        assert second.generate(input_ids=ids, max_tokens=24, proposer="ngram").token_ids == answer
        with second.fork() as fork:
            assert known(fork)[1] == answer[:8]
    with pytest.raises(ValueError, match="ngram_cache must be a SharedNgramCache, got int"):
        embedded.session(ngram_cache=4000)  # type: ignore[arg-type]
    with embedded.session(ngram_cache=SharedNgramCache(4000)) as apart:
        assert known(apart) == [[], []]


def test_taking_in_a_long_prompt_is_no_reading_of_the_drafts(embedded: SpecStackGenerator) -> None:
    ids = embedded.tokenizer("import os\nimport sys\n" * 400).input_ids
    result = embedded.generate(
        input_ids=ids,
        max_tokens=6,
        proposer="both",
        policy="throughput",
        sparse_prefill="draft_only",
        return_records=True,
    )
    first = next(record for record in result.records or [] if not record.is_prefill)
    # A tenth of a microsecond a token: far more than a decision takes.
    assert first.policy_s > 1e-7 * len(ids)
