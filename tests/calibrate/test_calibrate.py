"""A calibration ends within its budget, and gives settings that a generator takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.calibrate import search
from spec_stack.calibrate.choice import fields_of
from spec_stack.calibrate.config import CalibrateConfig
from spec_stack.calibrate.judged import ScoredPrompt, judge, needed
from spec_stack.calibrate.prompts import EncodedHaystack, PromptMaker, Task
from spec_stack.calibrate.search import calibrate, format_calibration
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.loading import ASSETS
from spec_stack.hf.model import CachedModel
from spec_stack.hf.prompt import num_shared
from spec_stack.prefill.calibration import CHOSEN, FILE_NAME, Calibration
from spec_stack.prefill.registry import make_rule
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.scoring import run_draft
from spec_stack.prefill.segments import make_segments
from spec_stack.prefill.selection import select
from tests.support.models import make_model
from tests.support.retokenize import drop_merges

TEXTS = ["\n".join(f"Line {number} of a long text about nothing." for number in range(500))]


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return ModelPair.load(device="cpu", prepack_linears=False, target_weights=False)


@pytest.fixture(scope="module")
def calibrated(pair: ModelPair) -> Calibration:
    return calibrate(pair, CalibrateConfig(lengths=(512, 1024), prompts=22), documents=TEXTS)


def test_a_calibration_is_the_same_after_a_file_and_works_in_a_generator(
    calibrated: Calibration, pair: ModelPair, tmp_path: Path
) -> None:
    made = calibrated
    assert set(made.settings) <= set(CHOSEN)
    assert (made.num_prompts, made.unfinished) == (22 + 5, 0)
    file = made.save(tmp_path)
    assert file.name == FILE_NAME
    again = Calibration.load(tmp_path)
    assert replace(again, origin="") == made
    assert again.check(pair.target.config, pair.draft.config) == ""
    assert "another draft" in again.check(pair.target.config, pair.target.config)
    assert (told := format_calibration(again)) == format_calibration(made)
    assert "Of 22 prompts of 512 tokens, " in told
    assert "Of 5 prompts of 1024 tokens, " in told
    assert "over the default" in told.splitlines()[-1]
    generator = SpecStackGenerator.from_pretrained(
        device="cpu", calibration=file, config=SpecStackConfig(PrefillConfig(min_prompt_tokens=512))
    )
    result = generator.generate(TEXTS[0][:3000], max_tokens=2)
    assert result.metrics.sparse_prefill_reason.startswith(
        f"on: the prompt has min_prompt_tokens=512 or more; calibrated by {FILE_NAME}"
    )


def test_the_budget_is_kept_and_what_is_judged_by_then_makes_a_calibration(
    pair: ModelPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, told = [0.0], []

    def judge_slowly(pair: ModelPair, draft_cache: CachedModel, prompt: EncodedHaystack) -> ScoredPrompt:
        now[0] += max(160, len(prompt.token_ids) - num_shared(draft_cache.token_ids, prompt.token_ids)) / 512
        return judge(pair, draft_cache, prompt)

    monkeypatch.setattr(search, "monotonic", lambda: now[0])
    monkeypatch.setattr(search, "judge", judge_slowly)
    made = calibrate(
        pair,
        CalibrateConfig(lengths=(512, 1024), prompts=400, budget_s=40),
        documents=TEXTS,
        progress=lambda done, total, what: told.append(what),
    )
    # The last prompt ends after the budget.
    assert 40 <= now[0] < 44
    assert made.num_prompts + made.unfinished == 400 + 100
    assert len(told) == made.num_prompts
    # A quarter of the time is for longer prompts.
    assert 27 <= sum(each.startswith("512 tokens") for each in told) <= 88
    assert sum(each.startswith("1024 tokens") for each in told) >= 3
    assert Calibration.load(made.save(tmp_path / "partial.json")).apply() == made.apply()
    assert f"{made.unfinished} are left" in format_calibration(made)


def look(pair: ModelPair, prompt: EncodedHaystack, config: PrefillConfig) -> ScoringInputs:
    pieces = pair.pieces(prompt.token_ids)
    draft = pair.draft_in_target_vocab(pair.new_draft_cache(8192))
    inputs = ScoringInputs(replace(prompt.text, pieces=pieces))
    seen, _ = run_draft(draft, inputs, lambda *_: pytest.fail("no look-ahead"), config)
    return replace(inputs, attention=seen)


def test_what_is_judged_is_what_the_selection_rules_give_whatever_was_judged_before(pair: ModelPair) -> None:
    index = pair.new_draft_cache(8192)
    maker = PromptMaker(pair, TEXTS, 0)
    for shape in ("question last", "JSON object", "question first"):
        prompt = maker.make(Task(1400, "fact", 1, False, shape))
        judged = judge(pair, index, prompt)
        config = PrefillConfig()
        evidence = look(pair, prompt, config)
        segments = make_segments(len(prompt.token_ids), evidence.pieces, config)
        expected = make_rule(config.scorer).score(evidence, segments, config)
        torch.testing.assert_close(judged.default, expected, rtol=2e-3, atol=2e-3)
        # Heads of the layer that weighs the default's question; calibration judges all heads by its weights.
        heads, rows = [(int(layer), int(head)) for layer, head in judged.heads.tolist()], [5, 4, 7]
        config = PrefillConfig(**fields_of([heads[row] for row in rows]))
        expected = make_rule(config.scorer).score(look(pair, prompt, config), segments, config)
        torch.testing.assert_close(judged.score(rows), expected, rtol=2e-3, atol=1e-5)
        wanted = {
            at for at, (start, stop) in enumerate(segments) for low, high in prompt.spans if start < high and low < stop
        }
        assert set(judged.wanted.nonzero()[:, 0].tolist()) == wanted


def test_the_share_that_a_prompt_needs_is_one_at_which_its_evidence_is_kept(pair: ModelPair) -> None:
    index, maker = pair.new_draft_cache(8192), PromptMaker(pair, TEXTS, 0)
    for shape in ("rules", "tags", "question first, reminder"):
        prompt = maker.make(Task(1400, "fact", 2, False, shape))
        need = float(needed(judged := judge(pair, index, prompt), judged.default))
        config = PrefillConfig(keep_rate=min(1.0, need + 1e-6))
        evidence = look(pair, prompt, config)
        kept = {*select(evidence, config).positions}
        assert all(at in kept for start, stop in prompt.spans for at in range(start, stop))


def test_what_is_judged_as_kept_anyway_is_what_selection_keeps_at_the_least_rate(pair: ModelPair) -> None:
    index, prompt = pair.new_draft_cache(8192), PromptMaker(pair, TEXTS, 0).make(Task(1400, "fact", 2, False, "rules"))
    evidence, config = look(pair, prompt, PrefillConfig()), PrefillConfig(keep_rate=1e-6)
    num_tokens = len(prompt.token_ids)
    # More than keep_last, so that the line before is an end.
    start = next(at for at, _ in make_segments(num_tokens, evidence.pieces, config) if at >= num_tokens - 80)
    for protected in ([], [(start, num_tokens)]):
        text = replace(prompt.text, protected=protected)
        judged = judge(pair, index, replace(prompt, text=text))
        least = select(replace(evidence, text=replace(text, pieces=evidence.pieces)), config).positions
        paid = {*least}.difference(*(range(start, stop) for start, stop in text.kept))
        assert judged.num_tokens.tolist() == [num_tokens, len(paid)]
        assert int(judged.costs.sum()) == num_tokens - len({*least})


def test_a_shape_more_of_a_document_goes_over_its_last_tokens_alone(pair: ModelPair) -> None:
    index, maker, read = pair.new_draft_cache(8192), PromptMaker(pair, TEXTS, 0), []

    def count(num_tokens: int, share_done: float) -> None:
        if share_done == 1.0:
            read.append(num_tokens)

    for shape, most in (("question last", 1400), ("JSON object", 400), ("tags", 1400)):
        read.clear()
        index.on_piece = count
        judge(pair, index, maker.make(Task(1400, "fact", 1, False, shape)))
        assert most / 4 < sum(read) < most + 256


def test_a_draft_with_another_tokenizer_is_calibrated_too(tmp_path: Path) -> None:
    drop_merges(ASSETS / "draft", tmp_path, 0.1, seed=0, tokenizer_from=ASSETS / "target")
    foreign = ModelPair.load(ASSETS / "target", tmp_path, device="cpu", target_weights=False)
    assert foreign.translation is not None
    found = calibrate(foreign, CalibrateConfig(lengths=(512,), prompts=12))
    assert found.num_prompts == 12
    assert found.check(foreign.target.config, foreign.draft.config) == ""


def test_what_cannot_be_calibrated_is_refused(pair: ModelPair) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        calibrate(ModelPair.assemble(make_model(), make_model(seed=1)))
    with pytest.raises(ValueError, match="no length fits"):
        calibrate(pair, CalibrateConfig(lengths=(10**6,)))
    with pytest.raises(ValueError, match="not empty"):
        calibrate(pair, documents=["  "])
    for bad in ({"lengths": ()}, {"prompts": 0}, {"margin": 1.0}, {"budget_s": 0}):
        with pytest.raises(ValueError, match=r"must be"):
            CalibrateConfig(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ({"version": 3}, "version.*calibrate again"),
        ({"settings": {"chunk_size": 8}}, ""),
        ({"settings": {"keep_rate": 7}}, ""),
        ({"weights": None}, ""),
    ],
)
def test_a_file_that_is_no_calibration_is_refused_by_name(tmp_path: Path, damage: dict[str, object], told: str) -> None:
    file = Calibration({"keep_rate": ((2000, 0.1),)}, {}, {}, 0.1).save(tmp_path / "calibration.json")
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"points": [{"setting": "default"}]}))
    assert Calibration.load(file).apply().keep_rate == ((2000, 0.1),)
    file.write_text(json.dumps(values | damage))
    with pytest.raises(ValueError, match=rf"calibration\.json.*{told}"):
        Calibration.load(file)
    with pytest.raises(ValueError, match="cannot read the calibration"):
        Calibration.load(file.parent / "missing.json")


def test_a_file_that_chose_bm25_still_works(tmp_path: Path) -> None:
    file = Calibration({"granularity": "lines", "scorer": "bm25", "keep_rate": 0.15}, {}, {}, 0.1).save(tmp_path)
    generator = SpecStackGenerator.from_pretrained(device="cpu", calibration=file)
    result = generator.generate(TEXTS[0], max_tokens=1)
    assert generator.config.prefill.scorer == "bm25"
    assert result.metrics.keep_rate == pytest.approx(0.15, abs=0.01)
