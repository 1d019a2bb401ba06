"""The traffic experiment's own arithmetic and prompts; its servers need SGLang."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from experiments.serving.client import Answer, Client, Prompts
from experiments.serving.traffic import Arms, ratio_of_later_turns

ASSETS = Path(__file__).resolve().parents[2] / "spec_stack" / "assets"
MOMENTS = st.integers(0, 1000)


@given(st.lists(MOMENTS, unique=True), MOMENTS, MOMENTS)
def test_the_longest_gap_is_the_longest_time_without_a_chunk(times: list[int], since: int, until: int) -> None:
    since, until = min(since, until), max(since, until)
    gap = Answer(0.0, [float(at) for at in sorted(times)]).longest_gap_s(since, until)
    assert gap <= until - since
    for start in range(since, until, 7):
        # A window without a chunk is no longer than the gap.
        end = next((at for at in range(start + 1, until) if at in times), until)
        assert end - start <= gap


def test_a_follow_up_ends_the_reply_and_asks_in_the_chat_templates_words() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target")
    prompts = Prompts(tokenizer)
    text = tokenizer.decode(prompts.follow_up(3))
    assert text.startswith("<|end|><|user|>")
    assert text.endswith("<|assistant|>")
    assert "part 3" in text
    assert abs(len(prompts.document(500, seed=1)) - 500) < 60
    assert len(tokenizer(prompts.text(300, seed=1), add_special_tokens=False).input_ids) == 300


def test_every_arm_is_the_first_one_equally_often_and_none_is_left_out() -> None:
    arms = Arms({name: Client(0) for name in ("off", "dense", "SPEC_STACK")})
    orders = [[name for name, _ in arms.in_turn()] for _ in range(6)]
    assert all(sorted(order) == sorted(arms.clients) for order in orders)
    assert sorted(order[0] for order in orders) == sorted([*arms.clients] * 2)


def test_later_turns_are_compared_turn_by_turn_and_first_ones_are_left_out() -> None:
    ours = [{"ttft_s": 50.0}, {"ttft_s": 2.0}, {"ttft_s": 3.0}]
    theirs = [{"ttft_s": 1.0}, {"ttft_s": 1.0}, {"ttft_s": 1.0}]
    assert ratio_of_later_turns([(ours, theirs)]) == 2.5
