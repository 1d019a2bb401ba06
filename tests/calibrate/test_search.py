from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.quality.held_out_needles import HELD_OUT
from experiments.quality.retokenize import drop_merges
from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.calibrate import choice as choosing
from spec_stack.calibrate import search as calibrating
from spec_stack.calibrate.costs import Costs, fit_quadratic
from spec_stack.calibrate.needles import IN_OTHER_WORDS, WORDINGS, hide, make_haystacks
from spec_stack.calibrate.prompts import Prompt, encode_haystack
from spec_stack.calibrate.report import format_calibration, plot_calibration
from spec_stack.calibrate.search import calibrate
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.loading import ASSETS
from spec_stack.prefill.calibration import CHOSEN, FILE_NAME, Calibration
from spec_stack.prefill.units import Chunks
from tests.support.models import make_model

LINES = [f"line {number} of a text that says nothing" for number in range(400)]


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return ModelPair.load(device="cpu", prepack_linears=False)


@pytest.fixture(scope="module")
def calibrated(pair: ModelPair) -> Calibration:
    return calibrate(pair, lengths=(2048, 3072), prompts_per_length=16)


@pytest.mark.parametrize(
    ("kind", "index", "held_out"),
    [
        (kind, index, held_out)
        for held_out, wordings in ((False, WORDINGS), (True, HELD_OUT))
        for kind in wordings
        for index in range(len(wordings[kind]))
    ],
)
def test_a_needle_s_lines_stand_where_the_haystack_says(kind: str, index: int, held_out: bool, pair: ModelPair) -> None:
    needle = (HELD_OUT if held_out else WORDINGS)[kind][index](random.Random(3))
    haystack = hide(kind, needle, LINES, random.Random(4))
    assert tuple(haystack.document[start:stop] for start, stop in haystack.spans) == needle.evidence
    assert all(line in haystack.document.split("\n") for line in (*needle.evidence, *needle.others, *LINES))
    assert any(needle.answer in line for line in needle.evidence)
    prompt = encode_haystack(pair.tokenizer, haystack)
    for (start, stop), line in zip(prompt.spans, needle.evidence, strict=True):
        assert line.strip() in pair.tokenizer.decode(prompt.token_ids[start:stop])
        assert line not in pair.tokenizer.decode(prompt.token_ids[start + 1 : stop])


def test_calibration_and_its_test_share_no_word_of_a_question_beside_common_ones() -> None:
    def names(wordings: object) -> set[str]:
        questions = [
            wording(random.Random(seed)).question for kind in wordings.values() for wording in kind for seed in range(5)
        ]  # type: ignore[attr-defined]
        return {word.strip("?.,") for question in questions for word in question.split() if word[0].isupper()}

    assert names(WORDINGS) & names(HELD_OUT) <= {"What", "Which", "List", "On", "Where", "Tell", "With", "How", "Who"}


def test_a_needle_in_other_words_shares_no_word_with_its_question() -> None:
    for kind in IN_OTHER_WORDS:
        for wording in WORDINGS[kind]:
            needle = wording(random.Random(5))
            told, asked = (set(re.findall(r"\w+", text.lower())) for text in (needle.evidence[0], needle.question))
            assert told & asked <= {"the"}, wording.__name__


def test_haystacks_are_of_every_kind_and_the_same_for_the_same_seed() -> None:
    made = make_haystacks(["\n".join(LINES)], 3000, 16, seed=5)
    assert {haystack.kind for haystack in made} == set(WORDINGS)
    assert made == make_haystacks(["\n".join(LINES)], 3000, 16, seed=5)
    with pytest.raises(ValueError, match="no text"):
        make_haystacks(["", "  "], 3000, 1, seed=5)


@given(st.integers(5, 60), st.integers(0, 1000), st.integers(0, 10_000))
def test_the_needed_share_is_the_smallest_that_keeps_the_evidence(num_chunks: int, at: int, seed: int) -> None:
    config = PrefillConfig(chunk_size=4)
    scores = torch.rand(num_chunks, generator=torch.Generator().manual_seed(seed))
    start = at % (num_chunks * 4 - 1)
    stop = min(start + 1 + seed % 9, num_chunks * 4)
    prompt = Prompt([0] * num_chunks * 4, ((start, stop),), None)
    needed = calibrating._needed(prompt, config, scores)[0]
    wanted, chunks = set(range(start, stop)), Chunks(num_chunks * 4, 4)
    assert wanted <= chunks.chosen(scores, config, max(needed, 1e-6))
    if needed > 3 / num_chunks:
        assert not wanted <= chunks.chosen(scores, config, needed - 1 / num_chunks)


@pytest.mark.parametrize("truth", [(0.01, 2e-4, 3e-8), (0.0, 1e-4, 0.0), (0.02, 0.0, 1e-7)])
def test_times_are_fitted_by_what_made_them(truth: tuple[float, float, float]) -> None:
    lengths = [256, 1024, 4096]
    a, b, c = truth
    fitted = fit_quadratic(lengths, [a + b * n + c * n * n for n in lengths])
    assert fitted(9000) == pytest.approx(a + b * 9000 + c * 9000**2, rel=1e-3)


