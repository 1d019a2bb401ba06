"""A planned request over its caches: score, select, decode, count."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from spec_stack.config import SamplingParams, SpecStackConfig
from spec_stack.controller.base import Policy
from spec_stack.controller.lookup import LookupGate
from spec_stack.controller.pool import PolicyPool, Shelf
from spec_stack.decode.loop import decode
from spec_stack.decode.propose import propose
from spec_stack.decode.proposer import Means
from spec_stack.decode.registry import make_proposer
from spec_stack.decode.sampler import Sampler, Shaper
from spec_stack.decode.stopping import Stopper
from spec_stack.engine.caches import Caches, RequestCaches, StoredCaches
from spec_stack.engine.pair import ModelPair
from spec_stack.engine.prefix_store import PrefixStore
from spec_stack.engine.request import CallOptions, Request
from spec_stack.engine.warning import warn_caller
from spec_stack.hf.fused_verify import accept_fused, fused_problem
from spec_stack.hf.model_sampling import ignored_sampling
from spec_stack.hf.processors import ProcessedRows
from spec_stack.hf.prompt import EncodedPrompt, PromptSource
from spec_stack.hf.sampling import make_warp
from spec_stack.hf.text import open_text_stream
from spec_stack.types import Metrics, Proposal, Selection, StepOutput

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftedPrompt:
    """What the draft made of a prompt: the selection, the first proposal, and why so."""

    selection: Selection
    proposal: Proposal
    num_scored_tokens: int
    reason: str


class Engine:
    """Plans requests and runs them over their caches. Several threads may have requests running at once.

    Parameters
    ----------
    pair : ModelPair
        The models.
    config : SpecStackConfig
        What holds where a call says nothing else.
    policy : str or Policy, optional
        What chooses gamma in calls that name none; None is the configuration's.

    Raises
    ------
    ValueError
        For a policy that is none.
    """

    def __init__(self, pair: ModelPair, config: SpecStackConfig, policy: str | Policy | None = None) -> None:
        self.pair, self.config = pair, config
        options: dict[str, Mapping[str, Any]] = {"fixed": {"gamma": config.decode.gamma}}
        options |= {name: {"predictor": file} for name, file in pair.predictors.items()}
        self._pool = PolicyPool(policy if policy is not None else config.decode.policy, options)
        self._gates = Shelf(LookupGate)
        self.store = PrefixStore(config.store.max_tokens)
        self._warned_of: set[str] = set()

    def plan(
        self,
        source: PromptSource,
        params: SamplingParams,
        options: CallOptions,
        held_ids: Sequence[int] = (),
        known: EncodedPrompt | None = None,
    ) -> Request:
        """Check a call and settle what is done for it (see `Request.plan`)."""
        request = Request.plan(self.pair, self.config, self._pool, source, params, options, held_ids, known)
        ignored = ignored_sampling(self.pair.target.generation_config, params) if options.sampling is None else ""
        if ignored:
            self._warn_once(
                "sampling", f'the checkpoint\'s generation config sets {ignored}; sampling="model" applies it'
            )
        if options.keep_rate not in (None, 1) and options.specprefill is None and not (request.scores or held_ids):
            self._warn_once(
                "keep_rate",
                f"keep_rate={options.keep_rate} is not applied ({request.reason}); specprefill=True prunes a prompt "
                "whatever its length",
            )
        return request

    def run(self, request: Request) -> Generator[StepOutput, None, None]:
        """Answer a planned request over caches of its own, which begin with what the store has of its prompt."""
        if self.store.max_tokens:
            return self._run_stored(request)
        return self.answer(request, RequestCaches(self.pair, request))

    def _run_stored(self, request: Request) -> Generator[StepOutput, None, None]:
        request.clock.resume()
        caches = StoredCaches(self.pair, request, self.store)
        try:
            yield from self.answer(request, caches)
        except GeneratorExit:
            caches.remember()
            raise
        caches.remember()

    def answer(self, request: Request, caches: Caches) -> Generator[StepOutput, None, None]:
        """The steps of a planned request over these caches, which they advance; between them its clock stands still."""
        clock = request.clock
        clock.resume()
        with self._pool.lend(request.policy) as policy, self._gates.lend() as gate:
            sampler, seed = self._make_sampler(request)
            stop_tokens, progress = request.stop_tokens, request.progress
            end_ids = stop_tokens.all_ids
            forward_s = -(caches.target.forward_s + caches.draft.forward_s)
            drafted = self._draft_prompt(request, caches, sampler.shaper)
            metrics = self._begin_metrics(request, drafted, caches.num_cached, policy.name, seed)
            steps = decode(
                target=caches.target,
                draft=caches.draft,
                prompt_ids=request.prompt_ids,
                selection=drafted.selection,
                proposal=drafted.proposal,
                policy=policy,
                proposer=make_proposer(request.proposer, Means(caches.draft, sampler, end_ids, gate)),
                sampler=sampler,
                stopper=Stopper(
                    request.params.num_tokens,
                    stop_tokens.end_ids,
                    request.stop_strings,
                    open_text_stream(self.pair.tokenizer, request.prompt_ids),
                    stop_tokens.stop_ids,
                ),
                end_ids=end_ids,
                labels=request.labels,
                clock=clock,
                num_logprobs=request.num_logprobs,
            )
            with progress.watch(caches.target, "prefill", len(drafted.selection.positions)):
                first = next(steps)
            for output in chain([first], steps):
                metrics.add(output.record, clock.elapsed_s)
                if output.record.is_prefill:
                    metrics.scoring_s = output.record.draft_s
                if output.finish_reason is not None:
                    metrics.forward_s = forward_s + caches.target.forward_s + caches.draft.forward_s
                    output = replace(output, metrics=metrics)
                with clock.paused():
                    yield output

    def _draft_prompt(self, request: Request, caches: Caches, shaper: Shaper | None) -> DraftedPrompt:
        """Have the draft score the prompt where that is needed; else, or where it fails, take it all."""
        reason = request.reason
        if caches.needs_scoring:
            sampler = Sampler(shaper=shaper)
            look_ahead = partial(propose, caches.draft, sampler=sampler, end_ids=request.stop_tokens.all_ids)
            num_tokens = request.num_draft_tokens - caches.draft.num_cached
            try:
                with (
                    request.clock.measure("scoring"),
                    request.progress.watch(caches.draft, "scoring", max(0, num_tokens)),
                ):
                    selection, proposal = caches.score(look_ahead)
            except Exception as error:
                if request.prefill.on_scoring_error == "raise":
                    raise
                # Nothing has been handed out yet, so dense prefill is still open, whatever went wrong.
                logger.exception(
                    "scoring a prompt of %d tokens failed; it is prefilled densely", len(request.prompt_ids)
                )
                reason = f"scoring failed, prefilled densely: {type(error).__name__}: {error}"
                self._warn_once("scoring", f"{reason} (metrics.specprefill_reason tells each time)")
                caches.reopen_draft()
            else:
                if request.scores and _num_kept(request, selection) == request.num_new_tokens:
                    reason += f", but chunks and protected spans cover the whole {request.text}"
                return DraftedPrompt(selection, proposal, len(request.prompt_ids), reason)
        return DraftedPrompt(caches.take_all(), Proposal(), 0, reason)

    def _begin_metrics(
        self, request: Request, drafted: DraftedPrompt, num_cached: int, policy: str, seed: int | None
    ) -> Metrics:
        selection = drafted.selection
        return Metrics(
            num_prompt_tokens=len(request.prompt_ids),
            num_kept_tokens=selection.num_held + len(selection.positions),
            num_scored_tokens=drafted.num_scored_tokens,
            specprefill=_num_kept(request, selection) < request.num_new_tokens,
            specprefill_reason=drafted.reason,
            policy=policy,
            precision=self.pair.precision,
            draft_precision=self.pair.draft_precision,
            target_weight_bytes=self.pair.target_weight_bytes,
            draft_weight_bytes=self.pair.draft_weight_bytes,
            seed=seed,
            proposer=request.proposer,
            num_new_tokens=len(request.prompt_ids) - num_cached,
            num_cached_tokens=num_cached,
            num_restored_tokens=selection.num_restored,
            decode_reason="; ".join(filter(None, (self.pair.vocabulary.decode_reason, request.decode_note))),
        )

    def _make_sampler(self, request: Request) -> tuple[Sampler, int | None]:
        """How the request draws, and the seed it draws with; None where it is greedy."""
        params = request.params
        shaper = ProcessedRows(request.processors, request.grammar) if request.is_shaped else None
        warp = make_warp(params.temperature, params.top_k, params.top_p, params.min_p)
        if warp is None:
            return Sampler(shaper=shaper), None
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        accept = accept_fused if fused_problem(self.pair.target.device) is None else None
        return Sampler(warp, torch.Generator(self.pair.target.device).manual_seed(seed), accept, shaper), seed

    def _warn_once(self, topic: str, message: str) -> None:
        """Warn of each topic once."""
        if topic not in self._warned_of:
            self._warned_of.add(topic)
            warn_caller(f"{message} (this is said once)")


def _num_kept(request: Request, selection: Selection) -> int:
    """Tokens kept of the prompt, or in a session of its new text: what a store held of them, and what is prefilled."""
    held = 0 if request.num_cached else selection.num_held
    return held + len(selection.positions) - selection.num_restored
