"""SpecStackGenerator: one draft model for both phases, over transformers models."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from spec_stack.backends.attention import install
from spec_stack.backends.cached_model import CachedModel
from spec_stack.backends.chat import Span, encode_messages, encode_text
from spec_stack.backends.loading import check_pair, end_token_ids, load_pair, max_positions
from spec_stack.backends.sampling import make_warp
from spec_stack.config import PrefillConfig, SpecStackConfig
from spec_stack.controller.policies import make_policy
from spec_stack.controller.pool import PolicyPool
from spec_stack.decode.draft import propose
from spec_stack.decode.loop import RequestLabels, decode
from spec_stack.decode.sampler import Sampler
from spec_stack.decode.stopping import Stopper
from spec_stack.prefill.sparse import score_prompt
from spec_stack.record_io import add_records, check_record_path
from spec_stack.records import GammaPolicy, StepRecord
from spec_stack.types import GenerationResult, Metrics, Proposal, SamplingParams, Selection, StepOutput


@dataclass(frozen=True)
class _Request:
    prompt_ids: list[int]
    protected: list[Span]
    params: SamplingParams
    prefill: PrefillConfig
    scores: bool
    reason: str
    lend_policy: Callable[[], AbstractContextManager[GammaPolicy]]
    labels: RequestLabels
    started: float


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
        config: SpecStackConfig | None = None,
        policy: str | GammaPolicy | None = None,
    ) -> None:
        """Wrap loaded models (with attn_implementation="sdpa"; it is replaced in place). Raises ValueError for a
        pair that does not fit together. Without a tokenizer only input_ids are taken and no text is made."""
        check_pair(target.config, draft.config)
        install(target)
        install(draft)
        self.target, self.draft, self.tokenizer = target, draft, tokenizer
        self.precision = precision or str(target.dtype).removeprefix("torch.")
        self.config = config or SpecStackConfig()
        self._policy = policy if policy is not None else self.config.decode.policy
        self._pool = PolicyPool()
        self._resolve_policy(None, None)
        self._warned = False

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        precision: str = "auto",
        device: str | None = None,
        config: SpecStackConfig | None = None,
        policy: str | GammaPolicy | None = None,
    ) -> SpecStackGenerator:
        """Load a pair from local folders or hub ids; with neither named, the pair embedded in the package.

        precision: "auto" (fp32 on a CPU, bf16 elsewhere), "fp32", "fp16" or "bf16". device: "cpu", "cuda", …; None
        takes CUDA where there is one. policy: a registered name or an object. Raises ValueError for what a
        caller can change: a missing folder, an unfit pair, an unknown precision, policy or device.
        """
        if isinstance(policy, str):
            make_policy(policy)
        pair = load_pair(target, draft, precision, device)
        return cls(pair.target, pair.draft, pair.tokenizer, precision=pair.precision, config=config, policy=policy)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        input_ids: Sequence[int] | torch.Tensor | None = None,
        return_records: bool = False,
        records: str | Path | None = None,
        **options: Any,
    ) -> GenerationResult:
        """The whole of `stream`, which see for the options.

        return_records keeps one StepRecord per step in the result; records adds them to a .csv or .parquet file
        (see `record_io`), which is made where there is none.
        """
        if records is not None:
            check_record_path(records)
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
        the fixed policy with that gamma. A seeded, sampled call that names neither is fixed too: policies that
        watch the clock propose other lengths in every run, and so draw other tokens of the same distribution.
        request_id and task label the records.

        Arguments are checked before this returns: ValueError says what to change.
        """
        started = perf_counter()
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            ignore_eos=ignore_eos,
        )
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; this generator was made without one")
        prefill = self.config.prefill if keep_rate is None else replace(self.config.prefill, keep_rate=keep_rate)
        if policy is None and gamma is None and seed is not None and temperature > 0:
            policy = "fixed"
        prompt_ids, protected = self._encode(prompt, messages, input_ids)
        self._check_length(len(prompt_ids), params.max_tokens)
        scores, reason = _decide(specprefill, prefill, len(prompt_ids))
        request = _Request(
            prompt_ids=prompt_ids,
            protected=protected,
            params=params,
            prefill=prefill,
            scores=scores,
            reason=reason,
            lend_policy=self._resolve_policy(policy, gamma),
            labels=RequestLabels(request_id or secrets.token_hex(4), self.precision, task),
            started=started,
        )
        return self._run(request)

    def _encode(
        self,
        prompt: str | None,
        messages: Sequence[Mapping[str, str]] | None,
        input_ids: Sequence[int] | torch.Tensor | None,
    ) -> tuple[list[int], list[Span]]:
        if sum(given is not None for given in (prompt, messages, input_ids)) != 1:
            raise ValueError("give exactly one of prompt, messages or input_ids")
        protected: list[Span] = []
        if input_ids is not None:
            ids = torch.as_tensor(input_ids)
            if ids.dim() == 2 and ids.shape[0] == 1:
                ids = ids[0]
            if ids.dim() != 1 or (ids.numel() and (ids.is_floating_point() or ids.is_complex())):
                raise ValueError(f"input_ids must be one sequence of ints, got shape {tuple(ids.shape)}")
            prompt_ids = ids.tolist()
            vocab_size = self.target.config.vocab_size
            if prompt_ids and not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
                raise ValueError(f"input_ids must lie in 0…{vocab_size - 1}, the target's vocabulary")
        elif self.tokenizer is None:
            raise ValueError("this generator was made without a tokenizer; give input_ids")
        elif messages is not None:
            prompt_ids, protected = encode_messages(self.tokenizer, messages)
        else:
            prompt_ids = encode_text(self.tokenizer, prompt) if prompt else []
        if not prompt_ids:
            raise ValueError("the prompt is empty; give at least one token")
        return prompt_ids, protected

    def _check_length(self, num_prompt_tokens: int, max_tokens: int) -> None:
        limit = min(max_positions(self.target.config), max_positions(self.draft.config))
        if num_prompt_tokens + max_tokens > limit:
            raise ValueError(
                f"{num_prompt_tokens} prompt tokens + max_tokens={max_tokens} exceed the models' {limit} positions; "
                "shorten the prompt or lower max_tokens"
            )

    def _resolve_policy(
        self, policy: str | GammaPolicy | None, gamma: int | None
    ) -> Callable[[], AbstractContextManager[GammaPolicy]]:
        if gamma is not None:
            if policy is not None and policy != "fixed":
                raise ValueError("gamma sets the fixed policy; give gamma or another policy, not both")
            make_policy("fixed", gamma=gamma)
            return partial(self._pool.lend, "fixed", gamma=gamma)
        chosen = policy if policy is not None else self._policy
        if isinstance(chosen, GammaPolicy):
            return lambda: nullcontext(chosen)
        if not isinstance(chosen, str):
            raise ValueError(f"policy must be a name or have choose, keep_drafting and observe, got {chosen!r}")
        options = {"gamma": self.config.decode.gamma} if chosen == "fixed" else {}
        # Made here once to refuse a bad name at the call, before the request runs.
        make_policy(chosen, **options)
        return partial(self._pool.lend, chosen, **options)

    def _run(self, request: _Request) -> Iterator[StepOutput]:
        with request.lend_policy() as policy:
            yield from self._steps(request, policy)

    def _steps(self, request: _Request, policy: GammaPolicy) -> Iterator[StepOutput]:
        params, prompt_ids = request.params, request.prompt_ids
        sampler, seed = self._make_sampler(params)
        end_ids = frozenset() if params.ignore_eos else end_token_ids(self.target)
        look_ahead = partial(propose, sampler=Sampler(), end_ids=end_ids)
        selection, proposal, draft, reason = self._prefill_draft(request, look_ahead)
        metrics = Metrics(
            num_prompt_tokens=len(prompt_ids),
            num_kept_tokens=len(selection.positions),
            num_scored_tokens=len(prompt_ids) if request.scores else 0,
            specprefill=len(selection.positions) < len(prompt_ids),
            specprefill_reason=reason,
            policy=policy.name,
            precision=self.precision,
            seed=seed,
            scoring_s=perf_counter() - request.started if request.scores else 0.0,
        )
        target = CachedModel(self.target, request.prefill.prefill_chunk)
        stopper = Stopper(params.max_tokens, end_ids, params.stop, self._decode_text())
        steps = decode(
            target=target,
            draft=draft,
            prompt_ids=prompt_ids,
            selection=selection,
            proposal=proposal,
            policy=policy,
            sampler=sampler,
            stopper=stopper,
            end_ids=end_ids,
            labels=request.labels,
        )
        for output in steps:
            _count(metrics, output.record, perf_counter() - request.started)
            if output.finish_reason is not None:
                metrics.forward_s = target.forward_s + draft.forward_s
                output = replace(output, metrics=metrics)
            yield output

    def _prefill_draft(
        self, request: _Request, look_ahead: Callable[[CachedModel, Sequence[int], int], Proposal]
    ) -> tuple[Selection, Proposal, CachedModel, str]:
        """Selection, first proposal, the draft as scoring left it, and the reason for the selection."""
        draft = CachedModel(self.draft, request.prefill.prefill_chunk)
        reason = request.reason
        if request.scores:
            try:
                selection, proposal = score_prompt(
                    draft, request.prompt_ids, partial(look_ahead, draft), request.prefill, request.protected
                )
                return selection, proposal, draft, reason
            except Exception as error:
                # Nothing has been handed out yet, so dense prefill is still open, whatever went wrong.
                reason = f"scoring failed, prefilled densely: {type(error).__name__}: {error}"
                self._warn_once(reason)
                draft = CachedModel(self.draft, request.prefill.prefill_chunk)
        return Selection.everything(request.prompt_ids), Proposal(), draft, reason

    def _make_sampler(self, params: SamplingParams) -> tuple[Sampler, int | None]:
        warp = make_warp(params.temperature, params.top_k, params.top_p)
        if warp is None:
            return Sampler(), None
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        return Sampler(warp, torch.Generator(self.target.device).manual_seed(seed)), seed

    def _decode_text(self) -> Callable[[list[int]], str] | None:
        if self.tokenizer is None:
            return None
        decode_text: Callable[[list[int]], str] = partial(self.tokenizer.decode, skip_special_tokens=True)
        return decode_text

    def _warn_once(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"{reason} (this is said once; metrics.specprefill_reason tells each time)", stacklevel=2)


def _decide(specprefill: bool | None, config: PrefillConfig, num_prompt_tokens: int) -> tuple[bool, str]:
    """Whether to score the prompt, and why."""
    if specprefill is False:
        return False, "off: the call asked for dense prefill"
    if config.keep_rate == 1:
        return False, "off: keep_rate is 1.0"
    if specprefill is True:
        return True, "on: the call asked for it"
    if num_prompt_tokens < config.min_prompt_tokens:
        return False, f"off: the prompt is shorter than min_prompt_tokens={config.min_prompt_tokens}"
    return True, f"on: the prompt has min_prompt_tokens={config.min_prompt_tokens} or more"


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
