"""Drafts beside a dense target, which differ in what of a long prompt they decode over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from spec_stack.engine.conversation import SingleTurn
from spec_stack.engine.pair import ModelPair
from spec_stack.engine.request import Request
from spec_stack.engine.slotted_draft import SlottedDraft
from spec_stack.hf.model import CachedModel
from spec_stack.prefill.draft_slots import choose_slots
from spec_stack.prefill.scoring import LookAhead
from spec_stack.types import Proposal, Selection

NEVER = (1 << 30, 1 << 30)
OpenDraft = Callable[[ModelPair, Request], Any]


def window_slots(text_ids: Sequence[int], num_slots: int, num_sinks: int) -> list[int]:
    """The first tokens and the newest ones."""
    num_tokens = len(text_ids)
    return sorted({*range(min(num_sinks, num_tokens)), *range(max(0, num_tokens - num_slots + num_sinks), num_tokens)})


def _slotted(pair: ModelPair, request: Request, choose: Any, renew_every: tuple[int, int]) -> SlottedDraft:
    prefill = request.prefill
    draft = pair.open_index(prefill.prefill_chunk)
    return SlottedDraft(draft, prefill.draft_slots, choose, renew_every)


def _by_words(pair: ModelPair, request: Request, renew_every: tuple[int, int]) -> SlottedDraft:
    chunk, first = request.prefill.chunk_size, request.prefill.keep_first
    return _slotted(pair, request, partial(choose_slots, chunk_size=chunk, num_sinks=first * chunk), renew_every)


def _window(pair: ModelPair, request: Request) -> SlottedDraft:
    prefill = request.prefill
    choose = partial(window_slots, num_sinks=prefill.keep_first * prefill.chunk_size)
    return _slotted(pair, request, choose, (32, 32))


@dataclass(frozen=True)
class Arm:
    """The options of a call, and the draft where it is not the library's own."""

    options: dict[str, Any] = field(default_factory=lambda: {"sparse_prefill": "off"})
    open_draft: OpenDraft | None = None


def dense_arms(num_tokens: int, num_slots: int) -> dict[str, Arm]:
    """By name, for a prompt of so many tokens. "chosen" is what the library does; "attention" has the draft score the
    prompt and keeps as many slots."""
    return {
        "full": Arm(),
        "window": Arm(open_draft=_window),
        "words": Arm(open_draft=partial(_by_words, renew_every=NEVER)),
        "attention": Arm({"sparse_prefill": "on", "keep_rate": min(1.0, num_slots / num_tokens)}),
        "chosen": Arm({"sparse_prefill": "draft_only"}),
    }


class DenseCaches(SingleTurn):
    """A target that has prefilled all of the prompt but its last token before, and an arm's draft."""

    def __init__(self, pair: ModelPair, request: Request, prefilled: CachedModel, arm: Arm) -> None:
        super().__init__(pair, request)
        self.target = prefilled.fork()
        if arm.open_draft is not None:
            self.draft = arm.open_draft(pair, request)

    @property
    def num_cached(self) -> int:
        return len(self._request.prompt_ids) - 1

    def score(self, look_ahead: LookAhead) -> tuple[Selection, Proposal]:
        _, proposal = super().score(look_ahead)
        return self.take_all(), proposal

    def take_all(self) -> Selection:
        ids = self._request.prompt_ids
        held = len(ids) - 1
        return Selection([ids[-1]], [held], len(ids), num_held=held, num_new_held=held)
