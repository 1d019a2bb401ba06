"""A prompt as the draft left it: scored and selected, or taken whole, and why."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

from spec_stack.decode.propose import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.engine.conversation import Turn
from spec_stack.engine.pair import ModelPair
from spec_stack.engine.request import Request
from spec_stack.types import Metrics, Proposal, Selection
from spec_stack.warning import OnceEach

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftedPrompt:
    """A prompt as the draft left it: the selection, the first proposal, and why so.

    num_cached: tokens at its beginning that neither model had to see again.
    """

    selection: Selection
    proposal: Proposal
    num_scored_tokens: int
    num_cached: int
    reason: str


def draft_prompt(request: Request, caches: Turn, sampler: Sampler, warnings: OnceEach) -> DraftedPrompt:
    """Have the draft score the prompt where that is needed; else, or where it fails, take it whole.

    Advances the draft's cache. Raises what scoring raises where the request wants it raised.
    """
    reason = request.reason
    if caches.needs_scoring:
        look_ahead = partial(propose, caches.draft, sampler=sampler, end_ids=request.stop_tokens.all_ids)
        num_tokens = max(0, request.num_draft_tokens - caches.draft.num_cached)
        try:
            with request.clock.measure("scoring"), request.progress.watch(caches.draft, "scoring", num_tokens):
                selection, proposal = caches.score(look_ahead)
        except Exception as error:
            if request.prefill.on_scoring_error == "raise":
                raise
            # Nothing has been handed out yet, so dense prefill is still open, whatever went wrong.
            logger.exception("scoring a prompt of %d tokens failed; it is prefilled densely", len(request.prompt_ids))
            reason = f"scoring failed, prefilled densely: {type(error).__name__}: {error}"
            warnings.warn("scoring", f"{reason} (metrics.sparse_prefill_reason tells each time)")
            caches.reopen_draft()
        else:
            if request.scores and selection.num_new == request.num_new_tokens:
                reason += f", but chunks and protected spans cover the whole {request.text}"
            return DraftedPrompt(selection, proposal, len(request.prompt_ids), caches.num_cached, reason)
    selection = caches.take_all()
    return DraftedPrompt(selection, Proposal(), 0, caches.num_cached, reason)


def begin_metrics(request: Request, drafted: DraftedPrompt, pair: ModelPair, policy: str, seed: int | None) -> Metrics:
    """Return a request's metrics as far as they are known before its first step."""
    selection = drafted.selection
    return Metrics(
        num_prompt_tokens=len(request.prompt_ids),
        num_kept_tokens=selection.num_held + len(selection.positions),
        num_scored_tokens=drafted.num_scored_tokens,
        sparse_prefill=selection.num_new < request.num_new_tokens,
        sparse_prefill_reason=drafted.reason,
        policy=policy,
        precision=pair.precision,
        draft_precision=pair.draft_precision,
        target_weight_bytes=pair.target_weight_bytes,
        draft_weight_bytes=pair.draft_weight_bytes,
        seed=seed,
        proposer=request.proposer,
        num_new_tokens=len(request.prompt_ids) - drafted.num_cached,
        num_cached_tokens=drafted.num_cached,
        num_restored_tokens=selection.num_restored,
        num_rewritten_tokens=selection.num_rewritten,
        decode_reason="; ".join(filter(None, (pair.vocabulary.decode_reason, request.decode_note))),
    )
