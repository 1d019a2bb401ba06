"""SpecStackGenerator: one draft model for both phases, over transformers models."""

from __future__ import annotations

import logging
import secrets
import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spec_stack.answering import Answering
from spec_stack.caches import Caches, RequestCaches, StoredCaches
from spec_stack.config import HubConfig, LoadConfig, SamplingParams, SessionConfig, SpecStackConfig
from spec_stack.controller.base import Policy
from spec_stack.controller.lookup import LookupGate
from spec_stack.controller.pool import PolicyPool, Shelf
from spec_stack.controller.registry import policy_class
from spec_stack.decode.loop import decode
from spec_stack.decode.propose import propose
from spec_stack.decode.proposer import Means, make_proposer
from spec_stack.decode.sampler import Sampler, Shaper
from spec_stack.decode.stopping import Stopper
from spec_stack.hf.architectures import text_config
from spec_stack.hf.fused_verify import accept_fused, fused_problem
from spec_stack.hf.loading import ASSETS, DeviceMap
from spec_stack.hf.model_sampling import ignored_sampling
from spec_stack.hf.precision import precision_named
from spec_stack.hf.processors import ProcessedRows
from spec_stack.hf.prompt import EncodedPrompt, Message, PromptSource
from spec_stack.hf.sampling import make_warp
from spec_stack.hf.text import open_text_stream
from spec_stack.options import refuses_unknown_options
from spec_stack.pair import ModelPair
from spec_stack.prefill.calibration import find_calibration
from spec_stack.prefix_store import PrefixStore
from spec_stack.request import CallOptions, Request
from spec_stack.session import Session
from spec_stack.types import GenerationResult, Metrics, Proposal, Selection, StepOutput

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftedPrompt:
    """What the draft made of a prompt: the selection, the first proposal, and why so."""

    selection: Selection
    proposal: Proposal
    num_scored_tokens: int
    reason: str


