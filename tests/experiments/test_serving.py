"""The serving benchmark's own arithmetic and prompts; its servers need SGLang."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from experiments.serving import bench, parts, proxy
from experiments.serving.client import Answer, Client
from tests.support.upstream import FakeUpstream

ASSETS = Path(__file__).resolve().parents[2] / "spec_stack" / "assets"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(ASSETS / "target")


class Parrot(Client):
    """A server that answers with so many tokens at once, and notes what it was asked."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    def ask(self, input_ids: Sequence[int], num_new: int, *_: Any, **__: Any) -> Answer:
        self.prompts.append(list(input_ids))
        meta = {"cached_tokens": 0, "finish_reason": {"type": "length"}}
        return Answer(1.0, [1.5, 3.0], list(range(70, 70 + num_new)), meta_info=meta)

    def forget(self) -> None:
        pass


def test_every_arm_is_the_first_one_equally_often_and_none_is_left_out() -> None:
    arms = parts.Arms({name: Client(0) for name in ("off", "dense", "SPEC_STACK")})
    orders = [[name for name, _ in arms.in_turn()] for _ in range(6)]
    assert all(sorted(order) == sorted(arms.clients) for order in orders)
    assert sorted(order[0] for order in orders) == sorted([*arms.clients] * 2)


def test_every_turn_goes_on_from_its_arms_own_replies(tokenizer: Any) -> None:
    clients = {"off": Parrot(), "SPEC_STACK": Parrot()}
    found = parts.conversations(parts.Arms(clients), tokenizer, [300], 2, 3, 4)
    told = parts.turns_told(found)
    assert set(told) == {f"300 {arm}, turn {turn}" for arm in clients for turn in (1, 2, 3)}
    assert all(row["n"] == 2 and row["ttft_s"] == 0.5 for row in told.values())
    for client in clients.values():
        first, second, third = client.prompts[:3]
        assert len(first) < len(second) < len(third)
        assert tokenizer.decode(first)[:200] == tokenizer.decode(third)[:200]


@pytest.mark.parametrize("name", bench.ARMS)
def test_an_arm_has_a_draft_where_it_speculates_and_our_plugin_where_it_is_ours(name: str) -> None:
    arguments, environment = bench.launch_of(bench.ARMS[name], bench.parse_args([]))
    assert ("--speculative-draft-model-path" in arguments) == (name != "off")
    assert ("SGLANG_PLUGINS" in environment) == (name in ("off", "STANDALONE"))


def test_a_conversation_goes_through_every_arm_and_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    upstream, rows = FakeUpstream(), tmp_path / "rows.jsonl"
    arms = [f"--arm={name}={upstream.url}" for name in ("direct", "proxy")]
    options = ["--model=m", f"--tokenizer={ASSETS / 'target'}", "--lengths", "300", "--turns", "2", f"--rows={rows}"]
    try:
        monkeypatch.setattr("sys.argv", ["proxy", *arms, *options, "--repeats", "1"])
        proxy.main()
        first = rows.read_text(encoding="utf-8")
        monkeypatch.setattr("sys.argv", ["proxy", arms[0], *options, "--repeats", "2"])
        proxy.main()
        monkeypatch.setattr("sys.argv", ["proxy", *arms, *options, "--repeats", "2"])
        proxy.main()
    finally:
        upstream.stop()
    assert len(first.splitlines()) == 4
    assert rows.read_text(encoding="utf-8").startswith(first)
    bodies = [seen.json for seen in upstream.seen]
    assert [len(body["messages"]) for body in bodies] == [1, 1, 3, 3, 1, 3, 1, 3]
    assert len({body["cache_salt"] for body in bodies}) == 4
    assert all(body["messages"][1]["content"] == "Vienna é" for body in bodies if len(body["messages"]) == 3)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["turns"]
    assert {(row["n"], row["num_prompt_tokens"], row["right"]) for row in told.values()} == {(2, 7, 0)}
