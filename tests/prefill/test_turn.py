"""One decision for a prompt or a turn: dense, or scored, by what and why."""

from __future__ import annotations

import random

import pytest
import torch

from spec_stack.config import PrefillConfig, SessionConfig
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.prefill.queries import find_candidates
from spec_stack.prefill.recall import recall
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.segments import make_segments
from spec_stack.prefill.turn import Cached, NeedsScore, Plan, plan_scored, plan_turn, scoring_obstacle, select_turn

CONFIG = PrefillConfig(min_prompt_tokens=400, granularity="chunks", keep_rate=0.2)
DROPPED = Cached(400, (*range(50), *range(350, 400)))
TEXT = PromptText(range(900))
PIECES = [*(["word ", "of ", "text\n"] * 200), "Which ", "word ", "is ", "it?"]


@pytest.mark.parametrize(
    ("num_tokens", "cached", "recalls", "obstacle", "expected"),
    [
        (399, Cached(), True, "", (None, "shorter than min_prompt_tokens=400")),
        (400, Cached(), True, "", ((True, False), "on: the prompt")),
        (400, Cached(), True, "no room", (None, "off: no room")),
        (799, Cached.dense(400), True, "", (None, "the new text is shorter")),
        (799, DROPPED, True, "", ((False, True), "the new text is shorter")),
        (799, DROPPED, False, "", (None, "the new text is shorter")),
        (799, DROPPED, True, "no room", (None, "no room")),
        (800, DROPPED, True, "", ((True, True), "on: the new text")),
    ],
)
def test_a_text_is_scored_where_it_is_pruned_or_recalls(
    num_tokens: int, cached: Cached, recalls: bool, obstacle: str, expected: tuple[tuple[bool, bool] | None, str]
) -> None:
    recall = SessionConfig() if recalls else None
    turn = plan_turn(range(num_tokens), lambda: PromptText(range(num_tokens)), cached, CONFIG, recall, obstacle)
    does, reason = expected
    assert reason in turn.reason or (obstacle and isinstance(turn, Plan))
    if does is None:
        # What was cached stays, and all of the new text is prefilled.
        assert isinstance(turn, Plan)
        assert turn.selection.positions == [*range(cached.num_tokens, num_tokens)]
    else:
        assert isinstance(turn, NeedsScore)
        assert (turn.prunes, turn.recalls) == does


def test_earlier_questions_count_again_only_where_new_text_is_pruned() -> None:
    for num_tokens, first_query in ((500, 401), (900, 0)):
        turn = plan_turn(range(num_tokens), lambda: TEXT, DROPPED, CONFIG, SessionConfig())
        assert isinstance(turn, NeedsScore)
        assert turn.first_query == first_query


def test_what_is_dropped_comes_back_before_the_new_text() -> None:
    turn = plan_turn(range(500), lambda: PromptText(range(500)), DROPPED, CONFIG, SessionConfig())
    assert isinstance(turn, NeedsScore)
    importance = torch.zeros(500)
    importance[96:128] = 1.0
    inputs = ScoringInputs(turn.text, importance=importance)
    selection = plan_scored(turn, inputs, CONFIG, SessionConfig(), "in_text").selection
    assert {*range(96, 128), *range(400, 500)} <= set(selection.positions)
    assert plan_scored(turn, inputs, CONFIG).selection.num_recalled == 0


@pytest.mark.parametrize("num_tokens", [500, 900], ids=["short", "pruned"])
@pytest.mark.parametrize("recalls", [True, False])
@pytest.mark.parametrize("obstacle", ["", "no room"])
def test_what_is_protected_comes_back_whatever_is_recalled(num_tokens: int, recalls: bool, obstacle: str) -> None:
    text = PromptText(range(num_tokens), protected=[(30, 70), (380, 420)])
    session = SessionConfig(recall=recalls)
    turn = plan_turn(text.token_ids, lambda: text, DROPPED, CONFIG, session, obstacle, "in_text")
    plans = [turn] if isinstance(turn, Plan) else [turn.unscored("failed", "in_text")]
    if isinstance(turn, NeedsScore):
        inputs = ScoringInputs(turn.text, importance=torch.zeros(num_tokens))
        plans.append(plan_scored(turn, inputs, CONFIG, session, "in_text"))
    for plan in plans:
        selection = plan.selection
        seen = [*DROPPED.positions[: selection.num_held], *selection.positions]
        assert seen == sorted(set(seen))
        assert {*DROPPED.positions, *range(30, 70), *range(400, 420)} <= set(seen)
        assert selection.num_recalled == 20
    # A target that takes nothing back.
    turn = plan_turn(text.token_ids, lambda: text, DROPPED, CONFIG, None, obstacle)
    selection = (turn if isinstance(turn, Plan) else turn.unscored("failed")).selection
    assert selection.positions == [*range(400, num_tokens)]


