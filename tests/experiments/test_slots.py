"""What a decoder accepts of given right and wrong proposals, and files that lack what the script needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.real.rows import Rows
from experiments.real.slots import accepted, dense_answers, summarise


@pytest.mark.parametrize(
    ("is_right", "expected"),
    [
        # A step ends with the target's own token, right or wrong, whose place nothing is proposed for.
        ([True] * 10, (8, 8)),
        ([False] * 3, (0, 6)),
        ([True, False, True, True], (3, 6)),
        ([], (0, 0)),
    ],
)
def test_a_step_ends_at_the_first_wrong_token_or_behind_the_proposal(
    is_right: list[bool], expected: tuple[int, int]
) -> None:
    assert accepted(is_right, 4) == expected


def test_answers_without_a_dense_arm_are_refused_by_what_to_run(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps({"key": "a", "arm": "default 0.2", "text": "x"}))
    with pytest.raises(ValueError, match="no answer of the arm 'dense'; make it with"):
        dense_answers(file)


def test_a_run_without_rows_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no row of full: --answers holds no long enough answer"):
        summarise(Rows(tmp_path / "rows.jsonl", 1), ["full"])
