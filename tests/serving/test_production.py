"""What production adds to requests and launches: msgpack, priorities, sessions, scores, weights, headers, metrics."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from spec_stack.prefill.queries import MOST_REPEATED
from tests.sglang.test_dashboard import NAMES

from .conftest import (
    ASSETS,
    MIN_PROMPT_TOKENS,
    Launcher,
    Reference,
    Server,
    generate_body,
    kept_positions,
    report_of,
    wait_until,
)

_DRAFT_POSITIONS = 2600
_LONG = {"sparse_prefill": "on"}


def _draft_of(folder: Path, positions: int) -> Path:
    """The embedded draft with another length."""
    draft = shutil.copytree(ASSETS / "draft", folder / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
    return draft


@pytest.fixture(scope="module")
def busy(launch: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """msgpack between its processes, two running requests, priorities, and a draft shorter than the context."""
    server = launch(
        *("--max-total-tokens", "16000", "--max-running-requests", "2", "--context-length", "4096"),
        *("--enable-priority-scheduling", "--chunked-prefill-size", "512", "--enable-metrics"),
        *("--spec-stack-min-prompt-tokens", str(MIN_PROMPT_TOKENS), "--log-level", "debug"),
        environment={"SGLANG_USE_PICKLE_IPC": "0", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"},
        draft=_draft_of(tmp_path_factory.mktemp("models"), _DRAFT_POSITIONS),
    )
    yield server
    server.stop()


@pytest.fixture(scope="module")
def scoring_only(launch: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """No drafting, and a context as long as the scoring model's positions."""
    server = launch(
        *("--max-total-tokens", "8000", "--context-length", "2048", "--enable-metrics"),
        *("--spec-stack-min-prompt-tokens", str(MIN_PROMPT_TOKENS)),
        own_algorithm=(),
        draft=_draft_of(tmp_path_factory.mktemp("models"), 2048),
    )
    yield server
    server.stop()


def _num_pruned(server: Server) -> int:
    return int(server.state()["num_requests"]["pruned"])


def _ask_with_header(server: Server, path: str, body: dict[str, Any], keep_rate: str) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json", "X-Spec-Stack-Keep-Rate": keep_rate}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_every_option_passes_msgpack_and_too_many_spans_do_not(busy: Server, reference: Reference) -> None:
    prompt = reference.prompt(700, seed=700)
    plain = busy.generate(prompt, 6)
    assert report_of(plain)["outcome"] == "pruned"
    spans = [[100, 400], [0, 60], [300, 420]]
    options = {"protect": spans, "explain": True, "gamma": 2, "keep_rate": 0.3, "max_dropped_attention": 1}
    reply = busy.generate(prompt, 6, **options, **_LONG)
    assert [each["keep_rate"] for each in report_of(reply)["tried_rates"]] == [0.3]
    assert {*kept_positions(reply)}.issuperset({*range(60), *range(100, 420)})
    # Spans that overlap count once.
    assert report_of(busy.generate(prompt, 2, protect=[[0, 400], [0, 400]], **_LONG))["outcome"] == "pruned"
    status, reply = busy.post("/generate", generate_body(prompt, 2, protect=[[0, 1]] * 5000))
    assert (status, "at most 4096 token spans" in reply["error"]["message"]) == (400, True)
    assert busy.is_alive


def test_a_draft_of_fewer_positions_than_the_context_scores_what_it_can(busy: Server, reference: Reference) -> None:
    # Its scoring queries run again behind the prompt.
    most, over = (reference.text_ids(_DRAFT_POSITIONS - MOST_REPEATED + more, seed=701) for more in (0, 1))
    assert report_of(busy.generate(most, 2, **_LONG))["outcome"] == "pruned"
    report = report_of(busy.generate(over, 2, **_LONG))
    assert report["outcome"] == "unsupported"
    assert f"and the draft {_DRAFT_POSITIONS} positions" in report["sparse_prefill_reason"]


def test_prompts_of_scores_stay_whole(busy: Server, reference: Reference) -> None:
    before = _num_pruned(busy)
    text = reference.tokenizer.decode(reference.text_ids(900, seed=702))
    body = {"model": "default", "query": text, "items": [" yes"], "label_token_ids": [5, 6]}
    status, reply = busy.post("/v1/score", body)
    assert status == 200, reply
    assert _num_pruned(busy) == before


