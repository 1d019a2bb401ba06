"""The draft's check in a generator and in a session, against whole forwards."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from spec_stack import DecodeConfig, PrefillConfig, SessionConfig, SpecStackConfig, SpecStackGenerator
from tests.support.models import make_model, random_prompt
from tests.support.reference_check import divergence

PROMPT = random_prompt(240, seed=3)
PREFILL = PrefillConfig(
    sparse_prefill="on",
    keep_rate=0.3,
    granularity="chunks",
    chunk_size=8,
    max_divergence=math.inf,
    check_tokens=5,
    check_rates=(0.5, 0.7),
    on_scoring_failure="raise",
)


def generator(**prefill: Any) -> SpecStackGenerator:
    config = SpecStackConfig(replace(PREFILL, **prefill), DecodeConfig("fixed", 3))
    return SpecStackGenerator(make_model("qwen2"), make_model("qwen2", seed=1), config=config)


def kept_positions(pair: SpecStackGenerator, prompt: list[int]) -> list[int]:
    with pair.session() as session:
        session.generate(input_ids=prompt, max_tokens=1)
        return [at for at in range(len(prompt)) if at not in session.dropped_positions]


@pytest.mark.parametrize("positions", ["original", "contiguous"])
@pytest.mark.parametrize("heads", [None, ((0, 1), (1, 2))], ids=["all layers", "early layers"])
def test_the_divergence_is_that_of_whole_forwards(positions: str, heads: Any) -> None:
    checked = generator(positions=positions, scoring_heads=heads)
    metrics = checked.generate(input_ids=PROMPT, max_tokens=4).metrics
    kept = kept_positions(checked, PROMPT)
    assert len(kept) == metrics.num_kept_tokens < len(PROMPT)
    expected = divergence(make_model("qwen2", seed=1), PROMPT, kept, 5, contiguous=positions == "contiguous")
    assert metrics.divergence == pytest.approx(expected, rel=1e-3)
    assert [each.keep_rate for each in metrics.tried_rates] == [0.3]
    assert f"changed by {expected:.2g} nats" in metrics.sparse_prefill_reason


@pytest.mark.parametrize("max_divergence", [0.0, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_are_those_of_the_rate_that_is_kept(max_divergence: float, temperature: float) -> None:
    options: Any = {"input_ids": PROMPT, "max_tokens": 12, "temperature": temperature, "seed": 1, "gamma": 0}
    checked = generator().generate(**options, max_divergence=max_divergence)
    plain = generator(max_divergence=None)
    other = plain.generate(**options, sparse_prefill="on" if max_divergence else "off")
    if not temperature:
        assert checked.token_ids == other.token_ids
    assert checked.metrics.num_kept_tokens == other.metrics.num_kept_tokens
    rates = [each.keep_rate for each in checked.metrics.tried_rates]
    assert rates == ([0.3] if max_divergence else [0.3, 0.5, 0.7])
    assert checked.metrics.sparse_prefill is bool(max_divergence)
    assert checked.metrics.sparse_prefill_reason.startswith("on" if max_divergence else "off: the draft's answer")
    assert other.metrics.divergence is None


def test_the_drafts_answer_is_the_first_proposal() -> None:
    model = make_model("qwen2")
    config = SpecStackConfig(replace(PREFILL, check_rates=()), DecodeConfig("fixed", 3))
    twins = SpecStackGenerator(model, model, config=config)
    # Over the threshold at once: the target then reads what the draft has read, and agrees with all of its answer.
    metrics = twins.generate(input_ids=PROMPT, max_tokens=12, max_divergence=0).metrics
    assert metrics.gamma_trace[0] == 5
    assert metrics.num_first_tokens == 6


@pytest.mark.parametrize("positions", ["original", "contiguous"])
def test_the_draft_decodes_over_what_the_check_has_read(positions: str) -> None:
    model = make_model("qwen2")
    config = SpecStackConfig(replace(PREFILL, positions=positions), DecodeConfig("fixed", 3))  # type: ignore[arg-type]
    twins = SpecStackGenerator(model, model, config=config)
    result = twins.generate(input_ids=PROMPT, max_tokens=24, return_records=True)
    assert result.metrics.sparse_prefill
    # A twin that has read the same tokens at the same positions is right every time.
    later = (result.records or [])[1:-1]
    assert later
    assert all(step.gamma == step.num_accepted == 3 for step in later)
    options: Any = {"input_ids": PROMPT, "max_tokens": 24}
    assert twins.generate(**options, gamma=0).token_ids == result.token_ids
    # With logits processors the draft's own answer is no proposal.
    biased = twins.generate(**options, logit_bias={result.token_ids[0]: -50.0}, return_records=True)
    assert all(step.gamma == step.num_accepted == 3 for step in (biased.records or [])[1:-1])


def test_a_session_checks_new_text_and_what_was_dropped() -> None:
    checked = generator(check_rates=())
    plain = generator(max_divergence=None)
    more = random_prompt(30, seed=5)
    with checked.session() as session, plain.session(SessionConfig(recall=False)) as dense:
        first = session.generate(input_ids=PROMPT, max_tokens=4)
        dropped = session.dropped_positions
        prompt = [*PROMPT, *first.token_ids, *more]
        second = session.generate(input_ids=prompt, max_tokens=4, sparse_prefill="auto", max_divergence=0)
        assert dropped
        assert session.dropped_positions == []
        assert second.metrics.num_recalled_tokens == len(dropped)
        assert second.metrics.sparse_prefill_reason.startswith("off: the draft's answer changed")
        whole = dense.generate(input_ids=prompt, max_tokens=4, sparse_prefill="off")
    assert whole.metrics.num_kept_tokens == second.metrics.num_kept_tokens


def test_recall_that_is_off_stays_off() -> None:
    checked = generator(max_divergence=0, check_rates=(0.9,), keep_rate=0.3)
    with checked.session(SessionConfig(recall=False)) as session:
        first = session.generate(input_ids=PROMPT, max_tokens=4, max_divergence=math.inf)
        dropped = session.dropped_positions
        session.generate(input_ids=[*PROMPT, *first.token_ids, *random_prompt(60, seed=5)], max_tokens=4)
        assert session.dropped_positions == dropped


def test_a_repeated_call_finds_the_same() -> None:
    checked = generator()
    calls = [checked.generate(input_ids=PROMPT, max_tokens=3).metrics.divergence for _ in range(2)]
    assert calls[0] == calls[1]
