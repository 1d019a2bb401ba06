from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spec_stack import SpecStackGenerator
from spec_stack.cli import measure as measuring
from spec_stack.cli.doctor import diagnose
from spec_stack.cli.main import main
from spec_stack.cli.measure import Answer, FirstToken, Measured, lines, measure, verdict
from spec_stack.hf.loading import ASSETS


def made_up(speedup: float = 2.0, decode_gain: float = 1.5, left_out: Sequence[str] = ()) -> Measured:
    runs = [FirstToken(n, n / 100, n / 100 / speedup, n / 500) for n in (512, 2048)]
    answers = [Answer(5.0, 5.0 * decode_gain, 25, 15)] * 2
    return Measured(runs, answers, left_out)


def test_the_verdict_names_what_pays_and_what_does_not() -> None:
    assert verdict(made_up()) == (
        "worth it, because the first token of 2048 prompt tokens comes 2.0x sooner and answers come 1.50x faster"
    )
    assert "sooner" not in verdict(made_up(speedup=0.9))
    useless = verdict(made_up(speedup=0.9, decode_gain=0.9))
    assert useless.startswith("not worth it, because")
    assert useless.endswith("answers 0.90x as fast")
    assert verdict(made_up(0.9, 0.9, ["prompts of 8192 tokens"])).startswith("undecided")


def test_the_report_says_what_bounds_a_speedup() -> None:
    told = "\n".join(lines(made_up(left_out=["answers"])))
    assert "at 2048 tokens: dense 20.48 s, sparse 10.24 s, 2.0x" in told
    assert "the draft costs r = 0.20, all the rest s = 0.30" in told
    assert "5.0 tokens/s plain, 7.5 with the draft (1.50x; 60% of 50 proposed tokens accepted, 2 prompts)" in told
    assert "left out, for the time: answers" in told


def test_a_pair_is_run_in_a_moment(embedded: SpecStackGenerator) -> None:
    measured = measure(embedded, lengths=(160, 640, 1 << 20))
    assert [run.num_tokens for run in measured.first_tokens] == [160, 640]
    assert all(0 < run.scoring_s < run.sparse_s for run in measured.first_tokens)
    assert len(measured.answers) == 4
    assert all(0 <= answer.num_accepted <= answer.num_proposed for answer in measured.answers)
    assert measured.left_out == []
    assert lines(measured)[-1].startswith(("worth it", "not worth it"))


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


class SlowPair:
    """A generator of 16,384 positions on a clock: ten dense tokens a second, 16 sparse ones, an answer of 60 s plain
    and 30 s drafted. What runs for the first time takes ten times as long."""

    tokenizer = staticmethod(lambda text, **options: SimpleNamespace(input_ids=[1] * 50))

    def __init__(self) -> None:
        self.now = 0.0
        self._warm: set[object] = set()
        self.pair = SimpleNamespace(max_positions=(16384, 40000))

    def generate(self, sparse_prefill: str, input_ids: Sequence[int] = (), gamma: int | None = None, **_: Any) -> Any:
        answer_s = 60.0 if gamma == 0 else 30.0
        seconds = len(input_ids) / (16 if sparse_prefill == "on" else 10) if input_ids else answer_s
        variant = (sparse_prefill, len(input_ids), gamma)
        seconds *= 1 if variant in self._warm else 10
        self._warm.add(variant)
        self.now += seconds
        metrics = SimpleNamespace(
            ttft_s=seconds, scoring_s=seconds / 4, decode_tokens_per_s=60 / seconds, num_proposed=8, num_accepted=4
        )
        return SimpleNamespace(metrics=metrics)


@pytest.mark.parametrize(
    ("minutes", "lengths", "num_answers", "left_out"),
    [
        (1.0, [512], 0, ["prompts of 2048 tokens", "prompts of 8192 tokens", "answers"]),
        (35.0, [512], 1, ["prompts of 2048 tokens", "prompts of 8192 tokens"]),
        (90.0, [512, 2048], 1, ["prompts of 8192 tokens"]),
        (400.0, [512, 2048, 8192], 4, []),
    ],
)
def test_what_a_slow_pair_has_no_time_for_is_left_out_and_named(
    minutes: float, lengths: list[int], num_answers: int, left_out: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair: Any = SlowPair()
    monkeypatch.setattr(measuring, "perf_counter", lambda: pair.now)
    measured = measure(pair, minutes)
    assert [run.num_tokens for run in measured.first_tokens] == lengths
    assert (len(measured.answers), measured.left_out) == (num_answers, left_out)


def test_what_a_first_run_costs_beyond_others_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pair: Any = SlowPair()
    monkeypatch.setattr(measuring, "perf_counter", lambda: pair.now)
    measured = measure(pair, 1000.0)
    assert measured.first_tokens == [FirstToken(n, n / 10, n / 16, n / 64) for n in (512, 2048, 8192)]
    assert measured.answers == [Answer(1.0, 2.0, 8, 4)] * 4
