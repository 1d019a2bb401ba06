"""The arms that decoding by length compares, and what becomes of their rows."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from experiments.real.rows import Rows
from experiments.speed.decode_collapse import LOSSLESS, Bench, first_tokens, pair_speeds, summed_up
from experiments.speed.draft_arms import window_slots
from experiments.speed.draft_choice import KINDS, answer_of
from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from tests.support import reference
from tests.support.models import make_model, random_prompt

SLOTS = 32


@pytest.mark.parametrize("policy", ["fixed", "default"])
def test_every_draft_beside_a_dense_target_leaves_its_tokens(policy: str, tmp_path: Path) -> None:
    prefill = PrefillConfig(chunk_size=8, draft_slots=SLOTS, min_prompt_tokens=10_000)
    own = SpecStackGenerator(make_model(seed=1), make_model(seed=2), config=SpecStackConfig(prefill=prefill))
    bench = Bench(own, argparse.Namespace(cpu_seconds=True, keep_rate=0.2, gamma=3, prefilled=tmp_path / "kept"))
    prompt = random_prompt(100)
    expected = reference.greedy(make_model(seed=1), prompt, 40)
    bench.prefilled("100 go on 0", prompt)
    # Taken from its file.
    prefilled = bench.prefilled("100 go on 0", prompt)
    assert prefilled.forward_s == 0
    for name in LOSSLESS:
        found = bench.decode(prompt, name, policy, prefilled, 40)
        assert found["token_ids"] == expected, name
        assert (found["gamma"] > 0) == (name != "plain" and policy == "fixed") or policy == "default"
        assert (found["reads_s"] > 0) == (name != "plain" and found["gamma"] > 0) or name == "attention"
    assert prefilled.num_cached == 99


@pytest.mark.parametrize("num_tokens", [5, 32, 33, 200])
def test_a_window_is_as_large_as_what_is_chosen(num_tokens: int) -> None:
    slots = window_slots(list(range(num_tokens)), SLOTS, 8)
    assert len(slots) == min(num_tokens, SLOTS)
    assert slots[:8] == list(range(min(8, num_tokens)))
    assert slots[-1] == num_tokens - 1


def test_rows_become_ratios_to_plain_of_the_same_prompt(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl", 1.0)
    for index, (plain, chosen) in enumerate([(10.0, 30.0), (20.0, 30.0), (40.0, 40.0)]):
        for name, speed in (("plain", plain), ("chosen", chosen)):
            values = {"tokens_per_s": speed, "with_reading": speed / 2, "acceptance_rate": None}
            rows.add(f"1000 go on {index}", f"{name} fixed", values | {"token_ids": [1, 2, index * (name == "plain")]})
            rows.add(f"1000 go on {index}", f"{name} ttft", {"ttft_s": speed})
    # Measured afterwards, and shown in its place.
    rows.add("500 go on 0", "plain fixed", {"tokens_per_s": 50.0, "with_reading": 50.0, "token_ids": [1]})
    arguments = argparse.Namespace(policies=["fixed"], arms=["plain", "chosen"])
    table = summed_up(Rows(tmp_path / "rows.jsonl", 1.0), arguments)
    chosen_row = table["fixed"]["1000 go on"]["chosen"]
    assert (chosen_row["over_plain"], chosen_row["over_plain_with_reading"]) == (1.5, 0.75)
    assert (chosen_row["lowest_over_plain"], chosen_row["same_tokens"], chosen_row["n"]) == (1.0, 1, 3)
    assert list(table["fixed"]) == ["500 go on", "1000 go on"]
    del table["fixed"]["500 go on"]
    assert pair_speeds(table, "fixed") == {"1000": {"plain": 20.0, "chosen": 30.0}}
    assert first_tokens(rows) == {"1000": {"over_plain": 1.5, "n": 3}}


def test_given_answers_quote_the_text_that_stands_before_them() -> None:
    whole = list(range(1192))
    assert answer_of(whole, "go on") == whole[1000:]
    for kind in KINDS[1:]:
        answer = answer_of(whole, kind)
        assert len(answer) == 192
        assert max(answer) < 1000
        starts = [at for at in range(1, 192) if answer[at] != answer[at - 1] + 1]
        assert len(starts) == {"quote": 0, "topics": 3}[kind]
