"""Answers over what a rule kept: arms side by side say what each says by itself."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from experiments.real.answers import DENSE, Arm, Asked, Bench, arms_of, is_right, row_of, run
from experiments.real.evidence_prompts import EvidencePrompt
from experiments.real.scoring import encode
from experiments.real.target import DensePrefix, Target
from spec_stack.bench.rows import Rows
from spec_stack.hf.loading import ASSETS
from tests.support import reference
from tests.support.models import make_model, random_prompt


@pytest.fixture
def target(tmp_path: Path) -> Target:
    make_model(seed=1).save_pretrained(tmp_path)
    return Target(tmp_path, "fp32")


def test_arms_side_by_side_answer_as_each_alone(target: Target) -> None:
    prompt = random_prompt(60)
    kept = [range(60), [*range(8), *range(40, 60)], [*range(0, 60, 3), 58, 59]]
    answers = target.decode([target.prefill(prompt, positions) for positions in kept], 12)
    model = make_model(seed=1)
    for positions, answer in zip(kept, answers, strict=True):
        ids = [prompt[position] for position in positions]
        assert answer == reference.sparse_greedy(model, ids, positions, 60, 12)


def test_shifted_positions_answer_as_unshifted_ones(target: Target) -> None:
    prompt = random_prompt(60)
    plain, shifted = target.decode([target.prefill(prompt, range(60)), target.prefill(prompt, range(60), 7)], 12)
    assert plain == shifted


def test_an_answers_loss_is_that_of_one_pass_over_the_kept_tokens(target: Target) -> None:
    prompt, answer = random_prompt(60), random_prompt(5, seed=4)
    kept = [range(60), [*range(8), *range(40, 60)]]
    model = make_model(seed=1)
    for positions, loss in zip(kept, target.losses([target.prefill(prompt, own) for own in kept], answer), strict=True):
        ids = torch.tensor([[*(prompt[position] for position in positions), *answer]])
        places = torch.tensor([[*positions, *range(60, 65)]])
        with torch.inference_mode():
            logits = model(ids, position_ids=places, attention_mask=torch.ones_like(ids)).logits[0]
        expected = torch.nn.functional.cross_entropy(logits[-6:-1], torch.tensor(answer))
        assert loss == pytest.approx(float(expected), abs=1e-4)


def test_a_dense_prefill_resumes_the_one_before(target: Target) -> None:
    dense, first = DensePrefix(target), random_prompt(60)
    prompts = (first, [*first[:40], *random_prompt(9, seed=2)], first[:30], random_prompt(50, seed=3), first)
    for prompt, is_resumed in zip(prompts, (False, True, True, False, False), strict=True):
        before = dense.cache
        got, alone = dense.prefill(prompt), target.prefill(prompt, range(len(prompt)))
        torch.testing.assert_close(got.logits, alone.logits, atol=1e-4, rtol=1e-3)
        assert (got.position, got.cache.get_seq_length()) == (len(prompt), len(prompt))
        assert (got.cache is before) == is_resumed


def test_an_answer_is_right_where_it_holds_all_parts() -> None:
    assert is_right("It was 4,250 euros, due on friday.", ("4250", "Friday"))
    assert not is_right("It was 4,250 euros.", ("4250", "Friday"))
    assert not is_right("One, 2", ("1",))


def _prompt(name: str, code: str) -> EvidencePrompt:
    lines = [f"Note {number}: nothing of the day is worth a word.\n" for number in range(40)]
    lines[11] = f"The code of the gate is {code}.\n"
    document, start = "".join(lines), len("".join(lines[:11]))
    question = "What is the code of the gate?"
    return EvidencePrompt(name, "fact", name, document, question, ((start, start + len(lines[11])),), (code,))


def _arguments() -> Namespace:
    pair = {"target": ASSETS / "target", "draft": ASSETS / "draft", "precision": "fp32", "threads": 1}
    return Namespace(**pair, draft_window=None, max_tokens=6)


def test_a_run_takes_what_rows_have_and_answers_the_rest() -> None:
    prompts, rows = [_prompt("one", "4711"), _prompt("two", "9023")], Rows(None, 1)
    arms = {name: arms_of(None)[name] for name in (DENSE, "BM25 0.2")}
    run(_arguments(), prompts[:1], {DENSE: Arm()}, rows)
    (own,) = rows.of_arm(DENSE).values()
    rows.add("one", DENSE, {**own, "commit": "c0ffee", "loss": 77.0})
    run(_arguments(), prompts, arms, rows)
    assert {name: row["commit"] == "c0ffee" for name, row in rows.of_arm(DENSE).items()} == {"one": True, "two": False}
    assert rows.num_left(["one", "two"], arms) == 0
    assert all(0 < row["num_kept"] < own["num_kept"] / 4 for row in rows.of_arm("BM25 0.2").values())
    # Their losses are of the dense answer that the row holds.
    rows.add("one", DENSE, {**own, "token_ids": own["token_ids"][:1]})
    run(_arguments(), prompts[:1], {DENSE: Arm(), "default 0.2": arms_of(None)["default 0.2"]}, rows)
    assert rows.of_arm("default 0.2")["one"]["num_dense_tokens"] == 1


def test_prompts_side_by_side_answer_as_each_alone_and_a_row_holds_its_dense_answer() -> None:
    bench = Bench.load(_arguments())
    arms = {name: arm for name, arm in arms_of(None).items() if name != DENSE}
    prompts, asked = [_prompt("one", "4711"), _prompt("two", "9023")], []
    for prompt in prompts:
        encoded = encode(bench.scorer.pair.tokenizer, prompt)
        dense = bench.answer_densely(encoded, 6)
        row = row_of(prompt, encoded, dense, dense, "c0ffee")
        assert (row["is_evidence_kept"], row["first_difference"]) == (True, None)
        known = bench.known(encoded, row)
        assert known is not None
        assert list(known.token_ids) == list(dense.token_ids)
        assert bench.known(encoded, {**row, "num_kept": row["num_kept"] - 1}) is None
        asked.append(Asked(encoded, known, arms))
    together = bench.answer(asked, 6)
    alone = [bench.answer([own], 6)[0] for own in asked]
    assert [[answer.arm for answer in own] for own in together] == [list(arms)] * 2
    for own, other in zip(together, alone, strict=True):
        for one, two in zip(own, other, strict=True):
            assert (list(one.kept), one.text) == (list(two.kept), two.text)
            assert one.loss == pytest.approx(two.loss, abs=1e-4)
    assert bench.answer([Asked(asked[0].encoded, asked[0].dense, {})], 6) == [[]]
