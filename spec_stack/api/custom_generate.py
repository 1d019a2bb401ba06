"""For code that calls `model.generate`: sparse prefill and speculative decoding as its `custom_generate`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationMode,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from spec_stack.api.generator import SpecStackGenerator
from spec_stack.api.streaming import Streamer
from spec_stack.config import SpecStackConfig
from spec_stack.controller.base import Policy
from spec_stack.hf.loading import has_tokenizer, load_draft, load_tokenizer
from spec_stack.hf.prompt import unpadded
from spec_stack.types import Metrics

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

# Generators kept with their models and drafts for the next call with the same ones.
_MAX_GENERATORS = 4
# What the generator does itself, by the option that it has for it.
_PLAIN_WARPERS = {TemperatureLogitsWarper: "temperature", TopKLogitsWarper: "top_k", TopPLogitsWarper: "top_p"}
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# What transformers hands to a callable, unless the call has inputs beside its tokens.
_MODEL_KWARGS = {"attention_mask", "position_ids", "past_key_values", "logits_to_keep", "use_cache"}
# What a call may ask back that is not kept here.
_NOT_RETURNED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass
class SpecStackOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """The output under `return_dict_in_generate=True`: `sequences`, and the `Metrics` of every row; None for one that a
    criterion of the caller's ended."""

    metrics: list[Metrics | None] | None = None


def with_draft(
    draft: str | Path | PreTrainedModel,
    *,
    keep_rate: float | None = None,
    specprefill: bool | None = None,
    policy: str | Policy | None = None,
    gamma: int | None = None,
    config: SpecStackConfig | None = None,
    tokenizer: Any = None,
    draft_tokenizer: Any = None,
) -> CustomGenerate:
    """A `custom_generate` for `model.generate`, which makes `model` the target.

    Parameters
    ----------
    draft : str, Path or PreTrainedModel
        A folder or hub id, which is loaded at the first call in the model's precision and on its device, or a loaded
        model.
    keep_rate, specprefill, policy, gamma
        For all calls, as in `SpecStackGenerator.generate`.
    config : SpecStackConfig, optional
        For all calls.
    tokenizer, draft_tokenizer : optional
        The model's and the draft's; only needed for a draft that has another tokenizer than the model.

    Returns
    -------
    CustomGenerate
        May be made anew for every call: the generator behind it is kept with its model and draft (the last 4; `forget`
        drops them).

    Examples
    --------
    >>> from spec_stack import SpecStackGenerator
    >>> from spec_stack import with_draft
    >>> pair = SpecStackGenerator.from_pretrained().pair
    >>> model, draft, tokenizer = pair.target, pair.draft, pair.tokenizer
    >>> inputs = tokenizer("def main():", return_tensors="pt")
    >>> model.generate(**inputs, max_new_tokens=8, custom_generate=with_draft(draft)).shape
    torch.Size([1, 12])
    """
    options = {"keep_rate": keep_rate, "specprefill": specprefill, "policy": policy, "gamma": gamma}
    return CustomGenerate(draft, config or SpecStackConfig(), tokenizer, draft_tokenizer, options)


def forget() -> None:
    """Let go of all generators that are kept for later calls, and so of their models and drafts."""
    _open_generator.cache_clear()


@lru_cache(maxsize=_MAX_GENERATORS)
def _open_generator(
    target: PreTrainedModel,
    draft: str | Path | PreTrainedModel,
    config: SpecStackConfig,
    tokenizer: Any,
    draft_tokenizer: Any,
) -> SpecStackGenerator:
    if not isinstance(draft, str | Path):
        return SpecStackGenerator(target, draft, tokenizer, config=config, draft_tokenizer=draft_tokenizer)
    model = load_draft(draft, target)
    if tokenizer is not None and draft_tokenizer is None:
        draft_tokenizer = load_tokenizer(str(draft)) if has_tokenizer(str(draft)) else None
    return SpecStackGenerator(target, model, tokenizer, config=config, draft_tokenizer=draft_tokenizer)


