"""SpecStackGenerator: one draft model for both phases, over transformers models."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Unpack

import torch
from transformers import PreTrainedModel

from spec_stack.config import MAX_LOOK_AHEAD, LoadConfig, SamplingParams, SpecStackConfig
from spec_stack.controller.base import GammaPolicy, StepRecord
from spec_stack.controller.pool import PolicyPool
from spec_stack.controller.registry import CLOCK_POLICY_NAMES, make_policy
from spec_stack.decode.loop import RequestLabels, decode
from spec_stack.decode.propose import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.decode.stopping import Stopper
from spec_stack.hf.architectures import scoring_limit, text_config
from spec_stack.hf.attention import install
from spec_stack.hf.fused_verify import accept_fused, fused_problem
from spec_stack.hf.loading import check_pair, end_token_ids, load_pair, max_positions
from spec_stack.hf.model import CachedModel
from spec_stack.hf.precision import precision_of, settle, weight_bytes
from spec_stack.hf.sampling import make_warp
from spec_stack.offline.records import add_records, check_record_path
from spec_stack.prefill.decide import decide_scoring
from spec_stack.prefill.scoring import score_prompt
from spec_stack.request import Request, StreamOptions, check_length, encode_prompt
from spec_stack.tokenizers.translated_draft import TranslatedDraft
from spec_stack.tokenizers.translation import Translation
from spec_stack.tokenizers.vocabulary import compare
from spec_stack.types import GenerationResult, Metrics, Proposal, Reading, Selection, StepOutput


class SpecStackGenerator:
    """Sparse prefill and speculative decoding with one draft model.

    Requests share only the weights: each has its own caches, so several threads may generate, and several
    streams may be open, at once. A policy by name keeps what it learns from request to request, and no two requests
    have it at once; one handed in as an object is shared by the requests that use it.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        tokenizer: Any = None,
        *,
        precision: str = "",
        draft_precision: str = "",
        config: SpecStackConfig | None = None,
        policy: str | GammaPolicy | None = None,
        predictors: Mapping[str, str | Path] | None = None,
        draft_tokenizer: Any = None,
    ) -> None:
        """Wrap loaded models (with transformers' default attention; it is replaced in place). Raises ValueError for a
        pair that does not fit together. Without a tokenizer only input_ids are taken and no text is made; without
        draft_tokenizer the draft is taken to have the target's (see `tokenizers.vocabulary.compare`). The names of the
        precisions are found out where they are not given. predictors: files of trained predictors, by the name of the
        policy that is to use them."""
        check_pair(target.config, draft.config)
        if target.device != draft.device:
            raise ValueError(f"target and draft are on different devices, {target.device} and {draft.device}")
        vocabulary = compare(
            tokenizer, draft_tokenizer, text_config(target.config).vocab_size, text_config(draft.config).vocab_size
        )
        if config is not None and not isinstance(config, SpecStackConfig):
            raise ValueError(f"config must be a SpecStackConfig, got {type(config).__name__}")
        for model in (target, draft):
            install(model)
            settle(model)
        self.target, self.draft, self.tokenizer = target, draft, tokenizer
        self.vocabulary = vocabulary
        self._translation = (
            Translation(tokenizer, draft_tokenizer, vocabulary) if vocabulary.relation == "other" else None
        )
        self.precision = precision or precision_of(target)
        self.draft_precision = draft_precision or precision_of(draft)
        self._weight_bytes = weight_bytes(target), weight_bytes(draft)
        self.config = config or SpecStackConfig()
        self._policy = policy if policy is not None else self.config.decode.policy
        self._policy_options: dict[str, dict[str, Any]] = {"fixed": {"gamma": self.config.decode.gamma}}
        self._policy_options |= {name: {"predictor": file} for name, file in (predictors or {}).items()}
        self._pool = PolicyPool()
        self._resolve_policy(None, None)
        self._warned = False

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        precision: str = LoadConfig.precision,
        draft_precision: str = LoadConfig.draft_precision,
        device: str | None = None,
        config: SpecStackConfig | None = None,
        policy: str | GammaPolicy | None = None,
        prepack_linears: bool | None = None,
    ) -> SpecStackGenerator:
        """Load a pair from local folders or hub ids; with neither named, the pair embedded in the package.

        precision, draft_precision: "auto" (see LoadConfig), "fp32", "fp16", "bf16", "int8" or "nf4"; the last two
        need spec-stack[quantized]. device: "cpu", "cuda", …; None takes CUDA where there is one. policy: a registered
        name or an object. prepack_linears: lay weights out for the CPU beforehand, which makes them unfit for saving;
        None does so wherever it works. Raises ValueError for what a caller can change: a missing folder, an unfit pair,
        an unknown precision, policy or device, a precision that cannot be had here.
        """
        chosen = policy if policy is not None else (config or SpecStackConfig()).decode.policy
        if isinstance(chosen, str):
            make_policy(chosen)
        pair = load_pair(target, draft, precision, device, prepack_linears, draft_precision)
        return cls(
            pair.target,
            pair.draft,
            pair.tokenizer,
            precision=pair.precision,
            draft_precision=pair.draft_precision,
            config=config,
            policy=policy,
            predictors=pair.predictors,
            draft_tokenizer=pair.draft_tokenizer,
        )

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        input_ids: Sequence[int] | torch.Tensor | None = None,
        return_records: bool = False,
        records: str | Path | None = None,
        **options: Unpack[StreamOptions],
    ) -> GenerationResult:
        """The whole of `stream`, which see for the options.

        return_records keeps one StepRecord per step in the result; records adds them to a .csv or .parquet file
        (see `record_io`), which is made where there is none.
        """
        if records is not None:
            check_record_path(records, options.get("request_id"))
        token_ids: list[int] = []
        texts: list[str] = []
        steps: list[StepRecord] = []
        for output in self.stream(prompt, messages=messages, input_ids=input_ids, **options):
            token_ids += output.token_ids
            texts.append(output.text)
            steps.append(output.record)
        if output.finish_reason is None or output.metrics is None:
            raise RuntimeError("the stream ended without a last step")
        if records is not None:
            add_records(steps, records)
        return GenerationResult(
            token_ids, "".join(texts), output.finish_reason, output.metrics, steps if return_records else None
        )

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        input_ids: Sequence[int] | torch.Tensor | None = None,
        max_tokens: int = SamplingParams.max_tokens,
        temperature: float = SamplingParams.temperature,
        top_k: int = SamplingParams.top_k,
        top_p: float = SamplingParams.top_p,
        seed: int | None = SamplingParams.seed,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool = SamplingParams.ignore_eos,
        keep_rate: float | None = None,
        specprefill: bool | None = None,
        policy: str | GammaPolicy | None = None,
        gamma: int | None = None,
        request_id: str | None = None,
        task: str = "",
    ) -> Iterator[StepOutput]:
        """One StepOutput per step, as soon as it is there; the last one carries finish_reason and metrics.

        Exactly one of prompt, messages (through the tokenizer's chat template) or input_ids is given. See
        SamplingParams for max_tokens … ignore_eos. keep_rate overrides the configuration's for this call;
        specprefill None prunes prompts of min_prompt_tokens or more, True any, False none. gamma is short for
        the fixed policy with that gamma. Policies that watch the clock propose other lengths in every run, and so
        draw other tokens of the same distribution: where the generator's own policy is one of them, a seeded, sampled
        call that names none is fixed, and by name it gets a policy that has learned nothing yet.
        request_id and task label the records.

        Arguments are checked before this returns: ValueError says what to change. The metrics' durations count from
        the call, without the time that the caller lets pass before or between steps.
        """
        started = perf_counter()
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=_as_tuple(stop),
            ignore_eos=ignore_eos,
        )
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; this generator was made without one")
        is_seeded = seed is not None and temperature > 0
        if is_seeded and policy is None and gamma is None and self._policy in CLOCK_POLICY_NAMES:
            policy = "fixed"
        lend_policy = self._resolve_policy(policy, gamma, is_seeded)
        if not self.vocabulary.can_propose:
            lend_policy = self._resolve_policy("fixed", 0)
        prompt_ids, protected = encode_prompt(
            self.tokenizer, text_config(self.target.config).vocab_size, prompt, messages, input_ids
        )
        prefill = self.config.prefill if keep_rate is None else replace(self.config.prefill, keep_rate=keep_rate)
        reading, obstacle = self._read(prompt_ids)
        num_read = len(prompt_ids) if reading is None else len(reading.token_ids)
        scores, reason = decide_scoring(
            specprefill, prefill, len(prompt_ids), protected, num_read, scoring_limit(self.draft.config)
        )
        if scores and obstacle:
            scores, reason = False, f"off: {obstacle}"
        # Where nothing can be proposed there is nothing to look ahead with either.
        room = MAX_LOOK_AHEAD if self.vocabulary.can_propose else 0
        for role, model, num_tokens in (("target", self.target, len(prompt_ids)), ("draft", self.draft, num_read)):
            limit = max_positions(model.config)
            check_length(role, num_tokens, params.max_tokens, limit)
            room = min(room, limit - num_tokens)
        prefill = replace(prefill, look_ahead=min(prefill.look_ahead, room))
        request = Request(
            prompt_ids=prompt_ids,
            protected=protected,
            params=params,
            prefill=prefill,
            scores=scores,
            reason=reason,
            lend_policy=lend_policy,
            labels=RequestLabels(request_id or secrets.token_hex(4), self.precision, task),
            prepared_s=perf_counter() - started,
            reading=reading,
        )
        return self._run(request)

    def _read(self, prompt_ids: list[int]) -> tuple[Reading | None, str]:
        """The prompt as a draft with another tokenizer reads it, and why it cannot score it, if so."""
        if self._translation is None:
            return None, ""
        try:
            return self._translation.read(prompt_ids), ""
        except ValueError as error:
            reading = self._translation.read_by_token(prompt_ids) if self.vocabulary.can_propose else None
            return reading, f"the draft has another tokenizer, and {error}"

    def _resolve_policy(
        self, policy: str | GammaPolicy | None, gamma: int | None, is_fresh: bool = False
    ) -> Callable[[], AbstractContextManager[GammaPolicy]]:
        if gamma is not None:
            if policy is not None and policy != "fixed":
                raise ValueError("gamma sets the fixed policy; give gamma or another policy, not both")
            make_policy("fixed", gamma=gamma)
            return partial(self._pool.lend, "fixed", gamma=gamma)
        chosen = policy if policy is not None else self._policy
        if isinstance(chosen, GammaPolicy) and not isinstance(chosen, type):
            return lambda: nullcontext(chosen)
        if not isinstance(chosen, str):
            raise ValueError(
                f"policy must be a name or an object with name, choose, keep_drafting and observe, got {chosen!r}"
            )
        options = self._policy_options.get(chosen, {})
        # Made here to refuse a bad name at the call; a seeded request also wants a policy without a past.
        made = make_policy(chosen, **options)
        return (lambda: nullcontext(made)) if is_fresh else partial(self._pool.lend, chosen, **options)

    def _run(self, request: Request) -> Iterator[StepOutput]:
        with request.lend_policy() as policy:
            yield from self._steps(request, policy)

    def _steps(self, request: Request, policy: GammaPolicy) -> Iterator[StepOutput]:
        started = perf_counter() - request.prepared_s
        params, prompt_ids = request.params, request.prompt_ids
        sampler, seed = self._make_sampler(params)
        end_ids = frozenset() if params.ignore_eos else end_token_ids(self.target)
        selection, proposal, draft, reason, num_scored = self._prefill_draft(request, end_ids)
        scoring_s = perf_counter() - started - request.prepared_s if request.scores else 0.0
        metrics = Metrics(
            num_prompt_tokens=len(prompt_ids),
            num_kept_tokens=len(selection.positions),
            num_scored_tokens=num_scored,
            specprefill=len(selection.positions) < len(prompt_ids),
            specprefill_reason=reason,
            policy=policy.name,
            precision=self.precision,
            draft_precision=self.draft_precision,
            target_weight_bytes=self._weight_bytes[0],
            draft_weight_bytes=self._weight_bytes[1],
            seed=seed,
            decode_reason=self.vocabulary.decode_reason,
            scoring_s=scoring_s,
        )
        target = CachedModel(self.target, request.prefill.prefill_chunk)
        steps = decode(
            target=target,
            draft=draft,
            prompt_ids=prompt_ids,
            selection=selection,
            proposal=proposal,
            policy=policy,
            sampler=sampler,
            stopper=Stopper(params.max_tokens, end_ids, params.stop, self._decode_text()),
            end_ids=end_ids,
            labels=request.labels,
            scoring_s=scoring_s,
        )
        for output in steps:
            _count(metrics, output.record, perf_counter() - started)
            if output.finish_reason is not None:
                metrics.forward_s = target.forward_s + draft.forward_s
                output = replace(output, metrics=metrics)
            paused = perf_counter()
            yield output
            started += perf_counter() - paused

    def _prefill_draft(
        self, request: Request, end_ids: Collection[int]
    ) -> tuple[Selection, Proposal, CachedModel | TranslatedDraft, str, int]:
        """Selection, first proposal, the draft as scoring left it, the reason for the selection, and the number of
        prompt tokens that were scored for it."""
        draft = self._open_draft(request)
        reason = request.reason
        if request.scores:
            look_ahead = partial(propose, draft, sampler=Sampler(), end_ids=end_ids)
            try:
                selection, proposal = score_prompt(
                    draft, request.prompt_ids, look_ahead, request.prefill, request.protected, request.reading
                )
                if len(selection.positions) == len(request.prompt_ids):
                    reason += ", but chunks and protected spans cover the whole prompt"
                return selection, proposal, draft, reason, len(request.prompt_ids)
            except Exception as error:
                # Nothing has been handed out yet, so dense prefill is still open, whatever went wrong.
                reason = f"scoring failed, prefilled densely: {type(error).__name__}: {error}"
                self._warn_once(reason)
                draft = self._open_draft(request)
        return Selection.everything(request.prompt_ids), Proposal(), draft, reason, 0

    def _open_draft(self, request: Request) -> CachedModel | TranslatedDraft:
        chunk = request.prefill.prefill_chunk
        if self._translation is not None and request.reading is not None:
            return TranslatedDraft(CachedModel(self.draft, chunk), self._translation, request.reading)
        return CachedModel(self.draft, chunk, num_ids=self.vocabulary.num_target)

    def _make_sampler(self, params: SamplingParams) -> tuple[Sampler, int | None]:
        warp = make_warp(params.temperature, params.top_k, params.top_p)
        if warp is None:
            return Sampler(), None
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        accept = accept_fused if fused_problem(self.target.device) is None else None
        return Sampler(warp, torch.Generator(self.target.device).manual_seed(seed), accept), seed

    def _decode_text(self) -> Callable[[list[int]], str] | None:
        if self.tokenizer is None:
            return None
        decode_text: Callable[[list[int]], str] = partial(self.tokenizer.decode, skip_special_tokens=True)
        return decode_text

    def _warn_once(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"{reason} (this is said once; metrics.specprefill_reason tells each time)", stacklevel=2)


def _count(metrics: Metrics, record: StepRecord, elapsed_s: float) -> None:
    if record.is_prefill:
        metrics.ttft_s = elapsed_s
        metrics.num_first_tokens = record.num_tokens
    metrics.total_s = elapsed_s
    metrics.num_tokens += record.num_tokens
    metrics.num_proposed += record.gamma
    metrics.num_accepted += record.num_accepted
    metrics.draft_s += record.draft_s
    metrics.verify_s += record.verify_s
    metrics.controller_s += record.controller_s
    metrics.gamma_trace.append(record.gamma)


def _as_tuple(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        return (stop,)
    if not isinstance(stop, Sequence):
        raise ValueError(f"stop must be a string or a list of strings, got {stop!r}")
    return tuple(stop)
