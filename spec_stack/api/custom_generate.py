"""Sparse prefill and speculative decoding as `custom_generate` of `model.generate`."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationMode,
    LogitsProcessorList,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from spec_stack.api.generator import SpecStackGenerator
from spec_stack.api.unknown_options import refuses_unknown_options
from spec_stack.config import DecodeConfig, PrefillConfig, SparsePrefill, SpecStackConfig
from spec_stack.controller.base import Policy
from spec_stack.controller.pool import check_gamma
from spec_stack.hf.architectures import as_ids
from spec_stack.hf.loading import load_draft
from spec_stack.hf.processors import Processor, is_shareable, keeps_nothing, name_of
from spec_stack.hf.prompt import unpadded
from spec_stack.hf.versions import CACHE_NAMES, is_given
from spec_stack.types import Metrics, StepOutput

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

# Most generators cached with their models and drafts.
_MAX_GENERATORS = 4
# Processors that the generator replaces, by its option.
_PLAIN_WARPERS = {TemperatureLogitsWarper: "temperature", TopKLogitsWarper: "top_k", TopPLogitsWarper: "top_p"}
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# Arguments that transformers passes to a callable for token inputs.
_MODEL_KWARGS = {"attention_mask", "position_ids", "logits_to_keep", "use_cache", *CACHE_NAMES}
# Outputs that a call may request and that are unsupported.
_NOT_RETURNED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass
class SpecStackOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """`sequences` and each row's `Metrics` (None if a criterion stopped it), for `return_dict_in_generate=True`."""

    metrics: list[Metrics | None] | None = None


@refuses_unknown_options
def with_draft(
    draft: str | Path | PreTrainedModel,
    *,
    keep_rate: float | None = None,
    sparse_prefill: SparsePrefill | None = None,
    policy: str | Policy | None = None,
    gamma: int | None = None,
    config: SpecStackConfig | None = None,
    tokenizer: Any = None,
    draft_tokenizer: Any = None,
) -> CustomGenerate:
    """A `custom_generate` for `model.generate` with `model` as the target.

    Parameters
    ----------
    draft : str, Path or PreTrainedModel
        A loaded model, or a folder or hub id, loaded at the first call in the model's precision and on its device.
    keep_rate, sparse_prefill, policy, gamma
        For all calls, as in `SpecStackGenerator.generate`.
    config : SpecStackConfig, optional
        For all calls.
    tokenizer, draft_tokenizer : optional
        The model's and the draft's. None finds them where the models were loaded from; without a tokenizer nothing is
        pruned in lines, and the reason says so.

    Returns
    -------
    CustomGenerate
        May be created for every call: the generators of the last 4 models and drafts are cached; `forget` drops them.

    Raises
    ------
    TypeError
        For an invalid draft or configuration.
    ValueError
        For an invalid option.

    Examples
    --------
    >>> from spec_stack import SpecStackGenerator
    >>> from spec_stack import with_draft
    >>> pair = SpecStackGenerator.from_pretrained().pair
    >>> model, draft, tokenizer = pair.target, pair.draft, pair.tokenizer
    >>> inputs = tokenizer("def main():", return_tensors="pt").to(model.device)
    >>> model.generate(**inputs, max_new_tokens=8, custom_generate=with_draft(draft)).shape
    torch.Size([1, 12])
    """
    if not (isinstance(draft, str | Path) or hasattr(draft, "config")):
        raise TypeError(f"draft must be a folder, a hub id or a loaded transformers model, got {draft!r}")
    if config is not None and not isinstance(config, SpecStackConfig):
        raise TypeError(f"config must be a SpecStackConfig, got {config!r}")
    options = {"keep_rate": keep_rate, "sparse_prefill": sparse_prefill, "policy": policy, "gamma": gamma}
    check_gamma(gamma, policy)
    # A policy of one's own is no setting.
    named = {**options, "policy": policy if isinstance(policy, str) else None}
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    for kind in (PrefillConfig, DecodeConfig):
        kind(**{each.name: given[each.name] for each in fields(kind) if each.name in given})
    return CustomGenerate(draft, config or SpecStackConfig(), tokenizer, draft_tokenizer, options)


def forget() -> None:
    """Drop all cached generators, with their models and drafts."""
    _open_generator.cache_clear()


