"""Short runs of a pair: what is measured in which time, and the verdict."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spec_stack import SpecStackGenerator
from spec_stack.bench import pair as measuring
from spec_stack.bench.intervals import Interval
from spec_stack.bench.leaderboard import Leaderboard, Line
from spec_stack.bench.pair import FirstToken, PairReport, measure_pair
from spec_stack.cli.doctor import diagnose
from spec_stack.cli.main import main
from spec_stack.cli.reports import pair_lines
from spec_stack.hf.loading import ASSETS


def made_up(speedup: float = 2.0, decode_gain: float = 1.5, left_out: Sequence[str] = ()) -> PairReport:
    runs = [FirstToken(n, n / 100, n / 100 / speedup, n / 500) for n in (512, 2048)]
    lines = [
        Line("fp32", "all", name, 8, Interval(gain, gain, gain), 5.0 * gain, 1.0, 1.0, 0.6, 8)
        for name, gain in (("plain", 1.0), ("default", decode_gain))
    ]
    return PairReport(runs, Leaderboard("", "plain", lines), left_out)


def test_the_verdict_names_what_pays_and_what_does_not() -> None:
    assert made_up().verdict == (
        "worth it, because the first token of 2048 prompt tokens comes 2.0x sooner and answers come 1.50x faster"
    )
    assert "sooner" not in made_up(speedup=0.9).verdict
    useless = made_up(speedup=0.9, decode_gain=0.9).verdict
    assert useless.startswith("not worth it, because")
    assert useless.endswith("answers 0.90x as fast")
    assert made_up(0.9, 0.9, ["prompts of 8192 tokens"]).verdict.startswith("undecided")


def test_a_pair_is_run_in_a_moment(embedded: SpecStackGenerator) -> None:
    measured = measure_pair(embedded, lengths=(160, 640, 1 << 20))
    assert [run.num_tokens for run in measured.first_tokens] == [160, 640]
    assert all(0 < run.scoring_s < run.sparse_s for run in measured.first_tokens)
    assert measured.answer("default").num_prompts == 8
    assert measured.left_out == []
    assert pair_lines(measured)[-1].startswith(("worth it", "not worth it"))


def test_a_draft_that_is_larger_than_its_target_is_no_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("small", "large"):
        shutil.copytree(ASSETS / "target", tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copy(ASSETS / "draft" / "config.json", tmp_path / "small" / "config.json")
    right = diagnose(str(tmp_path / "large"), str(tmp_path / "small"), "auto", "cpu")
    assert right["problem"] is None
    assert right["decoding"].startswith("a drafted token costs about c = 0.1")
    swapped = ["--target", str(tmp_path / "small"), "--draft", str(tmp_path / "large")]
    assert main(["doctor", "--measure", *swapped]) == 1
    assert "the draft is larger than its target (6 against 1 million weights)" in capsys.readouterr().out


class SlowClock:
    """A clock on which a dense prompt takes a second for ten tokens, and any other call a second."""

    def __init__(self, generator: SpecStackGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, generate = 0.0, generator.generate

        def slowly(**call: Any) -> Any:
            self.now += len(call["input_ids"]) / 10 if call["sparse_prefill"] == "off" else 1.0
            return generate(**call)

        monkeypatch.setattr(generator, "generate", slowly, raising=False)
        monkeypatch.setattr(measuring, "perf_counter", lambda: self.now)


@pytest.mark.parametrize(
    ("minutes", "lengths", "left_out"),
    [
        (0.1, [100], ["prompts of 200 tokens", "prompts of 400 tokens", "answers"]),
        (1.0, [100], ["prompts of 200 tokens", "prompts of 400 tokens"]),
        (1.5, [100, 200], ["prompts of 400 tokens"]),
        (9.0, [100, 200, 400], []),
    ],
)
def test_what_a_slow_pair_has_no_time_for_is_left_out_and_named(
    embedded: SpecStackGenerator,
    minutes: float,
    lengths: list[int],
    left_out: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    SlowClock(embedded, monkeypatch)
    monkeypatch.setattr(measuring, "bench", lambda *_, **options: made_up().answers)
    measured = measure_pair(embedded, minutes, (100, 200, 400))
    assert [run.num_tokens for run in measured.first_tokens] == lengths
    assert measured.left_out == left_out
    assert (measured.answers is None) == ("answers" in left_out)


def test_what_a_first_run_costs_beyond_others_is_not_measured(
    embedded: SpecStackGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, times = embedded.generate, iter([10.0, 8.0, 1.0, 0.5])

    def timed(**call: Any) -> Any:
        result = generate(**call)
        result.metrics.ttft_s = next(times)
        result.metrics.scoring_s = result.metrics.ttft_s / 4
        return result

    monkeypatch.setattr(embedded, "generate", timed, raising=False)
    monkeypatch.setattr(measuring, "bench", lambda *_, **options: None)
    assert measure_pair(embedded, 1000.0, (100,)).first_tokens == [FirstToken(100, 1.0, 0.5, 0.125)]
