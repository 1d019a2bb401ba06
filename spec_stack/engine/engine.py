"""A planned request over its caches: score, select, decode, count."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from spec_stack.config import SpecStackConfig
from spec_stack.controller.base import Policy
from spec_stack.controller.lookup import LookupGate
from spec_stack.controller.pool import PolicyPool, Shelf
from spec_stack.decode.loop import decode
from spec_stack.decode.proposer import Means
from spec_stack.decode.registry import make_proposer
from spec_stack.engine.conversation import SingleTurn, Turn
from spec_stack.engine.drafted import begin_metrics, draft_prompt
from spec_stack.engine.drawing import drawing_of, stopper_of
from spec_stack.engine.options import Call
from spec_stack.engine.pair import ModelPair
from spec_stack.engine.prefix_store import PrefixStore, StoredTurn
from spec_stack.engine.request import Request, plan_request
from spec_stack.hf.model_sampling import ignored_sampling
from spec_stack.hf.prompt import EncodedPrompt
from spec_stack.types import StepOutput
from spec_stack.warning import OnceEach


class Engine:
    """Plans requests and runs them over their caches. Several threads may have requests running at once."""

    def __init__(self, pair: ModelPair, config: SpecStackConfig, policy: str | Policy | None = None) -> None:
        self.pair, self.config = pair, config
        options: dict[str, Mapping[str, Any]] = {"fixed": {"gamma": config.decode.gamma}}
        options |= {name: {"predictor": file} for name, file in pair.predictors.items()}
        self._pool = PolicyPool(policy if policy is not None else config.decode.policy, options)
        self._gates = Shelf(LookupGate)
        self.store = PrefixStore(config.store.max_tokens)
        self._warnings = OnceEach()

    def plan(
        self,
        call: Call,
        held_ids: Sequence[int] = (),
        known: EncodedPrompt | None = None,
    ) -> Request:
        """Check a call and settle what is done for it (see `plan_request`)."""
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
        """Answer a planned request over caches of its own, which begin with what the store has of its prompt."""
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
        """Make the steps of a planned request over these caches. Its clock stands still between the steps."""
        pair, clock = self.pair, request.clock
        clock.resume()
        with self._pool.lend(request.policy) as policy, self._gates.lend() as gate:
            drawing = drawing_of(request, pair.target)
            models: list[Any] = [caches.draft]
            begun_s = caches.draft.forward_s
            drafted = draft_prompt(request, caches, drawing.look_ahead, self._warnings)
            draft = caches.draft if drafted.num_scored_tokens else caches.draft_beside_dense()
            models += [caches.target] if draft is models[0] else [caches.target, draft]
            begun_s += sum(model.forward_s for model in models[1:])
            metrics = begin_metrics(request, drafted, pair, policy.name, drawing.seed)
            steps = decode(
                target=caches.target,
                draft=draft,
                prompt_ids=request.prompt_ids,
                selection=drafted.selection,
                proposal=drafted.proposal,
                policy=policy,
                proposer=make_proposer(
                    request.proposer,
                    Means(draft, drawing.sampler, request.stop_tokens.all_ids, gate, caches.lookups),
                ),
                sampler=drawing.sampler,
                stopper=stopper_of(request, pair.tokenizer),
                end_ids=request.stop_tokens.all_ids,
                labels=request.labels,
                clock=clock,
                num_logprobs=request.num_logprobs,
            )
            with request.progress.watch(caches.target, "prefill", len(drafted.selection.positions)):
                first = next(steps)
            for output in chain([first], steps):
                metrics.add(output.record, clock.elapsed_s)
                if output.record.is_prefill:
                    metrics.scoring_s = output.record.draft_s
                if output.finish_reason is not None:
                    metrics.forward_s = sum(model.forward_s for model in models) - begun_s
                    output = replace(output, metrics=metrics)
                with clock.paused():
                    yield output
