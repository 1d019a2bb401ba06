"""The decision for a prompt, without an engine: what is known of a text goes in, a decision comes out."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from spec_stack.config import PrefillConfig
from spec_stack.hf.loading import ASSETS
from spec_stack.prefill.queries import MOST_REPEATED
from spec_stack.sglang.decide import (
    Decision,
    KnownTexts,
    Prompt,
    TurnStore,
    UnscoredPrompt,
    apply,
    decide,
    decide_scored,
    decide_unscored,
)
from spec_stack.sglang.request import RequestOptions
from spec_stack.sglang.server_args import ServerConfig
from tests.support.sglang_requests import request_of

CONFIG = PrefillConfig(min_prompt_tokens=400, granularity="chunks")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(ASSETS / "target")


def _known(num_cached: int = 0) -> KnownTexts:
    return KnownTexts(ServerConfig(), None, None, lambda prompt: min(num_cached, len(prompt.token_ids) - 1), 1_000_000)


def test_a_prompt_that_audits_leave_whole_is_dense_where_it_would_be_pruned() -> None:
    options = RequestOptions(route="/generate", whole="off: audits of /generate found more lost answers")
    for num_tokens, outcome in ((100, "disabled"), (900, "audited")):
        decision = decide(replace(_prompt(num_tokens), options=options), _known())
        assert isinstance(decision, Decision)
        assert (decision.outcome, decision.is_whole) == (outcome, True)
    request = request_of("a")
    apply(request, decision, _known())
    report = request.customized_info["spec_stack"][0]
    assert (report["route"], report["sparse_prefill_reason"]) == (options.route, options.whole)


def _prompt(num_tokens: int, **options: Any) -> Prompt:
    config = replace(CONFIG, **options)
    return Prompt(tuple(range(num_tokens)), None, None, config, "recall")


def test_a_long_system_message_is_kept_whole_and_a_text_without_turns_says_that_nothing_is(tokenizer: Any) -> None:
    known, long = KnownTexts(ServerConfig(), tokenizer, None, lambda prompt: 0, 1_000_000), "many words " * 400
    messages = [{"role": "system", "content": long}, {"role": "user", "content": "What is this about?"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    whole, pruned = (
        decide(replace(_prompt(0), token_ids=tuple(tokenizer(text, add_special_tokens=False).input_ids)), known)
        for text in (chat, long)
    )
    assert isinstance(whole, Decision)
    assert (whole.outcome, whole.is_whole, "could be pruned" in whole.reason) == ("disabled", True, True)
    assert isinstance(pruned, UnscoredPrompt)
    assert (pruned.text.num_kept, "no chat turn was found" in pruned.reason) == (0, True)


def test_what_a_request_protects_is_kept_and_counted() -> None:
    prompt = replace(_prompt(900), options=RequestOptions(protect=((300, 340),)))
    unscored = decide(prompt, _known())
    assert isinstance(unscored, UnscoredPrompt)
    decision = decide_scored(unscored, torch.zeros(900), 900, _known())
    assert {*range(300, 340)} <= {*decision.positions} < {*range(900)}
    assert decision.prompt.text is not None
    assert decision.prompt.text.num_kept == 40


@pytest.mark.parametrize(
    ("options", "num_tokens", "num_cached", "refusal", "outcome", "part"),
    [
        ({"sparse_prefill": "off"}, 900, 0, None, "disabled", "leaves the target dense"),
        ({}, 399, 0, None, "disabled", "shorter than min_prompt_tokens=400"),
        ({"keep_rate": 1.0}, 900, 0, None, "disabled", "keep_rate is 1.0"),
        ({}, 900, 0, "the target is too large", "unsupported", "off: the target is too large"),
        ({"granularity": "lines"}, 900, 0, None, "unsupported", "off: there is no tokenizer"),
        ({}, 900, 800, None, "cached", "off: 800 of 900 tokens are cached"),
    ],
)
def test_a_dense_decision_says_why(
    options: dict[str, Any], num_tokens: int, num_cached: int, refusal: str | None, outcome: str, part: str
) -> None:
    decision = decide(_prompt(num_tokens, **options), _known(num_cached), refusal)
    assert isinstance(decision, Decision)
    assert decision.is_whole
    assert decision.outcome == outcome
    assert part in decision.reason


@pytest.mark.parametrize(
    ("options", "num_cached", "start"),
    # A beginning counts from a quarter of the prompt on.
    [({}, 0, 0), ({"sparse_prefill": "on"}, 850, 0), ({}, 224, 0), ({}, 225, 225), ({}, 400, 400)],
)
def test_a_long_prompt_needs_a_score_first_and_then_has_a_plan(
    options: dict[str, Any], num_cached: int, start: int
) -> None:
    known, prompt = _known(num_cached), _prompt(900, **options)
    needs = decide(prompt, known)
    assert isinstance(needs, UnscoredPrompt)
    assert (needs.prunes, needs.recalls) == (True, False)
    plan = decide_scored(needs, torch.rand(900), 900, known)
    assert plan.outcome == "pruned"
    assert plan.num_scored_tokens == 900 - start
    assert plan.positions[:start] == tuple(range(start))
    assert len(plan.positions) < 900


def test_a_prompt_whose_queries_would_run_beyond_the_drafts_positions_is_dense() -> None:
    known = KnownTexts(ServerConfig(), None, None, lambda prompt: 0, 1_000_000, 1000)
    assert isinstance(decide(_prompt(1000 - MOST_REPEATED), known), UnscoredPrompt)
    decision = decide(_prompt(1001 - MOST_REPEATED), known)
    assert isinstance(decision, Decision)
    assert (decision.outcome, decision.is_whole) == ("unsupported", True)
    assert "and the draft 1000 positions" in decision.reason


def test_an_equal_prompt_gets_the_plan_that_is_remembered_and_scores_nothing() -> None:
    """It has its own route: an audit's prompt, which has none, is not audited."""
    known, prompt = _known(), _prompt(900)
    needs = decide(replace(prompt, options=RequestOptions(route="/generate")), known)
    assert isinstance(needs, UnscoredPrompt)
    plan = decide_scored(needs, torch.rand(900), 900, known)
    known.remember(plan)
    again = decide(prompt, known)
    assert isinstance(again, Decision)
    assert (again.positions, again.num_scored_tokens, again.num_draft_tokens) == (plan.positions, 0, 0)
    assert (plan.prompt.options.route, again.prompt.options.route) == ("/generate", None)
    assert isinstance(decide(replace(prompt, cache_salt="another"), known), UnscoredPrompt)


