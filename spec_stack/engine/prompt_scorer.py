"""A draft that scores the prompts of a target that another engine runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from spec_stack.config import PrefillConfig
from spec_stack.decode.propose import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.architectures import is_recurrent, max_positions, text_config
from spec_stack.hf.cache import bytes_per_token
from spec_stack.hf.loading import FoundModel, load_draft_tokenizer, open_alone
from spec_stack.hf.model import CachedModel
from spec_stack.hf.prompt import num_shared
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.decide import scoring_obstacle
from spec_stack.prefill.queries import WINDOW
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.scoring import gather_inputs, num_layers_needed
from spec_stack.tokenizers.vocabulary import Vocabulary, compare

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class FoundScorer:
    """A loadable draft, and its relation to the target's tokenizer, before the weights are read."""

    draft: FoundModel
    tokenizers: tuple[Any, Any]
    vocabulary: Vocabulary

    @classmethod
    def open(cls, source: str, tokenizer: Any, num_ids: int, device: str, precision: str) -> FoundScorer:
        """Find a draft: a folder, hub id, GGUF file or adapter.

        tokenizer, num_ids: the target's, with its embedding rows. Raises ValueError for a draft that cannot score, and
        for tokenizers that cannot be mapped.
        """
        draft = open_alone(source, precision, device)
        own = None if tokenizer is None else load_draft_tokenizer(draft.source, tokenizer)
        return cls(draft, (tokenizer, own), compare(tokenizer, own, num_ids, text_config(draft.config).vocab_size))

    @property
    def hf_text_config(self) -> Any:
        """The text model's configuration, under SGLang's name for it."""
        return text_config(self.draft.config)

    @property
    def context_len(self) -> int:
        """The draft's positions, under SGLang's name for them."""
        return max_positions(self.draft.config)

    @property
    def dtype(self) -> torch.dtype:
        return self.draft.precision.dtype

    @property
    def is_recurrent(self) -> bool:
        """Whether its KV of a prompt cannot be cropped to the prefix of another."""
        return is_recurrent(self.draft.config)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values."""
        return bytes_per_token(self.hf_text_config, self.dtype)

    def load(self) -> PromptScorer:
        return PromptScorer(self.draft.load(), self.tokenizers, self.vocabulary)


class PromptScorer:
    """Scores token ids of the target. The draft's KV stays for a prompt that begins as the last one, until `forget`."""

    def __init__(self, draft: PreTrainedModel, tokenizers: tuple[Any, Any], vocabulary: Vocabulary) -> None:
        # The draft stands for the target too, whose weights another engine has.
        self._pair = ModelPair.assemble(draft, draft, *tokenizers, vocabulary=vocabulary)
        self._index: CachedModel | None = None

    def forget(self) -> None:
        """Free the draft's KV."""
        self._index = None

    def score(
        self,
        prompt_ids: Sequence[int],
        config: PrefillConfig,
        most_of_a_part: Callable[[], int],
        pieces: Sequence[str] | None = None,
        protected: Sequence[Span] = (),
        end_ids: Collection[int] = (),
        most_look_ahead: int = PrefillConfig.look_ahead,
        first_query: int = 0,
    ) -> Generator[None, None, torch.Tensor]:
        """Score a prompt part by part: importance (num_prompt_tokens,), fp32, on the host.

        Yields after every part. most_of_a_part: most tokens of the next part, but the last one, which has the scoring
        queries too. pieces: the text of every token. protected: spans that are always kept. end_ids: end the
        look-ahead, of most_look_ahead tokens or fewer. first_query: first token whose segment may hold the question.
        Raises ValueError for a prompt that the draft cannot score, and for a rule that needs no attention.
        """
        pair, prompt_ids = self._pair, list(prompt_ids)
        tokenization, obstacle = pair.tokenize_for_draft(prompt_ids)
        num_draft_tokens = len(prompt_ids if tokenization is None else tokenization.token_ids)
        limit = pair.max_positions[1]
        if obstacle := obstacle or scoring_obstacle(config, num_draft_tokens, limit, pair.scoring_limit):
            raise ValueError(obstacle)
        most_look_ahead = min(most_look_ahead, limit - num_draft_tokens)
        config = replace(config, look_ahead=max(0, min(config.look_ahead, most_look_ahead)))
        if self._index is None:
            self._index = pair.new_draft_cache(config.prefill_chunk)
        if tokenization is None:
            self._index.truncate(num_shared(self._index.token_ids, prompt_ids))
        draft = pair.draft_in_target_vocab(self._index, tokenization)
        num_layers, window = num_layers_needed(config, draft.num_layers), config.window_for(len(prompt_ids))
        # The scoring queries begin there or later.
        while len(prompt_ids) - WINDOW - draft.next_position > (most := most_of_a_part()):
            part = range(draft.next_position, draft.next_position + most)
            draft.prefill(prompt_ids[part.start : part.stop], part, window, config.draft_sinks, num_layers)
            yield
        look_ahead = partial(propose, draft, sampler=Sampler(), end_ids=end_ids)
        inputs = ScoringInputs(prompt_ids, protected=protected, pieces=pieces)
        inputs, _ = gather_inputs(draft, inputs, look_ahead, config, tokenization, first_query=first_query)
        return inputs.token_importance(config)
