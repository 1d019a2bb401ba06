from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from spec_stack import DraftSignals, Policy, PrefillConfig, SpecStackConfig, SpecStackGenerator, StepContext
from spec_stack.config import ScoringQueries
from spec_stack.decode.proposer import entropy_and_confidence, propose
from spec_stack.decode.sampler import Sampler
from spec_stack.hf.attention import install
from spec_stack.hf.model import CachedModel
from spec_stack.hf.processors import make_warp
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.prefill.queries import find_candidates
from tests.support import reference
from tests.support.controller_data import RandomGamma
from tests.support.models import disturbed, make_model, random_prompt
from tests.support.nightly import others_nightly

DRAFTS: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = {
    "random": lambda target: make_model(seed=2),
    "equal": lambda target: disturbed(target, 0.0),
    "similar": lambda target: disturbed(target, 0.02),
}


@pytest.mark.parametrize(
    ("draft", "gamma"),
    others_nightly(
        [
            *((draft, gamma) for draft in DRAFTS for gamma in (0, 1, 4, 8)),
            *(("similar", gamma) for gamma in (2, 3, 5, 6, 7, 16)),
        ],
        usual=[*(("similar", gamma) for gamma in (0, 1, 2, 3, 4, 8, 16)), ("random", 4), ("equal", 1), ("equal", 8)],
    ),
)
def test_greedy_speculation_gives_the_targets_own_tokens(draft: str, gamma: int, target: PreTrainedModel) -> None:
    prompt = random_prompt(30)
    expected = reference.greedy(make_model(seed=1), prompt, 40)
    generator = SpecStackGenerator(target, DRAFTS[draft](target))
    result = generator.generate(input_ids=prompt, max_tokens=40, gamma=gamma, return_records=True)
    assert result.token_ids == expected
    if gamma and draft == "equal":
        assert result.metrics.acceptance_rate == 1.0
    assert all(record.gamma <= gamma for record in result.records or [])


@pytest.mark.parametrize(
    ("draft", "seed"),
    others_nightly(product(DRAFTS, range(4)), usual=[("random", 0), ("equal", 1), ("similar", 2), ("similar", 3)]),
)
def test_a_policy_that_changes_its_mind_every_step_changes_no_token(
    draft: str, seed: int, target: PreTrainedModel
) -> None:
    prompt = random_prompt(30, seed)
    expected = reference.greedy(make_model(seed=1), prompt, 40)
    policy = RandomGamma(seed)
    result = SpecStackGenerator(target, DRAFTS[draft](target)).generate(
        input_ids=prompt, max_tokens=40, policy=policy, return_records=True
    )
    assert result.token_ids == expected
    assert policy.records == result.records


@pytest.mark.parametrize(
    ("draft", "queries", "look_ahead"),
    others_nightly(
        [
            *(("similar", "look_ahead", look_ahead) for look_ahead in (0, 1)),
            *((draft, *queries) for draft in DRAFTS for queries in (("look_ahead", 8), ("prompt", 8))),
        ],
        usual=[
            *(("similar", "look_ahead", number) for number in (0, 1, 8)),
            ("similar", "prompt", 8),
            ("random", "prompt", 8),
        ],
    ),
)
def test_after_sparse_prefill_the_tokens_are_those_of_the_pruned_prompt(
    draft: str, queries: ScoringQueries, look_ahead: int, target: PreTrainedModel
) -> None:
    prompt = random_prompt(120)
    prefill = PrefillConfig(
        granularity="chunks",
        keep_rate=0.3,
        scoring_queries=queries,
        look_ahead=look_ahead,
        chunk_size=8,
        first_scoring_layer=0,
        head_reduction="max",
    )
    generator = SpecStackGenerator(target, DRAFTS[draft](target), config=SpecStackConfig(prefill))
    outputs = list(generator.stream(input_ids=prompt, max_tokens=30, sparse_prefill="on", policy=RandomGamma(0)))
    tokens = [token for output in outputs for token in output.token_ids]

    ahead = look_ahead if queries == "look_ahead" else 0
    look = propose(CachedModel(generator.draft, 4096), prompt, ahead, Sampler(), ())
    eager = _eager_copy(generator.draft)
    if queries == "look_ahead":
        scores = reference.importance(eager, prompt, look.token_ids, prefill.pool_kernel)
    else:
        found = find_candidates(PromptText(prompt))
        options = {"asks": found.asks, "pool_kernel": prefill.pool_kernel}
        scores = reference.question_importance(eager, prompt, (), found.segments, **options)
    positions = reference.selected_positions(scores, 0.3, 8, 1, 1)
    kept = [prompt[position] for position in positions]
    assert tokens == reference.sparse_greedy(make_model(seed=1), kept, positions, len(prompt), 30)
    first = outputs[0].record
    assert (first.is_prefill, first.gamma) == (True, ahead)
    metrics = outputs[-1].metrics
    assert metrics is not None
    assert metrics.num_kept_tokens == len(positions)


