"""Logits processors under speculation: transformers' own for the sampling options, those of a checkpoint's generation
config, and any callable over (input_ids, scores). The target's rows use a request's processors in plain generation's
order, the draft's rows the stateless ones alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from spec_stack.config import SamplingParams
from spec_stack.hf.structured import Grammar

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Stateless processors and criteria of transformers.
_STATELESS = re.compile(
    "(Epsilon|Eta|MinP|Temperature|TopK|TopP|Typical)LogitsWarper|(EosToken|MaxLength|MaxTime|StopString)Criteria|"
    "(ForcedBOSToken|ForcedEOSToken|InfNanRemove|MinLength|MinNewTokensLength|NoBadWords|NoRepeatNGram|RepetitionPenalty|"
    "SequenceBias|SuppressTokensAtBegin|SuppressTokens)LogitsProcessor|ExponentialDecayLengthPenalty|LogitNormalization"
)
# transformers' default for a sampling config without a temperature.
_TOP_K = 50
# Our options by transformers' names; those used only when sampling are marked.
_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "repetition_penalty": "repetition_penalty",
    "bad_words_ids": "bad_words_ids",
    "stop_strings": "stop",
}
_SAMPLED = ("temperature", "top_k", "top_p", "min_p")
# Settings that change the next token and have no option here, with their neutral values beside None.
_UNKNOWN: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("num_beams", "encoder_repetition_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "penalty_alpha"), (0,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), ([],)),
    **dict.fromkeys(("sequence_bias", "forced_bos_token_id", "forced_eos_token_id"), ()),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config"), ()),
}
_UNKNOWN_SAMPLED: dict[str, tuple[object, ...]] = {
    "typical_p": (1,),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), (0,)),
    "top_h": (),
}


def make_warp(
    temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Logits (n, vocab) → warped logits: temperature, top_k, top_p, then min_p. None for temperature 0 (greedy)."""
    if temperature == 0:
        return None
    processors = LogitsProcessorList()
    if temperature != 1:
        processors.append(TemperatureLogitsWarper(float(temperature)))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    if min_p:
        processors.append(MinPLogitsWarper(float(min_p)))
    no_ids = torch.empty(0, dtype=torch.long)
    return lambda logits: processors(no_ids, logits)


def make_processors(
    params: SamplingParams, num_prompt_tokens: int, end_ids: Collection[int], device: torch.device
) -> list[Processor]:
    """Processors for the options that depend on earlier tokens, in the order of transformers' `generate`."""
    processors: list[Processor] = []
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor({(int(at),): float(b) for at, b in params.logit_bias.items()}))
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.bad_words_ids:
        words = [[int(token_id) for token_id in word] for word in params.bad_words_ids]
        processors.append(NoBadWordsLogitsProcessor(words))
    if params.min_tokens and end_ids:
        processors.append(
            MinNewTokensLengthLogitsProcessor(num_prompt_tokens, params.min_tokens, sorted(end_ids), device=str(device))
        )
    return processors


def complete_sampling(generation_config: Any, params: SamplingParams) -> SamplingParams:
    """A call's options, with the checkpoint's values for those at their defaults."""
    own = model_sampling(generation_config)
    defaults = SamplingParams()
    unset = {name: value for name, value in own.items() if getattr(params, name) == getattr(defaults, name)}
    return replace(params, **unset)


def model_sampling(generation_config: Any) -> dict[str, Any]:
    """The checkpoint's settings by `SamplingParams` names. Raises ValueError for settings without an option."""
    samples = bool(getattr(generation_config, "do_sample", False))
    unknown = _UNKNOWN | (_UNKNOWN_SAMPLED if samples else {})
    strange = [name for name, idle in unknown.items() if getattr(generation_config, name, None) not in (None, *idle)]
    if strange:
        raise ValueError(
            f'sampling="model": the generation config sets {", ".join(strange)}, which have no option here; give '
            "them as logits_processor, and the rest as options"
        )
    own = {ours: getattr(generation_config, theirs, None) for theirs, ours in _NAMES.items()}
    if samples:
        own |= {name: getattr(generation_config, name, None) for name in _SAMPLED}
        own["temperature"] = 1.0 if own["temperature"] is None else own["temperature"]
        own["top_k"] = _TOP_K if own["top_k"] is None else own["top_k"]
    return {name: value for name, value in own.items() if value is not None}


