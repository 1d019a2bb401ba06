"""Runs a planned request over its caches: score, select, decode, count."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from spec_stack.config import SpecStackConfig
from spec_stack.controller.base import Policy
from spec_stack.controller.ngram import NgramPolicy
from spec_stack.controller.pool import PolicyPool, Shelf
from spec_stack.decode.loop import decode
from spec_stack.decode.propose import propose
from spec_stack.decode.proposer import Means
from spec_stack.decode.registry import make_proposer
from spec_stack.decode.sampler import Sampler
from spec_stack.engine.conversation import SingleTurn, Turn
from spec_stack.engine.drawing import drawing_of, stopper_of
from spec_stack.engine.options import Call
from spec_stack.engine.pair import ModelPair
from spec_stack.engine.prefix_store import PrefixStore, StoredTurn
from spec_stack.engine.request import Request, plan_request
from spec_stack.hf.model_sampling import ignored_sampling
from spec_stack.hf.prompt import EncodedPrompt
from spec_stack.types import Metrics, Proposal, Selection, StepOutput
from spec_stack.warning import OnceEach

logger = logging.getLogger(__name__)


class Engine:
    """Plans requests and runs them over their caches; several threads may run requests at once."""

    def __init__(self, pair: ModelPair, config: SpecStackConfig, policy: str | Policy | None = None) -> None:
        self.pair, self.config = pair, config
        options: dict[str, Mapping[str, Any]] = {"fixed": {"gamma": config.decode.gamma}}
        options |= {name: {"predictor": file} for name, file in pair.predictors.items()}
        self._pool = PolicyPool(policy if policy is not None else config.decode.policy, options)
        self._ngram_policies = Shelf(NgramPolicy)
        self.store = PrefixStore(config.store.max_tokens)
        self._warnings = OnceEach()

    def plan(
        self,
        call: Call,
        held_ids: Sequence[int] = (),
        known: EncodedPrompt | None = None,
    ) -> Request:
        """Check and plan a call (see `plan_request`)."""
        request = plan_request(self.pair, self.config, self._pool, call, held_ids, known)
        self._warn_of_what_is_ignored(call, request, bool(held_ids))
        return request

    def _warn_of_what_is_ignored(self, call: Call, request: Request, is_follow_up: bool) -> None:
        ignored = ""
        if call.get("sampling") is None:
            ignored = ignored_sampling(self.pair.target.generation_config, request.params)
        if ignored:
            self._warnings.warn(
                "sampling", f'the checkpoint\'s generation config sets {ignored}; sampling="model" applies it'
            )
        keep_rate, is_by_default = call.get("keep_rate"), call.get("sparse_prefill") is None
        if keep_rate not in (None, 1) and is_by_default and not (request.scores or is_follow_up):
            self._warnings.warn(
                "keep_rate",
                f"keep_rate={keep_rate} is not applied ({request.reason}); "
                'sparse_prefill="on" prunes a prompt of any length',
            )

    def run(self, request: Request) -> Generator[StepOutput, None, None]:
        """Answer a planned request over its own caches, which begin with the stored prefix of its prompt."""
        if self.store.max_tokens:
            return self._run_stored(request)
        return self.answer(request, SingleTurn(self.pair, request))

    def _run_stored(self, request: Request) -> Generator[StepOutput, None, None]:
        request.clock.resume()
        caches = StoredTurn(self.pair, request, self.store)
        try:
            yield from self.answer(request, caches)
        except GeneratorExit:
            caches.remember()
            raise
        caches.remember()

    def answer(self, request: Request, caches: Turn) -> Generator[StepOutput, None, None]:
        """The steps of a planned request over these caches. Its clock pauses between the steps."""
        pair, clock = self.pair, request.clock
        clock.resume()
        with self._pool.lend(request.policy) as policy, self._ngram_policies.lend() as ngram_policy:
            drawing = drawing_of(request, pair.target)
            models: list[Any] = [caches.draft]
            begun_s = caches.draft.forward_s
            scored = _score_or_take_whole(request, caches, drawing.look_ahead, self._warnings)
            if request.observer is not None:
                request.observer.selected(scored.selection, scored.proposal)
            draft = caches.draft if scored.num_scored_tokens else caches.draft_beside_dense()
            models += [caches.target] if draft is models[0] else [caches.target, draft]
            begun_s += sum(model.forward_s for model in models[1:])
            metrics = _begin_metrics(request, scored, pair, policy.name, drawing.seed)
            steps = decode(
                target=caches.target,
                draft=draft,
                prompt_ids=request.prompt_ids,
                selection=scored.selection,
                proposal=scored.proposal,
                policy=policy,
                proposer=make_proposer(
                    request.proposer,
                    Means(
                        draft,
                        drawing.sampler,
                        request.stop_tokens.all_ids,
                        ngram_policy,
                        caches.lookups,
                        draft.run_ahead,
                    ),
                ),
                sampler=drawing.sampler,
                stopper=stopper_of(request, pair.tokenizer, pair.answer_format.shown),
                end_ids=request.stop_tokens.all_ids,
                labels=request.labels,
                clock=clock,
                num_logprobs=request.num_logprobs,
            )
            try:
                with request.progress.watch(caches.target, "prefill", len(scored.selection.positions)):
                    first = next(steps)
                for output in chain([first], steps):
                    metrics.add(output.record, clock.elapsed_s)
                    if output.record.is_prefill:
                        metrics.scoring_s = output.record.draft_s
                    if output.finish_reason is not None:
                        metrics.forward_s = sum(model.forward_s for model in models) - begun_s
                        metrics.draft_step, metrics.target_step = str(pair.draft_step), str(pair.target_step)
                        output = replace(output, metrics=metrics)
                    with clock.paused():
                        yield output
            finally:
                for model in models:
                    model.release()


@dataclass(frozen=True)
class ScoredPrompt:
    """A scored or dense prompt: the target's selection, the first proposal, and the reason."""

    selection: Selection
    proposal: Proposal
    num_scored_tokens: int
    num_cached: int
    reason: str


