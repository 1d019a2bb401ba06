"""A loaded draft/target pair: two models on one device, their tokenizers, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_stack.config import DraftStep, HubConfig, LoadConfig, Positions, PrefillConfig
from spec_stack.decode.proposer import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.hf.answer_parser import AnswerFormat
from spec_stack.hf.architectures import end_token_ids, is_supported, max_positions, scoring_limit, text_config
from spec_stack.hf.attention import install
from spec_stack.hf.contiguous import ContiguousModel
from spec_stack.hf.fixed_step import FixedStep
from spec_stack.hf.loading import DeviceMap, check_pair, find_predictors, load_tokenizers, open_pair
from spec_stack.hf.model import CachedModel
from spec_stack.hf.precision import precision_of, skeleton, warm_up_quantized
from spec_stack.hf.prompt import EncodedPrompt
from spec_stack.hf.structured import Grammars
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.prefill.scoring import LookAhead
from spec_stack.tokenizers.prompt_reader import PromptReader
from spec_stack.tokenizers.translated_draft import TranslatedDraft
from spec_stack.tokenizers.translation import Translation
from spec_stack.tokenizers.vocabulary import Vocabulary, compare
from spec_stack.types import DraftTokenization

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DraftModel = CachedModel | TranslatedDraft


@dataclass(frozen=True)
class ModelPair:
    """Loaded models that fit together, made by `assemble` or `load`. Requests share it read-only.

    tokenizer is the target's, None for token ids only; translation is for a draft with another one. predictors: files
    by policy name. positions: `PrefillConfig.positions` of the target. target_step, draft_step: their forwards in fixed
    shapes.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: Any
    vocabulary: Vocabulary
    translation: Translation | None
    precision: str
    draft_precision: str
    grammars: Grammars
    target_step: FixedStep
    draft_step: FixedStep
    answer_format: AnswerFormat = field(default_factory=AnswerFormat)
    predictors: Mapping[str, str | Path] = field(default_factory=dict)
    positions: Positions = "original"

    @cached_property
    def reader(self) -> PromptReader:
        """Reads prompts in the target's tokens."""
        return PromptReader(self.tokenizer)

    def read(self, encoded: EncodedPrompt, question: str | None = None) -> PromptText:
        """Read an encoded prompt (see `PromptReader.read`)."""
        written = encoded.turns if encoded.text else None
        return self.reader.read(encoded.token_ids, encoded.protected, question, written)

    def pieces(self, prompt_ids: Sequence[int]) -> list[str] | None:
        """The text of every token; None without a tokenizer."""
        return None if self.reader.pieces is None else self.reader.pieces.of(prompt_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; empty for an id without a text, and without a tokenizer."""
        return b"" if self.reader.pieces is None else self.reader.pieces.bytes_of(token_id)

    @classmethod
    def assemble(
        cls,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        tokenizer: Any = None,
        draft_tokenizer: Any = None,
        positions: Positions = "original",
        draft_step: DraftStep = LoadConfig.draft_step,
        predictors: Mapping[str, str | Path] | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> ModelPair:
        """Pair loaded models; their attention is replaced in place.

        vocabulary: of a pair that has been checked. Raises ValueError for what is no loaded model or tokenizer, an
        unsupported architecture, two devices, or vocabularies that cannot be matched.
        """
        if vocabulary is None:
            _check_loaded(draft=draft, target=target)
            _check_tokenizers(tokenizer=tokenizer, draft_tokenizer=draft_tokenizer)
            check_pair(target.config, draft.config, positions)
            if target.device != draft.device:
                raise ValueError(f"target and draft are on different devices, {target.device} and {draft.device}")
            sizes = (text_config(model.config).vocab_size for model in (target, draft))
            vocabulary = compare(tokenizer, draft_tokenizer, *sizes)
        step = LoadConfig(draft_step=draft_step).draft_step
        for model in (target, draft):
            # A model in training mode would still drop activations at random.
            model.eval()
            if is_supported(model.config):
                install(model)
            warm_up_quantized(model)
        is_foreign = vocabulary.relation == "other"
        return cls(
            target=target,
            draft=draft,
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            translation=Translation(tokenizer, draft_tokenizer, vocabulary) if is_foreign else None,
            precision=precision_of(target),
            draft_precision=precision_of(draft),
            grammars=Grammars(tokenizer, int(text_config(target.config).vocab_size)),
            target_step=FixedStep(target, step),
            draft_step=FixedStep(draft, step, is_draft=True),
            answer_format=AnswerFormat.learn(tokenizer),
            predictors=predictors or {},
            positions=positions,
        )

    @classmethod
    def load(
        cls,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        precision: str = LoadConfig.precision,
        draft_precision: str = LoadConfig.draft_precision,
        device: str | None = None,
        prepack_linears: bool = True,
        hub: HubConfig | None = None,
        device_map: DeviceMap | None = None,
        target_weights: bool = True,
        positions: Positions = "original",
        draft_step: DraftStep = LoadConfig.draft_step,
    ) -> ModelPair:
        """Load a pair from folders or hub ids, the embedded one where neither is named.

        The options are those of `SpecStackGenerator.from_pretrained`; target_weights=False loads the draft's weights
        alone, with the target's tokenizer and configuration. All checks precede the weights; raises ValueError as
        `hf.loading.open_pair` and `assemble` do.
        """
        load = LoadConfig(precision, draft_precision, draft_step)
        found = open_pair(target, draft, load, device, prepack_linears, hub, device_map, positions)
        tokenizers = load_tokenizers(found[0].source, found[1].source, hub)
        vocabulary = compare(*tokenizers, *(text_config(model.config).vocab_size for model in found))
        first = found[0].load() if target_weights else skeleton(found[0].config)
        # A device map may place the target on another device than the first.
        second = replace(found[1], device=first.device if target_weights else found[1].device).load()
        predictors = find_predictors(found[1].source)
        return cls.assemble(first, second, *tokenizers, positions, draft_step, predictors, vocabulary)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end the target's text."""
        return end_token_ids(self.target)

    @cached_property
    def vocab_size(self) -> int:
        """Ids of the target's vocabulary."""
        return int(text_config(self.target.config).vocab_size)

    @cached_property
    def max_positions(self) -> tuple[int, int]:
        """The position limits of target and draft."""
        return max_positions(self.target.config), max_positions(self.draft.config)

    @cached_property
    def scoring_limit(self) -> int | None:
        """The longest context that a layer of the draft sees whole; None is any length."""
        return scoring_limit(self.draft.config)

    def check_heads(self, prefill: PrefillConfig) -> None:
        """Raise ValueError for scoring heads that the draft does not have."""
        config = text_config(self.draft.config)
        num_layers, num_heads = int(config.num_hidden_layers), int(config.num_attention_heads)
        heads = prefill.scoring_heads or ()
        if unknown := [(layer, head) for layer, head in heads if layer >= num_layers or head >= num_heads]:
            raise ValueError(
                f"scoring_heads names {unknown}; the draft has {num_layers} layers of {num_heads} heads, and "
                "(layer, head) pairs count from 0"
            )

    def tokenize_for_draft(self, prompt_ids: Sequence[int]) -> tuple[DraftTokenization | None, str]:
        """The prompt in the tokens of a draft with another tokenizer, and the reason why it cannot be used, if so.

        None where the draft takes the target's tokens, or cannot be used for this prompt.
        """
        if self.translation is None:
            return None, ""
        try:
            return self.translation.tokenize(prompt_ids), ""
        except ValueError as error:
            return None, f"the draft has another tokenizer, and {error}"

    def open_target(self, prefill_chunk: int) -> CachedModel:
        kind = CachedModel if self.positions == "original" else ContiguousModel
        return kind(self.target, prefill_chunk, step=self.target_step)

    def new_draft_cache(self, prefill_chunk: int, positions: Positions = "original") -> CachedModel:
        """The draft with an empty cache over its own ids, kept from turn to turn (see `draft_in_target_vocab`).

        positions: how it numbers a pruned prompt.
        """
        num_ids = self.vocabulary.num_target if self.vocabulary.relation == "padded" else None
        kind = CachedModel if positions == "original" else ContiguousModel
        return kind(self.draft, prefill_chunk, num_ids, self.draft_step)

    def draft_in_target_vocab(self, index: CachedModel, tokenization: DraftTokenization | None = None) -> DraftModel:
        """The draft behind an index as a request sees it: target ids in, logits over them out.

        Another tokenizer's index rolls back to its common prefix with the tokenization; None leaves it unchanged.
        """
        if self.translation is None:
            return index
        if tokenization is None:
            return CachedModel(self.draft, index.prefill_chunk, self.vocabulary.num_target)
        return TranslatedDraft(index, self.translation, tokenization)

    def greedy_look_ahead(self, draft: DraftModel) -> LookAhead:
        """What the draft drafts greedily after a prompt, up to the target's end."""
        return partial(propose, draft, sampler=Sampler(), end_ids=self.end_ids)


def _check_loaded(**models: object) -> None:
    for role, model in models.items():
        if not hasattr(model, "config"):
            raise ValueError(
                f"{role} must be a loaded transformers model, got {model!r}; from_pretrained() loads names"
            )


def _check_tokenizers(**tokenizers: object) -> None:
    for role, tokenizer in tokenizers.items():
        if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
            raise ValueError(f"{role} must be a loaded tokenizer of transformers or None, got {tokenizer!r}")
