"""The caches that a request is answered over."""

from __future__ import annotations

from typing import Protocol

from spec_stack.hf.model import CachedModel
from spec_stack.pair import DraftModel, ModelPair
from spec_stack.prefill.scoring import LookAhead, score_prompt
from spec_stack.request import Request
from spec_stack.types import Proposal, Selection


class Caches(Protocol):
    """Target and draft with what they hold already, and how a request's prompt is taken into them."""

    target: CachedModel
    draft: DraftModel

    @property
    def needs_scoring(self) -> bool:
        """Whether the draft has to score the prompt before the target sees any of it."""
        ...

    def score(self, look_ahead: LookAhead) -> tuple[Selection, Proposal]:
        """Have the draft score the prompt: what the target prefills, and the first proposal."""
        ...

    def take_all(self) -> Selection:
        """What the target prefills without scoring."""
        ...

    def reopen_draft(self) -> None:
        """Put an empty draft in the place of one that failed."""
        ...


class RequestCaches:
    """Of a request by itself: empty before it, gone after it."""

    def __init__(self, pair: ModelPair, request: Request) -> None:
        self._pair, self._request = pair, request
        self.target = pair.open_target(request.prefill.prefill_chunk)
        self.reopen_draft()

    @property
    def needs_scoring(self) -> bool:
        return self._request.scores

    def score(self, look_ahead: LookAhead) -> tuple[Selection, Proposal]:
        request = self._request
        return score_prompt(
            self.draft, request.prompt_ids, look_ahead, request.prefill, request.protected, request.tokenization
        )

    def take_all(self) -> Selection:
        return Selection.everything(self._request.prompt_ids)

    def reopen_draft(self) -> None:
        request = self._request
        self.draft: DraftModel = self._pair.open_draft(request.prefill.prefill_chunk, request.tokenization)
