"""A threshold of the draft's check by a bound on lost answers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_stack import PrefillConfig, SpecStackConfig
from spec_stack.bench.prompts import questions_of
from spec_stack.binomial import upper_bound
from spec_stack.calibrate.loss import LOST_NATS, THRESHOLDS, Rung, find_bound, rungs_of, with_bound
from spec_stack.cli.main import main
from spec_stack.engine.engine import Engine, PrefilledPrompt
from spec_stack.engine.pair import ModelPair
from spec_stack.engine.request import Call
from spec_stack.prefill.calibration import Calibration, describe_setting, fingerprint
from tests.support.models import make_model, random_prompt
from tests.support.reference_check import answer_attention, dropped_attention

GOOD, BAD = [Rung(0.01, False)], [Rung(0.35, True), Rung(0.22, False)]


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return ModelPair.load(device="cpu", prepack_linears=False)


def prompt(number: int) -> dict[str, object]:
    lines = [f"The code of room {at} is {at * 7 + number}." for at in range(40)]
    return {"text": "\n".join([*lines, f"What is the code of room {number}?"]), "answers": [str(number * 8)]}


def test_the_loosest_threshold_within_the_bound_is_found() -> None:
    # Under 0.3 these go to the second rate, which loses nothing; under 0.4 the first is kept, and lost.
    found = find_bound([GOOD] * 190 + [BAD] * 10, 0.02)
    assert (found.max_dropped_attention, found.num_lost, found.num_pruned, found.num_prompts) == (0.3, 0, 200, 200)
    assert upper_bound(10, 200) > 0.02
    loose = find_bound([GOOD] * 190 + [BAD] * 10, 0.2)
    assert (loose.max_dropped_attention, loose.num_lost) == (THRESHOLDS[-1], 10)
    assert "10 of 200 prompts were lost, at most 0.083 (95 %)" in loose.told()


def test_too_few_prompts_bound_nothing_and_the_number_is_told() -> None:
    found = find_bound([GOOD] * 100, 0.02)
    assert found.max_dropped_attention is None
    assert "149 prompts without a loss would be needed" in found.told()


def test_a_loss_that_the_check_does_not_see_ends_the_search() -> None:
    found = find_bound([GOOD] * 200 + [[Rung(0.12, True)]] * 20 + [[Rung(0.3, False)]] * 9, 0.05)
    assert found.max_dropped_attention == 0.1


def test_a_rung_is_what_whole_forwards_tell() -> None:
    target, draft, ids = make_model("qwen2"), make_model("qwen2", seed=1), random_prompt(200, seed=3)
    config = PrefillConfig(
        granularity="chunks", chunk_size=8, keep_rate=0.3, first_scoring_layer=0, check_rates=(0.6,), check_tokens=4
    )
    engine = Engine(ModelPair.assemble(target, draft), SpecStackConfig(config))
    rungs = rungs_of(engine, (Call(input_ids=ids), ()))
    heads = [*product(range(draft.config.num_hidden_layers), range(draft.config.num_attention_heads))]
    attention = answer_attention(make_model("qwen2", seed=1, implementation="eager"), ids, 4, heads)
    whole = loss_of(ids, range(200), answer := greedy(ids, 20))
    for rung, rate in zip(rungs, (0.3, 0.6), strict=True):
        prefilled = PrefilledPrompt(engine, Call(input_ids=ids, sparse_prefill="on", keep_rate=rate))
        kept = list(prefilled.selection.positions)
        expected = dropped_attention(attention, kept, first=8, last=8)
        assert rung.dropped_attention == pytest.approx(expected, rel=1e-3)
        assert rung.is_lost is (loss_of(ids, kept, answer) - whole > LOST_NATS)
    assert rungs[0].is_lost


def logits_of(ids: list[int], positions: list[int]) -> torch.Tensor:
    given, at = torch.tensor([ids]), torch.tensor([positions])
    with torch.no_grad():
        return make_model("qwen2")(given, attention_mask=torch.ones_like(given), position_ids=at).logits[0]


def greedy(ids: list[int], num_tokens: int) -> list[int]:
    answer: list[int] = []
    while len(answer) < num_tokens:
        answer.append(int(logits_of([*ids, *answer], [*range(len(ids) + len(answer))])[-1].argmax()))
    return answer


def loss_of(ids: list[int], kept: Iterable[int], answer: list[int]) -> float:
    positions = [*kept, *range(len(ids), len(ids) + len(answer) - 1)]
    rows = logits_of([*(ids[at] for at in kept), *answer[:-1]], positions)[-len(answer) :].log_softmax(-1)
    return -float(rows[range(len(answer)), answer].mean())


def test_a_bound_goes_into_the_calibration_and_a_file(pair: ModelPair, tmp_path: Path) -> None:
    models = (fingerprint(pair.target.config), fingerprint(pair.draft.config))
    made = Calibration({"keep_rate": 0.3, "min_prompt_tokens": 100}, *models, margin=0.1)
    seen: list[str] = []
    questions = questions_of([prompt(number) for number in range(4)], pair.tokenizer)
    bound = with_bound(made, pair, questions, 0.9, 60, lambda done, total, what: seen.append(f"{done}/{total}"))
    assert seen == ["1/4", "2/4", "3/4", "4/4"]
    again = Calibration.load(bound.save(tmp_path / "own.json"))
    assert again.settings == bound.settings
    threshold = bound.settings.get("max_dropped_attention")
    completed = again.complete(PrefillConfig())
    assert completed.max_dropped_attention == threshold
    assert threshold is None or f"max_dropped_attention={threshold}" in describe_setting(completed)
    # What a user sets holds.
    checked = replace(again, settings={**again.settings, "max_dropped_attention": 0.1})
    assert checked.complete(PrefillConfig()).max_dropped_attention == 0.1
    for given in (PrefillConfig(max_dropped_attention=None), PrefillConfig.raw(), PrefillConfig.full_look_ahead()):
        assert checked.complete(given).max_dropped_attention is None


@pytest.mark.parametrize("answers", [[""], [" "], 7, None, [7], {"text": ["7"]}])
def test_answers_that_no_answer_can_be_compared_with_are_named_before_anything_runs(
    answers: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [prompt(0), {**prompt(1), "answers": answers}]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    given = ["calibrate", "--out", str(tmp_path / "made.json"), "--max-loss", "0.1", "--loss-prompts", str(file)]
    assert main([*given, "--target", "nowhere"]) == 2
    assert f'{file}, line 3: "answers" must be' in capsys.readouterr().err


def test_a_text_is_one_answer_and_no_answers_are_none(pair: ModelPair) -> None:
    given: list[dict[str, Any]] = [{"prompt": "x", "answers": each} for each in ("48213", ["48213", "a"], [])]
    read = [list(answers) for _, answers in questions_of([*given, {"prompt": "x"}], pair.tokenizer)]
    assert read == [["48213"], ["48213", "a"], [], []]


def test_the_command_stores_the_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "calibration.json"
    file.write_text("\n".join(json.dumps(prompt(number)) for number in range(3)))
    given = ["calibrate", "--lengths", "400", "--prompts", "10", "--out", str(out)]
    assert main([*given, "--max-loss", "0.02", "--loss-prompts", str(file)]) == 0
    told = capsys.readouterr().out
    assert "No max_dropped_attention keeps lost answers under 0.02" in told
    assert "149 prompts without a loss would be needed" in told
    assert main([*given, "--loss-prompts", str(file)]) == 2
    assert main([*given, "--max-loss", "2"]) == 2
    assert "max_loss must be a share" in capsys.readouterr().err
