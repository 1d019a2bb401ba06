"""SpecStackGenerator: one draft model for both phases, over transformers models."""

from __future__ import annotations

import logging
import secrets
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from spec_stack.config import LoadConfig, SamplingParams, SpecStackConfig
from spec_stack.controller.base import Policy
from spec_stack.controller.pool import PolicyPool
from spec_stack.controller.registry import make_policy
from spec_stack.decode.loop import decode
from spec_stack.decode.propose import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.decode.stopping import Stopper
from spec_stack.hf.fused_verify import accept_fused, fused_problem
from spec_stack.hf.sampling import make_warp
from spec_stack.hf.text import open_text_stream
from spec_stack.offline.records import add_records, check_record_path
from spec_stack.options import refuses_unknown_options
from spec_stack.pair import DraftModel, ModelPair
from spec_stack.prefill.scoring import score_prompt
from spec_stack.request import CallOptions, Request
from spec_stack.types import GenerationResult, Metrics, Proposal, Selection, StepOutput

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftedPrompt:
    """What the draft made of a prompt: the selection, the first proposal, itself as scoring left it, and why so."""

    selection: Selection
    proposal: Proposal
    draft: DraftModel
    num_scored_tokens: int
    reason: str


class SpecStackGenerator:
    """Sparse prefill and speculative decoding with one draft model.

    Requests share only the weights: each has its own caches, so several threads may generate, and several streams may
    be open, at once. A policy by name keeps what it learns from request to request, and no two requests have it at
    once; one handed in as an object is shared by the requests that use it.

    Parameters
    ----------
    target, draft : PreTrainedModel
        Loaded models, on one device, with transformers' default attention (which is replaced in place).
    tokenizer : optional
        The target's. Without one only `input_ids` are taken and no text is made.
    precision, draft_precision : str, optional
        Names of the models' precisions; found out where they are not given.
    config : SpecStackConfig, optional
        How prompts are pruned and tokens drafted, for all calls that do not say otherwise.
    policy : str or Policy, optional
        What chooses gamma in calls that name none; the configuration's by default.
    predictors : mapping of str to str or Path, optional
        Files of trained predictors, by the name of the policy that is to use them.
    draft_tokenizer : optional
        The draft's; without one it is taken to be the target's (`tokenizers.vocabulary.compare`).

    Raises
    ------
    ValueError
        For a pair that does not fit together, and a configuration or a policy that is none.

    Examples
    --------
    >>> from spec_stack import SpecStackGenerator
    >>> generator = SpecStackGenerator.from_pretrained()  # the pair embedded in the package, offline
    >>> generator.generate("def main():", max_tokens=8).finish_reason
    'length'
    """

    @refuses_unknown_options
    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        tokenizer: Any = None,
        *,
        precision: str = "",
        draft_precision: str = "",
        config: SpecStackConfig | None = None,
        policy: str | Policy | None = None,
        predictors: Mapping[str, str | Path] | None = None,
        draft_tokenizer: Any = None,
    ) -> None:
        pair = ModelPair.assemble(target, draft, tokenizer, draft_tokenizer, precision, draft_precision, predictors)
        self._set_up(pair, config, policy)

    def _set_up(self, pair: ModelPair, config: SpecStackConfig | None, policy: str | Policy | None) -> None:
        self.pair = pair
        self.target, self.draft, self.tokenizer = pair.target, pair.draft, pair.tokenizer
        self.vocabulary = pair.vocabulary
        self.precision, self.draft_precision = pair.precision, pair.draft_precision
        self.config = _checked(config)
        options: dict[str, dict[str, Any]] = {"fixed": {"gamma": self.config.decode.gamma}}
        options |= {name: {"predictor": file} for name, file in pair.predictors.items()}
        self._pool = PolicyPool(policy if policy is not None else self.config.decode.policy, options)
        self._warned = False

    @classmethod
    @refuses_unknown_options
    def from_pretrained(
        cls,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        precision: str = LoadConfig.precision,
        draft_precision: str = LoadConfig.draft_precision,
        device: str | None = None,
        config: SpecStackConfig | None = None,
        policy: str | Policy | None = None,
        prepack_linears: bool | None = None,
    ) -> SpecStackGenerator:
        """Load a pair.

        Parameters
        ----------
        target, draft : str or Path, optional
            Local folders or hub ids; with neither named, the pair embedded in the package.
        precision, draft_precision : {"auto", "fp32", "fp16", "bf16", "int8", "nf4"}
            Of the weights (see `LoadConfig`); the last two need the extra `quantized`.
        device : str, optional
            "cpu", "cuda", "cuda:1", …; None takes CUDA where there is one.
        config : SpecStackConfig, optional
            How prompts are pruned and tokens drafted, for all calls that do not say otherwise.
        policy : str or Policy, optional
            What chooses gamma in calls that name none; the configuration's by default.
        prepack_linears : bool, optional
            Lay weights out for the CPU beforehand, which makes them unfit for saving; None does so wherever it works.

        Returns
        -------
        SpecStackGenerator

        Raises
        ------
        ValueError
            For what a caller can change: a missing folder, an unfit pair, an unknown precision, policy or device, a
            precision that cannot be had here. All of it before the weights are read.
        """
        chosen = policy if policy is not None else _checked(config).decode.policy
        if isinstance(chosen, str):
            # Before the weights are read, which can take minutes.
            make_policy(chosen)
        generator = cls.__new__(cls)
        pair = ModelPair.load(
            target,
            draft,
            precision=precision,
            draft_precision=draft_precision,
            device=device,
            prepack_linears=prepack_linears,
        )
        generator._set_up(pair, config, policy)
        return generator

    @refuses_unknown_options
    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        input_ids: Sequence[int] | torch.Tensor | None = None,
        params: SamplingParams | None = None,
        max_tokens: int = SamplingParams.max_tokens,
        temperature: float = SamplingParams.temperature,
        top_k: int = SamplingParams.top_k,
        top_p: float = SamplingParams.top_p,
        seed: int | None = SamplingParams.seed,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = SamplingParams.ignore_eos,
        keep_rate: float | None = None,
        specprefill: bool | None = None,
        policy: str | Policy | None = None,
        gamma: int | None = None,
        request_id: str | None = None,
        task: str = "",
        return_records: bool = False,
        records: str | Path | None = None,
    ) -> GenerationResult:
        """Answer or continue a prompt.

        Exactly one of `prompt`, `messages` and `input_ids` is given.

        Parameters
        ----------
        prompt : str, optional
            A text to go on with.
        messages : sequence of mapping, optional
            A chat, `{"role": ..., "content": ...}` each, rendered by the tokenizer's template. System messages and the
            template's own tokens are never pruned.
        input_ids : sequence of int or torch.Tensor, optional
            Token ids (N,) or (1, N) of the target.
        params : SamplingParams, optional
            The options from max_tokens to ignore_eos as one object, in their place.
        max_tokens : int
            Most tokens to generate.
        temperature : float
            0 is greedy.
        top_k : int
            Draw among this many most likely tokens; 0 is off.
        top_p : float
            Draw among the most likely tokens that have this share of the probability; 1.0 is off.
        seed : int, optional
            Makes a sampled call reproducible. Policies that watch the clock propose other lengths in every run, and so
            draw other tokens of the same distribution: where the generator's own is one of them, a seeded call that
            names no policy is "fixed"; one named by the call has learned nothing yet.
        stop : str or sequence of str, optional
            Strings that end the text; they are not part of it.
        ignore_eos : bool
            Go on past the end-of-sequence token (for benchmarks).
        keep_rate : float, optional
            Share of the prompt that the target prefills, over 0 to 1; None is the configuration's.
        specprefill : bool, optional
            Prune the prompt: True whatever its length, False never, None from `PrefillConfig.min_prompt_tokens` tokens
            on.
        policy : str or Policy, optional
            What chooses gamma, the number of tokens drafted in a step; None is the generator's.
        gamma : int, optional
            Short for the policy "fixed" with this many tokens, 0 to 16; 0 is plain decoding.
        request_id, task : str, optional
            Labels of the records.
        return_records : bool
            Keep one StepRecord per step in the result.
        records : str or Path, optional
            Append the records to this .jsonl file, which is made where there is none (`offline.records`).

        Returns
        -------
        GenerationResult
            token_ids, text, finish_reason ("eos", "stop" or "length"), metrics, records.

        Raises
        ------
        ValueError
            For a value that cannot be used, before any work; the message says what to change.
        TypeError
            For an unknown option; the message names the nearest one.

        Examples
        --------
        >>> from spec_stack import SpecStackGenerator
        >>> generator = SpecStackGenerator.from_pretrained()
        >>> result = generator.generate("def main():", max_tokens=8, gamma=4)
        >>> len(result.token_ids), result.metrics.num_prompt_tokens
        (8, 4)
        """
        if records is not None:
            check_record_path(records, request_id)
        request = self._plan(
            prompt,
            messages,
            input_ids,
            _merged(params, max_tokens, temperature, top_k, top_p, seed, stop, ignore_eos),
            CallOptions(keep_rate, specprefill, policy, gamma, request_id, task),
        )
        outputs = list(self._run(request))
        steps = [output.record for output in outputs]
        last = outputs[-1]
        if last.finish_reason is None or last.metrics is None:
            raise RuntimeError("the stream ended without a last step")
        if records is not None:
            add_records(steps, records)
        return GenerationResult(
            token_ids=[token_id for output in outputs for token_id in output.token_ids],
            text="".join(output.text for output in outputs),
            finish_reason=last.finish_reason,
            metrics=last.metrics,
            records=steps if return_records else None,
        )

    @refuses_unknown_options
    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        input_ids: Sequence[int] | torch.Tensor | None = None,
        params: SamplingParams | None = None,
        max_tokens: int = SamplingParams.max_tokens,
        temperature: float = SamplingParams.temperature,
        top_k: int = SamplingParams.top_k,
        top_p: float = SamplingParams.top_p,
        seed: int | None = SamplingParams.seed,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = SamplingParams.ignore_eos,
        keep_rate: float | None = None,
        specprefill: bool | None = None,
        policy: str | Policy | None = None,
        gamma: int | None = None,
        request_id: str | None = None,
        task: str = "",
    ) -> Iterator[StepOutput]:
        """Answer or continue a prompt, step by step.

        The arguments are checked before this returns; the work begins with the first `next`.

        Parameters
        ----------
        prompt, messages, input_ids
            The prompt: exactly one of a text, a chat, and token ids (N,) or (1, N).
        params : SamplingParams, optional
            The options from max_tokens to ignore_eos as one object, in their place.
        max_tokens : int
            Most tokens to generate.
        temperature : float
            0 is greedy.
        top_k : int
            Draw among this many most likely tokens; 0 is off.
        top_p : float
            Draw among the most likely tokens that have this share of the probability; 1.0 is off.
        seed : int, optional
            Makes a sampled call reproducible (see `generate`).
        stop : str or sequence of str, optional
            Strings that end the text; they are not part of it.
        ignore_eos : bool
            Go on past the end-of-sequence token (for benchmarks).
        keep_rate : float, optional
            Share of the prompt that the target prefills, over 0 to 1; None is the configuration's.
        specprefill : bool, optional
            Prune the prompt: True whatever its length, False never, None from `PrefillConfig.min_prompt_tokens` tokens
            on.
        policy : str or Policy, optional
            What chooses gamma, the number of tokens drafted in a step; None is the generator's.
        gamma : int, optional
            Short for the policy "fixed" with this many tokens, 0 to 16; 0 is plain decoding.
        request_id, task : str, optional
            Labels of the records.

        Returns
        -------
        iterator of StepOutput
            One per step, as soon as it is there; the last carries finish_reason and metrics, whose durations count from
            the call, without the time that the caller lets pass before or between steps.

        Raises
        ------
        ValueError
            For a value that cannot be used; the message says what to change.
        TypeError
            For an unknown option; the message names the nearest one.

        Examples
        --------
        >>> from spec_stack import SpecStackGenerator
        >>> generator = SpecStackGenerator.from_pretrained()
        >>> sum(len(output.token_ids) for output in generator.stream("def main():", max_tokens=8))
        8
        """
        request = self._plan(
            prompt,
            messages,
            input_ids,
            _merged(params, max_tokens, temperature, top_k, top_p, seed, stop, ignore_eos),
            CallOptions(keep_rate, specprefill, policy, gamma, request_id, task),
        )
        return self._run(request)

    def _plan(
        self,
        prompt: str | None,
        messages: Sequence[Mapping[str, str]] | None,
        input_ids: Sequence[int] | torch.Tensor | None,
        params: SamplingParams,
        options: CallOptions,
    ) -> Request:
        return Request.plan(
            self.pair,
            self.config,
            self._pool,
            prompt=prompt,
            messages=messages,
            input_ids=input_ids,
            params=params,
            options=options,
        )

    def _run(self, request: Request) -> Iterator[StepOutput]:
        """The request's steps; between them its clock stands still."""
        clock, params = request.clock, request.params
        clock.resume()
        with self._pool.lend(request.policy) as policy:
            sampler, seed = self._make_sampler(params)
            end_ids = frozenset() if params.ignore_eos else self.pair.end_ids
            drafted = self._draft_prompt(request, end_ids)
            target = self.pair.open_target(request.prefill.prefill_chunk)
            metrics = self._begin_metrics(request, drafted, policy.name, seed)
            steps = decode(
                target=target,
                draft=drafted.draft,
                prompt_ids=request.prompt_ids,
                selection=drafted.selection,
                proposal=drafted.proposal,
                policy=policy,
                sampler=sampler,
                stopper=Stopper(
                    params.max_tokens,
                    end_ids,
                    params.stop_strings,
                    open_text_stream(self.tokenizer, request.prompt_ids),
                ),
                end_ids=end_ids,
                labels=request.labels,
                clock=clock,
            )
            for output in steps:
                metrics.add(output.record, clock.elapsed_s)
                if output.record.is_prefill:
                    metrics.scoring_s = output.record.draft_s
                if output.finish_reason is not None:
                    metrics.forward_s = target.forward_s + drafted.draft.forward_s
                    output = replace(output, metrics=metrics)
                with clock.paused():
                    yield output

    def _draft_prompt(self, request: Request, end_ids: Collection[int]) -> DraftedPrompt:
        """Have the draft score the prompt where that was planned; else, or where it fails, take the whole prompt."""
        draft = self.pair.open_draft(request.prefill.prefill_chunk, request.tokenization)
        reason = request.reason
        if request.scores:
            look_ahead = partial(propose, draft, sampler=Sampler(), end_ids=end_ids)
            try:
                with request.clock.measure("scoring"):
                    selection, proposal = score_prompt(
                        draft, request.prompt_ids, look_ahead, request.prefill, request.protected, request.tokenization
                    )
            except Exception as error:
                if request.prefill.on_scoring_error == "raise":
                    raise
                # Nothing has been handed out yet, so dense prefill is still open, whatever went wrong.
                logger.exception(
                    "scoring a prompt of %d tokens failed; it is prefilled densely", len(request.prompt_ids)
                )
                reason = f"scoring failed, prefilled densely: {type(error).__name__}: {error}"
                self._warn_once(reason)
                draft = self.pair.open_draft(request.prefill.prefill_chunk, request.tokenization)
            else:
                if len(selection.positions) == len(request.prompt_ids):
                    reason += ", but chunks and protected spans cover the whole prompt"
                return DraftedPrompt(selection, proposal, draft, len(request.prompt_ids), reason)
        return DraftedPrompt(Selection.everything(request.prompt_ids), Proposal(), draft, 0, reason)

    def _begin_metrics(self, request: Request, drafted: DraftedPrompt, policy: str, seed: int | None) -> Metrics:
        num_prompt, num_kept = len(request.prompt_ids), len(drafted.selection.positions)
        return Metrics(
            num_prompt_tokens=num_prompt,
            num_kept_tokens=num_kept,
            num_scored_tokens=drafted.num_scored_tokens,
            specprefill=num_kept < num_prompt,
            specprefill_reason=drafted.reason,
            policy=policy,
            precision=self.precision,
            draft_precision=self.draft_precision,
            target_weight_bytes=self.pair.target_weight_bytes,
            draft_weight_bytes=self.pair.draft_weight_bytes,
            seed=seed,
            decode_reason=self.vocabulary.decode_reason,
        )

    def _make_sampler(self, params: SamplingParams) -> tuple[Sampler, int | None]:
        """How the request draws, and the seed it draws with; None where it is greedy."""
        warp = make_warp(params.temperature, params.top_k, params.top_p)
        if warp is None:
            return Sampler(), None
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        accept = accept_fused if fused_problem(self.target.device) is None else None
        return Sampler(warp, torch.Generator(self.target.device).manual_seed(seed), accept), seed

    def _warn_once(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"{reason} (this is said once; metrics.specprefill_reason tells each time)", stacklevel=2)


def _checked(config: SpecStackConfig | None) -> SpecStackConfig:
    if config is not None and not isinstance(config, SpecStackConfig):
        raise ValueError(f"config must be a SpecStackConfig, got {type(config).__name__}")
    return config or SpecStackConfig()


def _merged(
    params: SamplingParams | None,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    stop: str | Sequence[str] | None,
    ignore_eos: bool,
) -> SamplingParams:
    """The call's sampling options, given as one object or one by one."""
    given = SamplingParams(max_tokens, temperature, top_k, top_p, seed, () if stop is None else stop, ignore_eos)
    if params is None:
        return given
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be a SamplingParams, got {type(params).__name__}")
    if given != SamplingParams():
        raise ValueError("give params or single sampling options (max_tokens, temperature, …), not both")
    return params