class SpecStackGenerator(Answering):
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
        self._config = _checked(config)
        options: dict[str, dict[str, Any]] = {"fixed": {"gamma": self.config.decode.gamma}}
        options |= {name: {"predictor": file} for name, file in pair.predictors.items()}
        self._pool = PolicyPool(policy if policy is not None else self.config.decode.policy, options)
        self._gates = Shelf(LookupGate)
        self._store = PrefixStore(self.config.store.max_tokens)
        self._warned_of: set[str] = set()

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
        calibration: str | Path | bool | None = None,
        dtype: str | torch.dtype | None = None,
        device_map: DeviceMap | None = None,
        revision: str | None = HubConfig.revision,
        draft_revision: str | None = HubConfig.draft_revision,
        token: str | bool | None = None,
        trust_remote_code: bool = HubConfig.trust_remote_code,
    ) -> SpecStackGenerator:
        """Load a pair.

        Parameters
        ----------
        target, draft : str or Path, optional
            Local folders or hub ids; with neither named, the pair embedded in the package. An adapter's folder (LoRA)
            is its base model with the adapter merged into it, for which peft is needed.
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
        calibration : str, Path or bool, optional
            A file that `spec-stack calibrate` made for this pair. It takes the place of defaults of `PrefillConfig`;
            what `config` sets otherwise stays. None takes the one that lies in the draft's folder, if any; False takes
            none.
        dtype : str or torch.dtype, optional
            `precision` as transformers calls it: "bfloat16", torch.float16, …
        device_map : str or mapping, optional
            In place of `device`: where transformers, with accelerate, puts the parts of the target, and those of the
            draft where it is a name ("auto").
        revision, draft_revision : str, optional
            Branch, tag or commit of each.
        token : str or bool, optional
            For checkpoints that need one.
        trust_remote_code : bool
            Run code that comes with a checkpoint.

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
            policy_class(chosen)
        if dtype is not None:
            if precision != LoadConfig.precision:
                raise ValueError("give precision or dtype, not both; they mean the same")
            precision = precision_named(dtype)
        generator = cls.__new__(cls)
        pair = ModelPair.load(
            target,
            draft,
            precision=precision,
            draft_precision=draft_precision,
            device=device,
            prepack_linears=prepack_linears,
            hub=HubConfig(revision, draft_revision, token, trust_remote_code),
            device_map=device_map,
        )
        generator._set_up(pair, _calibrated(pair, config, draft, calibration), policy)
        return generator

    @property
    def config(self) -> SpecStackConfig:
        """What holds where a call says nothing else. It is settled when the generator is made."""
        return self._config

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(
            "a generator can be neither copied nor pickled: it lends locks, caches and maybe prepacked weights. "
            "Threads may share one; another process makes its own with from_pretrained"
        )

    def session(self, config: SessionConfig | None = None) -> Session:
        """A conversation whose caches live on from call to call (see `Session`).

        Parameters
        ----------
        config : SessionConfig, optional
            What it keeps and restores; None is the generator's.
        """
        return Session(self, config)

    def load_session(self, path: str | Path, config: SessionConfig | None = None) -> Session:
        """A session from a file of `Session.save`, which goes on as the saved one would have.

        Parameters
        ----------
        path : str or Path
            The file.
        config : SessionConfig, optional
            What it keeps and restores; None is what the saved one did.

        Raises
        ------
        ValueError
            For a file that is no session, and where it was made with another pair, precision, tokenizer or
            `PrefillConfig` than this generator's; the message names what differs.
        """
        return Session.load(self, path, config)

    def generate_all(
        self,
        prompts: Sequence[str] | None = None,
        *,
        messages: Sequence[Sequence[Message]] | None = None,
        input_ids: Sequence[Sequence[int]] | torch.Tensor | None = None,
        attention_mask: Sequence[Sequence[int]] | torch.Tensor | None = None,
        **options: Any,
    ) -> list[GenerationResult]:
        """Answer several prompts, one after the other, as turns of one session.

        What a prompt has in common with the one before, from the beginning on, is prefilled once; where a long prompt
        is pruned, it is the rest that is (see `Session`). This is no batch: that is what the server is for.

        Parameters
        ----------
        prompts : sequence of str, optional
            Texts to go on with.
        messages : sequence of chats, optional
            In place of them.
        input_ids, attention_mask : sequence or torch.Tensor, optional
            Rows of token ids in their place, and where they are padded.
        **options
            Those of `generate`, the same for all.

        Returns
        -------
        list of GenerationResult
            In the order of the prompts.

        Raises
        ------
        ValueError
            As `generate` does, when it is the prompt's turn.
        """
        sources: dict[str, Any] = {"prompt": prompts, "messages": messages, "input_ids": input_ids}
        given = [(name, values) for name, values in sources.items() if values is not None]
        if len(given) != 1 or isinstance(prompts, str):
            raise ValueError("give exactly one of prompts, messages or input_ids, and a list of it")
        name, values = given[0]
        several = [{name: value} for value in values]
        if attention_mask is not None:
            several = [one | {"attention_mask": mask} for one, mask in zip(several, attention_mask, strict=True)]
        with self.session() as session:
            return [session.generate(**one, **options) for one in several]

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
        ignored = ignored_sampling(self.target.generation_config, params) if options.sampling is None else ""
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

    def _plan(self, source: PromptSource, params: SamplingParams, options: CallOptions) -> Request:
        return self.plan(source, params, options)

    def _sampling(self) -> Session:
        return self.session(SessionConfig(restore=False))

    def _run(self, request: Request) -> Generator[StepOutput, None, None]:
        if self._store.max_tokens:
            return self._answer_stored(request)
        return self.answer(request, RequestCaches(self.pair, request))

    def _answer_stored(self, request: Request) -> Generator[StepOutput, None, None]:
        """The same over caches that begin with what the store has, and go there in the end."""
        request.clock.resume()
        caches = StoredCaches(self.pair, request, self._store)
        try:
            yield from self.answer(request, caches)
        except GeneratorExit:
            caches.remember()
            raise
        caches.remember()

    def clear_store(self) -> None:
        """Forget the prompts that `StoreConfig.max_tokens` has kept, and free their memory."""
        self._store.clear()

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
                    open_text_stream(self.tokenizer, request.prompt_ids),
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
            precision=self.precision,
            draft_precision=self.draft_precision,
            target_weight_bytes=self.pair.target_weight_bytes,
            draft_weight_bytes=self.pair.draft_weight_bytes,
            seed=seed,
            proposer=request.proposer,
            num_new_tokens=len(request.prompt_ids) - num_cached,
            num_cached_tokens=num_cached,
            num_restored_tokens=selection.num_restored,
            decode_reason="; ".join(filter(None, (self.vocabulary.decode_reason, request.decode_note))),
        )

    def _make_sampler(self, request: Request) -> tuple[Sampler, int | None]:
        """How the request draws, and the seed it draws with; None where it is greedy."""
        params = request.params
        shaper = ProcessedRows(request.processors, request.grammar) if request.is_shaped else None
        warp = make_warp(params.temperature, params.top_k, params.top_p, params.min_p)
        if warp is None:
            return Sampler(shaper=shaper), None
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        accept = accept_fused if fused_problem(self.target.device) is None else None
        return Sampler(warp, torch.Generator(self.target.device).manual_seed(seed), accept, shaper), seed

    def _warn_once(self, topic: str, message: str) -> None:
        """Warn of each topic once."""
        if topic not in self._warned_of:
            self._warned_of.add(topic)
            warnings.warn(f"{message} (this is said once)", stacklevel=3)


def _num_kept(request: Request, selection: Selection) -> int:
    """Tokens kept of the prompt, or in a session of its new text: what a store held of them, and what is prefilled."""
    held = 0 if request.num_cached else selection.num_held
    return held + len(selection.positions) - selection.num_restored


def _calibrated(
    pair: ModelPair, config: SpecStackConfig | None, draft: str | Path | None, named: str | Path | bool | None
) -> SpecStackConfig:
    """The configuration, completed by a calibration where there is one.

    One that was named and does not fit the pair is refused; one that merely lies beside the draft is left aside.
    """
    config = _checked(config)
    calibration = find_calibration(ASSETS / "draft" if draft is None else draft, named)
    if calibration is None:
        return config
    problem = calibration.check(text_config(pair.target.config), text_config(pair.draft.config))
    if not problem:
        return replace(config, prefill=calibration.complete(config.prefill))
    if named is None or named is True:
        warnings.warn(f"the calibration beside the draft is left aside: {problem}", stacklevel=3)
        return config
    raise ValueError(f"{named}: {problem}; calibrate this pair")


def _checked(config: SpecStackConfig | None) -> SpecStackConfig:
    if config is not None and not isinstance(config, SpecStackConfig):
        raise ValueError(f"config must be a SpecStackConfig, got {type(config).__name__}")
    return config or SpecStackConfig()