@pytest.mark.slow
def test_calibration_keeps_more_than_the_papers_rule_for_less(calibrated: Calibration) -> None:
    config = calibrated.apply()
    assert set(calibrated.settings) == set(CHOSEN)
    # The heads of the second layer retrieve, and those of the first do not.
    by_layer = [[recall for name, recall in calibrated.head_recall.items() if name.startswith(layer)] for layer in "01"]
    assert sum(by_layer[1]) > 2 * sum(by_layer[0])
    assert config.scorer in ("fused", "anchors")
    assert all(config.rate_for(length) <= 0.2 for length in (2048, 3072))
    assert "cannot retrieve" not in " ".join(calibrated.notes)


@pytest.mark.slow
def test_a_calibration_is_the_same_after_a_file_and_works_in_a_generator(
    calibrated: Calibration, pair: ModelPair, tmp_path: Path
) -> None:
    file = calibrated.save(tmp_path)
    assert file.name == FILE_NAME
    again = Calibration.load(tmp_path)
    assert again.apply() == calibrated.apply()
    assert again.check(pair.target.config, pair.draft.config) == ""
    assert "another draft" in again.check(pair.target.config, pair.target.config)
    assert format_calibration(again) == format_calibration(calibrated)
    plot_calibration(again, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    config = SpecStackConfig(replace(again.apply(), min_prompt_tokens=512))
    generator = SpecStackGenerator(pair.target, pair.draft, pair.tokenizer, config=config)
    result = generator.generate("\n".join(LINES[:120]), max_tokens=4)
    assert result.metrics.specprefill, result.metrics.specprefill_reason


@pytest.mark.slow
def test_of_a_draft_that_cannot_retrieve_calibration_says_so_and_uses_words(pair: ModelPair) -> None:
    torch.manual_seed(0)
    blind = type(pair.draft)(pair.draft.config).eval()
    blind.config._attn_implementation_internal = "sdpa"
    random_pair = ModelPair.assemble(pair.target, blind, pair.tokenizer)
    found = calibrate(random_pair, lengths=(2048,), prompts_per_length=16)
    assert "cannot retrieve" in " ".join(found.notes)
    assert found.apply().scorer == "anchors"


def _choose_among(attention: float, chance: float, anchors: float, paraphrases: float) -> choosing.Choice:
    """A choice between three settings that keep such shares of 16 prompts in the question's words at keep_rate 0.2."""

    def needed(same: float, other: float) -> choosing.Needed:
        def rates(share: float) -> list[list[float]]:
            return [[0.1 if index < 16 * share else 0.9] for index in range(16)]

        return {"fact": rates(same), "paraphrase": rates(other)}

    paper = PrefillConfig.full_look_ahead()
    settings = {
        paper: needed(attention, attention),
        replace(paper, scorer="anchors"): needed(anchors, paraphrases),
        replace(paper, scorer="fused"): needed(max(anchors, attention), attention),
    }
    costs = Costs(lambda n: 1e-3 * n, {(None, None): lambda n: 1e-4 * n}, 1e-4)
    return choosing.choose({2048: settings}, costs, chance, 0.05)


def test_words_alone_are_chosen_only_where_they_keep_what_is_asked_in_other_words() -> None:
    cheapest = _choose_among(attention=0.5, chance=0.1, anchors=1.0, paraphrases=0.5)
    assert cheapest.config.scorer == "anchors"
    guarded = _choose_among(attention=0.5, chance=0.1, anchors=1.0, paraphrases=0.125)
    assert guarded.config.scorer == "fused"
    assert guarded.kinds == {"fact": (1.0, 0.5), "paraphrase": (0.5, 0.5)}
    assert guarded.config.min_prompt_tokens == 2048


def test_a_draft_no_better_than_chance_is_said_to_retrieve_nothing() -> None:
    found = _choose_among(attention=0.125, chance=0.125, anchors=0.5, paraphrases=0.125)
    assert "cannot retrieve: its best heads keep 12% of the evidence" in " ".join(found.notes)
    assert found.config.scorer == "anchors"


@pytest.mark.slow
def test_a_draft_with_another_tokenizer_is_calibrated_too(tmp_path: Path) -> None:
    drop_merges(ASSETS / "draft", tmp_path, 0.1, seed=0, tokenizer_from=ASSETS / "target")
    foreign = ModelPair.load(ASSETS / "target", tmp_path, device="cpu")
    assert foreign.translation is not None
    found = calibrate(foreign, lengths=(1024,), prompts_per_length=8)
    assert found.check(foreign.target.config, foreign.draft.config) == ""


def test_without_a_tokenizer_or_a_length_that_fits_calibration_is_refused(pair: ModelPair) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        calibrate(ModelPair.assemble(make_model(), make_model(seed=1)))
    with pytest.raises(ValueError, match="no length fits"):
        calibrate(pair, lengths=(10**6,))


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
