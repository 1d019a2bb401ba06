"""Many clients at once, well-behaved and not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spec_stack import SpecStackGenerator
from tests.serve.conftest import Server
from tests.serve.load import Load, run_load


@pytest.mark.slow
def test_eight_clients_with_mixed_requests_get_right_answers_and_leave_nothing_behind(
    embedded: SpecStackGenerator, start: Callable[..., Server]
) -> None:
    server = start()
    load = Load(num_clients=8, num_requests=60)
    run_load(server.url, embedded, Load(num_clients=8, num_requests=16, seed=1))
    outcome = run_load(server.url, embedded, load)
    assert outcome.num_wrong == 0
    assert outcome.num_unexpected == []
    assert sum(outcome.counts.values()) == 60
    assert min(outcome.counts.values()) > 2
    assert outcome.is_idle
    # In MB; the caches of the kept sessions come and go.
    assert outcome.rss_growth_mb < 60
