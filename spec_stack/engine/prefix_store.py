"""Remember prompts: caches that later calls which begin alike take over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from spec_stack.config import PrefillConfig
from spec_stack.hf.model import CachedModel
from spec_stack.hf.prompt import num_shared

Slots = list[tuple[int, int]]


@dataclass(frozen=True)
class StoredPrompt:
    """Both caches of a prompt that was answered. Nothing is ever written to them: calls take forks.

    Parameters
    ----------
    target : CachedModel
        The slots of the prompt that were kept, by increasing position.
    index : CachedModel or None
        The draft over its own ids, the whole prompt or its beginning; None where it prefilled only parts of it.
    prefilled_by : tuple or None
        How the draft prefilled it (`draft_settings`).
    """

    target: CachedModel
    index: CachedModel | None
    prefilled_by: tuple[int, int] | None

    @property
    def num_tokens(self) -> int:
        return self.target.num_cached + (self.index.num_cached if self.index else 0)

    def compact(self) -> None:
        """Hold no more memory than the tokens take that are counted."""
        for model in (self.target, self.index):
            if model is not None:
                model.compact()

    @property
    def slots(self) -> Slots:
        return list(zip(self.target.positions, self.target.token_ids, strict=True))

    def covers(self, other: StoredPrompt) -> bool:
        """Return whether it has all that another has."""
        if self.prefilled_by != other.prefilled_by or self.slots[: other.target.num_cached] != other.slots:
            return False
        if self.index is None or other.index is None:
            return other.index is None
        return self.index.token_ids[: other.index.num_cached] == other.index.token_ids


def draft_settings(config: PrefillConfig, num_tokens: int) -> tuple[int, int] | None:
    """Return what the draft's keys of a prompt of this length depend on beside its tokens: window and sinks."""
    window = config.window_for(num_tokens)
    return None if window is None else (window, config.draft_sinks)


class PrefixStore:
    """The latest prompts, as many as fit; safe to use from several threads.

    A target's key depends on all slots before it and their positions. So a call takes over the beginning of a prompt's
    slots in which tokens and positions are the same, compared one by one, and of the draft the beginning in which its
    tokens are; both are then what they would be without the store.

    Parameters
    ----------
    max_tokens : int
        Most tokens in both caches together; 0 stores nothing.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._stored: list[StoredPrompt] = []
        self._lock = Lock()

    @property
    def num_tokens(self) -> int:
        """Tokens in the caches now."""
        with self._lock:
            return sum(each.num_tokens for each in self._stored)

    def put(self, prompt: StoredPrompt) -> None:
        """Remember a prompt; the longest unused ones go where there is no room."""
        if not 0 < prompt.num_tokens <= self.max_tokens:
            return
        with self._lock:
            if any(each.covers(prompt) for each in self._stored):
                return
            self._stored = [each for each in self._stored if not prompt.covers(each)]
            self._stored.append(prompt)
            while sum(each.num_tokens for each in self._stored) > self.max_tokens:
                del self._stored[0]
            # Under the lock: nobody has forked it yet.
            prompt.compact()

    def take_index(self, draft_ids: Sequence[int], prefilled_by: tuple[int, int] | None) -> CachedModel | None:
        """The draft with the longest beginning of these tokens that is stored, less their last one."""
        with self._lock:
            lengths = [
                num_shared(each.index.token_ids, draft_ids) if each.index and each.prefilled_by == prefilled_by else 0
                for each in self._stored
            ]
            best = self._best(lengths)
            index = None if best is None or best.index is None else best.index.fork()
        if index is not None:
            index.forget_from(min(max(lengths), len(draft_ids) - 1))
        return index

    def take_target(self, slots: Slots) -> CachedModel | None:
        """The target with the longest beginning of these slots, (position, token), that is stored, less the last."""
        with self._lock:
            lengths = [num_shared(each.slots, slots) for each in self._stored]
            best = self._best(lengths)
            target = None if best is None else best.target.fork()
        if target is not None:
            target.rollback(target.num_cached - min(max(lengths), len(slots) - 1))
        return target

    def _best(self, lengths: list[int]) -> StoredPrompt | None:
        """The one that shares most, from now on the latest used."""
        if not any(lengths):
            return None
        best = self._stored[lengths.index(max(lengths))]
        self._stored = [*(each for each in self._stored if each is not best), best]
        return best

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._stored = []
