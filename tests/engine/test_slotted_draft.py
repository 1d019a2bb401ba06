"""The lossless mode: a dense target with a draft over chosen slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import pytest
import torch
from transformers import PreTrainedModel

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.engine.conversation import SlottedDraft
from spec_stack.hf.attention import install
from spec_stack.hf.model import CachedModel
from spec_stack.prefill.draft_kv_budget import DraftKVBudget, Text, choose_slots
from tests.support import reference
from tests.support.models import make_model, random_prompt
from tests.support.nightly import others_nightly
from tests.support.reference_slots import chosen_slots, logits_in_order_of_writing

SLOTS = 32
PREFILL = PrefillConfig(
    granularity="chunks", chunk_size=8, draft_kv_budget=SLOTS, keep_rate=0.3, min_prompt_tokens=10_000
)


def generator(target: PreTrainedModel, draft: PreTrainedModel) -> SpecStackGenerator:
    return SpecStackGenerator(target, draft, config=SpecStackConfig(prefill=PREFILL))


@pytest.mark.parametrize(
    "options",
    others_nightly(
        [{"gamma": 4}, {"gamma": 1}, {"policy": "throughput"}, {"gamma": 2, "proposer": "both"}],
        usual=[{"policy": "throughput"}, {"gamma": 2, "proposer": "both"}],
    ),
)
# A draft that is often right, so that slots are renewed after accepted and rejected tokens, and a random one.
@pytest.mark.parametrize("draft_seed", [1, 2])
def test_greedy_tokens_are_the_targets_own_while_the_slots_are_chosen_anew(
    options: dict[str, object], draft_seed: int, target: PreTrainedModel
) -> None:
    prompt = random_prompt(90, 1)
    result = generator(target, make_model(seed=draft_seed)).generate(
        input_ids=prompt, max_tokens=80, sparse_prefill="draft_only", **options
    )  # type: ignore[arg-type]
    assert result.token_ids == reference.greedy(make_model(seed=1), prompt, 80)
    assert not result.metrics.sparse_prefill
    assert result.metrics.num_kept_tokens == len(prompt)


def test_the_draft_reads_no_more_of_the_prompt_than_its_slots(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    prompt = random_prompt(100)
    for switch, most in (("draft_only", SLOTS), ("auto", SLOTS), ("off", 100)):
        result = generator(target, draft).generate(
            input_ids=prompt,
            max_tokens=6,
            gamma=2,
            sparse_prefill=switch,
            return_records=True,  # type: ignore[arg-type]
        )
        first = next(record for record in result.records or [] if record.num_drafted)
        assert SLOTS <= first.draft_lag <= most + 2
        assert first.draft_prefilled_prompt


@pytest.mark.parametrize(("num_tokens", "num_read"), [(SLOTS, SLOTS + 1), (SLOTS + 1, SLOTS)])
def test_a_prompt_that_the_slots_hold_is_read_whole_and_a_longer_one_is_not(
    num_tokens: int, num_read: int, target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    result = generator(target, draft).generate(
        input_ids=random_prompt(num_tokens), max_tokens=6, gamma=2, sparse_prefill="draft_only", return_records=True
    )
    # With the first token of the answer, which the target made alone.
    assert max(record.draft_lag for record in result.records or []) == num_read


class Noted(CachedModel):
    """Notes what was cached before every forward, what went in, and the last logits."""

    def __init__(self, model: PreTrainedModel, prefill_chunk: int) -> None:
        super().__init__(model, prefill_chunk)
        self.writes: list[tuple[list[int], list[int], list[int], torch.Tensor]] = []

    def forward(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor:
        cached = list(self.positions)
        logits = super().forward(token_ids, positions, num_logits)
        self.writes.append((cached, list(token_ids), list(positions), logits[-1]))
        return logits


CHOOSE = partial(choose_slots, chunk_size=8, num_sinks=8)


def slotted(choose: Callable[[Text, int], Sequence[int]] = CHOOSE) -> tuple[SlottedDraft, Noted, list[int]]:
    """A draft over chosen slots, the model's cache under it, and a text."""
    model = make_model(seed=2)
    install(model)
    noted = Noted(model, 64)
    return SlottedDraft(noted, DraftKVBudget(SLOTS, choose)), noted, random_prompt(120)


def logits_over(text: Sequence[int], slots: Sequence[int]) -> torch.Tensor:
    """The last logits of a plain forward over these tokens of a text, at their positions."""
    ids = torch.tensor([[text[slot] for slot in slots]])
    logits: torch.Tensor = make_model(seed=2)(input_ids=ids, position_ids=torch.tensor([list(slots)])).logits
    return logits[0, -1]


