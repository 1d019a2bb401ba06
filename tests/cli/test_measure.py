from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.cli import measure as measuring
from spec_stack.cli.doctor import diagnose
from spec_stack.cli.main import main
from spec_stack.cli.measure import Curve, Measured, StepTimes, lines, measure, verdict
from spec_stack.config import MAX_LOOK_AHEAD
from spec_stack.hf.loading import ASSETS


def made_up(draft_share: float = 0.3, decode_gain: float = 1.5) -> Measured:
    """A pair of known costs: dense 4 ms a token and 1 us a pair of tokens, keep_rate 0.2, 0.1 s of look-ahead."""

    def dense(n: float) -> float:
        return 0.004 * n + 1e-6 * n * n

    def drafting(n: int) -> float:
        return draft_share * dense(n)

    def sparse(n: int) -> float:
        return 0.1 + drafting(n) + dense(0.2 * n)

    lengths = (512, 2048)
    return Measured(
        dense={n: [dense(n)] for n in lengths},
        sparse={n: [sparse(n) * 0.95, sparse(n), sparse(n) * 1.05] for n in lengths},
        draft={n: [drafting(n)] for n in lengths},
        keep_rate=0.2,
        steps=StepTimes(target_s=0.2, block_s=0.22, draft_s=0.05),
        plain={"code": 5.0, "chat": 5.0},
        drafted={"code": 5.0 * decode_gain, "chat": 5.0 * decode_gain},
        num_proposed=50,
        num_accepted=30,
        max_positions=32768,
    )


def test_a_curve_goes_through_its_points() -> None:
    curve = Curve(0.003, 2e-6)
    again = Curve.through([(n, curve.at(n)) for n in (300, 900)])
    assert again.at(5000) == pytest.approx(curve.at(5000))
    shifted = Curve(0.003, 2e-6, 0.4)
    again = Curve.with_square([(n, shifted.at(n)) for n in (300, 900)], 2e-6)
    assert again.at(5000) == pytest.approx(shifted.at(5000))


def test_other_lengths_are_foretold_from_two() -> None:
    measured = made_up()
    for n in (1024, 8192, 32768):
        dense = 0.004 * n + 1e-6 * n * n
        assert measured.dense_curve.at(n) == pytest.approx(dense)
        kept = 0.2 * n
        sparse = 0.1 + 0.3 * dense + 0.004 * kept + 1e-6 * kept * kept
        assert measured.sparse_curve.at(n) == pytest.approx(sparse)
    even = measured.break_even()
    assert even is not None
    assert measured.sparse_curve.at(even) < measured.dense_curve.at(even)
    assert measured.sparse_curve.at(even - 64) >= measured.dense_curve.at(even - 64)
    assert measured.spread == pytest.approx(0.05)


def test_the_verdict_names_what_pays_and_what_does_not() -> None:
    assert verdict(made_up()).startswith("worth it, because the first token of 32768 prompt tokens comes")
    assert "answers come 1.50x faster" in verdict(made_up())
    assert "sooner" not in verdict(made_up(draft_share=1.2))
    useless = verdict(made_up(draft_share=1.2, decode_gain=0.9))
    assert useless.startswith("not worth it, because")
    assert useless.endswith("answers 0.90x as fast")
    assert made_up(draft_share=1.2).break_even() is None


def test_the_report_says_what_bounds_decoding() -> None:
    told = "\n".join(lines(made_up()))
    assert "a drafted token costs c = 0.25 of a step: decoding at most 4.0x" in told
    assert "60% of 50 proposed tokens accepted" in told
    assert "expected at 32768" in told
    assert "expected at 32768" not in "\n".join(lines(replace(made_up(), max_positions=16384)))


def test_a_pair_is_run_in_a_moment(embedded: SpecStackGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "LENGTH", 160)
    monkeypatch.setattr(measuring, "_ANSWER_TOKENS", 6)
    ticks = count()
    measured = measure(embedded, timer=lambda: float(next(ticks)))
    assert sorted(measured.dense) == sorted(measured.sparse) == sorted(measured.draft) == [160, 640]
    assert list(measured.plain) == list(measured.drafted) == ["code", "maths", "chat", "edit"]
    assert measured.left_out == {}
    assert measured.num_proposed >= measured.num_accepted
    assert lines(measured)[-1].startswith(("worth it", "not worth it"))