def test_prompts_are_scored_when_they_can_start_and_the_urgent_one_first(busy: Server, reference: Reference) -> None:
    """What the server says decides, never how long anything takes: two requests run until they are aborted."""

    def run(number: int) -> None:
        prompt = reference.prompt(60, seed=720 + number)
        # Without a priority it would be preempted.
        busy.post("/generate", {**generate_body(prompt, 3500, gamma=0), "rid": f"runs {number}", "priority": 0})

    def ask(number: int) -> None:
        body = generate_body(reference.prompt(900, seed=730 + number), 2, **_LONG)
        # So little more that it preempts nobody.
        body |= {"rid": f"waits {number}", "priority": 5 if number == 5 else 0}
        status, reply = busy.post("/generate", body)
        assert (status, report_of(reply)["outcome"]) == (200, "pruned")

    def to_score(metrics: dict[str, float]) -> float:
        return metrics["spec_stack:prompts_to_score"]

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(run, number) for number in range(2)]
        try:
            wait_until(lambda: busy.metrics()["sglang:num_running_reqs"] == 2)
            before = _num_pruned(busy)
            waiting = [pool.submit(ask, number) for number in range(5)]
            # Of those that wait for the two one is scored ahead.
            wait_until(lambda: _num_pruned(busy) == before + 1 and to_score(busy.metrics()) == 4)
            waiting.append(pool.submit(ask, 5))
            # None that is scored is before the urgent one.
            wait_until(lambda: _num_pruned(busy) == before + 2)
            oldest, num_steps = busy.metrics()["spec_stack:oldest_prompt_to_score_seconds"], busy.state()["num_steps"]
            wait_until(lambda: busy.state()["num_steps"] > num_steps + 40)
            assert not any(each.done() for each in running), "they ended too soon for this test"
            assert (_num_pruned(busy), to_score(busy.metrics())) == (before + 2, 4)
            assert busy.metrics()["spec_stack:oldest_prompt_to_score_seconds"] > oldest
        finally:
            for number in range(2):
                busy.post("/abort_request", {"rid": f"runs {number}"})
        for each in (*running, *waiting):
            each.result()
    # In the log's order they were scored.
    scored = [line.split(": ")[1] for line in busy.log.read_text().splitlines() if ": waits " in line]
    assert scored.index("waits 5") == 1, scored
    wait_until(lambda: to_score(busy.metrics()) == 0)


def test_an_update_of_the_targets_weights_leaves_the_draft_and_what_is_known_goes(
    busy: Server, reference: Reference
) -> None:
    prompt = reference.prompt(900, seed=740)
    before = busy.generate(prompt, 12, **_LONG)
    assert busy.state()["num_turns_remembered"]
    status, reply = busy.post("/update_weights_from_disk", {"model_path": str(ASSETS / "target")})
    assert (status, reply["success"]) == (200, True), reply
    state = busy.state()
    assert (state["num_turns_remembered"], state["draft_pool"]["num_used"]) == (0, 0)
    after = busy.generate(prompt, 12, **_LONG)
    assert after["output_ids"] == before["output_ids"]
    # It is scored again, by the same draft.
    for name in ("num_kept_tokens", "num_scored_tokens"):
        assert report_of(after)[name] == report_of(before)[name]
    assert not state["num_failures"]


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions", "/v1/messages"])
def test_a_header_sets_the_keep_rate_on_every_endpoint(busy: Server, reference: Reference, path: str) -> None:
    text = reference.tokenizer.decode(reference.text_ids(900, seed=750 + len(path)))
    messages = {"model": "default", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"text": text, "sampling_params": {"max_new_tokens": 2}},
        "/v1/completions": {"model": "default", "prompt": text, "max_tokens": 2},
    }
    body = bodies.get(path, messages)
    counts = [busy.state()["num_requests"]]
    for keep_rate in ("1", "0.4"):
        status, reply = _ask_with_header(busy, path, body, keep_rate)
        assert status == 200, reply
        counts.append(busy.state()["num_requests"])
    assert [it["disabled"] - counts[0]["disabled"] for it in counts] == [0, 1, 1]
    assert [it["pruned"] - counts[0]["pruned"] for it in counts] == [0, 0, 1]
    status, reply = _ask_with_header(busy, path, body, "2")
    assert (status, "must be over 0 and at most 1" in json.dumps(reply)) == (400, True)


def test_a_bodys_options_hold_against_the_header(busy: Server, reference: Reference) -> None:
    body = generate_body(reference.prompt(900, seed=760), 2, sparse_prefill="off")
    status, reply = _ask_with_header(busy, "/generate", body, "0.4")
    assert (status, report_of(reply)["outcome"]) == (200, "disabled")


def test_a_prompt_up_to_the_context_limit_is_scored(scoring_only: Server, reference: Reference) -> None:
    """Up to where its queries, which run again behind it, are at the draft's last positions."""
    reply = scoring_only.generate(reference.text_ids(2048 - MOST_REPEATED, seed=770), 2, **_LONG)
    assert report_of(reply)["outcome"] == "pruned"
    assert not scoring_only.state()["num_failures"]


def test_a_scoring_model_checks_as_a_draft_does(scoring_only: Server, reference: Reference) -> None:
    prompt, options = reference.prompt(600, seed=772), {"keep_rate": 0.2, "max_dropped_attention": 0.0, **_LONG}
    report = report_of(scoring_only.generate(prompt, 2, **options))
    expected = reference.generator.generate(input_ids=prompt, max_tokens=1, ignore_eos=True, **options).metrics
    tried = [each.dropped_attention for each in expected.tried_rates]
    assert [each["dropped_attention"] for each in report["tried_rates"]] == pytest.approx(tried, rel=2e-3)
    assert report["outcome"] == "too_much_dropped"


def test_sglang_counts_whole_prompts_where_nothing_drafts(scoring_only: Server, reference: Reference) -> None:
    before = scoring_only.metrics()["sglang:prompt_tokens_total"]
    prompt = reference.prompt(900, seed=771)
    assert report_of(scoring_only.generate(prompt, 4))["outcome"] == "pruned"
    assert scoring_only.metrics()["sglang:prompt_tokens_total"] - before == len(prompt)


def test_the_dashboards_metrics_are_there(scoring_only: Server) -> None:
    scoring_only.generate([5, 6, 7], 4)
    assert scoring_only.metrics().keys() >= NAMES
