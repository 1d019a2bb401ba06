"""Base class of drafts that count in other tokens or positions than the wrapped model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from spec_stack.hf.attention import LayerCapture
from spec_stack.hf.model import CachedModel


class WrappedDraft:
    """Delegates the members that a draft shares with its wrapped model."""

    def __init__(self, draft: CachedModel | WrappedDraft) -> None:
        self._draft = draft

    @property
    def num_cached(self) -> int:
        """The draft's own cached tokens."""
        return self._draft.num_cached

    @property
    def next_position(self) -> int:
        """The text position after the last cached token."""
        return self._draft.next_position

    def checkpoint(self) -> None:
        self._draft.checkpoint()

    def release(self) -> None:
        self._draft.release()

    def run_ahead(self, token_ids: Sequence[int], positions: Sequence[int], max_tokens: int) -> None:
        """None, as `CachedModel.run_ahead` says of a draft that has to see each token."""

    def draft_lag(self, num_tokens: int) -> int:
        return num_tokens - self.next_position

    @property
    def num_layers(self) -> int:
        return self._draft.num_layers

    @property
    def on_piece(self) -> Callable[[int, float], None] | None:
        """Progress in the draft's own tokens."""
        return self._draft.on_piece

    @on_piece.setter
    def on_piece(self, tell: Callable[[int, float], None] | None) -> None:
        self._draft.on_piece = tell

    @property
    def is_stateful(self) -> bool:
        return self._draft.is_stateful

    def capture(self, first: int = 0) -> AbstractContextManager[dict[int, LayerCapture]]:
        """Queries and keys of the draft's own tokens, at its own positions."""
        return self._draft.capture(first)