def _eager_copy(model: PreTrainedModel) -> PreTrainedModel:
    twin = make_model(implementation="eager")
    twin.load_state_dict(model.state_dict())
    return twin


def test_keep_rate_one_equals_dense_prefill(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    generator = SpecStackGenerator(target, draft, config=SpecStackConfig(PrefillConfig(granularity="chunks")))
    prompt = random_prompt(200)
    dense = generator.generate(input_ids=prompt, max_tokens=30, sparse_prefill="off")
    expected = reference.greedy(make_model(seed=1), prompt, 30)
    # 0.999 keeps every chunk as well, but through scoring and with the look-ahead as the first proposal.
    for keep_rate, num_scored in ((1.0, 0), (0.999, 200)):
        kept = generator.generate(input_ids=prompt, max_tokens=30, sparse_prefill="on", keep_rate=keep_rate)
        assert kept.token_ids == dense.token_ids == expected
        assert not kept.metrics.sparse_prefill
        assert kept.metrics.num_scored_tokens == num_scored


def test_the_loop_keeps_its_promises_to_policies(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    policy = RandomGamma(3)
    result = SpecStackGenerator(target, draft).generate(
        input_ids=random_prompt(25), max_tokens=30, policy=policy, return_records=True, task="code", request_id="r"
    )
    records = result.records or []
    assert [record.step for record in records] == list(range(len(records)))
    assert [record.is_prefill for record in records] == [True] + [False] * (len(records) - 1)
    assert sum(record.num_tokens for record in records) == len(result.token_ids) == 30
    generated = 0
    for context, before in zip(policy.contexts, records, strict=False):
        generated += before.num_tokens
        assert context.last == before
        assert context.max_gamma == 30 - generated - 1
        assert context.task == "code"
    for record in records:
        assert len(record.signals) == record.num_drafted <= record.gamma >= record.num_accepted
        assert record.request_id == "r"
        assert min(record.draft_s, record.verify_s, record.policy_s) >= 0


class Greedy16(RandomGamma):
    def choose(self, context: StepContext) -> int:
        return 99

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return True


def test_a_policy_cannot_propose_past_max_tokens_or_sixteen(target: PreTrainedModel) -> None:
    generator = SpecStackGenerator(target, DRAFTS["equal"](target))
    result = generator.generate(input_ids=random_prompt(10), max_tokens=30, policy=Greedy16(0), return_records=True)
    assert result.metrics.gamma_trace == [0, 16, 11]
    assert [record.num_tokens for record in result.records or []] == [1, 17, 12]


def test_the_draft_is_fed_only_what_it_has_not_seen(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    sizes: list[int] = []
    generator = SpecStackGenerator(target, draft)
    draft.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    result = generator.generate(input_ids=random_prompt(20), max_tokens=30, gamma=3, return_records=True)
    all_accepted = sum(record.num_accepted == record.gamma for record in (result.records or [])[1:-1])
    # The prompt with the first token, then one at a time; two only after a step whose tokens were all accepted.
    assert sizes[0] == 21
    assert max(sizes[1:]) <= 2
    assert sizes[1:].count(2) <= all_accepted


def test_a_record_counts_only_what_was_handed_out(target: PreTrainedModel) -> None:
    config = SpecStackConfig(
        PrefillConfig(granularity="chunks", chunk_size=8, keep_rate=0.99, scoring_queries="look_ahead")
    )
    result = SpecStackGenerator(target, DRAFTS["equal"](target), config=config).generate(
        input_ids=random_prompt(60), max_tokens=3, sparse_prefill="on", return_records=True
    )
    assert result.records is not None
    assert result.metrics.num_tokens == len(result.token_ids) == 3
    assert (result.records[0].num_accepted, result.records[0].num_tokens) == (8, 3)


class TwoAtMost(Greedy16):
    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        assert len(signals) <= 2
        return len(signals) < 2


def test_a_policy_can_end_a_proposal(target: PreTrainedModel) -> None:
    result = SpecStackGenerator(target, DRAFTS["equal"](target)).generate(
        input_ids=random_prompt(20), max_tokens=20, policy=TwoAtMost(0)
    )
    assert set(result.metrics.gamma_trace[1:-1]) == {2}


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_signals_are_of_the_unwarped_draft(temperature: float, draft: PreTrainedModel) -> None:
    install(draft)
    prompt = random_prompt(20)
    warp = make_warp(temperature, 3, 0.9)
    sampler = Sampler(warp, torch.Generator().manual_seed(0))
    proposal = propose(CachedModel(draft, 4096), prompt, 3, sampler, ())
    rows = CachedModel(draft, 4096).forward([*prompt, *proposal.token_ids[:2]], range(22), 3).softmax(-1)
    assert proposal.signals.confidence == pytest.approx(rows.amax(-1).tolist(), rel=1e-4)
    bits = -(rows * rows.clamp_min(1e-30).log2()).sum(-1)
    assert proposal.signals.entropy == pytest.approx(bits.tolist(), rel=1e-3)


def test_drafting_ends_with_an_end_token_and_feeds_what_was_unseen(draft: PreTrainedModel) -> None:
    install(draft)
    prompt = random_prompt(20)
    model = CachedModel(draft, 4096)
    full = propose(model, prompt, 6, Sampler(), ()).token_ids
    model = CachedModel(draft, 4096)
    model.forward(prompt[:5], range(5), 1)
    end = full[2]
    cut = propose(model, prompt, 6, Sampler(), {end}).token_ids
    assert cut == full[: full.index(end) + 1]
    assert model.next_position == 20 + len(cut) - 1
    untouched = CachedModel(draft, 4096)
    assert propose(untouched, prompt, 0, Sampler(), ()).token_ids == []
    assert untouched.num_cached == 0


def test_signals_are_entropy_in_bits_and_the_largest_probability() -> None:
    entropy, confidence, token = entropy_and_confidence(torch.tensor([0.5, 0.25, 0.125, 0.125]).log())
    assert entropy == pytest.approx(1.75, abs=1e-5)
    assert confidence == pytest.approx(0.5, abs=1e-6)
    assert token == 0
    assert entropy_and_confidence(torch.tensor([0.0, -torch.inf, -torch.inf])) == (0.0, 1.0, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.filterwarnings("default")
def test_a_draft_whose_logits_are_not_finite_proposes_nothing_and_says_so_once(
    temperature: float, target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    with torch.no_grad():
        draft.get_output_embeddings().weight.fill_(float("nan"))
    generator = SpecStackGenerator(target, draft)
    prompt = random_prompt(20)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = generator.generate(input_ids=prompt, max_tokens=20, gamma=4, temperature=temperature)
    heard = [(str(warning.message)[:33], warning.filename) for warning in said if "finite" in str(warning.message)]
    assert heard == [("the draft's logits are not finite", __file__)]
    assert result.metrics.num_proposed == 0
    assert len(result.token_ids) == 20
    if not temperature:
        assert result.token_ids == reference.greedy(make_model(seed=1), prompt, 20)


def test_a_policy_is_told_what_the_draft_has_not_read(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    policy = RandomGamma(3)
    records = SpecStackGenerator(target, draft).generate(
        input_ids=random_prompt(25), max_tokens=30, policy=policy, return_records=True
    ).records or []  # fmt: skip
    seen, committed = 0, 25
    for context, before, record in zip(policy.contexts, records, records[1:], strict=False):
        committed += before.num_tokens
        assert context.draft_lag == committed - seen
        assert record.draft_lag == (context.draft_lag if record.gamma else 0)
        if record.gamma:
            # The last drafted token is not fed, and what was rejected is taken back.
            seen = committed + min(record.num_accepted, record.gamma - 1)


@pytest.mark.parametrize("nonsense", ["x", float("nan")])
def test_a_policy_that_chooses_nonsense_is_named(
    nonsense: object, target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    class Dreamer(Policy):
        name = "dreamer"

        def choose(self, context: StepContext) -> Any:
            return nonsense

    with pytest.raises(TypeError, match=r"policy 'dreamer' \(Dreamer\) must give a whole number"):
        SpecStackGenerator(target, draft).generate(input_ids=[3, 4], max_tokens=5, policy=Dreamer())


class OneEach(Greedy16):
    def choose(self, context: StepContext) -> int:
        super().choose(context)
        self.contexts.append(context)
        return 1


@pytest.mark.parametrize(("rule", "share"), [({"scorer": "bm25"}, 1.0), ({"scoring_heads": ((1, 0), (1, 2))}, 2 / 3)])
def test_a_policy_is_told_what_the_draft_runs_again_after_a_pruned_prefill(
    rule: dict[str, Any], share: float, target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    prefill = PrefillConfig(keep_rate=0.3, granularity="chunks", chunk_size=8, **rule)
    generator = SpecStackGenerator(target, draft, config=SpecStackConfig(prefill))
    policy = OneEach(0)
    result = generator.generate(
        input_ids=random_prompt(200), max_tokens=6, sparse_prefill="on", policy=policy, return_records=True
    )
    num_kept = result.metrics.num_kept_tokens
    first, second, *_ = policy.contexts
    assert first.draft_lag == 1 + round(share * num_kept)
    assert first.num_draft_slots == second.num_draft_slots - (result.records or [])[1].num_tokens == num_kept + 1
    assert second.draft_lag <= 2
    assert [record.draft_prefilled_prompt for record in (result.records or [])[1:3]] == [True, False]