def test_a_rule_without_a_draft_plans_at_once_unless_the_draft_checks() -> None:
    decision = decide(_prompt(900, scorer="bm25"), _known())
    assert isinstance(decision, Decision)
    assert (decision.outcome, decision.num_scored_tokens) == ("pruned", 0)
    assert isinstance(decide(_prompt(900, scorer="bm25", max_dropped_attention=0.1), _known()), UnscoredPrompt)


@pytest.mark.parametrize(
    ("most", "outcome", "rates"),
    [(1.0, "pruned", [0.1]), (0.7, "pruned", [0.1, 0.2, 0.4]), (0.0, "too_much_dropped", [0.1, 0.2, 0.4])],
)
def test_a_checked_prompt_keeps_the_first_rate_that_drops_little(most: float, outcome: str, rates: list[float]) -> None:
    known, prompt = _known(), _prompt(900, keep_rate=0.1, max_dropped_attention=most)
    needs = decide(prompt, known)
    assert isinstance(needs, UnscoredPrompt)
    # Equal attention, so that a rate drops what it does not keep.
    importance = torch.rand(900, generator=torch.Generator().manual_seed(0))
    plan = decide_scored(needs, importance, 900, known, torch.ones(900))
    assert (plan.outcome, [each.keep_rate for each in plan.tried]) == (outcome, rates)
    shares = [each.dropped_attention for each in plan.tried]
    assert shares == pytest.approx([1 - rate for rate in rates], abs=0.08)
    assert plan.is_whole or shares[-1] <= most
    request = request_of("a", num_prompt_tokens=900)
    apply(request, plan, known)
    report = request.customized_info["spec_stack"][0]
    assert (report["dropped_attention"], len(report["tried_rates"])) == (shares[-1], len(rates))
    assert report["tried_rates"][0] == {"keep_rate": 0.1, "dropped_attention": shares[0]}
    json.dumps(report, allow_nan=False)
    # Its repetition is neither scored nor checked.
    again = decide(prompt, known)
    assert isinstance(again, Decision)
    assert (again.positions, again.tried) == (plan.positions, plan.tried)


