"""Whose turn it is, without a model."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_stack.serve.config import ServeConfig
from spec_stack.serve.line import Job, Line, LineFull


def job(client: str) -> Job:
    return Job(client, {}, {}, 1, lambda delivery: None)


@given(st.lists(st.sampled_from("abc"), max_size=20))
def test_clients_take_turns_and_each_keeps_its_order(clients: list[str]) -> None:
    line, jobs = Line(100, 100), [job(client) for client in clients]
    for each in jobs:
        line.join(each)
    served = [line.next() for _ in jobs]
    assert len(line) == 0
    for client in "abc":
        assert [each for each in served if each and each.client == client] == [
            each for each in jobs if each.client == client
        ]
    # While a client waits, no other one is served twice.
    for at, each in enumerate(served):
        assert each is not None
        rest = {later.client for later in served[at + 1 :] if later}
        between = [later.client for later in served[at + 1 :][: len(rest)] if later]
        assert len(between) == len(set(between)) or len(rest) == 1


def test_a_full_line_and_a_client_with_too_many_are_refused() -> None:
    line = Line(3, 2)
    line.join(job("a"))
    line.join(second := job("a"))
    with pytest.raises(LineFull, match="of this client"):
        line.join(job("a"))
    line.join(job("b"))
    with pytest.raises(LineFull, match="3 requests are waiting"):
        line.join(job("c"))
    line.leave(second)
    line.leave(second)
    line.join(job("c"))
    assert [each.client for each in (line.next(), line.next(), line.next()) if each] == ["a", "b", "c"]


def test_closing_cancels_who_waits_and_wakes_who_serves() -> None:
    line, waiting, taken = Line(3, 3), job("a"), []
    line.join(waiting)
    line.close()
    assert waiting.is_cancelled.is_set()
    with pytest.raises(LineFull, match="shutting down"):
        line.join(job("b"))
    assert line.next() is waiting
    thread = threading.Thread(target=lambda: taken.append(line.next()))
    thread.start()
    thread.join(10)
    assert taken == [None]


@pytest.mark.parametrize(
    "options",
    [
        {"port": -1},
        {"max_queued": 0},
        {"max_body_bytes": True},
        {"max_sessions": -1},
        {"max_prompt_tokens": 0},
        {"api_keys": "secret"},
        {"api_keys": [""]},
        {"temperature": -1.0},
    ],
    ids=str,
)
def test_a_bad_setting_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ServeConfig(**options)  # type: ignore[arg-type]


def test_a_configuration_does_not_show_its_keys() -> None:
    assert "secret" not in repr(ServeConfig(api_keys=["secret"]))
