"""The order of streams around a part of a scoring, by streams that note who waits for whom: a CPU has none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch


class _Stream:
    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self._events = name, events

    def wait_stream(self, other: _Stream) -> None:
        self._events.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("fails", [False, True])
def test_a_part_runs_on_the_forward_stream_between_what_came_before_and_what_comes_after(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """What fails half-way has written slots on that stream too."""
    from spec_stack.sglang.scoring import on_forward_stream

    events: list[str] = []
    forward, current = _Stream("forward", events), _Stream("current", events)

    @contextmanager
    def on_forward() -> Iterator[None]:
        events.append("forward begins")
        try:
            yield
        finally:
            events.append("forward ends")

    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(current_stream=lambda: current))
    scheduler = SimpleNamespace(forward_stream=forward, forward_stream_ctx=on_forward())
    try:
        with on_forward_stream(scheduler, torch.device("cuda")):
            events.append("part")
            if fails:
                raise MemoryError
    except MemoryError:
        assert fails
    order = ["forward waits for current", "forward begins", "part", "forward ends", "current waits for forward"]
    assert events == order
