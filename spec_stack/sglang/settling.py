"""Applies a decision to a request: the target's part of its prompt, and the report."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

from spec_stack.prefill.alignment import Span
from spec_stack.sglang.follow_up import Placement, Turns, protected_lead
from spec_stack.sglang.positions import PositionMap
from spec_stack.sglang.protocols import RunningRequest
from spec_stack.sglang.radix_keys import PlacedKey
from spec_stack.sglang.request_state import OUTCOMES, PrefillReport, RequestOptions, RequestState, attach
from spec_stack.sglang.scoring import Prompt, Score
from spec_stack.sglang.server_args import ServerConfig
from spec_stack.sglang.waiting import Waiting
from spec_stack.tokenizers.chat_turns import Protected

_NOT_PROTECTED = Protected()


class Settler:
    """Changes requests in place: prompt, state and report. turns: records each pruned prompt, for follow-ups."""

    def __init__(self, config: ServerConfig, turns: Turns) -> None:
        self._config, self._turns = config, turns
        self.num_by_outcome = dict.fromkeys(OUTCOMES, 0)

    def give_part(
        self,
        waiting: Waiting,
        given: Placement,
        reason: str,
        score: Score | None = None,
        outcome: str | None = None,
    ) -> None:
        """Give the request a part of its prompt, at the original positions. Mutates it.

        given: the whole prompt where nothing is left out. outcome: one of OUTCOMES; None follows from the part.
        """
        request, prompt = waiting.request, waiting.prompt
        num_tokens = given.num_prompt_tokens
        positions = None if given.is_whole else PositionMap(given.positions, num_tokens)
        num_scored = 0
        if score is not None:
            num_scored = given.num_cached * waiting.recalls + (num_tokens - given.num_cached) * waiting.prunes
        report = PrefillReport(
            num_prompt_tokens=num_tokens,
            num_kept_tokens=len(given.positions),
            num_scored_tokens=num_scored,
            num_draft_tokens=0 if score is None else score.num_draft_tokens,
            num_protected_tokens=waiting.protected.num_tokens,
            num_cached_tokens=given.num_cached,
            num_recalled_tokens=given.num_recalled,
            follow_up=prompt.follow_up,
            sparse_prefill=positions is not None,
            sparse_prefill_reason=_with_note(reason, waiting.protected),
            outcome=outcome or ("covered" if positions is None else "pruned"),
            keep_rate=given.keep_rate,
            scoring_s=waiting.scoring_s,
            longest_part_s=waiting.longest_part_s,
            policy=self._policy(waiting.options),
            kept_spans=_spans_of(_shown(given, prompt)) if waiting.options.explain else None,
        )
        if positions is not None:
            self._prune(waiting, given, positions)
        elif given.num_recalled:
            # Prefilled as any dense prompt, but the recalled part was chosen: it is cached for every prompt with this
            # prefix.
            self._remember(waiting, given)
        self._attach(request, RequestState(waiting.options, report, positions))

    def _prune(self, waiting: Waiting, given: Placement, positions: PositionMap) -> None:
        """Give SGLang's request the kept tokens and their key. Steps that may fail come first, so pruning is atomic."""
        request = waiting.request
        key, token_ids = PlacedKey.of(positions, request.extra_key), array("q", given.token_ids)
        self._remember(waiting, given)
        # The unpadded ones stay whole: SGLang uses them for detokenization and NGRAM.
        request.origin_input_ids = token_ids
        request.full_untruncated_fill_ids = array("q")
        request.extra_key = key
        if request.logprob_start_len > 0:
            # SGLang's value for: none of the prompt's tokens.
            request.logprob_start_len = len(token_ids)

    def _remember(self, waiting: Waiting, given: Placement) -> None:
        prompt = waiting.prompt
        # Explicit spans are kept for that request alone.
        lead = protected_lead(prompt.protected) if waiting.options.protect is None else 0
        if given.inherits_all and not given.num_recalled:
            lead = max(lead, given.num_cached)
        self._turns.add(prompt.tenant, prompt.token_ids, given.positions, waiting.request, lead)

    def leave_whole(
        self,
        request: RunningRequest,
        options: RequestOptions,
        reason: str,
        outcome: str,
        protected: Protected = _NOT_PROTECTED,
        scoring_s: float = 0.0,
    ) -> None:
        """Give the request its whole prompt. Mutates it. outcome: one of OUTCOMES. scoring_s: seconds spent in vain."""
        num_tokens = len(request.origin_input_ids)
        report = PrefillReport(
            num_prompt_tokens=num_tokens,
            num_kept_tokens=num_tokens,
            num_scored_tokens=0,
            num_draft_tokens=0,
            num_protected_tokens=protected.num_tokens,
            num_cached_tokens=0,
            num_recalled_tokens=0,
            follow_up=options.follow_up or self._config.follow_up,
            sparse_prefill=False,
            sparse_prefill_reason=reason,
            outcome=outcome,
            keep_rate=1.0,
            scoring_s=scoring_s,
            policy=self._policy(options),
            kept_spans=((0, num_tokens),) if options.explain else None,
        )
        self._attach(request, RequestState(options, report))

    def _attach(self, request: RunningRequest, state: RequestState) -> None:
        attach(request, state)
        self.num_by_outcome[state.report.outcome] += 1

    def _policy(self, options: RequestOptions) -> str | None:
        if self._config.scoring_model is not None:
            return None
        return "fixed" if options.gamma is not None else options.policy or self._config.policy


def _shown(given: Placement, prompt: Prompt) -> Sequence[int]:
    """The kept positions that a reply may show. Earlier turns' selection is shown only under a shared salt: any client
    can send a prompt that begins as another's conversation.
    """
    if given.inherits_all or any(prompt.tenant):
        return given.positions
    return [position for position in given.positions if position >= given.num_cached]


def _spans_of(positions: Sequence[int]) -> tuple[Span, ...]:
    """Positions, in write order, as half-open spans."""
    if not positions:
        return ()
    edges = [at for at in range(1, len(positions)) if positions[at] != positions[at - 1] + 1]
    return tuple((positions[a], positions[b - 1] + 1) for a, b in pairwise([0, *edges, len(positions)]))


def _with_note(reason: str, protected: Protected) -> str:
    return f"{reason}; {protected.unrecognised}" if protected.unrecognised and reason.startswith("on") else reason