class CustomGenerate:
    """The callable behind `model.generate(custom_generate=...)`; made by `with_draft`.

    Notes
    -----
    The rows of a batch are answered one after the other. `stopping_criteria` are asked after every token, as in plain
    generation. A sampled row draws its seed from torch's global generator, so `torch.manual_seed` makes it
    reproducible.

    Transformers (up to 5.23 at least) hands the `streamer=` of a call to no custom callable: it is put the prompt, and
    then nothing, so that it is refused. `spec_streamer=` reaches it.
    """

    def __init__(
        self,
        draft: str | Path | PreTrainedModel,
        config: SpecStackConfig,
        tokenizer: Any,
        draft_tokenizer: Any,
        options: dict[str, Any],
    ) -> None:
        self._draft, self._config = draft, config
        self._tokenizers = tokenizer, draft_tokenizer
        self._options = options

    def generator(self, model: PreTrainedModel) -> SpecStackGenerator:
        """The generator that has this model for its target. Raises ValueError for a pair that does not fit together."""
        return _open_generator(model, self._draft, self._config, *self._tokenizers)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Streamer | None = None,
        spec_streamer: Streamer | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | SpecStackOutput:
        """The sequences (rows, prompt and new tokens), shorter ones padded on the right.

        Raises
        ------
        ValueError
            For what cannot be done: beams, a cache that is handed in, inputs that are no tokens, scores or hidden
            states asked back, several rows with a streamer, a streamer under a name that does not reach this.
        """
        _check(generation_config, model_kwargs)
        if streamer is None:
            _check_kept_back(sys._getframe(1).f_locals.get("streamer"))
        if (spec_streamer or streamer) is not None and len(input_ids) > 1:
            raise ValueError("a streamer takes one row; leave it out, or give one prompt")
        generator = self.generator(model)
        if spec_streamer is not None:
            # A streamer= that arrives has been put the prompt already.
            spec_streamer.put(input_ids)
        masks, positions = (
            [None] * len(input_ids) if values is None else values
            for values in (model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"))
        )
        answers = [
            self._answer(
                generator,
                row,
                _prompt_of(row, mask, places),
                _of_row(logits_processor, index),
                stopping_criteria,
                generation_config,
                spec_streamer or streamer,
            )
            for index, (row, mask, places) in enumerate(zip(input_ids, masks, positions, strict=True))
        ]
        sequences = _stacked([answer.sequence for answer in answers], generation_config)
        if not generation_config.return_dict_in_generate:
            return sequences
        return SpecStackOutput(sequences=sequences, metrics=[answer.metrics for answer in answers])

    def _answer(
        self,
        generator: SpecStackGenerator,
        row: torch.Tensor,
        prompt_ids: list[int],
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: Streamer | None,
    ) -> Answer:
        """One row (padding and prompt) with the tokens that follow it."""
        ends = config.eos_token_id
        end_ids = frozenset() if ends is None else frozenset([ends] if isinstance(ends, int) else ends)
        outputs = generator.stream(
            input_ids=prompt_ids,
            max_tokens=config.max_length - len(row),
            # Other end tokens than the model's own are left to the criteria.
            ignore_eos=end_ids != generator.pair.end_ids,
            **_drawing(config, processors, row[: len(row) - len(prompt_ids)]),
            **self._options,
        )
        sequence, metrics = row, None
        try:
            with closing(outputs):
                for output in outputs:
                    block, sequence, is_over = _take(output.token_ids, sequence, criteria)
                    if streamer is not None and block:
                        streamer.put(torch.tensor(block))
                    metrics = output.metrics
                    if is_over:
                        break
        finally:
            if streamer is not None:
                streamer.end()
        return Answer(sequence, metrics)


@dataclass(frozen=True)
class Answer:
    """A row with its new tokens, and what it cost; metrics is None where a criterion of the caller's ended it."""

    sequence: torch.Tensor
    metrics: Metrics | None


class BehindPadding(LogitsProcessor):  # type: ignore[misc]
    """Processors that are to see a prompt behind the padding (n,) that its row has in a batch, as they do in plain
    generation: some count from the length of the whole row on."""

    def __init__(self, processors: LogitsProcessorList, padding: torch.Tensor) -> None:
        self._processors, self._padding = processors, padding

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        padding = self._padding.to(input_ids.device).expand(len(input_ids), -1)
        shaped: torch.Tensor = self._processors(torch.cat([padding, input_ids], dim=1), scores)
        return shaped


def _check(config: GenerationConfig, model_kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for what a call of `model.generate` asks for and cannot have."""
    mode = config.get_generation_mode()
    if mode not in _MODES:
        raise ValueError(f"custom_generate=with_draft(...) is greedy or samples, and cannot do {mode.value!r}")
    if config.return_dict_in_generate:
        asked = [name for name in _NOT_RETURNED if getattr(config, name, None)]
        if asked:
            raise ValueError(
                f"{', '.join(asked)}: not to be had under speculation; leave it out, or call generate without "
                "custom_generate"
            )
    cache = model_kwargs.get("past_key_values")
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length()):
        raise ValueError("leave past_key_values out; SpecStackGenerator.session() keeps caches from call to call")
    unknown = [name for name, value in model_kwargs.items() if value is not None and name not in _MODEL_KWARGS]
    if unknown:
        raise ValueError(f"custom_generate=with_draft(...) takes token ids only, not {', '.join(unknown)}")


def _check_kept_back(streamer: Any) -> None:
    """Raise ValueError for a streamer that the calling `generate` has and does not hand on: its reader would wait for
    ever. Where a later transformers has it elsewhere, nothing is found here, and nothing is lost."""
    if hasattr(streamer, "put") and hasattr(streamer, "end"):
        streamer.end()
        raise ValueError("transformers hands streamer= to no custom_generate; give it as spec_streamer=")


def _prompt_of(row: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> list[int]:
    """A row's tokens behind its padding. Raises ValueError for padding elsewhere, and for positions of the caller's."""
    prompt = torch.as_tensor(unpadded(row, mask))
    if mask is not None and not bool(mask[-1]):
        raise ValueError("the rows are padded on the right; set padding_side='left' for the tokenizer")
    if positions is not None and positions[len(row) - len(prompt) :].tolist() != list(range(len(prompt))):
        raise ValueError("leave position_ids out; the tokens of a prompt are at 0, 1, 2, …")
    token_ids: list[int] = prompt.tolist()
    return token_ids


def _of_row(processors: LogitsProcessorList, index: int) -> LogitsProcessorList:
    """The processors as they are for one row of a batch: transformers' penalty knows every row's own padding."""
    of_row = LogitsProcessorList()
    for processor in processors:
        lengths = getattr(processor, "prompt_ignore_length", None)
        if isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(lengths, torch.Tensor):
            processor = RepetitionPenaltyLogitsProcessor(processor.penalty, lengths[index : index + 1])
        of_row.append(processor)
    return of_row


def _drawing(config: GenerationConfig, processors: LogitsProcessorList, padding: torch.Tensor) -> dict[str, Any]:
    """The options of `stream` for how tokens are drawn."""
    if not config.do_sample and not processors:
        return {}
    seed = {"seed": int(torch.randint(2**63 - 1, ()))} if config.do_sample else {}
    kinds = [type(processor) for processor in processors]
    if config.do_sample and set(kinds) <= set(_PLAIN_WARPERS) and len(kinds) == len(set(kinds)):
        # The generator's own, which take a whole block of rows at once.
        values = {_PLAIN_WARPERS[type(warper)]: getattr(warper, _PLAIN_WARPERS[type(warper)]) for warper in processors}
        return {"temperature": 1.0} | values | seed
    shaping = BehindPadding(processors, padding) if len(padding) else processors
    return {"logits_processor": shaping, "temperature": 1.0 if config.do_sample else 0.0} | seed


def _take(
    token_ids: Sequence[int], sequence: torch.Tensor, criteria: StoppingCriteriaList
) -> tuple[list[int], torch.Tensor, bool]:
    """The tokens up to the one after which a criterion holds, the sequence (n,) with them, and whether one does."""
    for num, token_id in enumerate(token_ids, 1):
        sequence = torch.cat([sequence, sequence.new_tensor([token_id])])
        if bool(criteria(sequence[None], None).all()):
            return list(token_ids[:num]), sequence, True
    return list(token_ids), sequence, False


def _stacked(rows: Sequence[torch.Tensor], config: GenerationConfig) -> torch.Tensor:
    """Rows of several lengths as one tensor, padded on the right."""
    if len({len(row) for row in rows}) == 1:
        return torch.stack(list(rows))
    padding = config._pad_token_tensor
    if padding is None:
        raise ValueError("the rows have several lengths; set pad_token_id, with which the shorter ones are filled up")
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=int(padding))
