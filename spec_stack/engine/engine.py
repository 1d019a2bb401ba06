"""Runs a planned request over its caches: score, select, decode, count. And a prefilled prompt, whose answers are
scored."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, cast

import torch

from spec_stack.config import SamplingParams, SpecStackConfig
from spec_stack.controller.base import Policy
from spec_stack.controller.ngram import NgramPolicy
from spec_stack.controller.pool import ObjectPool, PolicyPool
from spec_stack.decode.loop import decode
from spec_stack.decode.proposer import Proposer, propose
from spec_stack.decode.sampler import Sampler
from spec_stack.engine.conversation import Turn, single_turn
from spec_stack.engine.pair import ModelPair
from spec_stack.engine.request import Call, Request, plan_request
from spec_stack.hf.architectures import text_config
from spec_stack.hf.processors import ignored_sampling
from spec_stack.hf.prompt import EncodedPrompt
from spec_stack.prefill.cost import with_threshold
from spec_stack.prefill.rule import Observer
from spec_stack.prefill.turn import Cached, NeedsScore, Plan, why_whole
from spec_stack.settings.warning import OnceEach
from spec_stack.types import Metrics, Proposal, Selection, StepOutput

logger = logging.getLogger(__name__)


class Engine:
    """Plans requests and runs them over their caches; several threads may run requests at once."""

    def __init__(self, pair: ModelPair, config: SpecStackConfig, policy: str | Policy | None = None) -> None:
        pair.check_heads(config.prefill)
        self.pair, self.config = pair, _for_device(pair, config)
        options: dict[str, Mapping[str, Any]] = {"fixed": {"gamma": config.decode.gamma}}
        options |= {name: {"predictor": file} for name, file in pair.predictors.items()}
        self._pool = PolicyPool(policy if policy is not None else config.decode.policy, options)
        self._ngram_policies = ObjectPool(NgramPolicy)
        self._warnings = OnceEach()
        self._model_samples = ignored_sampling(pair.target.generation_config, SamplingParams()) != ""

    def plan(self, call: Call, known: EncodedPrompt | None = None) -> Request:
        """Check and plan a call (see `plan_request`)."""
        request = plan_request(self.pair, self.config, self._pool, call, known)
        self._warn_of_what_is_ignored(call, request, known is not None)
        return request

    def _warn_of_what_is_ignored(self, call: Call, request: Request, is_follow_up: bool) -> None:
        if self._model_samples and call.get("sampling") is None:
            ignored = ignored_sampling(self.pair.target.generation_config, request.params)
            if ignored:
                self._warnings.warn(
                    "sampling", f'the checkpoint\'s generation config sets {ignored}; sampling="model" applies it'
                )
        if call.get("keep_rate") in (None, 1) or call.get("sparse_prefill") is not None or is_follow_up:
            return
        if reason := why_whole(request.prefill, len(request.prompt_ids), request.obstacle):
            self._warnings.warn(
                "keep_rate",
                f"keep_rate={call['keep_rate']} is not applied ({reason}); "
                'sparse_prefill="on" prunes a prompt of any length',
            )

    def run(self, request: Request) -> Generator[StepOutput, None, None]:
        """Answer a planned request over its own caches."""
        # Reading the prompt counts.
        request.clock.resume()
        yield from self.answer(request, single_turn(self.pair, request))

    def answer(self, request: Request, caches: Turn) -> Generator[StepOutput, None, None]:
        """The steps of a planned request over these caches. Its clock pauses between the steps."""
        pair, clock = self.pair, request.clock
        clock.resume()
        with request.policy.lend() as policy, self._ngram_policies.lend() as ngram_policy:
            selection, proposal, metrics = self._score_or_take_whole(request, caches, policy.name)
            observer, cached = caches.observer, caches.cached.positions
            explanation = None if observer is None else observer.explanation(cached, selection)
            draft = caches.draft if metrics.num_scored_tokens else caches.draft_for_dense()
            proposer = Proposer(request, draft, ngram_policy, caches.lookups)
            steps = decode(request, caches.target, selection, proposal, policy, proposer)
            try:
                with request.progress.watch(caches.target, "prefill", len(selection.positions)):
                    first = next(steps)
                for output in chain([first], steps):
                    metrics.add(output.record, clock.elapsed_s)
                    if output.record.is_prefill:
                        metrics.scoring_s = output.record.draft_s
                    if output.finish_reason is not None:
                        metrics.draft_step, metrics.target_step = str(pair.draft_step), str(pair.target_step)
                        output = replace(output, metrics=metrics, explanation=explanation)
                    clock.pause()
                    yield output
                    clock.resume()
            finally:
                caches.target.release()
                for each in (caches.draft, draft):
                    each.release()

    def _score_or_take_whole(self, request: Request, caches: Turn, policy: str) -> tuple[Selection, Proposal, Metrics]:
        """The target's selection, the first proposal and the metrics so far."""
        plan, proposal, num_scored_tokens = caches.plan, Proposal(), 0
        if isinstance(plan, NeedsScore):
            try:
                scored = _score(request, caches, plan)
            except Exception as error:
                if request.prefill.on_scoring_failure == "raise":
                    raise
                # No token has been yielded yet, so dense prefill is still possible after any failure.
                logger.exception("scoring %d tokens failed; the prompt is prefilled densely", len(request.prompt_ids))
                reason = f"scoring failed, prefilled densely: {type(error).__name__}: {error}"
                self._warnings.warn("scoring", f"{reason} (metrics.sparse_prefill_reason tells each time)")
                caches.reset_draft()
                plan = caches.unscored(plan, reason)
            else:
                (plan, proposal), num_scored_tokens = scored, len(request.prompt_ids)
        return plan.selection, proposal, self._begin_metrics(request, caches.cached, plan, num_scored_tokens, policy)

    def _begin_metrics(
        self, request: Request, cached: Cached, plan: Plan, num_scored_tokens: int, policy: str
    ) -> Metrics:
        """A request's metrics before its first step."""
        selection, num_new = plan.selection, len(request.prompt_ids) - cached.num_tokens
        return Metrics(
            num_prompt_tokens=len(request.prompt_ids),
            num_kept_tokens=selection.num_held + len(selection.positions),
            num_scored_tokens=num_scored_tokens,
            sparse_prefill=selection.num_new < num_new,
            sparse_prefill_reason=plan.reason,
            policy=policy,
            precision=self.pair.precision,
            draft_precision=self.pair.draft_precision,
            seed=None if request.sampler.is_greedy else request.params.seed,
            proposer=request.proposer,
            num_new_tokens=num_new,
            num_cached_tokens=cached.num_tokens,
            num_recalled_tokens=selection.num_recalled,
            num_recomputed_tokens=selection.num_recomputed,
            decode_reason=request.decode_note,
            tried_rates=list(selection.tried),
        )


