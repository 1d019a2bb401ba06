"""A server answers pruned requests again while nobody waits; clients and its own counts see nothing of it."""

from __future__ import annotations

import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .conftest import Reference, Server, generate_body


def _audits(server: Server) -> dict[str, float]:
    """Audits by outcome."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=600) as reply:
        lines = [line for line in reply.read().decode().splitlines() if line.startswith("spec_stack_audits_total{")]
    counts: dict[str, float] = {}
    for line in lines:
        outcome = line.partition('outcome="')[2].partition('"')[0]
        counts[outcome] = counts.get(outcome, 0.0) + float(line.rpartition(" ")[2])
    return counts


@pytest.mark.nightly
def test_pruned_requests_are_audited_when_clients_are_gone(launch: Any, reference: Reference) -> None:
    server = launch(
        *("--max-total-tokens", "8000", "--enable-metrics", "--enable-priority-scheduling"),
        *("--spec-stack-audit-rate", "1", "--spec-stack-min-prompt-tokens", "400"),
    )
    prompts = [reference.prompt(600, seed=300 + at) for at in range(4)]
    asked = [generate_body(prompt, 12) for prompt in prompts]
    asked[1]["sampling_params"]["temperature"] = 0.8
    asked.append(generate_body(prompts[0][:200], 12))
    with ThreadPoolExecutor(5) as pool:
        replies = list(pool.map(lambda body: server.post("/generate", body), asked))
    reports = [reply["meta_info"]["spec_stack"] for status, reply in replies if status == 200]
    assert [report["sparse_prefill"] for report in reports] == [True] * 4 + [False]
    requests = server.metrics()["spec_stack:requests_total"]
    deadline = time.monotonic() + 300
    while sum((found := _audits(server)).values()) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert set(found) <= {"agreed", "lost"}
    assert server.metrics()["spec_stack:requests_total"] == requests == 5
    # A dense answer of an audit is no prefix of a client's.
    history = [*prompts[0], *replies[0][1]["output_ids"], *reference.user_turn(30, seed=310)]
    report = server.generate(history, 4)["meta_info"]["spec_stack"]
    assert (report["outcome"], report["num_cached_tokens"] > 500) == ("pruned", True)
    assert not server.state()["num_failures"]
    server.stop()