@lru_cache(maxsize=_MAX_GENERATORS)
def _open_generator(
    target: PreTrainedModel,
    draft: str | Path | PreTrainedModel,
    config: SpecStackConfig,
    tokenizer: Any,
    draft_tokenizer: Any,
) -> SpecStackGenerator:
    if isinstance(draft, str | Path):
        draft = load_draft(draft, target, config.prefill.positions)
    return SpecStackGenerator(target, draft, tokenizer, config=config, draft_tokenizer=draft_tokenizer)


@dataclass(frozen=True, eq=False)
class CustomGenerate:
    """The callable for `model.generate(custom_generate=...)`; made by `with_draft`.

    Rows are answered one after the other, and several rows take stateless processors and criteria alone. Criteria run
    after every token. A sampled row draws its seed from torch's global generator, so `torch.manual_seed` makes it
    reproducible.

    Transformers (5.24 and earlier) puts the prompt into `streamer=` and does not pass it on, so it is rejected;
    `spec_streamer=` is passed on.
    """

    draft: str | Path | PreTrainedModel
    config: SpecStackConfig
    tokenizer: Any
    draft_tokenizer: Any
    options: Mapping[str, Any]

    def generator(self, model: PreTrainedModel) -> SpecStackGenerator:
        """The generator with this model as target. Raises ValueError for an incompatible pair."""
        return _open_generator(model, self.draft, self.config, self.tokenizer, self.draft_tokenizer)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        spec_streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | SpecStackOutput:
        """Sequences (rows, prompt and new tokens), right-padded.

        Raises ValueError for unsupported calls: beams, a given cache, non-token inputs, scores or hidden states, a
        streamer under another name, and several rows with a streamer, or with a processor or criterion that may keep
        state.
        """
        caller = sys._getframe(1).f_locals
        _check(generation_config, model_kwargs, caller)
        _check_kept_back(caller.get("streamer"))
        num_rows = len(input_ids)
        if num_rows > 1:
            _check_rows([*logits_processor, *stopping_criteria], spec_streamer)
        generator = self.generator(model)
        if spec_streamer is not None:
            spec_streamer.put(input_ids)
        masks, positions = (
            [None] * num_rows if values is None else values
            for values in (model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
        )
        prompts = [_prompt_of(*given) for given in zip(input_ids, masks, positions, strict=True)]
        answers = []
        for index, (row, prompt_ids) in enumerate(zip(input_ids, prompts, strict=True)):
            place = index, num_rows, row[: len(row) - len(prompt_ids)]
            outputs = generator.stream(
                input_ids=prompt_ids,
                max_tokens=generation_config.max_length - len(row),
                # Other end tokens are checked by the criteria.
                ignore_eos=as_ids(generation_config.eos_token_id) != generator.pair.end_ids,
                **_drawing(generation_config, logits_processor, place),
                **self.options,
            )
            answers.append(_answer(outputs, row, stopping_criteria, spec_streamer))
        rows, metrics = zip(*answers, strict=True)
        sequences = _stacked(rows, generation_config)
        if not generation_config.return_dict_in_generate:
            return sequences
        return SpecStackOutput(sequences=sequences, metrics=list(metrics))


class _AtRow:
    """A processor that gets one row, and sees it at its index of num_rows copies behind its left padding (n,)."""

    def __init__(self, processor: Processor, index: int, num_rows: int, padding: torch.Tensor) -> None:
        self._processor, self._place = processor, (index, num_rows, padding)
        self.__qualname__ = name_of(processor)
        self.stateless = is_shareable(processor)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        index, num_rows, padding = self._place
        whole = torch.cat([padding.to(input_ids.device)[None], input_ids], dim=1)
        return self._processor(whole.repeat(num_rows, 1), scores.repeat(num_rows, 1))[index : index + 1]


def _answer(
    outputs: Generator[StepOutput, None, None],
    row: torch.Tensor,
    criteria: StoppingCriteriaList,
    streamer: BaseStreamer | None,
) -> tuple[torch.Tensor, Metrics | None]:
    """One padded row plus its new tokens, up to the first one at which a criterion holds, and its metrics."""
    sequence, metrics = row, None
    try:
        with closing(outputs):
            for output in outputs:
                begin, ends = len(sequence), False
                for token_id in output.token_ids:
                    sequence = torch.cat([sequence, sequence.new_tensor([token_id])])
                    ends = bool(criteria(sequence[None], None).all())
                    if ends:
                        break
                if streamer is not None and len(sequence) > begin:
                    streamer.put(sequence[begin:].cpu())
                metrics = output.metrics
                if ends:
                    break
    finally:
        if streamer is not None:
            streamer.end()
    return sequence, metrics


def _check(config: GenerationConfig, model_kwargs: Mapping[str, Any], caller: Mapping[str, Any]) -> None:
    """Raise ValueError for unsupported arguments of `model.generate`. caller: its local variables."""
    mode = config.get_generation_mode()
    if mode not in _MODES:
        raise ValueError(f"custom_generate=with_draft(...) is greedy or samples, and cannot do {mode.value!r}")
    if config.return_dict_in_generate:
        requested = [name for name in _NOT_RETURNED if getattr(config, name, None)]
        if requested:
            raise ValueError(
                f"{', '.join(requested)}: not to be had under speculation; leave it out, or call generate without "
                "custom_generate"
            )
    for name in CACHE_NAMES:
        cache = model_kwargs.get(name)
        if cache is not None and (is_given(cache, caller) or cache.get_seq_length()):
            raise ValueError(f"leave {name} out; SpecStackGenerator.session() keeps caches from call to call")
    unknown = [name for name, value in model_kwargs.items() if value is not None and name not in _MODEL_KWARGS]
    if unknown:
        raise ValueError(f"custom_generate=with_draft(...) takes token ids only, not {', '.join(unknown)}")


def _check_rows(given: Sequence[object], streamer: BaseStreamer | None) -> None:
    """Raise ValueError for what several rows, which are answered one after the other, cannot share."""
    if streamer is not None:
        raise ValueError("a streamer takes one row; leave it out, or give one prompt")
    stateful = [name_of(each) for each in given if not keeps_nothing(each)]
    if stateful:
        raise ValueError(
            f"several rows cannot share {', '.join(stateful)}, which may keep state or tell rows apart: call generate "
            "with one row, or give it a true attribute `stateless` where it does neither"
        )


def _check_kept_back(streamer: Any) -> None:
    """Raise ValueError for a streamer that the calling `generate` does not pass on: its reader would hang."""
    if hasattr(streamer, "put") and hasattr(streamer, "end"):
        streamer.end()
        raise ValueError("transformers hands streamer= to no custom_generate; give it as spec_streamer=")


def _prompt_of(row: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> list[int]:
    """A row's tokens without left padding. Raises ValueError for other padding and for given positions."""
    prompt = row if mask is None else unpadded(row, mask)
    if mask is not None and not bool(mask[-1]):
        raise ValueError("the rows are padded on the right; set padding_side='left' for the tokenizer")
    if positions is not None and positions[len(row) - len(prompt) :].tolist() != list(range(len(prompt))):
        raise ValueError("leave position_ids out; the tokens of a prompt are at 0, 1, 2, …")
    token_ids: list[int] = prompt.tolist()
    return token_ids


def _drawing(
    config: GenerationConfig, processors: Sequence[Processor], place: tuple[int, int, torch.Tensor]
) -> dict[str, Any]:
    """The sampling options of `stream`. place: as `_AtRow` has it."""
    if not config.do_sample and not processors:
        return {}
    seed = {"seed": int(torch.randint(2**63 - 1, ()))} if config.do_sample else {}
    kinds = [type(processor) for processor in processors]
    is_plain = all(getattr(processor, "min_tokens_to_keep", 1) == 1 for processor in processors)
    if config.do_sample and is_plain and kinds == [kind for kind in _PLAIN_WARPERS if kind in kinds]:
        # The generator's own processors take a block of rows at once, in this order.
        values = {_PLAIN_WARPERS[type(warper)]: getattr(warper, _PLAIN_WARPERS[type(warper)]) for warper in processors}
        return {"temperature": 1.0} | values | seed
    _, num_rows, padding = place
    is_seen_whole = num_rows == 1 and not len(padding)
    shaping = list(processors) if is_seen_whole else [_AtRow(each, *place) for each in processors]
    return {"logits_processor": shaping, "temperature": 1.0 if config.do_sample else 0.0} | seed


def _stacked(rows: Sequence[torch.Tensor], config: GenerationConfig) -> torch.Tensor:
    """Rows as one right-padded tensor."""
    if len({len(row) for row in rows}) == 1:
        return torch.stack(list(rows))
    padding = config._pad_token_tensor
    if padding is None:
        raise ValueError("the rows have several lengths; set pad_token_id, with which the shorter ones are filled up")
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=int(padding))