def _score(request: Request, caches: Turn, needs: NeedsScore) -> tuple[Plan, Proposal]:
    """Score the prompt: the plan, and the look-ahead as the first proposal. The look-ahead is greedy."""
    greedy = Sampler(shaper=request.sampler.shaper)
    look_ahead = partial(propose, caches.draft, sampler=greedy, end_ids=request.end_ids)
    own = request.prompt_ids if request.tokenization is None else request.tokenization.token_ids
    num_tokens = max(0, len(own) - caches.draft.num_cached)
    with request.clock.measure("scoring"), request.progress.watch(caches.draft, "scoring", num_tokens):
        return caches.score(needs, look_ahead)


def _for_device(pair: ModelPair, config: SpecStackConfig) -> SpecStackConfig:
    """On a GPU, launches make short prompts of small targets as slow as longer ones: "auto" leaves them dense."""
    if pair.target.device.type != "cuda":
        return config
    target, draft = (text_config(model.config) for model in (pair.target, pair.draft))
    return replace(config, prefill=with_threshold(config.prefill, target, draft, on_gpu=True))


class PrefilledPrompt:
    """A planned prompt after its prefill, sparse or dense. Answers leave the cache as it is.

    request: the plan. selection: the K prompt tokens that the target prefilled. Raises ValueError as `Engine.plan`.
    """

    def __init__(self, engine: Engine, call: Call, observer: Observer | None = None) -> None:
        self._end_ids = engine.pair.end_ids
        self.request = engine.plan(cast(Call, {**call, "gamma": 0}))
        caches = single_turn(engine.pair, self.request, observer)
        plan = caches.plan
        if isinstance(plan, NeedsScore):
            plan, _ = _score(self.request, caches, plan)
        self.selection = plan.selection
        self._target = caches.target
        self._first = self._target.forward(self.selection.token_ids, self.selection.positions, 1)

    @property
    def first_token(self) -> int:
        """The most likely first token of an answer."""
        return int(self._first[-1].argmax())

    def greedy(self, max_tokens: int) -> list[int]:
        """The greedy answer by plain decoding: at most max_tokens tokens, an end-of-sequence token included."""
        target, answer = self._target.fork(), [self.first_token]
        while len(answer) < max_tokens and answer[-1] not in self._end_ids:
            row = target.forward(answer[-1:], [target.next_position], 1)
            answer.append(int(row[-1].argmax()))
        return answer

    def logits(self, answer: Sequence[int]) -> torch.Tensor:
        """Teacher-forced logits (n, vocab) of an answer of n ≥ 1 tokens; row i predicts its token i."""
        seen = list(answer[:-1])
        if not seen:
            return self._first
        start = self._target.next_position
        later = self._target.forward(seen, range(start, start + len(seen)), len(seen))
        self._target.rollback(len(seen))
        return torch.cat([self._first, later])


def token_logprobs(logits: torch.Tensor, answer: Sequence[int]) -> torch.Tensor:
    """Log-probabilities (n,) of an answer's tokens, in fp32; logits (n, vocab)."""
    ids = torch.tensor(answer, device=logits.device)
    return logits.float().log_softmax(dim=-1).gather(1, ids[:, None])[:, 0]