def test_the_drafts_pass_is_of_the_layers_that_scoring_asks_for_and_none_where_words_decide(
    embedded: SpecStackGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "LENGTH", 160)
    behind: list[int] = []
    layer = embedded.draft.model.layers[1].input_layernorm
    hook = layer.register_forward_hook(lambda module, given, output: behind.append(output.shape[1]))
    found = {}
    for name, changes in (
        ("all", {}),
        ("first", {"scoring_heads": ((0, 0),), "head_reduction": "mean"}),
        ("words", {"scorer": "bm25"}),
    ):
        prefill = replace(PrefillConfig(), **changes)
        generator = SpecStackGenerator(
            embedded.target, embedded.draft, embedded.tokenizer, config=SpecStackConfig(prefill)
        )
        behind.clear()
        ticks = count()
        # The shorter prompt once: dense, sparse, and the draft's pass alone.
        measured = measure(generator, 0.0, timer=lambda ticks=ticks: float(next(ticks)))  # type: ignore[misc]
        found[name] = measured.draft[160], behind.count(160)
    hook.remove()
    # Scoring and the pass; the layer is also behind those that are asked for.
    assert found == {"all": ([1.0], 2), "first": ([1.0], 0), "words": ([0.0], 0)}


def test_no_prompt_that_is_run_has_a_window_of_longer_ones(
    embedded: SpecStackGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "LENGTH", 160)
    monkeypatch.setattr(measuring, "_ANSWER_TOKENS", 6)
    told = {}
    for shortest in (100, 500):
        prefill = replace(embedded.config.prefill, draft_window=(shortest, 64))
        generator = SpecStackGenerator(
            embedded.target, embedded.draft, embedded.tokenizer, config=SpecStackConfig(prefill)
        )
        ticks = count()
        measured = measure(generator, timer=lambda ticks=ticks: float(next(ticks)))  # type: ignore[misc]
        told[shortest] = sorted(measured.dense)
    assert told == {100: [160, 640], 500: [160, 499]}


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


class Stream:
    """A device that computes asynchronously: one clock for the host and one for what it has launched."""

    def __init__(self, launch_s: float) -> None:
        self.host = self.device = 0.0
        self._launch_s = launch_s

    def launch(self, seconds: float) -> None:
        self.device = max(self.device, self.host) + max(self._launch_s, seconds)
        self.host += self._launch_s

    def synchronize(self, *device: Any) -> None:
        self.host = max(self.host, self.device)


def simulated(
    stream: Stream, generate: Callable[..., Any], draft_s: Callable[[list[int]], float], step_s: float
) -> Any:
    """A generator whose models run on a simulated device."""
    view = SimpleNamespace(
        prefill=lambda ids, *arguments: stream.launch(draft_s(ids)),
        forward=lambda *arguments: stream.launch(step_s),
        rollback=lambda num_tokens: None,
    )
    model = SimpleNamespace(device=torch.device("cuda"))
    pair = SimpleNamespace(
        target=model,
        draft=model,
        new_draft_cache=lambda chunk: view,
        open_target=lambda chunk: view,
        tokenize_for_draft=lambda ids: (None, None),
        max_positions=(16384, 16384),
    )

    def tokenize(text: str, **options: Any) -> Any:
        return SimpleNamespace(input_ids=[1] * 50)

    return SimpleNamespace(config=SpecStackConfig(), pair=pair, generate=generate, tokenizer=tokenize)


def test_what_a_first_run_costs_beyond_others_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(0.0)
    monkeypatch.setattr(torch.accelerator, "synchronize", stream.synchronize)
    warm: set[object] = set()

    def cost(seconds: float, *variant: object) -> float:
        """Its first run loads kernels and captures graphs."""
        is_first = variant not in warm
        warm.add(variant)
        return seconds + 10 * is_first

    def generate(
        sparse_prefill: str, max_tokens: int, input_ids: Sequence[int] = (), gamma: int | None = None, **options: Any
    ) -> Any:
        if input_ids:
            share = 0.5 if sparse_prefill == "on" else 1.0
            stream.launch(cost(share * len(input_ids) / 1000, sparse_prefill, len(input_ids)))
        else:
            stream.launch(cost(1.0 if gamma == 0 else 0.5, gamma))
        metrics = SimpleNamespace(num_proposed=8, num_accepted=4)
        return SimpleNamespace(token_ids=[0] * max_tokens, metrics=metrics)

    generator = simulated(stream, generate, lambda ids: cost(len(ids) / 10_000, "draft", len(ids)), 0.01)
    measured = measure(generator, 60.0, timer=lambda: stream.host)
    for kind, share in ((measured.dense, 1.0), (measured.sparse, 0.5), (measured.draft, 0.1)):
        assert {length: pytest.approx(runs) for length, runs in kind.items()} == {
            length: [share * length / 1000] * 2 for length in (512, 2048)
        }
    assert (len(measured.plain), measured.decode_gain) == (4, pytest.approx(2.0))


