"""A server answers pruned requests again while nobody waits; clients and its own counts see nothing of it."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from .conftest import Server, wait_until

ROOMS = "\n".join(f"The code of room {number} is {number * 7 + 13}." for number in range(60))
BREAKS = "/v1/chat/completions"


def _audits(server: Server, route: str = "") -> dict[str, float]:
    """Audits by outcome."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=600) as reply:
        lines = [line for line in reply.read().decode().splitlines() if line.startswith("spec_stack_audits_total{")]
    counts: dict[str, float] = {}
    for line in (line for line in lines if f'route="{route}' in line):
        outcome = line.partition('outcome="')[2].partition('"')[0]
        counts[outcome] = counts.get(outcome, 0.0) + float(line.rpartition(" ")[2])
    return counts


def _report(server: Server, text: str, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    """The report on a chat of one message."""
    chat = {"model": "default", "messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0}
    data, headers = json.dumps({**chat, "return_meta_info": True, **body}).encode(), headers or {}
    request = urllib.request.Request(server.url + BREAKS, data, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return dict(json.loads(reply.read())["choices"][0]["meta_info"]["spec_stack"])


def _wait_for(server: Server, num_audits: int) -> dict[str, float]:
    wait_until(lambda: sum(_audits(server, BREAKS).values()) >= num_audits)
    return _audits(server, BREAKS)


@pytest.mark.nightly
def test_lost_answers_turn_a_routes_pruning_off_and_audits_that_agree_turn_it_on(launch: Any) -> None:
    server = launch(
        *("--max-total-tokens", "40000", "--enable-metrics", "--spec-stack-min-prompt-tokens", "300"),
        *("--spec-stack-keep-rate", "0.1", "--spec-stack-audit-rate", "1", "--spec-stack-audit-max-loss", "0.1"),
    )
    for number in range(5):
        # The embedded pair loses codes of rooms.
        report = _report(server, f"Floor {number}.\n{ROOMS}\nContinue, please.")
        assert (report["outcome"], report["route"]) == ("pruned", BREAKS)
        found = _wait_for(server, number + 1)
    assert found == {"lost": 5}
    # Their own requests are not counted.
    assert server.metrics()["spec_stack:requests_total"] == 5
    report = _report(server, f"Floor 5.\n{ROOMS}\nContinue, please.")
    assert (report["outcome"], report["num_kept_tokens"]) == ("audited", report["num_prompt_tokens"])
    assert report["sparse_prefill_reason"].startswith(f"off: audits of {BREAKS} found more lost answers")
    # Other routes, and requests that say so themselves, are pruned.
    other = _report(server, f"Floor 6.\n{ROOMS}\nContinue.", {"x-spec-stack-route": "another"})
    assert (other["outcome"], other["route"]) == ("pruned", "another")
    for own in ({"custom_params": {"spec_stack": {"keep_rate": 0.1}}}, {"headers": {"x-spec-stack-keep-rate": "0.2"}}):
        assert _report(server, f"Floor {len(str(own))}.\n{ROOMS}\nContinue.", **own)["outcome"] == "pruned"
    # Audits are not audited.
    num_whole, before = 0, sum(_wait_for(server, 8).values())
    assert before == 8
    # Whatever is kept of its prompt, such a request is answered alike.
    said = {"logit_bias": {"300": 100}}
    while (report := _report(server, f"House {num_whole}.\n{ROOMS}\nContinue.", **said))["outcome"] == "audited":
        num_whole += 1
        found = _wait_for(server, 8 + num_whole)
    # Twenty audits decide, of which this route had three when it was off.
    assert (report["outcome"], found) == ("pruned", {"lost": 8, "agreed": num_whole})
    assert 17 <= num_whole <= 20
    assert not server.state()["num_failures"]
    server.stop()