def test_what_is_protected_may_hold_the_question_and_the_template_may_not() -> None:
    plain = find_candidates(PromptText(range(len(PIECES)), PIECES))
    question = (len(PIECES) - 4, len(PIECES))
    assert find_candidates(PromptText(range(len(PIECES)), PIECES, protected=[question])) == plain
    hidden = find_candidates(PromptText(range(len(PIECES)), PIECES, template=[question]))
    assert not any(stop > question[0] for _, stop in hidden.segments)


@pytest.mark.parametrize("question", [(30, 36), (600, 604), (604, 610)], ids=["early", "in place", "behind"])
def test_a_given_question_alone_asks(question: tuple[int, int]) -> None:
    behind = max(0, question[1] - len(PIECES))
    text = PromptText(
        range(len(PIECES)), PIECES, question=question, question_ids=range(behind), question_pieces=["why "] * behind
    )
    found = find_candidates(text)
    asking = [segment for segment, asks in zip(found.segments, found.asks, strict=True) if asks]
    assert asking == [question]
    assert (question in found.repeated) is (question[0] < found.start or question[0] >= len(PIECES))
    # Also where only a follow-up's text is scored.
    assert question in found.reaching(500).segments
    # The new text alone still knows it.
    assert find_candidates(text.starting_at(500)).is_given


def test_without_texts_there_are_no_lines() -> None:
    assert "there is no tokenizer" in scoring_obstacle(PrefillConfig(), 5000, 8000, has_texts=False)
    assert scoring_obstacle(CONFIG, 5000, 8000, has_texts=False) == ""


@pytest.mark.parametrize("seed", range(20))
def test_what_comes_back_is_written_last_or_in_its_place(seed: int) -> None:
    rng = random.Random(seed)
    num_cached = rng.choice([50, 400, 1500])
    dropped = sorted(rng.sample(range(num_cached), rng.randint(1, num_cached // 2)))
    cached = [position for position in range(num_cached) if position not in dropped]
    restored = sorted(rng.sample(dropped, rng.randint(0, len(dropped) - 1)))
    text, left = PromptText(range(num_cached + 1)), Cached(num_cached, cached)
    last = select_turn(text, left, restored)
    assert (last.num_held, last.positions) == (len(cached), [*restored, num_cached])
    in_text = select_turn(text, left, restored, place="in_text")
    assert [*cached[: in_text.num_held], *in_text.positions] == sorted([*cached, *restored, num_cached])
    assert in_text.positions[0] == [*restored, num_cached][0]
    assert (in_text.num_recalled, in_text.num_held + in_text.num_recomputed) == (len(restored), len(cached))


def test_text_without_any_attention_is_not_recalled() -> None:
    config = PrefillConfig(granularity="chunks", chunk_size=8)
    importance = torch.cat([torch.zeros(64), torch.ones(16)])
    assert recall(importance, range(8), make_segments(64, None, config), config, SessionConfig()) == []


def test_protected_spans_of_a_turn_are_kept_where_they_stand_in_the_conversation() -> None:
    config = PrefillConfig(keep_rate=0.1, granularity="chunks", chunk_size=4)
    # Across the border to the new text, and within it.
    protected = [(30, 50), (90, 97)]
    inputs = ScoringInputs(PromptText(range(200), protected=protected), importance=torch.zeros(200))
    turn = select_turn(inputs.text, Cached.dense(40), by=(inputs, config))
    forced = [*range(40, 44), *range(196, 200)]
    assert {*range(40, 50), *range(90, 97), *forced} <= set(turn.positions)
    assert len(turn.positions) < 50
