"""The scheduler's side: decides for each arriving request, prunes its prompt, and maps positions from then on."""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.decide import decide_scoring
from spec_stack.sglang.positions import PositionMap, batch_map
from spec_stack.sglang.request_state import (
    STATE,
    PrefillReport,
    RequestOptions,
    RequestState,
    attach,
    dense_reason,
    namespace,
)
from spec_stack.sglang.scoring import DraftScorer, QueryCapture
from spec_stack.sglang.server_args import ServerConfig
from spec_stack.sglang.support import NAME, draft_positions_are_mapped, pruning_refusal
from spec_stack.types import Selection

logger = logging.getLogger(__name__)
CAPTURE = QueryCapture()
_MOST_REMEMBERED = 16


class Engine:
    """One scheduler's sparse prefill. Made at its first request; every request is decided here, none fails here."""

    def __init__(self, scheduler: Any) -> None:
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
    def of(scheduler: Any) -> Engine | None:
        """The scheduler's engine, made where it has none yet; None where another algorithm runs."""
        if scheduler.spec_algorithm.is_none() or getattr(scheduler.spec_algorithm, "name", "") != NAME:
            return None
        engine = getattr(scheduler, STATE, None)
        if engine is None:
            engine = Engine(scheduler)
            setattr(scheduler, STATE, engine)
        return engine

    @contextmanager
    def prepared(self, request: Any) -> Iterator[None]:
        """For the block, `request` (SGLang's, tokenized) is the one that arrives, its prompt pruned if it can be.

        Mutates its input_ids and extra_key, the radix cache's namespace.
        """
        prompt_ids = list(request.input_ids or ())
        if not prompt_ids:
            # Embeddings, or nothing at all, which SGLang refuses in its own words.
            yield
            return
        options = self._options(request)
        selection, reason, num_scored, scoring_s = self._decide(request, prompt_ids, options)
        positions = None
        if len(selection.positions) < len(prompt_ids):
            positions = PositionMap(selection.positions, len(prompt_ids))
            request.input_ids = array("q", selection.token_ids)
            request.extra_key = (request.extra_key or "") + namespace(selection.positions, len(prompt_ids))
        report = PrefillReport(
            num_prompt_tokens=len(prompt_ids),
            num_kept_tokens=len(selection.positions),
            num_scored_tokens=num_scored,
            specprefill=positions is not None,
            specprefill_reason=reason,
            keep_rate=selection.keep_rate,
            scoring_s=scoring_s,
            policy="fixed" if options.gamma is not None else options.policy or self.config.policy,
        )
        self._arriving = RequestState(options, report, positions)
        try:
            yield
        finally:
            self._arriving = None

    def adopt(self, request: Any) -> None:
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

    def _options(self, request: Any) -> RequestOptions:
        try:
            return RequestOptions.parse(request.sampling_params.custom_params, self.config)
        except ValueError as error:
            # The server has refused it already, unless the request came in another way; no loop ends for its sake.
            logger.warning("a request's options are left aside, and its prompt is read densely: %s", error)
            return RequestOptions(specprefill=False)

    def _decide(
        self, request: Any, prompt_ids: list[int], options: RequestOptions
    ) -> tuple[Selection, str, int, float]:
        """Selection, reason, number of prompt tokens scored for it, seconds that took."""
        started = perf_counter()
        everything = Selection.everything(prompt_ids)
        prefill = options.prefill(self.config)
        scores, reason = decide_scoring(options.specprefill, prefill, len(prompt_ids), [])
        refusal = self._refusal or dense_reason(request)
        if not scores:
            return everything, reason, 0, 0.0
        if refusal is not None:
            return everything, f"off: {refusal}", 0, 0.0
        try:
            selection, num_scored = self._select(prompt_ids, prefill, self._end_ids(request))
        except Exception as error:
            # Nothing of this request is in the engine yet, so dense prefill is still open, whatever went wrong.
            logger.warning("scoring a prompt of %d tokens failed, read densely: %s", len(prompt_ids), error)
            return everything, f"off: scoring failed: {type(error).__name__}: {error}", 0, perf_counter() - started
        return selection, reason, num_scored, perf_counter() - started

    def _select(
        self, prompt_ids: Sequence[int], config: PrefillConfig, end_ids: Collection[int]
    ) -> tuple[Selection, int]:
        """The selection, and the number of tokens scored for it now: none where it is remembered."""
        key = (namespace(prompt_ids, len(prompt_ids)), config, frozenset(end_ids))
        found = self._remembered.pop(key, None)
        if found is None:
            # Decode steps around this are not as slow as it makes them look.
            self._scheduler.draft_worker.gamma.interrupt()
        self._remembered[key] = found or self._scorer.select(prompt_ids, config, end_ids)
        if len(self._remembered) > _MOST_REMEMBERED:
            self._remembered.popitem(last=False)
        return self._remembered[key], 0 if found is not None else len(prompt_ids)

    def _end_ids(self, request: Any) -> Collection[int]:
        if request.sampling_params.ignore_eos:
            return ()
        return self._scheduler.model_config.hf_eos_token_id or ()


def positions_of(forward_batch: Any, requests: Sequence[Any], runner: Any) -> torch.Tensor | None:
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
