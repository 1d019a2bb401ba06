"""The prefix cache: caches of earlier prompts, reused by calls with the same prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from spec_stack.engine.conversation import SingleTurn
from spec_stack.engine.pair import ModelPair
from spec_stack.engine.request import Request
from spec_stack.hf.model import CachedModel
from spec_stack.hf.prompt import num_shared
from spec_stack.prefill.registry import needs_attention
from spec_stack.prefill.scoring import LookAhead
from spec_stack.types import Proposal, Selection

Slots = list[tuple[int, int]]


@dataclass(frozen=True)
class StoredPrompt:
    """Both caches of an answered prompt, immutable: calls take forks.

    index is empty where the draft prefilled only parts of the prompt. prefilled_by: its window and sinks.
    """

    target: CachedModel
    index: CachedModel
    prefilled_by: tuple[int, int] | None

    @property
    def num_tokens(self) -> int:
        return self.target.num_cached + self.index.num_cached

    @property
    def slots(self) -> Slots:
        return list(zip(self.target.positions, self.target.token_ids, strict=True))

    def covers(self, other: StoredPrompt) -> bool:
        """Return whether this prompt holds everything that the other holds."""
        return (
            self.prefilled_by == other.prefilled_by
            and num_shared(self.slots, other.slots) == other.target.num_cached
            and num_shared(self.index.token_ids, other.index.token_ids) == other.index.num_cached
        )


class PrefixCache:
    """The latest prompts, as many as fit into max_tokens of both caches. Thread-safe.

    A target's key depends on all slots before it and their positions, so a call reuses the prefix with equal tokens and
    positions; of the draft, the prefix with equal tokens.
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
        """Store a prompt instead of those that it covers, evicting the least recently used ones."""
        if not 0 < prompt.num_tokens <= self.max_tokens:
            return
        with self._lock:
            if any(each.covers(prompt) for each in self._stored):
                return
            self._stored = [*(each for each in self._stored if not prompt.covers(each)), prompt]
            while sum(each.num_tokens for each in self._stored) > self.max_tokens:
                del self._stored[0]
            # Under the lock: no call has forked it yet.
            for model in (prompt.target, prompt.index):
                model.compact()

    def take_index(self, draft_ids: Sequence[int], prefilled_by: tuple[int, int] | None) -> CachedModel | None:
        """The draft with the longest stored prefix of these tokens, less their last one."""
        with self._lock:
            same = [each.index.token_ids if each.prefilled_by == prefilled_by else () for each in self._stored]
            best, length = self._best([num_shared(token_ids, draft_ids) for token_ids in same])
            return None if best is None else _cut(best.index, min(length, len(draft_ids) - 1))

    def take_target(self, slots: Slots) -> CachedModel | None:
        """The target with the longest stored prefix of these slots, (position, token), less the last."""
        with self._lock:
            best, length = self._best([num_shared(each.slots, slots) for each in self._stored])
            return None if best is None else _cut(best.target, min(length, len(slots) - 1))

    def _best(self, lengths: Sequence[int]) -> tuple[StoredPrompt | None, int]:
        """The prompt with the longest common prefix, marked as used, and that length."""
        length = max(lengths, default=0)
        if length == 0:
            return None, 0
        self._stored.append(self._stored.pop(lengths.index(length)))
        return self._stored[-1], length

    def clear(self) -> None:
        with self._lock:
            self._stored = []


def _cut(model: CachedModel, num_tokens: int) -> CachedModel:
    """A copy with the first num_tokens slots."""
    other = model.fork()
    other.rollback(other.num_cached - num_tokens)
    return other


class CachedPrefixTurn(SingleTurn):
    """A request that starts from a stored prefix and can store its own caches."""

    _reads_whole = True

    def __init__(self, pair: ModelPair, request: Request, store: PrefixCache) -> None:
        super().__init__(pair, request)
        self._store = store
        prefill = request.prefill
        reads_whole = not request.scores or (prefill.num_scoring_layers is None and needs_attention(prefill.scorer))
        # A state cannot go back to what two prompts share.
        self._keeps_index = reads_whole and bool(self._draft_ids) and not self.index.is_stateful
        # The index as it was before the selection dropped any of it.
        self._read: CachedModel | None = None
        if self._keeps_index:
            self.index = store.take_index(self._draft_ids, self._settings) or self.index
            self.draft = pair.draft_in_target_vocab(self.index, request.tokenization)

    @property
    def _settings(self) -> tuple[int, int] | None:
        """The window and sinks that the draft's keys of this prompt depend on; what it prefills in order to propose has
        no window."""
        prefill = self._request.prefill
        window = prefill.window_for(len(self._request.prompt_ids)) if self._request.scores else None
        return None if window is None else (window, prefill.draft_sinks)

    @property
    def _draft_ids(self) -> Sequence[int]:
        """The prompt in the draft's own tokens; empty where the draft is of no use for it."""
        if self._pair.translation is None:
            return self._request.prompt_ids
        return self._request.tokenization.token_ids if self._request.tokenization is not None else ()

    def score(self, look_ahead: LookAhead) -> tuple[Selection, Proposal]:
        selection, proposal = super().score(look_ahead)
        return self._take_over(selection), proposal

    def _on_prefilled(self) -> None:
        # Nothing of the prompt is dropped yet.
        self._read = self.index.fork() if self._keeps_index else None

    def select_everything(self) -> Selection:
        return self._take_over(super().select_everything())

    def reset_draft(self) -> None:
        self._keeps_index, self._read = False, None
        super().reset_draft()

    def _take_over(self, selection: Selection) -> Selection:
        """The selection behind the stored slots."""
        if self.target.is_stateful:
            return selection
        slots = list(zip(selection.positions, selection.token_ids, strict=True))
        target = self._store.take_target(slots)
        if target is None:
            return selection
        self.target, num_held = target, target.num_cached
        self.num_cached = selection.positions[num_held]
        return Selection(
            selection.token_ids[num_held:],
            selection.positions[num_held:],
            selection.num_prompt_tokens,
            num_held=num_held,
            num_new_held=num_held,
        )

    def remember(self) -> None:
        """Move this request's caches into the prefix cache. Do not use them afterwards."""
        if self.target.is_stateful:
            return
        self.target.truncate(len(self._request.prompt_ids))
        index = self._read
        if index is None:
            is_whole = self._keeps_index and not self._request.scores
            index = self.index if is_whole else self._pair.new_draft_cache(self._request.prefill.prefill_chunk)
            index.truncate(len(self._draft_ids))
        self._store.put(StoredPrompt(self.target, index, self._settings))