@pytest.mark.parametrize(
    ("seconds", "most", "longer"),
    [(12.0, 32000, 1024), (5.0, 32000, 2048), (0.6, 32000, 2048), (0.1, 32000, 8192), (0.1, 4000, 4000)],
)
def test_the_longer_prompt_is_as_long_as_time_and_positions_allow(
    seconds: float, most: int, longer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(0.0)
    monkeypatch.setattr(torch.accelerator, "synchronize", stream.synchronize)

    def generate(max_tokens: int, input_ids: Sequence[int] = (), **options: Any) -> Any:
        stream.launch(seconds * len(input_ids) / 512 if input_ids else 1.0)
        return SimpleNamespace(token_ids=[0] * max_tokens, metrics=SimpleNamespace(num_proposed=8, num_accepted=4))

    generator = simulated(stream, generate, lambda ids: 0.0, 0.01)
    generator.pair.max_positions = (most + MAX_LOOK_AHEAD, 40_000)
    assert sorted(measure(generator, 10_000.0, timer=lambda: stream.host).dense) == [512, longer]


@pytest.mark.parametrize(
    ("minutes", "lengths", "num_answers", "left_out", "told"),
    [
        (1.0, [512], 0, ["repeats at 512 tokens", "prompts of 1024 tokens", "steps and answers"], "undecided"),
        (8.0, [512], 1, ["repeats at 512 tokens", "prompts of 1024 tokens", "further answers"], "undecided"),
        (10.0, [512, 1024], 0, ["repeats at 512 tokens", "repeats at 1024 tokens", "steps and answers"], "worth it"),
        (15.0, [512, 1024], 1, ["repeats at 512 tokens", "repeats at 1024 tokens", "further answers"], "worth it"),
        (90.0, [512, 1024], 4, [], "worth it"),
    ],
)
def test_what_a_slow_pair_has_no_time_for_is_left_out_and_named(
    minutes: float,
    lengths: list[int],
    num_answers: int,
    left_out: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A round of the shorter prompt takes 200 s."""
    stream = Stream(0.0)
    monkeypatch.setattr(torch.accelerator, "synchronize", stream.synchronize)
    monkeypatch.setattr(measuring, "perf_counter", lambda: stream.host)

    def generate(sparse_prefill: str, max_tokens: int, input_ids: Sequence[int] = (), **options: Any) -> Any:
        share = {"off": 100, "on": 70}.get(sparse_prefill, 0)
        stream.launch(share * len(input_ids) / 512 if input_ids else max_tokens)
        stream.synchronize()
        return SimpleNamespace(token_ids=[0] * max_tokens, metrics=SimpleNamespace(num_proposed=8, num_accepted=4))

    measured = measure(
        simulated(stream, generate, lambda ids: 30 * len(ids) / 512, 1.0), minutes, timer=lambda: stream.host
    )
    assert stream.host <= max(60 * minutes, 200)
    assert (sorted(measured.dense), len(measured.plain), list(measured.left_out)) == (lengths, num_answers, left_out)
    text = lines(measured)
    assert text[-1].startswith(told)
    named = [line for line in text if line.startswith("left out, for the time: repeats at 512 tokens (about 200 s), ")]
    assert len(named) == bool(left_out)


@pytest.mark.parametrize("launch_s", [0.0, 0.02, 0.3])
@pytest.mark.parametrize(
    ("dense_s", "sparse_s", "draft_s", "step_s"), [(1.0, 0.62, 0.25, 0.05), (0.4, 0.9, 0.7, 0.5), (2.0, 1.0, 0.0, 0.0)]
)
def test_what_is_measured_has_ended(
    launch_s: float, dense_s: float, sparse_s: float, draft_s: float, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(launch_s)
    monkeypatch.setattr(torch.accelerator, "synchronize", stream.synchronize)

    def generate(sparse_prefill: str, max_tokens: int, **options: Any) -> Any:
        # The first token is read back.
        stream.launch(sparse_s if sparse_prefill == "on" else dense_s)
        stream.synchronize()
        return SimpleNamespace(token_ids=[0] * max_tokens, metrics=SimpleNamespace(num_proposed=8, num_accepted=4))

    measured = measure(simulated(stream, generate, lambda ids: draft_s, step_s), 10_000.0, timer=lambda: stream.host)
    assert measured.steps is not None
    found = {
        "dense": median(measured.dense[512]),
        "sparse": median(measured.sparse[512]),
        "draft": median(measured.draft[512]),
        "step": measured.steps.target_s,
    }
    expected = {"dense": dense_s, "sparse": sparse_s, "draft": draft_s, "step": step_s}
    assert found == pytest.approx({name: max(each, launch_s) for name, each in expected.items()})
