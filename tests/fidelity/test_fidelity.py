"""What pruning does to prompts: against `generate`, resumed, in time, and summed up."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_stack import SpecStackGenerator, measure_fidelity
from spec_stack.bench.fidelity import FidelityReport, Interval, PromptFidelity, PrunedPrompt, summarise
from spec_stack.cli.reports import fidelity_lines

CODE = "".join(f"def step_{number}(x):\n    return x + {number}\n\n" for number in range(24))
SYSTEM = {"role": "system", "content": "Answer in one line.\nName the function."}
PROMPTS: list[Any] = [
    {"messages": [SYSTEM, {"role": "user", "content": f"{CODE}What does step_7 return?"}]},
    f"Which function returns x + 3?\n\n{CODE}",
    {"text": f"{CODE}What does step_9 return?\n\n" + "Write plain English.\n" * 12},
    {"prompt": f"{CODE}Continue this file."},
]
KINDS = ["question last", "question first", "instructions behind the question", "question last"]


class Forced:
    """A logits processor after which only these tokens can be generated."""

    def __init__(self, num_prompt_tokens: int, answer: list[int]) -> None:
        self._num_prompt_tokens, self._answer = num_prompt_tokens, answer

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted = self._answer[input_ids.shape[1] - self._num_prompt_tokens]
        forced = torch.full_like(scores, -torch.inf)
        forced[:, wanted] = 0.0
        return forced


@pytest.fixture(scope="module")
def report(embedded: SpecStackGenerator, tmp_path_factory: pytest.TempPathFactory) -> FidelityReport:
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    found = measure_fidelity(embedded, [*PROMPTS, "too short"], [0.4, 1.0], max_tokens=6, rows=rows)
    # The rows are taken, and nothing is measured again.
    told: list[str] = []
    again = measure_fidelity(
        embedded, PROMPTS, [0.4, 1.0], max_tokens=6, rows=rows, progress=lambda *row: told.append(row[2])
    )
    assert (again.prompts, again.settings, told) == (found.prompts, found.settings, [])
    return found


def test_the_loss_is_that_of_generating_the_dense_answer_under_the_pruned_prompt(
    embedded: SpecStackGenerator, report: FidelityReport
) -> None:
    messages = PROMPTS[0]["messages"]
    dense = embedded.generate(messages=messages, max_tokens=6, sparse_prefill="off", logprobs=0)
    row = report.prompts[0]
    assert row.answer == dense.text
    assert row.num_tokens == dense.metrics.num_prompt_tokens
    assert row.loss == pytest.approx(-sum(each.logprob for each in dense.logprobs or []) / 6, abs=1e-3)
    sparse = {"messages": messages, "sparse_prefill": "on", "keep_rate": 0.4, "max_tokens": 6, "gamma": 0}
    forced = embedded.generate(
        **sparse,
        logprobs=0,
        logits_processor=Forced(row.num_tokens, dense.token_ids),  # type: ignore[arg-type]
    )
    pruned = row.of("0.4")
    assert forced.token_ids == dense.token_ids
    assert pruned.num_kept_tokens == forced.metrics.num_kept_tokens < row.num_tokens
    assert pruned.loss == pytest.approx(-sum(each.logprob for each in forced.logprobs or []) / 6, abs=1e-3)
    free = embedded.generate(**sparse).token_ids  # type: ignore[arg-type]
    assert (pruned.agreement == 1) == (free == dense.token_ids)


def test_everything_kept_loses_nothing(report: FidelityReport) -> None:
    pruned, whole = report.settings
    assert whole.lost.value == pytest.approx(0, abs=1e-4)
    assert (whole.kept, whole.token_agreement, whole.answer_agreement) == (1, 1, 1)
    assert whole.perplexity_ratio.low <= 1 <= whole.perplexity_ratio.high + 1e-4
    assert pruned.kept < 0.6


def test_kinds_are_told_by_the_scoring_queries_and_short_prompts_are_listed(report: FidelityReport) -> None:
    assert [row.kind for row in report.prompts] == KINDS
    assert "What does step_7 return?" in report.prompts[0].question
    assert report.num_short == len(PROMPTS)
    ((number, reason),) = report.skipped
    assert number == 5
    assert "cannot be pruned (off: no more than" in reason
    assert set(json.loads(json.dumps(report.as_dict()))["settings"][0]["lost_by_kind"]) == set(KINDS)
    assert len(report.examples) == 2


def test_time_ends_a_run_after_its_first_prompt(embedded: SpecStackGenerator, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    found = measure_fidelity(embedded, PROMPTS[:2], [0.5], max_tokens=1, minutes=1e-9, rows=rows)
    assert (len(found.prompts), found.num_left) == (1, 1)
    assert rows.read_text().count("\n") == 1
    again = measure_fidelity(embedded, PROMPTS[:2], [0.5], max_tokens=1, rows=rows)
    assert (again.prompts[0], again.num_left) == (found.prompts[0], 0)
    assert measure_fidelity(embedded, PROMPTS[:2], [0.5], max_tokens=1, rows=rows).prompts == again.prompts


def test_two_runs_share_a_file(embedded: SpecStackGenerator, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"

    def run_other(number: int, *_: object) -> None:
        if number == 1:
            measure_fidelity(embedded, PROMPTS[2:3], [0.5], max_tokens=1, rows=rows)

    measure_fidelity(embedded, PROMPTS[:2], [0.5], max_tokens=1, rows=rows, progress=run_other)
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["kind"] for row in found] == [KINDS[number] for number in (0, 2, 1)]


def test_rows_of_other_weights_are_not_taken(tmp_path: Path) -> None:
    generator, rows = SpecStackGenerator.from_pretrained(), tmp_path / "rows.jsonl"
    measure_fidelity(generator, PROMPTS[:1], [0.5], max_tokens=1, rows=rows)
    with torch.no_grad():
        generator.target.model.norm.weight.mul_(0.5)
    measure_fidelity(generator, PROMPTS[:1], [0.5], max_tokens=1, rows=rows)
    assert rows.read_text().count("\n") == 2


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "the list is empty"),
        (["short", "also"], {}, "prompt 1: it has .* tokens and cannot be pruned"),
        ([{"question": "x"}], {}, "prompt 1 must be a text, or have"),
        ([CODE], {"keep_rates": [2]}, "keep_rate must"),
        ([CODE], {"keep_rates": ["0.2"]}, "keep_rates must be one or more shares"),
        ([CODE], {"max_tokens": 0}, "must be over 0, got 0, 10.0 and 0.02"),
    ],
)
def test_bad_input_is_named(
    embedded: SpecStackGenerator, prompts: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        measure_fidelity(embedded, prompts, **options)


def made_up(number: int, kind: str, lost: dict[str, float], ttft_s: dict[str, float]) -> PromptFidelity:
    pruned = [
        PrunedPrompt(setting, 200, ttft_s[setting], 0.5 + loss, 1.0 if loss < 0.1 else 0.9)
        for setting, loss in lost.items()
    ]
    return PromptFidelity(f"{number}", number, 1000, kind, "Why?", "Because.", 2.0, 0.5, pruned)


def test_the_fastest_setting_within_the_limit_is_found() -> None:
    times = {"0.1": 0.4, "0.2": 0.5, "0.3": 0.8}
    kinds = ["question last", "question first"]
    rows = [
        made_up(number, kinds[number % 2], {"0.1": 0.2 + number % 2, "0.2": 0.01, "0.3": 0.0}, times)
        for number in range(8)
    ]
    report = FidelityReport([summarise(name, rows) for name in times], rows, [], 0, 0, 0.02)
    assert report.fastest is report.settings[1]
    assert report.fastest.speedup.value == pytest.approx(4.0)
    assert report.fastest.answer_agreement == 1
    assert report.promising is None
    strict = replace(report, within=1e-3)
    assert strict.fastest is strict.settings[2]
    lossy = replace(report, settings=report.settings[:1])
    assert lossy.fastest is None
    by_kind = {kind: lost.value for kind, lost in lossy.shown.lost_by_kind.items()}
    assert by_kind == pytest.approx({"question first": 1.2, "question last": 0.2})
    lost = lossy.shown.lost
    assert lost.value == pytest.approx(0.7)
    assert lost.low < lost.value < lost.high
    with_less = replace(lossy.settings[0], lost=Interval(0.1, 0.0, 0.2))
    ratio = replace(lossy, settings=[with_less]).as_dict()["settings"][0]["perplexity_ratio"]
    assert ratio == pytest.approx({"value": math.exp(0.1), "low": 1.0, "high": math.exp(0.2)})


def test_the_upper_bound_decides_and_a_setting_that_needs_more_prompts_says_how_many() -> None:
    times, losses = {"0.1": 0.4, "0.3": 0.8}, [0.0] * 9 + [0.15]
    rows = [made_up(at, "question last", {"0.1": lost, "0.3": 0.0}, times) for at, lost in enumerate(losses)]
    report = FidelityReport([summarise(name, rows) for name in times], rows, [], 0, 0, 0.02)
    # The mean is within the limit.
    fast, slow = report.settings
    assert fast.perplexity_ratio.value < 1.02 < fast.perplexity_ratio.high
    assert report.fastest is slow
    assert report.promising is fast
    needed = report.num_needed(fast)
    told = " ".join(fidelity_lines(report))
    assert "fastest within 2%, by the upper bound: keep_rate 0.3" in told
    assert f"keep_rate 0.1, first token 5.0x sooner, perplexity ratio {fast.perplexity_ratio:.3f}, may be" in told
    assert f"about {needed:.0f} like these would" in told
    assert report.as_dict()["promising"] == {"setting": "0.1", "prompts_needed": needed}
    # So many of the same kind do.
    many = [replace(row, number=at) for at, row in enumerate(rows * math.ceil(needed / len(rows)))]
    assert summarise("0.1", many).perplexity_ratio.high == pytest.approx(1.02, abs=2e-3)
    one = FidelityReport([summarise("0.3", rows[:1])], rows[:1], [], 0, 0, 0.02)
    assert one.fastest is None
    assert "no setting is surely within 2%" in " ".join(fidelity_lines(one))
    assert one.num_needed(one.settings[0]) == 8


def test_the_check_is_measured_from_the_lowest_rate_on(embedded: SpecStackGenerator, report: FidelityReport) -> None:
    def checked(max_dropped_attention: float) -> FidelityReport:
        return measure_fidelity(
            embedded, PROMPTS[:2], [0.4, 1.0], max_tokens=6, max_dropped_attention=max_dropped_attention
        )

    loose, strict = checked(1.0), checked(0.0)
    assert [each.setting for each in loose.settings][-1] == "checked"
    for row in loose.prompts:
        assert row.of("checked").num_kept_tokens == row.of("0.4").num_kept_tokens
        assert row.of("checked").loss == pytest.approx(row.of("0.4").loss, abs=1e-4)
    assert (strict.settings[-1].whole, strict.settings[-1].kept, strict.settings[0].whole) == (1, 1, 0)
    assert strict.settings[-1].lost.value == pytest.approx(0, abs=1e-4)
