"""The scheduler's side: decides for each arriving request, prunes its prompt, and maps positions from then on."""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.decide import decide_scoring
from spec_stack.sglang.positions import PositionMap, batch_map
from spec_stack.sglang.protocols import Runner, RunningRequest, Scheduler, TokenizedRequest
from spec_stack.sglang.request_state import (
    STATE,
    PrefillReport,
    RequestOptions,
    RequestState,
    attach,
    dense_reason,
    namespace,
)
from spec_stack.sglang.scoring import DraftScorer, NoRoomError, QueryCapture
from spec_stack.sglang.server_args import ServerConfig
from spec_stack.sglang.support import NAME, draft_positions_are_mapped, pruning_refusal
from spec_stack.types import Selection

logger = logging.getLogger(__name__)
CAPTURE = QueryCapture()
_MOST_REMEMBERED = 16


@dataclass(frozen=True)
class Decision:
    """What the target is to prefill of a prompt, and how that came about.

    num_scored: prompt tokens that were scored for it, in scoring_s seconds.
    """

    selection: Selection
    reason: str
    num_scored: int = 0
    scoring_s: float = 0.0

    @property
    def is_pruned(self) -> bool:
        return len(self.selection.positions) < self.selection.num_prompt_tokens


class RequestPruner:
    """One scheduler's sparse prefill. Made at its first request; every request is decided here, none fails here.

    `RequestPruner.of(scheduler)` is how the hooks reach it. SGLang turns a tokenized request into one of its own
    running ones deep inside the function that is wrapped: `pruned` is around the whole of that, `attach_state` is told
    of the running request at the first moment it exists.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.config = ServerConfig.from_environment()
        self._refusal = pruning_refusal(scheduler)
        self.prunes = self._refusal is None
        if self._refusal is not None:
            logger.warning("no prompt is pruned here: %s", self._refusal)
        elif not draft_positions_are_mapped(scheduler.draft_worker.draft_worker.draft_runner):
            logger.warning("the draft stays at its cache slots on this attention backend; fewer tokens are accepted")
        self._scorer = DraftScorer(scheduler, CAPTURE)
        # The same prompt comes again at once where n replies are asked for, and after a client's retry.
        self._remembered: OrderedDict[tuple[Any, ...], Selection] = OrderedDict()
        self._arriving: RequestState | None = None

    @staticmethod
    def of(scheduler: Scheduler) -> RequestPruner | None:
        """The scheduler's pruner, made where it has none yet; None where another algorithm runs."""
        if scheduler.spec_algorithm.is_none() or getattr(scheduler.spec_algorithm, "name", "") != NAME:
            return None
        pruner = getattr(scheduler, STATE, None)
        if pruner is None:
            pruner = RequestPruner(scheduler)
            setattr(scheduler, STATE, pruner)
        return pruner

    @contextmanager
    def pruned(self, request: TokenizedRequest) -> Iterator[None]:
        """For the block, `request` is the one that arrives, its prompt pruned if it can be.

        Mutates its input_ids and extra_key, the radix cache's namespace.
        """
        prompt_ids = list(request.input_ids or ())
        if not prompt_ids:
            # Embeddings, or nothing at all, which SGLang refuses in its own words.
            yield
            return
        options = self._options(request)
        decision = self._decide(request, prompt_ids, options)
        selection = decision.selection
        positions = None
        if decision.is_pruned:
            positions = PositionMap(selection.positions, len(prompt_ids))
            request.input_ids = array("q", selection.token_ids)
            request.extra_key = (request.extra_key or "") + namespace(selection.positions, len(prompt_ids))
        report = PrefillReport(
            num_prompt_tokens=len(prompt_ids),
            num_kept_tokens=len(selection.positions),
            num_scored_tokens=decision.num_scored,
            specprefill=decision.is_pruned,
            specprefill_reason=decision.reason,
            keep_rate=selection.keep_rate,
            scoring_s=decision.scoring_s,
            policy="fixed" if options.gamma is not None else options.policy or self.config.policy,
        )
        self._arriving = RequestState(options, report, positions)
        try:
            yield
        finally:
            self._arriving = None

    def attach_state(self, request: RunningRequest) -> None:
        """Give the request that SGLang has made of the arriving one its state, and what its reply will report.

        Mutates it. A pruned prompt leaves less room in the context than its own length says: max_new_tokens is cut.
        """
        state = self._arriving
        if state is None:
            return
        if state.positions is None:
            # A session has put its past before the prompt, images have taken their room in it.
            num_tokens = len(request.origin_input_ids)
            report = replace(state.report, num_prompt_tokens=num_tokens, num_kept_tokens=num_tokens)
            state = replace(state, report=report)
        attach(request, state)
        if state.positions is not None:
            room = int(self._scheduler.model_config.context_len) - state.report.num_prompt_tokens - 1
            asked = request.sampling_params.max_new_tokens
            request.sampling_params.max_new_tokens = max(0, room if asked is None else min(asked, room))

    def _options(self, request: TokenizedRequest) -> RequestOptions:
        try:
            return RequestOptions.parse(request.sampling_params.custom_params, self.config)
        except ValueError as error:
            # The server has refused it already, unless the request came in another way; no loop ends for its sake.
            logger.warning("a request's options are left aside, and its prompt is prefilled densely: %s", error)
            return RequestOptions(specprefill=False)

    def _decide(self, request: TokenizedRequest, prompt_ids: list[int], options: RequestOptions) -> Decision:
        started = perf_counter()
        everything = Selection.everything(prompt_ids)
        prefill = options.prefill(self.config)
        scores, reason = decide_scoring(options.specprefill, prefill, len(prompt_ids), [])
        refusal = self._refusal or dense_reason(request)
        if not scores:
            return Decision(everything, reason)
        if refusal is not None:
            return Decision(everything, f"off: {refusal}")
        try:
            selection, num_scored = self._select(prompt_ids, prefill, self._end_ids(request))
        except NoRoomError as error:
            return Decision(everything, f"off: {error}", scoring_s=perf_counter() - started)
        except Exception as error:
            if self.config.raise_scoring_errors:
                raise
            # Nothing of this request is in the engine yet, so dense prefill is still open, whatever went wrong.
            logger.exception("scoring a prompt of %d tokens failed, and it is prefilled densely", len(prompt_ids))
            failure = f"off: scoring failed: {type(error).__name__}: {error}"
            return Decision(everything, failure, scoring_s=perf_counter() - started)
        return Decision(selection, reason, num_scored, perf_counter() - started)

    def _select(
        self, prompt_ids: Sequence[int], config: PrefillConfig, end_ids: Collection[int]
    ) -> tuple[Selection, int]:
        """The selection, and the number of tokens scored for it now: none where it is remembered."""
        key = (namespace(prompt_ids, len(prompt_ids)), config, frozenset(end_ids))
        found = self._remembered.pop(key, None)
        if found is None:
            # Decode steps around this are not as slow as it makes them look.
            self._scheduler.draft_worker.batch_policy.something_else_runs()
        self._remembered[key] = found or self._scorer.select(prompt_ids, config, end_ids)
        if len(self._remembered) > _MOST_REMEMBERED:
            self._remembered.popitem(last=False)
        return self._remembered[key], 0 if found is not None else len(prompt_ids)

    def _end_ids(self, request: TokenizedRequest) -> Collection[int]:
        if request.sampling_params.ignore_eos:
            return ()
        return self._scheduler.model_config.hf_eos_token_id or ()


def positions_of(forward_batch: Any, requests: Sequence[RunningRequest], runner: Runner) -> torch.Tensor | None:
    """Original positions for a batch that SGLang has just given its slots as positions; None to leave it alone.

    Covers prefill, chunks of it, prefill after a retraction, mixed batches, decoding, drafting and verification: all of
    them are slots here. The host alone is asked, so nothing waits for the device.
    """
    maps = [getattr(getattr(request, STATE, None), "positions", None) for request in requests or ()]
    if not any(maps) or forward_batch.positions is None or forward_batch.forward_mode.is_idle():
        return None
    is_draft = bool(runner.is_draft_worker)
    if is_draft and not draft_positions_are_mapped(runner):
        return None
    slots = forward_batch.positions
    lengths = forward_batch.extend_seq_lens_cpu
    if lengths is None:
        if slots.numel() % len(maps):
            raise RuntimeError(f"{slots.numel()} positions cannot be shared evenly by {len(maps)} requests")
        lengths = [slots.numel() // len(maps)] * len(maps)
    return batch_map(tuple(maps), is_draft, slots.device)(slots, [int(length) for length in lengths])