def _score_or_take_whole(request: Request, caches: Turn, sampler: Sampler, warnings: OnceEach) -> ScoredPrompt:
    """Score the prompt where needed; without need, or after a failure, take it whole.

    Scoring errors are raised where the request's options say so.
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
            # No token has been yielded yet, so dense prefill is still possible after any failure.
            logger.exception("scoring a prompt of %d tokens failed; it is prefilled densely", len(request.prompt_ids))
            reason = f"scoring failed, prefilled densely: {type(error).__name__}: {error}"
            warnings.warn("scoring", f"{reason} (metrics.sparse_prefill_reason tells each time)")
            caches.reopen_draft()
        else:
            if request.scores and selection.num_new == request.num_new_tokens:
                reason += f", but chunks and protected spans cover the whole {request.text}"
            return ScoredPrompt(selection, proposal, len(request.prompt_ids), caches.num_cached, reason)
    selection = caches.take_all()
    return ScoredPrompt(selection, Proposal(), 0, caches.num_cached, reason)


def _begin_metrics(request: Request, scored: ScoredPrompt, pair: ModelPair, policy: str, seed: int | None) -> Metrics:
    """A request's metrics before its first step."""
    selection = scored.selection
    return Metrics(
        num_prompt_tokens=len(request.prompt_ids),
        num_kept_tokens=selection.num_held + len(selection.positions),
        num_scored_tokens=scored.num_scored_tokens,
        sparse_prefill=selection.num_new < request.num_new_tokens,
        sparse_prefill_reason=scored.reason,
        policy=policy,
        precision=pair.precision,
        draft_precision=pair.draft_precision,
        target_weight_bytes=pair.target_weight_bytes,
        draft_weight_bytes=pair.draft_weight_bytes,
        seed=seed,
        proposer=request.proposer,
        num_new_tokens=len(request.prompt_ids) - scored.num_cached,
        num_cached_tokens=scored.num_cached,
        num_restored_tokens=selection.num_restored,
        num_rewritten_tokens=selection.num_rewritten,
        decode_reason="; ".join(filter(None, (pair.vocabulary.decode_reason, request.decode_note))),
    )
