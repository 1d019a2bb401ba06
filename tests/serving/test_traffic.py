"""Random conversations of many clients on one server: right tokens, nothing lost, and numbers that add up."""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from .conftest import MIN_PROMPT_TOKENS, Reference, Server, generate_body

NUM_REQUESTS = int(os.environ.get("SPEC_STACK_TEST_REQUESTS", "42"))


@dataclass
class Traffic:
    """Clients that ask, go on with the reply, branch off each other's conversations, hang up, and make mistakes."""

    server: Server
    reference: Reference
    num_requests: int
    seed: int
    sets_gamma: bool = True
    replies: list[tuple[list[int], dict[str, Any]]] = field(default_factory=list)
    cut_short: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    num_refused: int = 0

    @property
    def num_aborted(self) -> int:
        return sum(reply["meta_info"]["finish_reason"]["type"] == "abort" for reply in self.cut_short)

    @property
    def reports(self) -> list[dict[str, Any]]:
        """Of all replies, cut short or not; a request that was aborted before it was prefilled has none."""
        replies = [*(reply for _, reply in self.replies), *self.cut_short]
        return [reply["meta_info"]["spec_stack"] for reply in replies if "spec_stack" in reply["meta_info"]]

    def run(self, num_clients: int = 6) -> None:
        self._rng = random.Random(self.seed)
        self._texts = [self.reference.text_ids(num_tokens, seed=300 + at) for at, num_tokens in enumerate(_LENGTHS)]
        self._histories: list[list[int]] = [[]]
        self._left = list(range(self.num_requests))
        self._lock = threading.Lock()
        clients = [self._client_of_each_kind, *[self._client] * (num_clients - 1)]
        threads = [threading.Thread(target=client) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client_of_each_kind(self) -> None:
        """What random requests may happen not to be; then such requests."""
        try:
            dense = self._go_on([], self._texts[-2], sparse_prefill="off")
            self._go_on(dense, self._texts[0])
            for rule in ("recall", "freeze"):
                pruned = self._go_on(self._texts[1], self._texts[-1], sparse_prefill="on", follow_up=rule)
                # Words of the text that was dropped.
                self._go_on(pruned, pruned[200:230], follow_up=rule)
        except Exception as error:
            self.failures.append(f"a request of each kind: {type(error).__name__}: {error}")
        self._client()

    def _go_on(self, history: list[int], text: list[int], **custom: Any) -> list[int]:
        """Ask, and what was asked with the reply."""
        prompt = [*history, *text]
        reply = self.server.generate(prompt, 7, explain=True, **custom)
        with self._lock:
            self.replies.append((prompt, reply))
        return [*prompt, *reply["output_ids"]]

    def _client(self) -> None:
        while True:
            with self._lock:
                if not self._left:
                    return
                job, rng = self._left.pop(), random.Random(self._rng.random())
                history = rng.choice(self._histories[-6:])
                text = rng.choice(self._texts)
            prompt = [*history, *text] if len(history) + len(text) < 1400 else list(text)
            custom: dict[str, Any] = {
                "sparse_prefill": rng.choice((None, None, "on", "off")),
                "keep_rate": rng.choice((0.2, 0.4)),
                "follow_up": rng.choice((None, "recall", "freeze", "afresh")),
                "gamma": rng.choice((None, None, 0, 2, 8)) if self.sets_gamma else None,
                "explain": True,
            }
            num_new = rng.choice((1, 7, 20))
            try:
                self._ask(job, rng.random(), prompt, num_new, custom)
            except Exception as error:
                self.failures.append(f"request {job}: {type(error).__name__}: {error}")

    def _ask(self, job: int, kind: float, prompt: list[int], num_new: int, custom: dict[str, Any]) -> None:
        if kind < 0.08:
            assert self.server.post("/generate", generate_body(prompt, num_new, **{**custom, "keep_rate": 7}))[0] == 400
            self.num_refused += 1
        elif kind < 0.2:
            body = {**generate_body(prompt, 150, **custom), "rid": f"cancelled-{self.seed}-{job}"}
            threading.Timer(0.15, self.server.post, ("/abort_request", {"rid": body["rid"]})).start()
            status, reply = self.server.post("/generate", body)
            assert status == 200, reply
            with self._lock:
                self.cut_short.append(reply)
        else:
            reply = self.server.generate(prompt, num_new, **custom)
            with self._lock:
                self.replies.append((prompt, reply))
                self._histories.append([*prompt, *reply["output_ids"]])

    def followed(self, rule: str) -> list[dict[str, Any]]:
        """The reports of replies that this rule held for."""
        return [report for report in self.reports if report["follow_up"] == rule]

    def check_tokens(self) -> None:
        """Every reply is plain Transformers' over what the server says it kept; equal questions are asked once."""
        expected: dict[Any, list[int]] = {}
        for prompt, reply in self.replies:
            spans = reply["meta_info"]["spec_stack"]["kept_spans"]
            key = (tuple(prompt), str(spans))
            num_new = len(reply["output_ids"])
            if len(expected.get(key, ())) < num_new:
                expected[key] = self.reference.tokens_over(prompt, spans, num_new)
            assert reply["output_ids"] == expected[key][:num_new], (len(prompt), reply["meta_info"])

    def check_numbers(self, before: dict[str, float]) -> None:
        """Every counter of /metrics has grown by the sum over the replies, to the token. before: what it showed."""
        _check_counters(self.server, before, self.reports)


def _check_counters(server: Server, before: dict[str, float], reports: list[dict[str, Any]]) -> dict[str, float]:
    """The counters of /metrics, which have grown by the sums over these reports."""
    _settle(server)
    after = server.metrics()
    expected = {
        "requests_total": len(reports),
        "gamma_count": sum(len(report["gamma_trace"]) for report in reports),
        "scoring_seconds_count": sum(report["num_scored_tokens"] > 0 for report in reports),
        "draft_prefilled_tokens_total": sum(report["num_draft_tokens"] for report in reports),
    }
    for name in ("prompt", "kept", "scored", "recalled", "protected"):
        expected[f"{name}_tokens_total"] = sum(report[f"num_{name}_tokens"] for report in reports)
    for name in ("proposed", "accepted"):
        expected[f"{name}_tokens_total"] = sum(report[f"num_{name}"] for report in reports)
    names = {name: f"spec_stack:{name}" for name in expected}
    assert {name: after[shown] - before.get(shown, 0) for name, shown in names.items()} == expected
    return after


_LENGTHS = (30, 60, 90, 250, MIN_PROMPT_TOKENS + 60, MIN_PROMPT_TOKENS + 250)


@pytest.mark.slow
def test_random_conversations_get_the_references_tokens_and_the_numbers_add_up(
    server: Server, reference: Reference
) -> None:
    _settle(server)
    before, num_before = server.metrics(), server.state()["num_requests"]
    traffic = Traffic(server, reference, NUM_REQUESTS, seed=1)
    traffic.run()
    assert not traffic.failures, traffic.failures[:3]
    assert traffic.num_refused
    assert traffic.num_aborted
    time.sleep(3)
    # Idle, SGLang compares what its pools hold with what they should, and ends itself if they differ.
    assert server.is_alive, server.tail()
    load = server.get("/v1/loads")["loads"][0]
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0)
    assert {"pruned", "cached", "disabled"} <= {report["outcome"] for report in traffic.reports}
    assert any(report["num_recalled_tokens"] for report in traffic.reports)
    for rule in ("recall", "freeze"):
        assert any(report["sparse_prefill"] and report["num_cached_tokens"] for report in traffic.followed(rule))
    assert not any(report["num_cached_tokens"] for report in traffic.followed("afresh"))
    pool = server.state()["draft_pool"]
    assert pool["num_used"] + pool["num_free"] == pool["num_tokens"]
    assert pool["num_pinned"] == 0
    traffic.check_tokens()
    traffic.check_numbers(before)
    num_after = server.state()["num_requests"]
    assert num_after["failed"] == num_before["failed"]


