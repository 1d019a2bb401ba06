"""Scoring by the Transformers backend, for models that SGLang's runner does not score with."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from spec_stack.engine.prompt_scorer import FoundScorer, PromptScorer
from spec_stack.hf.prompt import num_shared
from spec_stack.sglang.decide import Prompt
from spec_stack.sglang.draft_radix_cache import PoolFullError
from spec_stack.sglang.ranks import from_first_rank
from spec_stack.sglang.scoring import Score, Scorer


class TransformersScorer(Scorer):
    """Scores one prompt at a time, on every rank of a tensor-parallel group, with all of the model.

    The KV of the last prompt stays for a follow-up, unless the model has a recurrent state.
    """

    def __init__(
        self, found: FoundScorer, model: PromptScorer, device: str, num_pool_tokens: int, context_len: int
    ) -> None:
        """context_len: the target's."""
        self._found, self._model, self._device, self._context_len = found, model, device, context_len
        self.num_pool_tokens = num_pool_tokens
        self._room: torch.Tensor | None = None
        # The prompt whose KV is there, or is being written.
        self._held: Prompt | None = None
        self._is_busy = False

    def allocate(self) -> None:
        # SGLang's pools leave this room to the model's KV, which is allocated by request.
        shape = self.num_pool_tokens, self._found.bytes_per_token
        self._room = torch.empty(shape, dtype=torch.uint8, device=self._device)

    def pool_state(self) -> dict[str, int]:
        num_held = 0 if self._held is None else len(self._held.token_ids)
        num_bytes = self.num_pool_tokens * self._found.bytes_per_token
        return {"num_tokens": self.num_pool_tokens, "num_held": num_held, "num_bytes": num_bytes}

    def num_to_prefill(self, prompt: Prompt) -> int:
        return len(prompt.token_ids) - self._num_shared(prompt)

    def _num_shared(self, prompt: Prompt) -> int:
        if self._held is None or _walls(self._held) != _walls(prompt):
            return 0
        return num_shared(self._held.token_ids, prompt.token_ids[:-1])

    def has_room(self, num_tokens: int) -> bool:
        return not self._is_busy and num_tokens <= self.num_pool_tokens

    def forget(self) -> None:
        self._held = None
        self._model.forget()

    def working(self, scheduler: Any) -> AbstractContextManager[None]:
        return torch.no_grad()

    def score(
        self,
        prompt: Prompt,
        most_of_a_part: Callable[[int], int],
        pieces: Sequence[str] | None = None,
        first_query: int = 0,
    ) -> Generator[None, None, Score]:
        self._room = None
        num_tokens, num_held = len(prompt.token_ids), self._num_shared(prompt)
        if num_tokens > self.num_pool_tokens:
            raise PoolFullError(f"the prompt has {num_tokens} tokens, and the draft's KV {self.num_pool_tokens}")
        if not num_held:
            self.forget()
        self._held, self._is_busy, is_reusable = prompt, True, False
        try:
            importance = yield from self._model.score(
                prompt.token_ids,
                prompt.config,
                lambda: most_of_a_part(prompt.config.prefill_chunk),
                pieces,
                prompt.spans,
                prompt.end_ids,
                self._context_len - num_tokens,
                first_query,
            )
            # All ranks agree that they have come so far before any waits for another.
            yield
            is_reusable = not self._found.is_recurrent
            return Score(from_first_rank(importance), num_tokens - num_held)
        finally:
            self._is_busy = False
            if not is_reusable:
                self.forget()


def _walls(prompt: Prompt) -> Hashable:
    """What two prompts must share for one to use the other's KV."""
    return prompt.tenant, prompt.config.resolved_scoring_layers