def test_the_first_logits_are_a_plain_forwards_over_the_chosen_tokens_at_their_positions() -> None:
    draft, _, prompt = slotted()
    start = draft.next_position
    logits = draft.forward(prompt[start:], range(start, len(prompt)), num_logits=1)
    slots = chosen_slots(prompt, SLOTS, 8, 8)
    torch.testing.assert_close(logits[0], logits_over(prompt, slots), atol=1e-4, rtol=1e-4)
    assert draft.num_cached == len(slots)


def test_a_choice_that_keeps_no_cached_slot_is_a_forward_over_the_chosen_tokens_alone() -> None:
    draft, noted, text = slotted(lambda text_ids, num_slots: range(len(text_ids) - num_slots, len(text_ids)))
    for grown in (text, [*text, *random_prompt(2 * SLOTS, seed=3)]):
        start = draft.next_position
        logits = draft.forward(grown[start:], range(start, len(grown)), num_logits=1)
        draft.rollback(0)
    slots = list(range(len(grown) - SLOTS, len(grown)))
    assert noted.positions == slots
    torch.testing.assert_close(logits[0], logits_over(grown, slots), atol=1e-4, rtol=1e-4)


def test_slots_stay_bounded_however_long_the_answer_and_whatever_is_rejected() -> None:
    draft, _, text = slotted()
    for step, token in enumerate(random_prompt(300, seed=5)):
        draft.forward(text[draft.next_position :], range(draft.next_position, len(text)), num_logits=1)
        for drafted in range(step % 4):
            draft.forward([drafted + 2], [draft.next_position], num_logits=1)
        draft.rollback(draft.next_position - len(text) + (step % 3 == 0))
        text.append(token)
        assert draft.num_cached <= SLOTS + 64 + 8
        assert draft.next_position <= len(text)


@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_chosen_anew_sees_what_was_written_before_it_and_nothing_else(seed: int) -> None:
    """By one forward over all that was ever written, with a mask that says what was cached when."""
    draft, noted, text = slotted()
    answer = [*random_prompt(60, seed), *text[24:60], *random_prompt(40, seed + 5), *text[64:90]]
    for step, token in enumerate(answer):
        draft.forward(text[draft.next_position :], range(draft.next_position, len(text)), num_logits=1)
        for drafted in range(step % 3):
            draft.forward([drafted + 2], [draft.next_position], num_logits=1)
        draft.rollback(draft.next_position - len(text))
        text.append(token)
    came_back = [positions for cached, _, positions, _ in noted.writes if cached and positions[0] < max(cached)]
    assert came_back
    expected = logits_in_order_of_writing(make_model(seed=2), [write[:3] for write in noted.writes])
    torch.testing.assert_close(torch.stack([write[3] for write in noted.writes]), expected, atol=1e-4, rtol=1e-4)
    for _, token_ids, positions, _ in noted.writes:
        known = [(at, token) for at, token in zip(positions, token_ids, strict=True) if at < 120]
        assert all(text[at] == token for at, token in known)


def slotted_with_noted_choices() -> tuple[SlottedDraft, list[int], list[int]]:
    """A draft, its text, and the lengths of the text at which slots are chosen."""
    chosen_at: list[int] = []

    def choose(text_ids: Text, num_slots: int) -> list[int]:
        chosen_at.append(len(text_ids))
        return CHOOSE(text_ids, num_slots)

    draft, _, text = slotted(choose)
    return draft, text, chosen_at


@pytest.mark.parametrize(
    ("num_right", "every"),
    others_nightly([(4, 64), (3, 64), (2, 64), (1, 8), (0, 8)], usual=[(4, 64), (2, 64), (1, 8)]),
)
def test_slots_are_chosen_anew_sooner_where_half_of_a_proposal_or_more_is_wrong(num_right: int, every: int) -> None:
    draft, text, chosen_at = slotted_with_noted_choices()
    while len(text) < 320:
        draft.forward(text[draft.next_position :], range(draft.next_position, len(text)), num_logits=1)
        drafted = random_prompt(4, seed=len(text))
        for token in drafted[:3]:
            draft.forward([token], [draft.next_position], num_logits=1)
        text += [*drafted[:num_right], 5]
        draft.rollback(max(0, draft.next_position - len(text) + 1))
    gaps = [after - before for before, after in pairwise(chosen_at)]
    assert gaps
    assert all(every <= gap <= every + 4 for gap in gaps)


@pytest.mark.parametrize(("is_right", "every"), [(True, 64), (False, 8)])
def test_one_token_a_step_tells_where_the_draft_is_wrong_too(is_right: bool, every: int) -> None:
    draft, text, chosen_at = slotted_with_noted_choices()
    while len(text) < 320:
        logits = draft.forward(text[draft.next_position :], range(draft.next_position, len(text)), num_logits=1)
        draft.rollback(0)
        guess = int(logits[0].argmax())
        text.append(guess if is_right else (guess + 1) % 50)
    assert all(every <= after - before <= every + 2 for before, after in pairwise(chosen_at[1:]))