def test_metrics_are_the_sums_over_replies(server: Server, reference: Reference) -> None:
    """With nothing aborted, to the token; SGLang's own counters too, which know no moving gamma."""
    _settle(server)
    before = server.metrics()
    requests = [
        (
            reference.text_ids(100 + 150 * at, seed=700 + at),
            {"sparse_prefill": "on" if at % 2 == 0 else "off", "gamma": gamma},
        )
        for at, gamma in enumerate((8, 0, 2, 4, 1, 8))
    ]
    # The last two at once.
    replies = [server.generate(ids, **options) for ids, options in requests[:4]] + server.generate_all(requests[4:])
    reports = [reply["meta_info"]["spec_stack"] for reply in replies]
    for reply, report in zip(replies, reports, strict=True):
        info = reply["meta_info"]
        assert report["num_proposed"] == sum(report["gamma_trace"])
        assert report["num_accepted"] == sum(report["accepted_trace"])
        assert info["spec_num_proposed_drafts"] == report["num_proposed"]
        assert info["spec_num_correct_drafts"] == report["num_accepted"]
        assert info["spec_accept_rate"] == pytest.approx(report["num_accepted"] / max(report["num_proposed"], 1))
        assert info["prompt_tokens"] == report["num_prompt_tokens"]
    assert len({gamma for report in reports for gamma in report["gamma_trace"]}) >= 4
    after = _check_counters(server, before, reports)
    num_tokens = after["sglang:prompt_tokens_total"] - before.get("sglang:prompt_tokens_total", 0)
    assert num_tokens == sum(len(ids) for ids, _ in requests)
    # SGLang's own gauge divides by the gamma of that moment, so that it may pass 1.
    assert after["sglang:spec_accept_rate"] >= 0


