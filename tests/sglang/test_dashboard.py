"""The dashboard and the alerts ask for metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def _queries() -> list[str]:
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
    return [target["expr"] for panel in panels for target in panel["targets"]] + [rule["expr"] for rule in rules]


NAMES = {name for query in _queries() for name in re.findall(r"\b(?:spec_stack|sglang):\w+", query)}
METRICS = {name for name in NAMES if name.startswith("spec_stack:")}

_SAMPLES = """
from prometheus_client import REGISTRY
from spec_stack.sglang.metrics import ReportStore, SchedulerMetrics
store, scheduler = ReportStore("model"), SchedulerMetrics("model")
scheduler.tell(2, 3.5, {"num_tokens": 100, "num_used": 40, "num_free": 60, "num_pinned": 0, "num_evicted": 7})
scheduler.tell(0, 0.0, {"num_tokens": 100, "num_used": 30, "num_free": 70, "num_pinned": 0, "num_evicted": 9})
import json
print(json.dumps([[s.name, s.labels.get("outcome"), s.value] for m in REGISTRY.collect() for s in m.samples]))
"""


def _samples() -> list[list[Any]]:
    """In a process of its own: a name is registered once."""
    done = subprocess.run([sys.executable, "-c", _SAMPLES], capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


def test_every_metric_of_the_dashboard_and_the_alerts_is_there_before_any_request() -> None:
    from spec_stack.sglang.decide import OUTCOMES

    samples = _samples()
    assert len(METRICS) > 12
    assert {name for name, *_ in samples} >= METRICS
    assert {outcome for name, outcome, _ in samples if name == "spec_stack:requests_total"} == set(OUTCOMES)
    queried = {outcome for query in _queries() for outcome in re.findall(r'outcome="(\w+)"', query)}
    assert queried <= set(OUTCOMES)


def test_a_schedulers_metrics_are_its_newest_state() -> None:
    values = {name: value for name, _, value in _samples()}
    assert values["spec_stack:prompts_to_score"] == values["spec_stack:oldest_prompt_to_score_seconds"] == 0
    assert (values["spec_stack:draft_pool_tokens"], values["spec_stack:draft_pool_used_tokens"]) == (100, 30)
    assert values["spec_stack:draft_pool_evicted_tokens_total"] == 9


def test_every_panel_and_alert_says_what_it_shows() -> None:
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    assert all(panel["title"] and panel["description"] for panel in panels)
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
    assert all(rule["annotations"]["remedy"] and rule["labels"]["severity"] for rule in rules)
