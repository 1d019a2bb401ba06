"""The draft's check on a server: what Python's finds, in parts, and nothing is left behind."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spec_stack.config import PrefillConfig

from .conftest import Reference, Server, generate_body
from .test_device_copies import VOCAB, runner_of_layers

RATES = [0.1, *PrefillConfig.check_rates]


def _report(reply: Any) -> dict[str, Any]:
    return dict(reply["meta_info"]["spec_stack"])


def _kept(prompt: Sequence[int], reply: Any) -> list[int]:
    return [at for start, stop in _report(reply)["kept_spans"] for at in range(start, stop)]


def _checked(server: Server, prompt: Sequence[int], max_divergence: float, num_tokens: int = 16) -> Any:
    options = {"sparse_prefill": "on", "keep_rate": RATES[0], "explain": True, "max_divergence": max_divergence}
    return server.generate(prompt, num_tokens, **options)


@pytest.mark.parametrize(
    ("num_tokens", "seed"), [(420, 201), (600, 202), pytest.param(900, 203, marks=pytest.mark.nightly)]
)
def test_the_divergence_and_the_kept_rate_are_pythons(
    server: Server, reference: Reference, num_tokens: int, seed: int
) -> None:
    prompt = reference.prompt(num_tokens, seed=seed)
    options: Any = {"sparse_prefill": "on", "keep_rate": RATES[0], "ignore_eos": True, "gamma": 0, "max_tokens": 16}
    least = math.nan
    for name in ("reports alone", "none passes", "the best one passes"):
        limit = {"reports alone": 1e6, "none passes": 0.0}.get(name, 1.01 * least)
        reply = _checked(server, prompt, limit)
        report, kept = _report(reply), _kept(prompt, reply)
        expected = reference.generator.generate(input_ids=prompt, max_divergence=limit, **options).metrics
        tried = [each["divergence"] for each in report["tried_rates"]]
        assert [each["keep_rate"] for each in report["tried_rates"]] == RATES[: len(tried)]
        assert tried == pytest.approx([each.divergence for each in expected.tried_rates], rel=2e-3)
        assert report["num_kept_tokens"] == len(kept) == expected.num_kept_tokens
        assert report["sparse_prefill_reason"] == expected.sparse_prefill_reason
        assert report["divergence"] == tried[-1]
        assert reply["output_ids"] == reference.tokens([prompt[at] for at in kept], max_new_tokens=16)
        if limit:
            assert report["outcome"] == "pruned"
            assert tried[-1] <= limit
        else:
            assert (report["outcome"], report["sparse_prefill"], len(tried)) == ("answer_changed", False, len(RATES))
            assert report["sparse_prefill_reason"].startswith("off: the draft's answer changed")
        least = min(tried)


def test_a_checked_turn_gets_back_what_was_dropped(server: Server, reference: Reference) -> None:
    prompt = reference.prompt(900, seed=205)
    first = server.generate(prompt, 8, sparse_prefill="on", keep_rate=0.1, follow_up="recall")
    history = [*prompt, *first["output_ids"], *reference.user_turn(40, seed=206)]
    reply = server.generate(history, 8, max_divergence=0.0)
    report = _report(reply)
    # Nothing of its own is pruned, so it has no keep rate, and all that recall leaves is tried.
    assert (report["outcome"], len(report["tried_rates"])) == ("answer_changed", 1)
    assert report["num_kept_tokens"] == len(history)
    assert reply["output_ids"] == reference.tokens(history, max_new_tokens=8)


def test_a_repeated_prompt_is_not_checked_again_and_metrics_count_it(server: Server, reference: Reference) -> None:
    prompt, before = reference.prompt(700, seed=207), server.metrics()
    for _ in range(2):
        report = _report(_checked(server, prompt, 0.0, 2))
        assert (report["outcome"], len(report["tried_rates"])) == ("answer_changed", len(RATES))
    assert report["num_draft_tokens"] == 0
    after = server.metrics()
    assert after["spec_stack:divergence_count"] - before["spec_stack:divergence_count"] == 2


def test_a_server_survives_aborts_of_checked_requests(server: Server, reference: Reference) -> None:
    for number in range(4):
        body = generate_body(reference.prompt(1200, seed=210 + number), 4, sparse_prefill="on", max_divergence=0.0)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.post, "/generate", {**body, "rid": f"checked {number}"})
            while not asked.done():
                time.sleep(0.05 * number)
                server.post("/abort_request", {"rid": f"checked {number}"})
        assert asked.result()[0] == 200
    pool_state = server.state()["draft_pool"]
    assert (pool_state["num_pinned"], pool_state["num_held"] + pool_state["num_free"]) == (0, pool_state["num_tokens"])
    prompt = reference.prompt(500, seed=201)
    assert _report(_checked(server, prompt, 1e6, 2))["outcome"] == "pruned"


class _Work:
    """The scoring and check of a prompt over a model without weights, in parts of 64 tokens."""

    def __init__(self, num_tokens: int, num_slots: int) -> None:
        from spec_stack.prefill.turn import Held
        from spec_stack.sglang.decide import KnownTexts, Prompt, UnscoredPrompt
        from spec_stack.sglang.draft_pool import DraftScoringRunner
        from spec_stack.sglang.scoring import DraftScorer
        from spec_stack.sglang.server_args import ServerConfig

        config = PrefillConfig(granularity="chunks", keep_rate=0.1, max_divergence=0.0, positions="contiguous")
        known = KnownTexts(ServerConfig(), None, None, lambda prompt: 0, num_slots)
        prompt = Prompt(tuple(at % VOCAB for at in range(num_tokens)), None, None, config, "recall")
        needs = UnscoredPrompt(known.text_of(prompt), Held(), True, False, "on", prompt)
        self.runner = runner_of_layers("cpu")
        torch.nn.init.normal_(self.runner.model.table, generator=torch.Generator().manual_seed(0))
        self.scorer = DraftScorer(DraftScoringRunner(self.runner, num_slots), 10_000)
        self.parts = self.scorer.decide(needs, known, lambda chunk: 64)

    def do(self, num_parts: int) -> Any:
        """Run so many parts, and give the work up, unless it ends before with a decision."""
        try:
            for _ in range(num_parts):
                next(self.parts)
        except StopIteration as end:
            return end.value
        self.parts.close()
        return None


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from spec_stack.sglang import ranks

    monkeypatch.setattr(ranks, "get_tp_group", lambda: SimpleNamespace(world_size=1, rank_in_group=0))


@pytest.mark.usefixtures("one_rank")
def test_a_check_that_is_given_up_at_any_part_leaves_nothing_behind() -> None:
    num_tokens, num_parts, found = 400, 0, None
    while found is None:
        num_parts += 1
        work = _Work(num_tokens, num_tokens + 300)
        found = work.do(num_parts)
        pool = work.scorer.pool_state()
        assert (pool["num_pinned"], pool["num_held"] + pool["num_free"]) == (0, num_tokens + 300)
        # Of the prompt alone: neither an answer nor kept tokens stay.
        assert pool["num_held"] <= num_tokens
    assert [each.keep_rate for each in found.tried] == RATES
    assert (found.outcome, pool["num_held"]) == ("answer_changed", num_tokens)
    lengths = work.runner.model.lengths
    checked = lengths[lengths.index(1) :]
    # The answer token by token, and kept tokens by chunks, the last of which has the answer's too.
    assert checked[: PrefillConfig.check_tokens] == [1] * PrefillConfig.check_tokens
    assert max(checked) < 64 + PrefillConfig.check_tokens
    # Four steps of the draft, or one chunk, in a part; and one is left to each selection.
    assert num_parts >= len(lengths) - 3 * PrefillConfig.check_tokens // 4 + len(RATES)


@pytest.mark.usefixtures("one_rank")
def test_a_check_takes_no_more_of_the_pool_than_the_prompt() -> None:
    work = _Work(600, 600 + 256)
    assert work.do(1000).outcome == "answer_changed"


def test_a_pool_of_the_first_layers_checks_nothing() -> None:
    from spec_stack.sglang.draft_pool import DraftScoringRunner
    from spec_stack.sglang.scoring import DraftScorer

    scorer = DraftScorer(DraftScoringRunner(runner_of_layers("cpu"), 100, num_layers=2), 1000)
    assert scorer.check_refusal(PrefillConfig()) is None
    assert "--spec-stack-max-divergence" in (scorer.check_refusal(PrefillConfig(max_divergence=0.1)) or "")
