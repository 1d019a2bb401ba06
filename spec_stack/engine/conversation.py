"""Both caches of one text, and one turn over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spec_stack.config import PrefillConfig, SessionConfig
from spec_stack.decode.lookup_index import LookupIndex, TextMemory
from spec_stack.engine.conversation_file import SavedSession
from spec_stack.engine.pair import DraftModel, ModelPair
from spec_stack.engine.request import Request
from spec_stack.engine.slotted_draft import SlottedDraft, drafts_over_slots, open_slotted
from spec_stack.hf.model import CachedModel
from spec_stack.hf.prompt import EncodedPrompt, Span, num_shared
from spec_stack.prefill.recall import dropped_positions, recall, select_turn, shared_words
from spec_stack.prefill.rule import Evidence
from spec_stack.prefill.scoring import LookAhead, look_at
from spec_stack.prefill.units import make_units
from spec_stack.types import Proposal, Selection


@dataclass(frozen=True)
class Unfinished:
    """A turn that ended before its answer: what its prefill has left in the caches is of use to the same turn again.

    Parameters
    ----------
    prompt_ids, num_cached, scores, prefill, protected
        Of its request: the same turn is one for which they are the same.
    held : list of int
        Positions that the target held before it, in the order in which they were written.
    planned : list of int, optional
        Those that it was to hold with the prompt; None where the turn had not come to select them.
    num_restored : int
        How many of these come back.
    """

    prompt_ids: list[int]
    num_cached: int
    scores: bool
    prefill: PrefillConfig
    protected: list[Span]
    held: list[int]
    planned: list[int] | None
    num_restored: int

    def is_of(self, request: Request) -> bool:
        """Return whether a request is the same turn again."""
        return (
            self.prompt_ids == request.prompt_ids
            and (self.num_cached, self.scores, self.prefill) == (request.num_cached, request.scores, request.prefill)
            and self.protected == list(request.protected)
        )


class Conversation:
    """Both models' caches of one text.

    Parameters
    ----------
    pair : ModelPair
        The models.
    prefill_chunk : int
        Most tokens in one forward.
    memory : TextMemory, optional
        Earlier answers to the same person, in which look-ups look too; it takes in this conversation's.

    Attributes
    ----------
    token_ids
        All tokens that were dealt with, prefilled or dropped. Token i is at position i in both caches.
    encoded
        The last prompt as it was encoded, with its answer.
    target
        Holds what was kept and restored, in the order in which it was written.
    index
        The draft, over its own ids. Holds the tokens from the beginning on, maybe not yet the last ones; one with
        another tokenizer tokenizes every prompt anew, and holds what of it it had in common with the last one.
    lookups
        Where look-ups look: all turns so far.
    slotted
        The draft over chosen slots of the text, where a turn had one.
    """

    def __init__(self, pair: ModelPair, prefill_chunk: int, memory: TextMemory | None = None) -> None:
        self._pair, self._prefill_chunk, self._memory = pair, prefill_chunk, memory
        self.token_ids: list[int] = []
        self.encoded: EncodedPrompt | None = None
        self.target = pair.open_target(prefill_chunk)
        self.index = pair.open_index(prefill_chunk)
        self.unfinished: Unfinished | None = None
        self.lookups = LookupIndex(memory)
        self.slotted: SlottedDraft | None = None

    @property
    def held(self) -> Sequence[int]:
        """The positions that the target holds of the text, in the order in which they were written.

        After a turn that ended early they are those before it: what it had rolled back is prefilled again.
        """
        return self.target.positions if self.unfinished is None else self.unfinished.held

    @property
    def num_dense(self) -> int:
        """Tokens at the beginning of which the target holds all, each written behind all before it."""
        held = self.held
        return next((slot for slot, position in enumerate(held) if slot != position), len(held))

    def fork(self) -> Conversation:
        other = Conversation(self._pair, self._prefill_chunk, self._memory)
        other.token_ids, other.encoded = list(self.token_ids), self.encoded
        other.target = self.target.fork()
        other.index = self.index.fork()
        other.unfinished = self.unfinished
        other.slotted = self.slotted and self.slotted.fork()
        return other

    def saved(self, config: SessionConfig) -> SavedSession:
        """Return what is held, to be written to a file. Text that a turn which ended early has rolled back is new in
        it."""
        settled = self.fork()
        owed = settled._go_back(len(self.token_ids))
        num_tokens = min(owed, default=len(self.token_ids))
        settled.target.forget_from(num_tokens)
        if self._pair.translation is None:
            settled.index.forget_from(num_tokens)
        contents = settled.target.contents(), settled.index.contents()
        return SavedSession(self.token_ids[:num_tokens], self.encoded, *contents, config)

    def take_in(self, saved: SavedSession, path: str | Path) -> None:
        """Hold what a file held. Raises ValueError where its parts do not fit together."""
        try:
            target, index = self.target.filled(saved.target), self.index.filled(saved.index)
        except ValueError as error:
            raise ValueError(f"cannot take {path} for a session: {error}") from error
        if target.next_position > len(saved.token_ids):
            raise ValueError(f"cannot take {path} for a session: it holds slots past its {len(saved.token_ids)} tokens")
        self.token_ids, self.encoded, self.target, self.index = saved.token_ids, saved.encoded, target, index

    def begin(self, request: Request, config: SessionConfig, room: float = math.inf) -> Turn:
        """Go back to what a request shares with the conversation. room: tokens that may be restored.

        Raises RuntimeError where the conversation has changed since the request was planned.
        """
        if num_shared(self.token_ids, request.prompt_ids) < request.num_cached:
            raise RuntimeError("the session went on between this call and its first step; call again")
        del self.token_ids[request.num_cached :]
        last = len(request.prompt_ids) - 1
        earlier, owed = self.unfinished, list[int]()
        if earlier is None or earlier.planned is None or not earlier.is_of(request):
            earlier, owed = None, self._go_back(request.num_cached)
        self.unfinished = None
        # The last token is always new: what comes after it is asked for.
        self.target.forget_from(last)
        if self._pair.translation is None:
            self.index.forget_from(min(num_shared(self.index.token_ids, request.prompt_ids), last))
        self.lookups.reopen()
        return Turn(
            self._pair, request, config, room, self.target, self.index, self.lookups, self.slotted, owed, earlier
        )

    def _go_back(self, num_cached: int) -> list[int]:
        """Forget all past so many tokens, and what an unfinished turn wrote; return what it has rolled back of them."""
        held, self.unfinished = self.held, None
        num_same = num_shared(held, self.target.positions)
        self.target.rollback(self.target.num_cached - num_same)
        self.target.forget_from(num_cached)
        return [position for position in held[num_same:] if position < num_cached]

    def commit(self, request: Request, turn: Turn, answer_ids: Sequence[int], text: str | None) -> None:
        """Take in a turn's prompt and answer. text: the answer's, None where it is not that of its tokens."""
        token_ids = [*request.prompt_ids, *answer_ids]
        if self._memory is not None:
            self._memory.remember(request.prompt_ids, answer_ids)
        self.index, self.slotted = turn.index, turn.slotted
        # What comes after the last token has been asked for, but the token itself has been through no model.
        self.token_ids = token_ids[:-1]
        self.target.forget_from(len(self.token_ids))
        if self._pair.translation is None:
            self.index.forget_from(len(self.token_ids))
        encoded = request.encoded
        if encoded is not None and text is not None:
            ended = bool(answer_ids) and answer_ids[-1] in self._pair.end_ids
            encoded = encoded.with_answer(answer_ids[:-1] if ended else answer_ids, text)
        self.encoded = encoded

    def recover(self, request: Request, turn: Turn) -> None:
        """Go back to where a turn that failed, maybe in the middle of a forward, began.

        The chunks of the prompt that went through the models stay for the same turn again (`unfinished`). A state
        cannot go back: of a model that has one nothing stays.
        """
        if self.target.is_stateful:
            # Nobody knows how far a state has come.
            self.token_ids, self.encoded = [], None
            self.target = self._pair.open_target(self._prefill_chunk)
        del self.token_ids[request.num_cached :]
        # In the middle of a forward nobody knows what it holds.
        self.index, self.slotted = turn.index, None
        if self.index.is_stateful:
            self.index = self._pair.open_index(self._prefill_chunk)
        if not self.target.is_stateful:
            self.target.forget_from(len(request.prompt_ids))
            self.unfinished = turn.unfinished


class Turn:
    """The caches of a conversation as one request is answered over them (`engine.caches.Caches`).

    owed: positions that the target held before a turn that ended early and lacks now. earlier: the same turn, which
    ended early, and goes on now.
    """

    def __init__(
        self,
        pair: ModelPair,
        request: Request,
        config: SessionConfig,
        room: float,
        target: CachedModel,
        index: CachedModel,
        lookups: LookupIndex,
        slotted: SlottedDraft | None = None,
        owed: Sequence[int] = (),
        earlier: Unfinished | None = None,
    ) -> None:
        self._pair, self._request, self._config, self._room = pair, request, config, room
        self._owed, self._earlier = owed, earlier
        self.target, self.index, self.lookups, self.slotted = target, index, lookups, slotted
        self.draft: DraftModel = pair.view_draft(index, request.tokenization)
        self._slots = list(target.positions)
        held = [*self._slots, *owed] if earlier is None else earlier.held
        self.unfinished = Unfinished(
            request.prompt_ids,
            request.num_cached,
            request.scores,
            request.prefill,
            list(request.protected),
            held,
            None,
            0,
        )
        self._dropped: list[int] = []
        if config.restore and config.max_restored_chunks and request.can_score and target.can_restore:
            self._dropped = dropped_positions(held, request.num_cached)

    @property
    def num_cached(self) -> int:
        return self._request.num_cached

    @property
    def needs_scoring(self) -> bool:
        return self._earlier is None and (self._request.scores or bool(self._dropped))

    def score(self, look_ahead: LookAhead) -> tuple[Selection, Proposal]:
        request = self._request
        prompt_ids, pieces = request.prompt_ids, self._pair.pieces(request.prompt_ids)
        protected = request.protected
        attention, proposal = look_at(
            self.draft,
            prompt_ids,
            look_ahead,
            request.prefill,
            request.tokenization,
            pieces=pieces,
            protected=protected,
        )
        importance = attention.importance(request.prefill)
        evidence = Evidence(prompt_ids, attention, protected, pieces, importance, request.observer)
        if request.observer is not None:
            request.observer.scored(evidence)
        return self._select(evidence, self._recall(evidence), request.prefill if request.scores else None), proposal

    def _recall(self, evidence: Evidence) -> list[int]:
        """Positions of dropped units that the new text wants back."""
        if not self._dropped:
            return []
        request, num_cached = self._request, self._request.num_cached
        units = make_units(num_cached, evidence.pieces and evidence.pieces[:num_cached], request.prefill)
        words = None
        if self._config.anchor_threshold is not None:
            words = shared_words(request.prompt_ids, units, evidence.candidates)
        room = max(0, self._room)
        importance = evidence.token_importance(request.prefill)
        return recall(importance, self._dropped, units, request.prefill, self._config, words, room)

    def take_all(self) -> Selection:
        if self._earlier is not None and self._earlier.planned is not None:
            return self._go_on(self._earlier, self._earlier.planned)
        return self._select(Evidence(self._request.prompt_ids))

    def beside_dense(self) -> DraftModel | SlottedDraft:
        request = self._request
        if not drafts_over_slots(self._pair, request, self.index):
            return self.draft
        if self.slotted is None:
            self.slotted = open_slotted(request, self.index)
        else:
            self.slotted.go_back(request.prompt_ids)
        return self.slotted

    def _select(
        self, evidence: Evidence, restored: Sequence[int] = (), config: PrefillConfig | None = None
    ) -> Selection:
        """Select, make room for what is prefilled, and remember what it is to become."""
        request = self._request
        selection = select_turn(
            evidence,
            self._slots,
            request.num_cached,
            restored,
            config,
            request.protected,
            self._config.order,
            self._owed,
            self._pair.positions == "contiguous",
        )
        planned = [*self._slots[: selection.num_held], *selection.positions]
        self.unfinished = replace(self.unfinished, planned=planned, num_restored=selection.num_restored)
        self.target.rollback(len(self._slots) - selection.num_held)
        return selection

    def _go_on(self, earlier: Unfinished, planned: Sequence[int]) -> Selection:
        """Select what an earlier try of this turn has left to do."""
        self.unfinished = earlier
        prompt_ids, num_cached = self._request.prompt_ids, self._request.num_cached
        positions = planned[len(self._slots) :]
        num_old = sum(position < num_cached for position in positions)
        # Nobody knows any more which of them come back and which are written again.
        num_restored = min(num_old, earlier.num_restored)
        return Selection(
            token_ids=[prompt_ids[position] for position in positions],
            positions=positions,
            num_prompt_tokens=len(prompt_ids),
            num_restored=num_restored,
            num_held=len(self._slots),
            num_rewritten=num_old - num_restored,
            num_new_held=sum(position >= num_cached for position in self._slots),
        )

    def reopen_draft(self) -> None:
        self.index = self._pair.open_index(self._request.prefill.prefill_chunk)
        self.draft = self._pair.view_draft(self.index, self._request.tokenization)