def test_what_was_looked_up_meanwhile_counts_as_read_no_further_than_the_slots_go() -> None:
    draft, noted, text = slotted()
    assert draft.draft_lag(len(text)) == SLOTS
    draft.forward(text, range(len(text)), num_logits=1)
    draft.rollback(0)
    assert draft.draft_lag(len(text) + 5) == 5
    longer = [*text, *random_prompt(500, seed=9)]
    assert draft.draft_lag(len(longer)) == SLOTS
    draft.forward(longer[len(text) :], range(len(text), len(longer)), num_logits=1)
    assert len(noted.writes[-1][2]) <= SLOTS + 64
    assert draft.num_cached <= SLOTS + 64


def test_a_draft_over_slots_goes_on_from_its_next_position() -> None:
    draft, _, prompt = slotted()
    with pytest.raises(ValueError, match="next position"):
        draft.forward(prompt, range(1, len(prompt) + 1), num_logits=1)


def test_slots_that_an_index_holds_are_not_read_again() -> None:
    model = make_model(seed=2)
    install(model)
    prompt = random_prompt(120)
    index = Noted(model, 64)
    index.prefill(prompt[:110], range(110))
    fork = Noted(model, 64)
    fork.prefill(prompt[:110], range(110))
    fork.writes.clear()
    draft = SlottedDraft(fork, DraftKVBudget(SLOTS, CHOOSE))
    assert draft.next_position == 110
    logits = draft.forward(prompt[110:], range(110, 120), num_logits=1)
    assert fork.writes[0][2] == list(range(110, 120))
    assert draft.num_cached == len(chosen_slots(prompt, SLOTS, 8, 8))
    # What is cached was written over the whole text, so this is no forward over the slots alone.
    expected = index.forward(prompt[110:], range(110, 120), num_logits=1)
    assert not torch.allclose(logits, expected, atol=1e-4)


def test_a_later_turn_reads_what_is_new_and_keeps_its_slots(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    own = generator(target, draft)
    history = random_prompt(100)
    with own.session() as session:
        for turn in range(4):
            result = session.generate(
                input_ids=history, max_tokens=12, gamma=2, sparse_prefill="draft_only", return_records=True
            )
            assert result.token_ids == reference.greedy(make_model(seed=1), history, 12), turn
            most = max(record.draft_lag for record in result.records or [])
            assert most == SLOTS if turn == 0 else most < 12
            history = [*history, *result.token_ids, *random_prompt(6, seed=turn)]
        with session.fork() as other:
            longer = [*history, *random_prompt(40, seed=11)]
            for each in (other, session):
                assert each.generate(input_ids=longer, max_tokens=12, gamma=2).token_ids == reference.greedy(
                    make_model(seed=1), longer, 12
                )


def test_a_conversation_that_outgrows_the_slots_takes_them_from_what_its_draft_has_read(
    target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    own = generator(target, draft)
    prompt = random_prompt(2 * SLOTS - 20)
    with own.session() as session:
        first = session.generate(input_ids=prompt, max_tokens=12, gamma=2).token_ids
        longer = [*prompt, *first, *random_prompt(10, seed=3)]
        assert len(longer) > 2 * SLOTS
        second = session.generate(input_ids=longer, max_tokens=12, gamma=2, return_records=True)
    assert second.token_ids == reference.greedy(make_model(seed=1), longer, 12)
    assert max(record.draft_lag for record in second.records or []) < SLOTS


@pytest.mark.parametrize("switch", ["draft_only", "off"])
def test_a_turn_that_asks_for_a_dense_target_has_one_though_earlier_ones_were_pruned(
    switch: str, target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    own = generator(target, draft)
    prompt = random_prompt(100)
    with own.session() as session:
        first = session.generate(input_ids=prompt, max_tokens=8, sparse_prefill="on")
        assert first.metrics.sparse_prefill
        longer = [*prompt, *first.token_ids, *random_prompt(20, seed=7)]
        second = session.generate(input_ids=longer, max_tokens=30, sparse_prefill=switch)  # type: ignore[arg-type]
        assert not session.dropped_positions
        third = [*longer, *second.token_ids, *random_prompt(5, seed=8)]
        again = session.generate(input_ids=third, max_tokens=10, sparse_prefill=switch)  # type: ignore[arg-type]
    assert second.token_ids == reference.greedy(make_model(seed=1), longer, 30)
    assert second.metrics.num_kept_tokens == len(longer)
    assert f'sparse_prefill="{switch}"' in second.metrics.sparse_prefill_reason
    assert again.metrics.num_cached_tokens >= len(longer)
    assert again.token_ids == reference.greedy(make_model(seed=1), third, 10)


def test_a_bad_switch_or_budget_is_named(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    own = generator(target, draft)
    with pytest.raises(ValueError, match="sparse_prefill must be one of"):
        own.generate(input_ids=random_prompt(9), max_tokens=2, sparse_prefill="target")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="draft_kv_budget must be"):
        PrefillConfig(draft_kv_budget=3)
