"""Whose turn it is, without a model."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_stack.serve.config import ServeConfig
from spec_stack.serve.queue import QueuedRequest, QueueFullError, RequestQueue


def job(client: str) -> QueuedRequest:
    return QueuedRequest(client, {}, {}, 1, lambda delivery: None)


@given(st.lists(st.sampled_from("abc"), max_size=20))
def test_clients_take_turns_and_each_keeps_its_order(clients: list[str]) -> None:
    queue, jobs = RequestQueue(100, 100), [job(client) for client in clients]
    for each in jobs:
        queue.add(each)
    served = [queue.next() for _ in jobs]
    assert len(queue) == 0
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


def test_a_full_queue_and_a_client_with_too_many_are_refused() -> None:
    queue = RequestQueue(3, 2)
    queue.add(job("a"))
    queue.add(second := job("a"))
    with pytest.raises(QueueFullError, match="of this client"):
        queue.add(job("a"))
    queue.add(job("b"))
    with pytest.raises(QueueFullError, match="3 requests are waiting"):
        queue.add(job("c"))
    queue.cancel(second)
    queue.cancel(second)
    queue.add(job("c"))
    assert [each.client for each in (queue.next(), queue.next(), queue.next()) if each] == ["a", "b", "c"]


def test_closing_cancels_who_waits_and_wakes_who_serves() -> None:
    queue, waiting, taken = RequestQueue(3, 3), job("a"), []
    queue.add(waiting)
    queue.close()
    assert waiting.is_cancelled.is_set()
    with pytest.raises(QueueFullError, match="shutting down"):
        queue.add(job("b"))
    assert queue.next() is waiting
    thread = threading.Thread(target=lambda: taken.append(queue.next()))
    thread.start()
    thread.join(60)
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
