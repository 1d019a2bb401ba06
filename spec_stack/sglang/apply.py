"""Applies a decision to a request: its input ids, its radix key, its report."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

import torch

from spec_stack.prefill.alignment import Span
from spec_stack.sglang.decide import OUTCOMES, Dense, Plan
from spec_stack.sglang.positions import BatchMap, PlacedKey, PositionMap
from spec_stack.sglang.prefix_reuse import TurnStore, protected_lead
from spec_stack.sglang.request_state import PrefillReport, RequestOptions, RequestState, attach
from spec_stack.sglang.seams import RunningRequest
from spec_stack.sglang.server_args import ServerConfig


class Applier:
    """Changes requests in place. turns: records each pruned prompt, for follow-ups."""

    def __init__(self, config: ServerConfig, turns: TurnStore) -> None:
        self._config, self._turns = config, turns
        self.num_by_outcome = dict.fromkeys(OUTCOMES, 0)

    def apply(
        self,
        request: RunningRequest,
        options: RequestOptions,
        decision: Dense | Plan,
        scoring_s: Sequence[float] = (),
    ) -> None:
        """Give the request its whole prompt, or the planned part of it. Mutates the request, after all that may fail.

        scoring_s: of every part of its scoring.
        """
        positions = None
        if isinstance(decision, Plan) and not decision.prefill.is_whole:
            positions = self._prune(request, options, decision)
        elif isinstance(decision, Plan) and decision.prefill.num_recalled:
            # Prefilled as any dense prompt, but the recalled part was chosen, and is cached for every prompt like it.
            self._remember(request, options, decision)
        report = self._report(options, decision, scoring_s)
        attach(request, RequestState(options, report, positions))
        self.num_by_outcome[report.outcome] += 1

    def _prune(self, request: RunningRequest, options: RequestOptions, plan: Plan) -> PositionMap | None:
        """Give the request its kept tokens; at contiguous positions they are an ordinary, shorter prompt."""
        positions, key = None, request.extra_key
        token_ids = array("q", plan.prefill.token_ids)
        if plan.prompt.config.positions == "original":
            positions = _checked_positions(plan)
            placed = PlacedKey.of(positions, request.extra_key)
            placed.place(token_ids)
            key = placed
        self._remember(request, options, plan)
        # The unpadded ones stay whole: SGLang uses them for detokenization and NGRAM.
        request.origin_input_ids = token_ids
        request.full_untruncated_fill_ids = array("q")
        request.extra_key = key
        if request.logprob_start_len > 0:
            # SGLang's value for: none of the prompt's tokens.
            request.logprob_start_len = len(token_ids)
        return positions

    def _remember(self, request: RunningRequest, options: RequestOptions, plan: Plan) -> None:
        prompt, prefill = plan.prompt, plan.prefill
        # Explicit spans are kept for that request alone.
        lead = protected_lead(prompt.spans) if options.protect is None else 0
        if prefill.inherits_all and not prefill.num_recalled:
            lead = max(lead, prefill.num_cached)
        self._turns.add(prompt.tenant, prompt.token_ids, prefill.positions, request, lead)

    def _report(self, options: RequestOptions, decision: Dense | Plan, scoring_s: Sequence[float]) -> PrefillReport:
        prompt = decision.prompt
        num_tokens = len(prompt.token_ids)
        plan = decision if isinstance(decision, Plan) else None
        prefill = None if plan is None else plan.prefill
        shown: Sequence[int] = range(num_tokens) if plan is None else _shown_positions(plan)
        policy = "fixed" if options.gamma is not None else options.policy or self._config.policy
        return PrefillReport(
            num_prompt_tokens=num_tokens,
            num_kept_tokens=num_tokens if prefill is None else len(prefill.positions),
            num_scored_tokens=0 if plan is None else plan.num_scored_tokens,
            num_draft_tokens=0 if plan is None else plan.num_draft_tokens,
            num_protected_tokens=0 if prompt.protected is None else prompt.protected.num_tokens,
            num_cached_tokens=0 if prefill is None else prefill.num_cached,
            num_recalled_tokens=0 if prefill is None else prefill.num_recalled,
            follow_up=prompt.follow_up,
            sparse_prefill=prefill is not None and not prefill.is_whole,
            sparse_prefill_reason=_with_note(decision),
            outcome=decision.outcome,
            keep_rate=1.0 if prefill is None else prefill.keep_rate,
            scoring_s=sum(scoring_s),
            longest_part_s=max(scoring_s, default=0.0),
            policy=policy if self._config.scoring_model is None else None,
            kept_spans=_spans_of(shown) if options.explain else None,
            positions=None if prefill is None or prefill.is_whole else prompt.config.positions,
        )


def _checked_positions(plan: Plan) -> PositionMap:
    """The plan's map, tried once: a batch that cannot be mapped would give wrong tokens."""
    kept = plan.prefill.positions
    positions, slots = PositionMap(kept, plan.prefill.num_prompt_tokens), torch.arange(len(kept))
    mapped = BatchMap((positions,), is_draft=False, device=slots.device)(slots, [len(kept)])
    if not torch.equal(mapped, positions.target):
        raise RuntimeError("a pruned prompt's slots are not mapped to its original positions")
    return positions


def _shown_positions(plan: Plan) -> Sequence[int]:
    """The kept positions that a reply may show: earlier turns' only under a shared salt, since any client can send a
    prompt that begins as another's conversation.
    """
    prefill = plan.prefill
    if prefill.inherits_all or any(plan.prompt.tenant):
        return prefill.positions
    return [position for position in prefill.positions if position >= prefill.num_cached]


def _spans_of(positions: Sequence[int]) -> tuple[Span, ...]:
    if not positions:
        return ()
    edges = [at for at in range(1, len(positions)) if positions[at] != positions[at - 1] + 1]
    return tuple((positions[a], positions[b - 1] + 1) for a, b in pairwise([0, *edges, len(positions)]))


def _with_note(decision: Dense | Plan) -> str:
    reason, protected = decision.reason, decision.prompt.protected
    if protected is None or not protected.unrecognised or not reason.startswith("on"):
        return reason
    return f"{reason}; {protected.unrecognised}"
