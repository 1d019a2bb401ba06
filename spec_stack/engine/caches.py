"""The caches that a request is answered over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from spec_stack.decode.lookup_index import LookupIndex
from spec_stack.engine.pair import DraftModel, ModelPair
from spec_stack.engine.prefix_store import PrefixStore, StoredPrompt, draft_settings
from spec_stack.engine.request import Request
from spec_stack.engine.slotted_draft import SlottedDraft, drafts_over_slots, open_slotted
from spec_stack.hf.model import CachedModel
from spec_stack.prefill.registry import needs_attention
from spec_stack.prefill.scoring import LookAhead, score_prompt
from spec_stack.types import Proposal, Selection


class Caches(Protocol):
    """Target and draft with what they hold already, and how a request's prompt is taken into them.

    lookups: where look-ups look, which takes in the text when one is first asked for.
    """

    target: CachedModel
    draft: DraftModel
    lookups: LookupIndex

    @property
    def num_cached(self) -> int:
        """Tokens at the prompt's beginning that neither model has to see again."""
        ...

    @property
    def needs_scoring(self) -> bool:
        """Return whether the draft has to score the prompt before the target sees any of it."""
        ...

    def score(self, look_ahead: LookAhead) -> tuple[Selection, Proposal]:
        """Have the draft score the prompt: what the target prefills, and the first proposal."""
        ...

    def take_all(self) -> Selection:
        """Return what the target prefills without scoring."""
        ...

    def beside_dense(self) -> DraftModel | SlottedDraft:
        """The draft that decodes where nothing was scored: over all of the text, or over chosen slots of it."""
        ...

    def reopen_draft(self) -> None:
        """Put an empty draft in the place of one that failed."""
        ...


class RequestCaches:
    """The caches of a request by itself: empty before it, gone after it."""

    def __init__(self, pair: ModelPair, request: Request) -> None:
        self._pair, self._request = pair, request
        self.target = pair.open_target(request.prefill.prefill_chunk)
        self.lookups = LookupIndex()
        self.reopen_draft()

    @property
    def num_cached(self) -> int:
        return 0

    @property
    def needs_scoring(self) -> bool:
        return self._request.scores

    def score(self, look_ahead: LookAhead) -> tuple[Selection, Proposal]:
        return self._score(look_ahead)

    def _score(
        self, look_ahead: LookAhead, whole: bool = False, on_prefilled: Callable[[], None] | None = None
    ) -> tuple[Selection, Proposal]:
        request = self._request
        return score_prompt(
            self.draft,
            request.prompt_ids,
            look_ahead,
            request.prefill,
            request.protected,
            request.tokenization,
            self._pair.pieces(request.prompt_ids),
            whole,
            on_prefilled,
            request.observer,
        )

    def take_all(self) -> Selection:
        return Selection.everything(self._request.prompt_ids)

    def beside_dense(self) -> DraftModel | SlottedDraft:
        index = self._index()
        return open_slotted(self._request, index) if drafts_over_slots(self._pair, self._request, index) else self.draft

    def _index(self) -> CachedModel:
        """The draft over its own ids, with what it holds of the prompt's beginning."""
        return self._pair.open_index(self._request.prefill.prefill_chunk)

    def reopen_draft(self) -> None:
        request, chunk = self._request, self._request.prefill.prefill_chunk
        self.draft: DraftModel = (
            self._pair.open_tail(chunk, request.prompt_ids, request.draft_start)
            if request.draft_start
            else self._pair.open_draft(chunk, request.tokenization)
        )


class StoredCaches(RequestCaches):
    """The caches of a request that begins with what a store has of its prompt, and can leave it what it made of it."""

    def __init__(self, pair: ModelPair, request: Request, store: PrefixStore) -> None:
        self._store = store
        self._num_reused = 0
        # The draft over its own ids as this request goes on with it, and as it was with the whole prompt.
        self._running: CachedModel | None = None
        self._read: CachedModel | None = None
        super().__init__(pair, request)
        prefill = request.prefill
        reads_whole = not request.scores or (prefill.scoring_layers is None and needs_attention(prefill.scorer))
        if reads_whole and self._draft_ids is not None:
            running = store.take_index(self._draft_ids, self._settings) or pair.open_index(prefill.prefill_chunk)
            # A state cannot go back to what two prompts share.
            if not running.is_stateful:
                self._running, self.draft = running, pair.view_draft(running, request.tokenization)

    @property
    def num_cached(self) -> int:
        return self._num_reused

    @property
    def _settings(self) -> tuple[int, int] | None:
        """What the draft's keys of this prompt depend on; what it prefills in order to propose has no window."""
        request = self._request
        return draft_settings(request.prefill, len(request.prompt_ids)) if request.scores else None

    @property
    def _draft_ids(self) -> Sequence[int] | None:
        """The prompt in the draft's own tokens; None where it is of no use for it, or sees its end alone."""
        if self._request.draft_start:
            return None
        if self._pair.translation is None:
            return self._request.prompt_ids
        return None if self._request.tokenization is None else self._request.tokenization.token_ids

    def score(self, look_ahead: LookAhead) -> tuple[Selection, Proposal]:
        def remember_index() -> None:
            # The draft has prefilled the prompt but the tokens that ask, and nothing of it is dropped yet.
            self._read = self._running and self._running.fork()

        selection, proposal = self._score(look_ahead, whole=True, on_prefilled=remember_index)
        return self._take_over(selection), proposal

    def take_all(self) -> Selection:
        return self._take_over(super().take_all())

    def _index(self) -> CachedModel:
        return super()._index() if self._running is None else self._running

    def reopen_draft(self) -> None:
        self._running = self._read = None
        super().reopen_draft()

    def _take_over(self, selection: Selection) -> Selection:
        """Return what is left of a selection behind the slots that the store has."""
        if self.target.is_stateful:
            return selection
        slots = list(zip(selection.positions, selection.token_ids, strict=True))
        target = self._store.take_target(slots)
        if target is None:
            return selection
        self.target, num_held = target, target.num_cached
        self._num_reused = selection.positions[num_held]
        return Selection(
            selection.token_ids[num_held:],
            selection.positions[num_held:],
            selection.num_prompt_tokens,
            num_held=num_held,
            num_new_held=num_held,
        )

    def remember(self) -> None:
        """Leave the prompt to the store; between two steps, or after the last one. The caches end with it."""
        if self.target.is_stateful:
            return
        self.target.forget_from(len(self._request.prompt_ids))
        index = self._read
        if index is None and not self._request.scores and self._running is not None and self._draft_ids is not None:
            index = self._running
            index.forget_from(len(self._draft_ids))
        self._store.put(StoredPrompt(self.target, index, self._settings))
