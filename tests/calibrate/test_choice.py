"""What is chosen of judged prompts: heads of other families, a share by length, or the default."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from zlib import crc32

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_stack import PrefillConfig
from spec_stack.calibrate.choice import Case, HeadRanking, Setting, TooFewPromptsError, choose
from spec_stack.calibrate.judged import ScoredPrompt, needed
from spec_stack.calibrate.needles import FAMILIES
from spec_stack.calibrate.prompts import Task, plan
from spec_stack.calibrate.shapes import SHAPES
from spec_stack.prefill.segments import Segments

NUM_UNITS, TOKENS = 100, 20
HEADS = [(layer, head) for layer in range(6) for head in range(4)]
# Which heads find a prompt's evidence.
Finds = Callable[[Task], Sequence[int]]


def judged_of(task: Task, heads: Sequence[int], default: bool = False) -> ScoredPrompt:
    """A prompt of a hundred segments, one of them the evidence, which these rows rank first and the others anywhere."""
    random = torch.Generator().manual_seed(crc32(repr(task).encode()))
    wanted = torch.zeros(NUM_UNITS, dtype=torch.bool)
    at = int(torch.randint(30, 60, (), generator=random))
    wanted[at] = True
    shares = torch.rand(len(HEADS), NUM_UNITS, generator=random)
    # Those that do not find it rank it last.
    shares[:, at] = 0.0
    shares[list(heads), at] = 30.0
    scores = torch.rand(NUM_UNITS, generator=random)
    scores[at] = 30.0 if default else -1.0
    costs = torch.full((NUM_UNITS,), TOKENS)
    sizes = torch.tensor([NUM_UNITS * TOKENS, 0])
    return ScoredPrompt(torch.tensor(HEADS), shares, scores, costs, wanted, sizes)


def cases_of(finds: Finds, lengths: Sequence[int] = (2048,), default: bool = False, count: int = 88) -> list[Case]:
    return [Case(task, judged_of(task, finds(task), default)) for task in plan(lengths, count)]


@given(st.lists(st.integers(1, 30), min_size=3, max_size=40), st.integers(0, 10_000), st.integers(0, 3))
def test_the_needed_share_keeps_the_evidence_and_so_does_every_larger_one(
    sizes: list[int], seed: int, first: int
) -> None:
    borders = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    num_tokens, random = borders[-1], torch.Generator().manual_seed(seed)
    config = PrefillConfig(chunk_size=1, keep_first=first, keep_last=1)
    scores, unit = torch.rand(len(sizes), generator=random), seed % len(sizes)
    segments = Segments(borders)
    forced = segments.ends(config)
    costs = torch.tensor([sum(at not in forced for at in range(start, stop)) for start, stop in segments])
    wanted = torch.arange(len(sizes)) == unit
    judged = ScoredPrompt(
        torch.zeros(1, 2), scores[None], scores, costs, wanted & (costs > 0), torch.tensor([num_tokens, len(forced)])
    )
    need = float(needed(judged, scores))
    for share in (need, (need + 1) / 2, 1.0):
        assert set(range(borders[unit], borders[unit + 1])) <= segments.chosen(scores, config, share)
    assert needed(judged, torch.stack([scores, scores])).tolist() == [need, need]


def test_the_plan_goes_through_all_families_and_shapes_and_keeps_every_fourth_document_out_of_the_choice() -> None:
    tasks = plan((2048, 4096, 8192), 88)
    first = [task for task in tasks if task.num_tokens == 2048]
    assert len(first) == 88
    documents = list(dict.fromkeys((task.kind, task.number) for task in first))
    assert [kind for kind, _ in documents[: len(FAMILIES)]] == list(FAMILIES)
    assert len({(task.kind, task.number, task.is_guard) for task in first}) == len(documents)
    for guard in (False, True):
        own = [task for task in first if task.is_guard == guard]
        assert {task.kind for task in own} == set(FAMILIES)
        assert {task.shape for task in own} == set(SHAPES)
    assert 0.15 < sum(task.is_guard for task in first) / 88 < 0.35
    # The prompts of a document follow each other, and begin with it.
    assert [key for key, _ in groupby(first, lambda task: (task.kind, task.number))] == documents
    others = [task for task in tasks if task.num_tokens > 2048]
    assert all(task.is_guard for task in others)
    assert [sum(task.num_tokens == length for task in others) for length in (4096, 8192)] == [22, 22]
    assert tasks == plan((8192, 2048, 4096), 88)
    assert plan((2048,), 200)[:88] == first


def test_a_family_is_judged_by_heads_that_it_has_not_chosen() -> None:
    own, common = 5, 9
    cases = cases_of(lambda task: [common, own] if task.kind == "log" else [common])
    cases = [Case(case.task, judged_of(case.task, [own])) if case.task.kind == "json" else case for case in cases]
    ranks = HeadRanking([case for case in cases if not case.task.is_guard], HEADS)
    setting = Setting(2)
    assert ranks.best(setting) == [common, own]
    assert own in ranks.best(setting, without=("log",))  # json has chosen it
    assert own not in ranks.best(setting, without=("log", "json"))
    log = next(case for case in cases if case.task.kind == "log" and not case.task.is_guard)
    assert ranks.needs(Setting(1), log) < 0.1
    json = next(case for case in cases if case.task.kind == "json" and not case.task.is_guard)
    # Its own head is of no use to it, since no other family has found it by itself.
    assert ranks.needs(Setting(1), json) == pytest.approx(float(needed(json.judged, json.judged.by_head[common])))


def test_the_heads_that_find_are_chosen_and_no_layer_behind_them_is_run() -> None:
    good = [8, 9, 13]
    choice = choose(cases_of(lambda task: good), 0.1)
    config = PrefillConfig(**choice.settings)
    assert config.scoring_heads is not None
    assert {HEADS[row] for row in good[:2]} & set(config.scoring_heads)
    assert max(layer for layer, _ in config.scoring_heads) <= 3
    assert (config.scoring_queries, config.head_reduction, config.granularity) == ("prompt", "mean", "lines")
    assert choice.notes[0].startswith("Of 88 prompts of 2048 tokens, 100% keep all evidence at 0.04; 0% under")
    # The last line says in words what is gained.
    assert re.fullmatch(
        r"Gained over the default: it keeps 4% of 2048 tokens in place of 20%; [34] of the draft's 6 layers run; "
        r"100% of \d+ held-out prompts keep their evidence at 20%, by default 0%.",
        choice.notes[-1],
    )


def test_heads_alone_are_chosen_and_no_share_is_promised() -> None:
    choice = choose(cases_of(lambda task: [8, 9, 13]), 0.1, chooses_rates=False)
    assert choice.settings["scoring_heads"]
    assert "keep_rate" not in choice.settings
    assert choice.notes[0].startswith("Of 88 prompts of 2048 tokens, 100% keep all evidence at 0.2;")
    assert "it keeps" not in choice.notes[-1]


def own_head(task: Task) -> int:
    return list(FAMILIES).index(task.kind)


@pytest.mark.parametrize(
    "heads",
    [
        (lambda task: [] if task.is_guard else [8, 9]),
        (lambda task: []),
        # A family is found by its own heads alone, which no prompts of other kinds would choose; held-out prompts by
        # all of the first layer.
        (lambda task: [0, 1, 2, 3] if task.is_guard else [own_head(task), own_head(task) + len(FAMILIES)]),
    ],
)
def test_a_choice_that_keeps_less_than_the_default_on_other_prompts_gains_nothing(heads: Finds) -> None:
    choice = choose(cases_of(heads, default=True), 0.1)
    assert choice.settings == {}
    assert choice.notes[-1] == "It gains nothing over the default, which stays."
    assert "100% keep all evidence at 0.2; 100% under the default" in choice.notes[-2]


def test_the_same_recall_from_the_last_layer_at_the_usual_share_gains_nothing() -> None:
    """Evidence that the heads rank nineteenth of a hundred, as the default does, in a draft without layers to save."""

    def ranked_nineteenth(judged: ScoredPrompt) -> ScoredPrompt:
        scores = judged.wanted.double()
        scores[:18] = 2.0
        return replace(judged, default=scores, by_head=scores.expand(4, -1), heads=torch.tensor(HEADS[-4:]))

    cases = [replace(case, judged=ranked_nineteenth(case.judged)) for case in cases_of(lambda task: [])]
    assert choose(cases, 0.1).notes[-1] == "It gains nothing over the default, which stays."


def test_heads_of_fewer_layers_that_keep_as_much_as_the_default_are_chosen() -> None:
    choice = choose(cases_of(lambda task: [8, 9], default=True), 0.1)
    assert choice.settings["scoring_heads"]
    assert "layers run" in choice.notes[-1]


def test_too_few_prompts_choose_nothing() -> None:
    for cases in (cases_of(lambda task: [8])[:7], []):
        with pytest.raises(TooFewPromptsError, match=rf"{len(cases)} prompts are too few to choose by"):
            choose(cases, 0.1)


def test_a_longer_prompt_keeps_no_larger_share_and_no_fewer_tokens() -> None:
    curve = choose(cases_of(lambda task: [8, 9, 10], (2048, 4096, 16384)), 0.1).settings["keep_rate"]
    assert [length for length, _ in curve] == [2048, 4096, 16384]
    rates = [rate for _, rate in curve]
    assert rates == sorted(rates, reverse=True)
    kept = [length * rate for length, rate in curve]
    assert kept == sorted(kept)


def test_a_smaller_share_loses_no_more_than_the_margin() -> None:
    def ranked_eleventh(judged: ScoredPrompt) -> ScoredPrompt:
        by_head = judged.by_head.clone()
        by_head[:, :10] = 40.0
        return replace(judged, by_head=by_head)

    cases = [
        replace(case, judged=ranked_eleventh(case.judged)) if case.task.number % 2 else case
        for case in cases_of(lambda task: [8, 9, 10])
    ]
    strict, lax = (choose(cases, margin).settings["keep_rate"] for margin in (0.1, 0.9))
    assert lax < 0.11 <= strict
