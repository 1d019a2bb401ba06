"""The check in a generator and in a session."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from spec_stack import DecodeConfig, PrefillConfig, SessionConfig, SpecStackConfig, SpecStackGenerator
from tests.support.models import make_model, random_prompt
from tests.support.reference_check import answer_attention, dropped_attention

PROMPT = random_prompt(240, seed=3)
PREFILL = PrefillConfig(
    sparse_prefill="on",
    keep_rate=0.3,
    granularity="chunks",
    chunk_size=8,
    first_scoring_layer=0,
    max_dropped_attention=1,
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
@pytest.mark.parametrize("scorer", ["attention", "bm25"])
@pytest.mark.parametrize("heads", [None, ((0, 1), (1, 2))], ids=["all layers", "early layers"])
def test_the_share_is_that_of_loops_over_whole_forwards(positions: str, scorer: str, heads: Any) -> None:
    checked = generator(positions=positions, scoring_heads=heads, scorer=scorer)
    metrics = checked.generate(input_ids=PROMPT, max_tokens=4).metrics
    kept = kept_positions(checked, PROMPT)
    assert len(kept) == metrics.num_kept_tokens < len(PROMPT)
    eager = make_model("qwen2", seed=1, implementation="eager")
    config = eager.config
    every = [*product(range(config.num_hidden_layers), range(config.num_attention_heads))]
    attention = answer_attention(eager, PROMPT, 5, heads or every)
    expected = dropped_attention(attention, kept, first=8, last=8)
    assert 0 < expected < 1
    assert metrics.dropped_attention == pytest.approx(expected, rel=1e-3)
    assert [each.keep_rate for each in metrics.tried_rates] == [0.3]
    assert f"{expected:.2g} of the draft's attention is dropped" in metrics.sparse_prefill_reason


@pytest.mark.parametrize("most", [0.0, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_are_those_of_the_rate_that_is_kept(most: float, temperature: float) -> None:
    options: Any = {"input_ids": PROMPT, "max_tokens": 12, "temperature": temperature, "seed": 1, "gamma": 0}
    checked = generator().generate(**options, max_dropped_attention=most)
    plain = generator(max_dropped_attention=None)
    other = plain.generate(**options, sparse_prefill="on" if most else "off")
    if not temperature:
        assert checked.token_ids == other.token_ids
    assert checked.metrics.num_kept_tokens == other.metrics.num_kept_tokens
    rates = [each.keep_rate for each in checked.metrics.tried_rates]
    assert rates == ([0.3] if most else [0.3, 0.5, 0.7])
    assert checked.metrics.sparse_prefill is bool(most)
    assert checked.metrics.sparse_prefill_reason.startswith("on" if most else "off: too much of the draft's attention")
    assert other.metrics.dropped_attention is None


def test_the_drafts_answer_is_the_first_proposal() -> None:
    model = make_model("qwen2")
    config = SpecStackConfig(replace(PREFILL, check_rates=()), DecodeConfig("fixed", 3))
    twins = SpecStackGenerator(model, model, config=config)
    # Over the threshold at once: the target then reads what the draft has read, and agrees with all of its answer.
    metrics = twins.generate(input_ids=PROMPT, max_tokens=12, max_dropped_attention=0).metrics
    assert metrics.gamma_trace[0] == 5
    assert metrics.num_first_tokens == 6


@pytest.mark.parametrize("scorer", ["attention", "bm25"])
@pytest.mark.parametrize("positions", ["original", "contiguous"])
def test_decoding_goes_on_behind_a_checked_prompt(positions: str, scorer: str) -> None:
    checked = generator(positions=positions, scorer=scorer)
    options: Any = {"input_ids": PROMPT, "max_tokens": 24}
    plain = checked.generate(**options, gamma=0)
    assert checked.generate(**options).token_ids == plain.token_ids
    biased: Any = {**options, "logit_bias": {plain.token_ids[0]: -50.0}}
    assert checked.generate(**biased).token_ids == checked.generate(**biased, gamma=0).token_ids != plain.token_ids


def test_the_next_rate_is_kept_where_it_drops_little_enough() -> None:
    shares = [generator(keep_rate=rate).generate(input_ids=PROMPT, max_tokens=1).metrics for rate in (0.3, 0.5)]
    first, second = (each.dropped_attention or 0 for each in shares)
    assert first > second > 0
    metrics = generator().generate(input_ids=PROMPT, max_tokens=1, max_dropped_attention=second).metrics
    assert [each.keep_rate for each in metrics.tried_rates] == [0.3, 0.5]
    assert metrics.num_kept_tokens == shares[1].num_kept_tokens
    assert "; 0.5 kept: too much of the draft's attention would be dropped" in metrics.sparse_prefill_reason


def test_a_session_checks_new_text_and_what_was_dropped() -> None:
    checked = generator(check_rates=())
    plain = generator(max_dropped_attention=None)
    more = random_prompt(30, seed=5)
    with checked.session() as session, plain.session(SessionConfig(recall=False)) as dense:
        first = session.generate(input_ids=PROMPT, max_tokens=4)
        dropped = session.dropped_positions
        prompt = [*PROMPT, *first.token_ids, *more]
        second = session.generate(input_ids=prompt, max_tokens=4, sparse_prefill="auto", max_dropped_attention=0)
        assert dropped
        assert session.dropped_positions == []
        assert second.metrics.num_recalled_tokens == len(dropped)
        assert second.metrics.sparse_prefill_reason.startswith("off: too much of the draft's attention")
        whole = dense.generate(input_ids=prompt, max_tokens=4, sparse_prefill="off")
    assert whole.metrics.num_kept_tokens == second.metrics.num_kept_tokens


def test_recall_that_is_off_stays_off() -> None:
    checked = generator(max_dropped_attention=0, check_rates=(0.9,), keep_rate=0.3)
    with checked.session(SessionConfig(recall=False)) as session:
        first = session.generate(input_ids=PROMPT, max_tokens=4, max_dropped_attention=1)
        dropped = session.dropped_positions
        session.generate(input_ids=[*PROMPT, *first.token_ids, *random_prompt(60, seed=5)], max_tokens=4)
        assert session.dropped_positions == dropped
