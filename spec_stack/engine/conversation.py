"""Both caches of one text, and one turn over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from spec_stack.config import PrefillConfig, SessionConfig
from spec_stack.engine.conversation_file import SavedSession
from spec_stack.engine.pair import DraftModel, ModelPair
from spec_stack.engine.request import Request
from spec_stack.hf.model import CachedModel
from spec_stack.hf.prompt import EncodedPrompt, num_shared
from spec_stack.prefill.recall import dropped_positions, recall, select_turn, shared_words
from spec_stack.prefill.rule import Evidence
from spec_stack.prefill.scoring import LookAhead, look_at
from spec_stack.prefill.units import make_units
from spec_stack.types import Proposal, Selection


class Conversation:
    """What target and draft hold of one text.

    Parameters
    ----------
    pair : ModelPair
        The models.
    prefill_chunk : int
        Most tokens in one forward.

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
    """

    def __init__(self, pair: ModelPair, prefill_chunk: int) -> None:
        self._pair, self._prefill_chunk = pair, prefill_chunk
        self.token_ids: list[int] = []
        self.encoded: EncodedPrompt | None = None
        self.target = pair.open_target(prefill_chunk)
        self.index = pair.open_index(prefill_chunk)

    def fork(self) -> Conversation:
        other = Conversation(self._pair, self._prefill_chunk)
        other.token_ids, other.encoded = list(self.token_ids), self.encoded
        other.target = self.target.fork()
        other.index = self.index.fork()
        return other

    def saved(self, config: SessionConfig) -> SavedSession:
        """What is held, to be written to a file."""
        return SavedSession(self.token_ids, self.encoded, self.target.contents(), self.index.contents(), config)

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
        shared = num_shared(self.token_ids, request.prompt_ids)
        if shared < request.num_cached:
            raise RuntimeError("the session went on between this call and its first step; call again")
        del self.token_ids[shared:]
        self.target.forget_from(request.num_cached)
        if self._pair.translation is None:
            self.index.forget_from(min(shared, len(request.prompt_ids) - 1))
        return Turn(self._pair, request, config, room, self.target, self.index)

    def commit(self, request: Request, turn: Turn, answer_ids: Sequence[int], text: str | None) -> None:
        """Take in a turn's prompt and answer. text: the answer's, None where it is not that of its tokens."""
        token_ids = [*request.prompt_ids, *answer_ids]
        self.index = turn.index
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
        """Go back to where a turn that failed, maybe in the middle of a forward, began."""
        if self.target.is_stateful:
            # Nobody knows how far a state has come.
            self.token_ids, self.encoded = [], None
            self.target = self._pair.open_target(self._prefill_chunk)
        del self.token_ids[request.num_cached :]
        self.target.rollback(max(0, self.target.num_cached - turn.num_held))
        self.index = turn.index
        if self.index.is_stateful:
            self.index = self._pair.open_index(self._prefill_chunk)
        self.index.forget_from(turn.num_drafted)


class Turn:
    """The caches of a conversation as one request is answered over them (`engine.caches.Caches`)."""

    def __init__(
        self,
        pair: ModelPair,
        request: Request,
        config: SessionConfig,
        room: float,
        target: CachedModel,
        index: CachedModel,
    ) -> None:
        self._pair, self._request, self._config, self._room = pair, request, config, room
        self.target, self.index = target, index
        self.draft: DraftModel = pair.view_draft(index, request.tokenization)
        self._held = list(target.positions)
        # Where the caches stood when the turn began.
        self.num_held, self.num_drafted = len(self._held), index.next_position
        self._dropped: list[int] = []
        if config.restore and config.max_restored_chunks and request.can_score and target.can_restore:
            self._dropped = dropped_positions(self._held, request.num_cached)

    @property
    def num_cached(self) -> int:
        return self._request.num_cached

    @property
    def needs_scoring(self) -> bool:
        return self._request.scores or bool(self._dropped)

    def score(self, look_ahead: LookAhead) -> tuple[Selection, Proposal]:
        request = self._request
        prompt_ids, pieces = request.prompt_ids, self._pair.pieces(request.prompt_ids)
        attention, proposal = look_at(self.draft, prompt_ids, look_ahead, request.prefill, request.tokenization)
        importance = attention.importance(request.prefill)
        evidence = Evidence(prompt_ids, attention, request.question, pieces, importance)
        return self._select(evidence, self._recall(evidence), request.prefill if request.scores else None), proposal

    def _recall(self, evidence: Evidence) -> list[int]:
        """Positions of dropped units that the new text wants back."""
        if not self._dropped:
            return []
        request, num_cached = self._request, self._request.num_cached
        units = make_units(num_cached, evidence.pieces and evidence.pieces[:num_cached], request.prefill)
        words = None
        if self._config.anchor_threshold is not None:
            words = shared_words(request.prompt_ids, units, request.prefill)
        room = max(0, self._room)
        importance = evidence.token_importance(request.prefill)
        return recall(importance, self._dropped, units, request.prefill, self._config, words, room)

    def take_all(self) -> Selection:
        return self._select(Evidence(self._request.prompt_ids))

    def _select(
        self, evidence: Evidence, restored: Sequence[int] = (), config: PrefillConfig | None = None
    ) -> Selection:
        request = self._request
        return select_turn(evidence, self._held, request.num_cached, restored, config, request.protected)

    def reopen_draft(self) -> None:
        self.index, self.num_drafted = self._pair.open_index(self._request.prefill.prefill_chunk), 0
        self.draft = self._pair.view_draft(self.index, self._request.tokenization)
