"""A calibration ends within its budget, goes on where it was, and gives settings that a generator takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.quality.retokenize import drop_merges
from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.calibrate import search
from spec_stack.calibrate.heads import Setting
from spec_stack.calibrate.judged import Judged, judge
from spec_stack.calibrate.prompts import Prompt, PromptMaker, Task
from spec_stack.calibrate.report import format_calibration, plot_calibration
from spec_stack.calibrate.search import calibrate
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.loading import ASSETS
from spec_stack.prefill.calibration import CHOSEN, FILE_NAME, Calibration
from spec_stack.prefill.registry import make_rule
from spec_stack.prefill.rule import Evidence
from spec_stack.prefill.scoring import look_at
from spec_stack.prefill.units import make_units
from tests.support.models import make_model

TEXTS = ["\n".join(f"Line {number} of a long text about nothing." for number in range(500))]


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return ModelPair.load(device="cpu", prepack_linears=False, target_weights=False)


@pytest.fixture(scope="module")
def calibrated(pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Calibration, Path]:
    work = tmp_path_factory.mktemp("calibration") / "work"
    return calibrate(pair, lengths=(512, 1024), prompts_per_length=22, documents=TEXTS, work=work), work


def test_a_calibration_is_the_same_after_a_file_and_works_in_a_generator(
    calibrated: tuple[Calibration, Path], pair: ModelPair, tmp_path: Path
) -> None:
    made, _ = calibrated
    assert set(made.settings) <= set(CHOSEN)
    assert made.unfinished == 0
    file = made.save(tmp_path)
    assert file.name == FILE_NAME
    again = Calibration.load(tmp_path)
    assert replace(again, origin="") == made
    assert again.check(pair.target.config, pair.draft.config) == ""
    assert "another draft" in again.check(pair.target.config, pair.target.config)
    assert format_calibration(again) == format_calibration(made)
    plot_calibration(again, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000
    generator = SpecStackGenerator.from_pretrained(
        device="cpu", calibration=file, config=SpecStackConfig(PrefillConfig(min_prompt_tokens=512))
    )
    result = generator.generate(TEXTS[0][:3000], max_tokens=2)
    assert result.metrics.specprefill_reason == (
        f"on: the prompt has min_prompt_tokens=512 or more; calibrated by {FILE_NAME}"
    )


def test_the_report_says_what_every_kind_keeps_and_loses_and_whether_the_draft_pays(
    calibrated: tuple[Calibration, Path],
) -> None:
    text = format_calibration(calibrated[0])
    assert all(kind in text for kind in ("paraphrase", "log, other words", "json", "function", "BM25", "lost"))
    assert "its pass" in text
    assert "prompts that chose nothing" in text
    assert "1024 tokens" in text


def test_going_on_passes_over_no_prompt_twice(
    calibrated: tuple[Calibration, Path], pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, work = calibrated
    files = sorted(work.iterdir())
    assert len(files) == made.num_prompts == 22 + 5
    files[3].unlink()
    passes: list[int] = []

    def counted(pair: ModelPair, prompt: object, *rest: object) -> object:
        passes.append(1)
        return judge(pair, prompt, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(search, "judge", counted)
    again = calibrate(pair, lengths=(512, 1024), prompts_per_length=22, documents=TEXTS, work=work)
    assert len(passes) == 1
    assert replace(again, seconds=made.seconds) == made
    # Another seed asks other prompts.
    calibrate(pair, lengths=(512,), prompts_per_length=2, documents=TEXTS, work=work, seed=1)
    assert len(passes) == 3


def test_a_pass_that_was_ended_in_the_middle_leaves_nothing_behind(pair: ModelPair, tmp_path: Path) -> None:
    def stop(done: int, total: int, what: str) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(pair, lengths=(512,), prompts_per_length=9, documents=TEXTS, work=tmp_path, progress=stop)
    assert len(list(tmp_path.iterdir())) == 4
    assert all(file.suffix == ".safetensors" for file in tmp_path.iterdir())


def test_the_budget_is_kept_and_what_is_judged_by_then_makes_a_calibration(
    pair: ModelPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, told = [0.0], []

    def judge_slowly(pair: ModelPair, prompt: Prompt, *rest: object) -> Judged:
        now[0] += len(prompt.token_ids) / 512
        return judge(pair, prompt)

    monkeypatch.setattr(search, "monotonic", lambda: now[0])
    monkeypatch.setattr(search, "judge", judge_slowly)
    made = calibrate(
        pair,
        lengths=(512, 1024),
        prompts_per_length=400,
        budget_s=40,
        documents=TEXTS,
        progress=lambda done, total, what: told.append(what),
    )
    assert 35 < now[0] <= 40
    assert made.num_prompts + made.unfinished == 400 + 100
    assert len(told) == made.num_prompts
    # A quarter of the time is for longer prompts.
    assert 27 <= sum(each.startswith("512 tokens") for each in told) <= 31
    assert sum(each.startswith("1024 tokens") for each in told) >= 3
    assert "kept: chosen" in told[-1]
    assert Calibration.load(made.save(tmp_path / "partial.json")).apply() == made.apply()
    assert f"{made.unfinished} are left" in format_calibration(made)


def test_a_budget_for_no_prompt_leaves_the_default(pair: ModelPair) -> None:
    made = calibrate(pair, lengths=(8192,), budget_s=0.05, documents=TEXTS)
    assert made.num_prompts == 0
    assert made.apply() == PrefillConfig()
    assert "too few" in format_calibration(made)


def test_of_a_draft_with_random_weights_bm25_is_chosen(pair: ModelPair) -> None:
    torch.manual_seed(0)
    blind = type(pair.draft)(pair.draft.config).eval()
    blind.config._attn_implementation_internal = "sdpa"
    random_pair = ModelPair.assemble(blind, blind, pair.tokenizer)
    found = calibrate(random_pair, lengths=(512,), prompts_per_length=22)
    assert found.apply().scorer == "bm25"
    assert "does not earn its pass" in " ".join(found.notes)


def test_what_is_judged_equals_what_the_selection_rule_gives(pair: ModelPair) -> None:
    task = Task(700, "fact", 1, False)
    prompt = PromptMaker(pair, TEXTS, 0).make(task)
    judged = judge(pair, prompt)
    rows = [5, 2, 7]
    heads = [(int(layer), int(head)) for layer, head in judged.heads[rows]]
    setting = Setting(3, "prompt", 0.5)
    config = PrefillConfig(**setting.fields(heads))
    seen, _ = look_at(pair.open_draft(8192), prompt.token_ids, lambda *_: pytest.fail("no look-ahead"), config)
    pieces = pair.pieces(prompt.token_ids)
    units = make_units(len(prompt.token_ids), pieces, config)
    assert prompt.turn is not None
    evidence = Evidence(prompt.token_ids, seen, (prompt.turn[0], prompt.turn[1]), pieces)
    scores = make_rule(config.scorer).score(evidence, units, config)
    torch.testing.assert_close(setting.scores(judged, rows), scores, rtol=2e-3, atol=2e-3)
    default = PrefillConfig()
    seen, _ = look_at(pair.open_draft(8192), prompt.token_ids, lambda *_: pytest.fail("no look-ahead"), default)
    expected = make_rule(default.scorer).score(replace(evidence, attention=seen), units, default)
    torch.testing.assert_close(judged.default, expected, rtol=2e-3, atol=2e-3)
    evidence_units = {
        at for at, (start, stop) in enumerate(units) for low, high in prompt.spans if start < high and low < stop
    }
    assert set(judged.wanted.nonzero()[:, 0].tolist()) == evidence_units


def test_a_draft_with_another_tokenizer_is_calibrated_too(tmp_path: Path) -> None:
    drop_merges(ASSETS / "draft", tmp_path, 0.1, seed=0, tokenizer_from=ASSETS / "target")
    foreign = ModelPair.load(ASSETS / "target", tmp_path, device="cpu", target_weights=False)
    assert foreign.translation is not None
    found = calibrate(foreign, lengths=(512,), prompts_per_length=12)
    assert found.settings
    assert found.check(foreign.target.config, foreign.draft.config) == ""


def test_what_cannot_be_calibrated_is_refused(pair: ModelPair) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        calibrate(ModelPair.assemble(make_model(), make_model(seed=1)))
    with pytest.raises(ValueError, match="no length fits"):
        calibrate(pair, lengths=(10**6,))
    with pytest.raises(ValueError, match="not empty"):
        calibrate(pair, documents=["  "])
    for bad in ({"lengths": ()}, {"prompts_per_length": 0}, {"margin": 1.0}, {"budget_s": 0}):
        with pytest.raises(ValueError, match=r"must be"):
            calibrate(pair, **bad)  # type: ignore[arg-type]


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[str, object]]:
    made = Calibration({"keep_rate": ((2000, 0.1),)}, {}, {}, 0.1)
    file = made.save(tmp_path / "calibration.json")
    return file, json.loads(file.read_text())


@pytest.mark.parametrize(
    "damage", [{"version": 9}, {"settings": {"chunk_size": 8}}, {"settings": {"keep_rate": 7}}, {"points": [{"x": 1}]}]
)
def test_a_file_that_is_no_calibration_is_refused_by_name(
    written: tuple[Path, dict[str, object]], damage: dict[str, object]
) -> None:
    file, values = written
    assert Calibration.load(file).apply().keep_rate == ((2000, 0.1),)
    file.write_text(json.dumps(values | damage))
    with pytest.raises(ValueError, match=r"calibration\.json"):
        Calibration.load(file)
    with pytest.raises(ValueError, match="cannot take"):
        Calibration.load(file.parent / "missing.json")


def test_a_file_of_before_keeps_its_chunks_and_loses_its_times(written: tuple[Path, dict[str, object]]) -> None:
    file, values = written
    point = {"setting": "default", "num_tokens": 2048, "keep_rate": 0.2, "recall": 0.5, "ttft_s": 1.0}
    before = {name: value for name, value in values.items() if name in ("settings", "target", "draft", "margin")}
    before |= {"dense_s": {"2048": 2.0}, "kinds": {"fact": [1.0, 0.5]}, "points": [point]}
    for version, unit in ((1, "chunks"), (2, PrefillConfig.unit)):
        file.write_text(json.dumps({"version": version, **before}))
        found = Calibration.load(file)
        assert found.apply().unit == unit
        assert found.kinds == {"fact": {"chosen": 1.0, "default": 0.5}}
        assert found.points[0].recall == 0.5