@pytest.mark.parametrize(("follow_up", "recalls"), [("recall", True), ("freeze", False), ("afresh", False)])
def test_a_follow_up_inherits_the_selection_of_its_turn(follow_up: str, recalls: bool) -> None:
    known = _known()
    kept = (*range(100), *range(700, 800))
    known.turns.add((None, None), range(800), kept, [])
    decision = decide(replace(_prompt(850), follow_up=follow_up), known)
    if follow_up == "freeze":
        assert isinstance(decision, Decision)
        assert decision.positions == (*kept, *range(800, 850))
        assert decision.num_cached == 800
    else:
        assert isinstance(decision, UnscoredPrompt)
        assert (decision.is_recall_only, decision.recalls) == (recalls, recalls)


@pytest.mark.parametrize("inherits", [False, True])
def test_without_a_score_nothing_new_is_dropped(inherits: bool) -> None:
    known, kept = _known(), (*range(100), *range(700, 800))
    if inherits:
        known.turns.add((None, None), range(800), kept, [])
    needs = decide(_prompt(850), known)
    assert isinstance(needs, UnscoredPrompt)
    decision = decide_unscored(needs, "no room", "draft_pool_full")
    assert decision.outcome == "draft_pool_full"
    if inherits:
        assert isinstance(decision, Decision)
        assert decision.positions == (*kept, *range(800, 850))
    else:
        assert decision.is_whole
        assert decision.reason == "off: no room"


@pytest.mark.parametrize("num_tokens", [850, 1700], ids=["short", "pruned"])
@pytest.mark.parametrize("follow_up", ["recall", "freeze", "afresh"])
@pytest.mark.parametrize("is_scored", [True, False])
def test_what_a_follow_up_protects_of_earlier_turns_comes_back(
    follow_up: str, num_tokens: int, is_scored: bool
) -> None:
    known, kept = _known(), (*range(100), *range(700, 800))
    known.turns.add((None, None), range(800), kept, [])
    options = RequestOptions(protect=((300, 340), (690, 710)))
    decision = decide(replace(_prompt(num_tokens), follow_up=follow_up, options=options), known)
    if isinstance(decision, UnscoredPrompt):
        if is_scored:
            decision = decide_scored(decision, torch.zeros(num_tokens), 900, known)
        else:
            decision = decide_unscored(decision, "no room", "draft_pool_full")
    assert {*range(300, 340), *range(690, 710)} <= {*decision.positions}
    assert list(decision.positions) == sorted(set(decision.positions))
    if follow_up != "afresh":
        assert {*kept} <= {*decision.positions}
        assert decision.num_recalled == 50
    request = request_of("a")
    apply(request, decision, known)
    assert request.customized_info["spec_stack"][0]["num_protected_tokens"] == 60


def test_a_turn_is_gone_on_with_by_its_tenant_alone() -> None:
    turns = TurnStore(1000)
    turns.add(("one", None), [1, 2, 3, 4], (0, 1, 3), [5])
    again = [1, 2, 3, 4, 5, 6]
    assert turns.find(("other", None), again).num_tokens == turns.find((None, None), again).num_tokens == 0
    assert turns.find(("one", None), again).num_tokens == 4
