"""The common part of drafts that count in other tokens or positions than the model under them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from spec_stack.hf.attention import LayerCapture
from spec_stack.hf.model import CachedModel


class WrappedDraft:
    """Hands on what a draft and the one under it have in common."""

    def __init__(self, draft: CachedModel | WrappedDraft) -> None:
        self._draft = draft

    @property
    def num_cached(self) -> int:
        """The draft's own cached tokens."""
        return self._draft.num_cached

    @property
    def next_position(self) -> int:
        """The position in the text after that of the last cached token."""
        return self._draft.next_position

    def checkpoint(self) -> None:
        """As the draft's."""
        self._draft.checkpoint()

    def num_unread(self, num_tokens: int) -> int:
        """How many tokens it has to take in to have caught up with a text of so many."""
        return num_tokens - self.next_position

    @property
    def num_layers(self) -> int:
        """Layers of the draft."""
        return self._draft.num_layers

    @property
    def forward_s(self) -> float:
        """Seconds inside the draft."""
        return self._draft.forward_s

    @property
    def on_piece(self) -> Callable[[int, float], None] | None:
        """The draft's, told of its own tokens."""
        return self._draft.on_piece

    @on_piece.setter
    def on_piece(self, tell: Callable[[int, float], None] | None) -> None:
        self._draft.on_piece = tell

    def capture(self) -> AbstractContextManager[dict[int, LayerCapture]]:
        """Capture the draft's queries and keys, in its own tokens."""
        return self._draft.capture()
