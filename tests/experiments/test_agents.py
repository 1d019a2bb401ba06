"""The replay of recorded agents: turns as the log has them, nothing of the system message lost, ratios by kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.real.agents import KEPT, SESSION, replay, report_of, shared_tokens, turns_of
from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.bench.rows import Rows

LOG: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "Run the tests. " + "The log says nothing new in this line either. " * 40},
        {"role": "assistant", "content": "They pass."},
        {"role": "user", "content": "Output: " + "a file was written, and another one was read. " * 60},
    ]
}


def test_a_turn_is_all_that_stands_before_an_answer() -> None:
    turns = turns_of(LOG)
    assert [[message["role"] for message in turn] for turn in turns] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
    ]
    answered = {"messages": [*LOG["messages"], {"role": "assistant", "content": "Done."}]}
    assert turns_of(answered) == turns
    own = {"messages": [{"role": "system", "content": "Be brief."}, *LOG["messages"]]}
    assert turns_of(own)[0][0]["content"] == "Be brief."


@pytest.fixture(scope="module")
def generator() -> SpecStackGenerator:
    config = SpecStackConfig(PrefillConfig(min_prompt_tokens=200, keep_rate=0.2))
    return SpecStackGenerator.from_pretrained(config=config, calibration=False, device="cpu")


def test_a_replay_prunes_what_is_new_and_nothing_of_system_and_tools(
    generator: SpecStackGenerator, tmp_path: Path
) -> None:
    rows = Rows(tmp_path / "rows.jsonl", 10)
    found = replay(generator, "log", LOG, rows, 2)
    by_arm = {(row["arm"], row["turn"]): row for row in found}
    assert set(by_arm) == {
        *((arm, turn) for arm in (KEPT, SESSION) for turn in (0, 1)),
        *((arm, 1) for arm in (f"cold {KEPT}", f"cold {SESSION}")),
    }
    assert all(row["system_tokens_lost"] == 0 for row in found)
    for turn in (0, 1):
        dense, sparse = by_arm[KEPT, turn], by_arm[SESSION, turn]
        assert dense["num_kept_tokens"] == dense["num_prompt_tokens"] == sparse["num_prompt_tokens"]
        assert sparse["num_kept_tokens"] < dense["num_kept_tokens"]
    assert by_arm[SESSION, 1]["num_cached_tokens"] > 0 == by_arm[f"cold {SESSION}", 1]["num_cached_tokens"]
    report = report_of(Rows(tmp_path / "rows.jsonl", 10))
    assert {name: kind["n"] for name, kind in report["kinds"].items()} == {
        "first turns": 1,
        "warm turns, pruned": 1,
        "cold, whole conversation": 1,
    }
    assert report["system_tokens_lost"] == 0


def test_what_is_protected_ends_where_two_users_part(generator: SpecStackGenerator) -> None:
    messages = turns_of(LOG)[0]
    tokenizer: Any = generator.tokenizer
    chat = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False).input_ids
    protected = tokenizer.decode(chat[: shared_tokens(tokenizer, messages, [])])
    assert messages[0]["content"] in protected
    assert "Run the tests" not in protected
