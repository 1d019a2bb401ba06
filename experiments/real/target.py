"""A target as transformers runs it, over tokens at positions of their own, several caches side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from spec_stack.hf.architectures import end_token_ids
from spec_stack.hf.cache import cache_argument
from spec_stack.hf.precision import DTYPES
from spec_stack.hf.prepack import can_prepack, prepack
from spec_stack.hf.prompt import num_shared


@dataclass
class Prefilled:
    """One arm's cache, the logits (vocabulary,) behind it, and the position of the next token."""

    cache: Any
    logits: torch.Tensor
    position: int

    @property
    def token_id(self) -> int:
        return int(self.logits.argmax())


class Target:
    """The model of a folder, its weights laid out as this package lays them out."""

    def __init__(self, folder: str | Path, precision: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[precision]).eval()
        if can_prepack(self.model.device, self.model.dtype):
            prepack(self.model)
        self.end_ids = frozenset(end_token_ids(self.model))

    @torch.inference_mode()
    def prefill(
        self, token_ids: Sequence[int], positions: Sequence[int], shift: int = 0, cache: Any = None
    ) -> Prefilled:
        """Go over some tokens of a prompt, at positions `shift` further on. cache: with the first of these tokens."""
        cache = DynamicCache(config=self.model.config) if cache is None else cache
        own = positions[cache.get_seq_length() :]
        made = self.model(
            torch.tensor([[token_ids[position] for position in own]]),
            # Without a mask transformers takes gaps between positions for several texts in one row.
            attention_mask=torch.ones(1, len(positions), dtype=torch.long),
            position_ids=torch.tensor([[position + shift for position in own]]),
            logits_to_keep=1,
            **cache_argument(self.model, cache),
        )
        return Prefilled(cache, made.logits[0, -1], positions[-1] + shift + 1)

    @torch.inference_mode()
    def decode(self, arms: Sequence[Prefilled], max_tokens: int) -> list[list[int]]:
        """Answer greedily, all arms side by side, until each has ended."""
        widths = [arm.cache.get_seq_length() for arm in arms]
        cache, mask = _side_by_side([arm.cache for arm in arms]), _mask(widths)
        answers = [[arm.token_id] for arm in arms]
        while len(answers[0]) < max_tokens and not all(self.end_ids & {*answer} for answer in answers):
            mask = torch.cat([mask, mask.new_ones(len(arms), 1)], dim=1)
            positions = [[arm.position + len(answers[0]) - 1] for arm in arms]
            made = self.model(
                torch.tensor([answer[-1:] for answer in answers]),
                attention_mask=mask,
                position_ids=torch.tensor(positions),
                **cache_argument(self.model, cache),
            )
            for answer, token_id in zip(answers, made.logits[:, -1].argmax(-1).tolist(), strict=True):
                answer.append(token_id)
        return [self._to_the_end(answer) for answer in answers]

    @torch.inference_mode()
    def losses(self, arms: Sequence[Prefilled], answer: Sequence[int]) -> list[float]:
        """The mean loss of an answer's tokens behind each arm's cache, which then holds them, in nats a token."""
        return [self._loss(arm, answer) for arm in arms]

    def _loss(self, arm: Prefilled, answer: Sequence[int]) -> float:
        logits = arm.logits[None]
        if known := answer[:-1]:
            made = self.model(
                torch.tensor([known]),
                attention_mask=torch.ones(1, arm.cache.get_seq_length() + len(known), dtype=torch.long),
                position_ids=torch.arange(arm.position, arm.position + len(known))[None],
                **cache_argument(self.model, arm.cache),
            )
            logits = torch.cat([logits, made.logits[0]])
        told = -logits.float().log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])
        return float(told.mean())

    def _to_the_end(self, answer: list[int]) -> list[int]:
        return answer[: next((at for at, token_id in enumerate(answer) if token_id in self.end_ids), len(answer))]


def _mask(widths: Sequence[int]) -> torch.Tensor:
    longest = max(widths)
    return torch.tensor([[0] * (longest - width) + [1] * width for width in widths])


def _side_by_side(caches: Sequence[Any]) -> Any:
    """One cache of several, the shorter ones with empty slots before them."""
    joined = DynamicCache()
    longest = max(cache.get_seq_length() for cache in caches)
    for layer in range(len(caches[0].layers)):
        parts = []
        for cache in caches:
            own = cache.layers[layer]
            empty = longest - own.keys.shape[-2]
            parts.append([torch.nn.functional.pad(each, (0, 0, empty, 0)) for each in (own.keys, own.values)])
        joined.update(*(torch.cat(each) for each in zip(*parts, strict=True)), layer)
    return joined


@dataclass
class DensePrefix:
    """The dense cache of the previous prompt, which the next one resumes where it shares most of it."""

    target: Target
    token_ids: Sequence[int] = ()
    cache: Any = None

    def prefill(self, token_ids: Sequence[int]) -> Prefilled:
        """Go over what the previous prompt does not share. The result's cache ends with the next call."""
        shared = min(num_shared(self.token_ids, token_ids), len(token_ids) - 1)
        surplus = 0 if self.cache is None else self.cache.get_seq_length() - shared
        if 2 * shared < len(token_ids):
            # Behind a cache attention takes a mask, and twice as long.
            self.cache = None
        elif surplus:
            # transformers crops by how many tokens go.
            self.cache.crop(-surplus)
        made = self.target.prefill(token_ids, range(len(token_ids)), cache=self.cache)
        self.token_ids, self.cache = token_ids, made.cache
        return made
