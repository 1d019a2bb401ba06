"""Requests on a clock that no other load on the machine slows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count

import pytest

from spec_stack.decode.clock import Clock


@contextmanager
def counted_readings() -> Iterator[None]:
    """A request's clock is a second later at each reading, so that a step takes as long however much it verifies. For a
    generator that has measured no other seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spec_stack.engine.request.Clock", partial(Clock, now=partial(next, count(0.0))))
        yield