def ignored_sampling(generation_config: Any, params: SamplingParams) -> str:
    """The checkpoint's settings that a greedy call without sampling="model" ignores, as text; empty if none."""
    if params.temperature:
        return ""
    samples = bool(getattr(generation_config, "do_sample", False))
    names = [*(_SAMPLED if samples else ()), *(["repetition_penalty"] if params.repetition_penalty == 1 else [])]
    settings = {name: getattr(generation_config, name, None) for name in names}
    found = [f"{name}={value}" for name, value in settings.items() if value is not None and value not in (0, 1)]
    return ", ".join(["do_sample=True", *found] if samples else found)


def keeps_nothing(processor: object) -> bool:
    """Whether it is a stateless processor or criterion of transformers, or says that it is one."""
    kind = type(processor)
    if getattr(processor, "stateless", False):
        return True
    return kind.__module__.startswith("transformers.generation.") and bool(_STATELESS.fullmatch(kind.__name__))


def is_shareable(processor: object) -> bool:
    """Whether the draft and other samples can call it too: a stateless one, or a function without a closure."""
    return keeps_nothing(processor) or (isinstance(processor, FunctionType) and processor.__closure__ is None)


def name_of(processor: object) -> str:
    """A processor's name for messages."""
    return str(getattr(processor, "__qualname__", None) or type(processor).__name__)


def check_processors(given: object) -> list[Processor]:
    """The processors of a call, as a list."""
    if given is None:
        return []
    # transformers' LogitsProcessorList is both a list and callable.
    listed: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    for each in listed:
        if not callable(each) or isinstance(each, type):
            raise ValueError(
                f"logits_processor must be a callable over (input_ids, scores), or a list of such, got {each!r}"
            )
    return listed


class ProcessedRows:
    """One request's processors, called in order with the whole input_ids (1, n) and fp32 scores (1, vocab); the
    grammar's mask comes last."""

    def __init__(self, processors: Sequence[Processor], grammar: Grammar | None = None) -> None:
        self._processors = list(processors)
        self._grammar = grammar
        self._ids: torch.Tensor | None = None

    def __call__(self, prefix_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        # Copied: inference tensors may not be modified outside inference mode, and some processors write in place.
        scores = logits.to(torch.float32, copy=True)[None]
        input_ids = self._grown(prefix_ids, scores.device) if self._processors else None
        for processor in self._processors:
            shape = scores.shape
            scores = processor(input_ids, scores)  # type: ignore[arg-type]
            if not isinstance(scores, torch.Tensor) or scores.shape != shape:
                got = tuple(scores.shape) if isinstance(scores, torch.Tensor) else repr(scores)
                raise ValueError(
                    f"the logits processor {name_of(processor)} must return scores of the shape {tuple(shape)} it was "
                    f"given, got {got}"
                )
        if self._grammar is not None:
            scores = self._grammar.mask(prefix_ids, scores)
        return scores[0]

    def _grown(self, prefix_ids: Sequence[int], device: torch.device) -> torch.Tensor:
        num_known = 0 if self._ids is None else self._ids.shape[1]
        new = torch.tensor([prefix_ids[num_known:]], dtype=torch.long, device=device)
        self._ids = new if self._ids is None else torch.cat([self._ids, new], dim=1)
        return self._ids

    def fork_for_draft(self) -> ProcessedRows:
        # Verification applies those that may keep state.
        shared = [processor for processor in self._processors if is_shareable(processor)]
        other = ProcessedRows(shared, self._grammar.fork() if self._grammar is not None else None)
        other._ids = self._ids
        return other


def skipped_note(processors: Iterable[Processor]) -> str:
    """A note naming processors that the draft skips, and the fix; empty without any."""
    found = [name_of(processor) for processor in processors if not is_shareable(processor)]
    if not found:
        return ""
    return (
        f"the draft guesses without the logits processors {', '.join(found)}, which may keep state: give them a true "
        "attribute `stateless` where they keep nothing"
    )