def test_the_server_shows_its_settings_and_its_log_says_what_is_pruned(server: Server) -> None:
    settings = server.state()["settings"]
    assert settings["prefill"]["min_prompt_tokens"] == MIN_PROMPT_TOKENS
    assert settings["policy"] == "throughput"
    log = server.log.read_text(errors="replace")
    assert f"PROMPTS ARE PRUNED, which is lossy: of those with {MIN_PROMPT_TOKENS} or more tokens" in log
    assert "policy throughput, gammas [0, 1, 2, 4, 8]" in log


def test_changes_of_gamma_leave_no_trail_in_sglangs_log_of_overrides(server: Server, reference: Reference) -> None:
    """It is walked at every /get_server_info, and kept for ever."""
    prompt = reference.prompt(60, seed=3)
    server.generate(prompt, 4, gamma=1)
    before = server.state()
    num_steps = 0
    for gamma in (0, 2) * 6:
        num_steps += len(server.generate(prompt, 4, gamma=gamma)["meta_info"]["spec_stack"]["gamma_trace"])
    after = server.state()
    assert after["num_steps"] - before["num_steps"] == num_steps >= 12
    assert after["num_overrides_kept"] == before["num_overrides_kept"]


def test_an_openai_stream_reports_in_its_last_chunk(server: Server, reference: Reference) -> None:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": reference.tokenizer.decode(reference.text_ids(600, seed=77))}],
        "max_tokens": 16,
        "temperature": 0,
        "custom_params": {"spec_stack": {"sparse_prefill": "on"}},
        "stream_options": {"include_usage": True},
    }
    for path, request in (
        ("/v1/chat/completions", body),
        ("/v1/completions", {**body, "prompt": body["messages"][0]["content"]}),
    ):
        *others, last = server.stream(path, request)
        assert last["spec_stack"]["sparse_prefill"], path
        assert last["spec_stack"]["num_prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert last["spec_stack"]["num_proposed"] == sum(last["spec_stack"]["gamma_trace"])
        assert not any("spec_stack" in chunk for chunk in others)


def _settle(server: Server) -> None:
    """Until the counters stand still for two seconds: a reply is counted after it was sent."""
    counted, num_same = dict[str, float](), 0
    for _ in range(200):
        now = {name: value for name, value in server.metrics().items() if name.startswith("spec_stack")}
        counted, num_same = now, num_same + 1 if counted == now else 0
        if num_same == 4:
            return
        time.sleep(0.5)
