"""A prompt in the target's cache: its greedy answer, and the logits of any other answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from spec_stack.decode.propose import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.engine.conversation import SingleTurn
from spec_stack.engine.engine import Engine
from spec_stack.engine.options import Call
from spec_stack.prefill.rule import Observer


class PrefilledPrompt:
    """A planned prompt after its prefill, sparse or dense. Answers leave the cache as it is.

    request: the plan. selection: the K prompt tokens that the target prefilled. Raises ValueError as `Engine.plan`.
    """

    def __init__(self, engine: Engine, call: Call, observer: Observer | None = None) -> None:
        self._end_ids = engine.pair.end_ids
        self.request = replace(engine.plan(cast(Call, {**call, "gamma": 0})), observer=observer)
        caches = SingleTurn(engine.pair, self.request)
        look_ahead = partial(propose, caches.draft, sampler=Sampler(), end_ids=self._end_ids)
        self.selection = caches.score(look_ahead)[0] if caches.needs_scoring else caches.select_everything()
        self._target = caches.target
        self._first = self._target.forward(self.selection.token_ids, self.selection.positions, 1)

    @property
    def first_token(self) -> int:
        """The most likely first token of an answer."""
        return int(self._first[-1].argmax())

    def greedy(self, max_tokens: int) -> list[int]:
        """The greedy answer by plain decoding: at most max_tokens tokens, an end-of-sequence token included."""
        target, answer = self._target.fork(), [self.first_token]
        while len(answer) < max_tokens and answer[-1] not in self._end_ids:
            row = target.forward(answer[-1:], [target.next_position], 1)
            answer.append(int(row[-1].argmax()))
        return answer

    def logits(self, answer: Sequence[int]) -> torch.Tensor:
        """Teacher-forced logits (n, vocab) of an answer of n ≥ 1 tokens; row i predicts its token i."""
        seen = list(answer[:-1])
        if not seen:
            return self._first
        start = self._target.next_position
        later = self._target.forward(seen, range(start, start + len(seen)), len(seen))
        self._target.rollback(len(seen))
        return torch.cat([self._first, later])


def token_logprobs(logits: torch.Tensor, answer: Sequence[int]) -> torch.Tensor:
    """Log-probabilities (n,) of an answer's tokens, in fp32; logits (n, vocab)."""
    ids = torch.tensor(answer, device=logits.device)
    return logits.float().log_softmax(dim=-1).gather(1, ids[:, None])[:, 0]
