from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_stack.controller.base import DraftSignals, StepRecord
from spec_stack.explain.page import writers_of, written


def record(step: int, gamma: int, num_accepted: int, num_tokens: int | None = None) -> StepRecord:
    return StepRecord(
        request_id="one",
        step=step,
        policy="fixed",
        precision="fp32",
        task="code",
        is_prefill=step == 0,
        keep_rate=0.25,
        gamma=gamma,
        num_accepted=num_accepted,
        num_tokens=num_accepted + 1 if num_tokens is None else num_tokens,
        signals=DraftSignals([1.0] * gamma, [0.5] * gamma),
        draft_s=0.1,
        verify_s=0.2,
        policy_s=0.0,
    )


def test_the_token_behind_the_accepted_ones_is_bonus_correction_or_the_targets_alone() -> None:
    assert writers_of(record(1, 2, 2)) == ["draft", "draft", "bonus"]
    assert writers_of(record(1, 2, 1)) == ["draft", "correction"]
    assert writers_of(record(1, 2, 0)) == ["correction"]
    assert writers_of(record(1, 0, 0)) == ["plain"]
    # A stop string inside the accepted run: the target's own token was never handed out.
    assert writers_of(record(1, 4, 3, num_tokens=2)) == ["draft", "draft"]


def test_of_a_proposal_of_both_the_looked_up_tokens_are_the_last() -> None:
    both = replace(record(1, 5, 4), proposer="model+ngram", num_ngram_tokens=3)
    assert writers_of(both) == ["draft", "draft", "ngram", "ngram", "correction"]
    assert writers_of(replace(both, num_accepted=1, num_tokens=2)) == ["draft", "correction"]
    assert writers_of(replace(both, num_accepted=5, num_tokens=6))[1:] == ["draft", *["ngram"] * 3, "bonus"]


def test_a_record_that_names_its_proposer_is_believed() -> None:
    one = record(1, 2, 1)
    assert writers_of(replace(one, proposer="look-up")) == ["look-up", "correction"]
    assert writers_of(replace(one, proposer="model")) == ["draft", "correction"]


@given(st.lists(st.integers(0, 6).flatmap(lambda gamma: st.tuples(st.just(gamma), st.integers(0, gamma))), min_size=1))
def test_every_token_has_one_writer_and_its_own_step(steps: list[tuple[int, int]]) -> None:
    records = [record(index, gamma, accepted) for index, (gamma, accepted) in enumerate(steps)]
    tokens = written(records, ["a"] * sum(one.num_tokens for one in records))
    assert [token["step"] for token in tokens] == sorted(token["step"] for token in tokens)
    assert sum(token["writer"] == "draft" for token in tokens) == sum(one.num_accepted for one in records)


def test_texts_that_do_not_fit_the_records_are_refused() -> None:
    with pytest.raises(ValueError, match="2 texts for 3 tokens"):
        written([record(0, 2, 2)], ["a", "b"])
