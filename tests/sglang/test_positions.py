"""Positions of slots and drafts, batch by batch. No SGLang here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_stack.sglang.positions import BatchMap, PositionMap, positions_of, protect_kv_lengths

CPU = torch.device("cpu")


@st.composite
def selections(draw: st.DrawFn) -> tuple[list[int], int]:
    num_prompt_tokens = draw(st.integers(1, 40))
    kept = draw(st.sets(st.integers(0, num_prompt_tokens - 1)))
    # What comes back of an earlier turn stands behind what was written after it; the last token is always the last.
    order = draw(st.permutations(sorted(kept - {num_prompt_tokens - 1}))) if draw(st.booleans()) else sorted(kept)
    return [*(at for at in order if at != num_prompt_tokens - 1), num_prompt_tokens - 1], num_prompt_tokens


@given(selections(), st.integers(0, 12))
def test_slots_stand_where_their_tokens_stood(selection: tuple[list[int], int], num_generated: int) -> None:
    kept, num_prompt_tokens = selection
    whole = [*kept, *range(num_prompt_tokens, num_prompt_tokens + num_generated)]
    target = BatchMap([PositionMap(kept, num_prompt_tokens)], is_draft=False, device=CPU)
    assert target(torch.arange(len(whole)), [len(whole)]).tolist() == whole


@given(selections(), st.integers(1, 12))
def test_the_drafts_slots_stand_one_before_the_token_they_hold(
    selection: tuple[list[int], int], num_generated: int
) -> None:
    """Slot j of SGLang's draft holds token j + 1."""
    kept, num_prompt_tokens = selection
    whole = [*kept, *range(num_prompt_tokens, num_prompt_tokens + num_generated)]
    draft = BatchMap([PositionMap(kept, num_prompt_tokens)], is_draft=True, device=CPU)
    mapped = draft(torch.arange(len(whole) - 1), [len(whole) - 1])
    assert mapped.tolist() == [max(0, position - 1) for position in whole[1:]]


def test_a_batch_is_mapped_request_by_request() -> None:
    pruned, other = PositionMap([0, 4, 9], 10), PositionMap([5, 6], 7)
    slots = torch.tensor([0, 1, 2, 7, 8, 1, 2, 3], dtype=torch.int32)
    mapped = BatchMap([pruned, None, other], is_draft=False, device=CPU)(slots, [3, 2, 3])
    assert mapped.tolist() == [0, 4, 9, 7, 8, 6, 7, 8]
    assert mapped.dtype == torch.int32


def test_lengths_that_do_not_fit_a_batch_are_refused() -> None:
    with pytest.raises(RuntimeError, match="nothing is mapped"):
        BatchMap([None, PositionMap([0], 1)], is_draft=False, device=CPU)(torch.arange(5), [2, 2])


def test_a_protected_draft_backend_sees_lengths_only_while_it_builds() -> None:
    seen: list[list[int]] = []

    class Backend:
        topk = 1

        def common_template(self, forward_batch: Any) -> None:
            seen.append(forward_batch.positions.tolist())
            raise ValueError("from within")

    batch = SimpleNamespace(positions=torch.tensor([90, 7]), seq_lens=torch.tensor([30, 7]))
    backend = protect_kv_lengths(Backend())
    with pytest.raises(ValueError, match="from within"):
        backend.common_template(batch)
    assert seen == [[30, 7]]
    assert batch.positions.tolist() == [90, 7]


def test_a_draft_backend_whose_lengths_cannot_be_protected_ends_the_launch() -> None:
    other = SimpleNamespace()
    with pytest.raises(RuntimeError, match="no common_template"):
        protect_kv_lengths(other, must=True)
    assert protect_kv_lengths(other) is other
    # Where no step drafts more than one token there is none.
    assert protect_kv_lengths(None, must=True) is None


@pytest.mark.parametrize("is_draft", [False, True])
@pytest.mark.parametrize("mode", ["decode", "verify", "extend"])
def test_a_batch_of_pruned_and_dense_requests_is_mapped_slot_by_slot(mode: str, is_draft: bool) -> None:
    kept: list[tuple[list[int], int] | None] = [([0, 4, 9], 10), None, ([5, 6], 7)]
    lengths = {"decode": [1, 1, 1], "verify": [3, 3, 3], "extend": [3, 2, 3]}[mode]
    slots = {"decode": [3, 7, 2], "verify": [3, 4, 5, 7, 8, 9, 2, 3, 4], "extend": [0, 1, 2, 7, 8, 1, 2, 3]}[mode]
    batch = SimpleNamespace(
        positions=torch.tensor(slots, dtype=torch.int32),
        extend_seq_lens_cpu=lengths if mode == "extend" else None,
        forward_mode=SimpleNamespace(
            is_idle=lambda: False, is_decode=lambda: mode == "decode", is_target_verify=lambda: mode == "verify"
        ),
    )
    runner: Any = SimpleNamespace(
        is_draft_worker=is_draft,
        server_args=SimpleNamespace(speculative_algorithm="SPEC_STACK", speculative_draft_attention_backend=None),
        decode_attention_backend_str="triton",
    )
    found = positions_of(batch, [None if it is None else PositionMap(*it) for it in kept], runner)
    owners = [it for it, length in zip(kept, lengths, strict=True) for _ in range(length)]
    assert found is not None
    assert found.dtype == torch.int32
    assert found.tolist() == [_position(it, slot, is_draft) for it, slot in zip(owners, slots, strict=True)]


def test_slots_that_cannot_be_shared_evenly_are_refused() -> None:
    mode = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: True, is_target_verify=lambda: False)
    batch = SimpleNamespace(positions=torch.arange(5), extend_seq_lens_cpu=None, forward_mode=mode)
    runner: Any = SimpleNamespace(is_draft_worker=False)
    with pytest.raises(RuntimeError, match="nothing is mapped"):
        positions_of(batch, [None, PositionMap([0], 1)], runner)


def _position(kept: tuple[list[int], int] | None, slot: int, is_draft: bool) -> int:
    """The position of one slot; slot j of SGLang's draft holds token j + 1."""
    if kept is None:
        return slot
    positions, num_prompt_tokens = kept
    if slot >= len(positions):
        return slot + num_prompt_tokens - len(positions)
    return max(positions[slot + 1] - 1, 0) if is_draft and slot + 1 < len(positions) else positions[slot]
