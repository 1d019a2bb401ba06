"""Exact frequency, presence and repetition penalties under speculation. No SGLang import.

SGLang counts one token per step and forgets a retracted request's output. Here penalised requests draft nothing, and
their output is counted on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch

from spec_stack.devices import to_device
from spec_stack.sglang.errors import log_and_continue
from spec_stack.sglang.request import RunningRequest

_COUNTING = "counting penalties", "they are SGLang's own"


def is_penalised(request: RunningRequest) -> bool:
    """Return whether a request's output changes its next token's logits."""
    params = request.sampling_params
    return _counts(params) or len(request.output_ids) < params.min_new_tokens


def has_penalties(request: RunningRequest) -> bool:
    """Return whether SGLang keeps penalties for a request, expired ones included."""
    return _counts(request.sampling_params) or request.sampling_params.min_new_tokens > 0


class Penalties:
    """Makes SGLang's penalties exact, step by step.

    sampling_info: SGLang's SamplingBatchInfo, with acc_additive_penalties, added to logits, and acc_scaling_penalties,
    which divide positive logits and multiply negative ones, each (num_requests, vocab) or None. They are mutated.
    """

    def __init__(self) -> None:
        self._counted: _OutputCounts | None = None

    def correct_step(
        self, requests: Sequence[RunningRequest], sampling_info: Any, newest: torch.Tensor, seq_lens: torch.Tensor
    ) -> None:
        """Correct a decode step. newest: (num_requests,), the last tokens. seq_lens: (num_requests,), tokens before."""
        counted, self._counted = self._counted, None
        with log_and_continue(*_COUNTING):
            if counted is None or not counted.is_of(requests):
                counted = _OutputCounts.of(requests, sampling_info, seq_lens.device)
            if counted is not None:
                counted.correct(sampling_info, newest, seq_lens + 1 - counted.num_prompt_tokens)
                self._counted = counted

    def correct_prefill(self, requests: Sequence[RunningRequest], sampling_info: Any, device: torch.device) -> None:
        """Correct a prefill, which repeats output after a retraction. device: SGLang's.

        The next step counts the output anew: a prefill may be of a request that was retracted.
        """
        self._counted = None
        with log_and_continue(*_COUNTING):
            repeats = any(request.output_ids and has_penalties(request) for request in requests)
            if repeats and (counted := _OutputCounts.of(requests, sampling_info, device)):
                num_output = to_device(torch.tensor([len(request.output_ids) for request in requests]), device)
                counted.correct(sampling_info, torch.zeros_like(num_output), num_output)


class _OutputCounts:
    """Output tokens of a batch's penalised requests, counted on their device; num_prompt_tokens: (num_requests,)."""

    def __init__(self, requests: Sequence[RunningRequest], num_tokens: int, device: torch.device) -> None:
        self._requests = requests
        rows = [row for row, request in enumerate(requests) if has_penalties(request)]
        outputs = [torch.tensor(list(requests[row].output_ids), dtype=torch.int64) for row in rows]
        lengths = torch.tensor([len(ids) for ids in outputs])
        params = [requests[row].sampling_params for row in rows]
        settings = [
            (it.frequency_penalty, it.presence_penalty, it.repetition_penalty, float(it.min_new_tokens))
            for it in params
        ]
        self.num_prompt_tokens = to_device(torch.tensor([len(it.origin_input_ids) for it in requests]), device)
        self._rows, self._num_counted = to_device(torch.tensor(rows), device), to_device(lengths, device)
        self._settings = to_device(torch.tensor(settings).T.contiguous(), device)[..., None]
        owners = to_device(torch.arange(len(rows)).repeat_interleave(lengths), device)
        ids = to_device(torch.cat(outputs), device)
        self._times = torch.zeros(len(rows), num_tokens, device=device)
        self._times.index_put_((owners, ids), torch.ones(len(ids), device=device), accumulate=True)

    @classmethod
    def of(cls, requests: Sequence[RunningRequest], sampling_info: Any, device: torch.device) -> _OutputCounts | None:
        """None where SGLang keeps no penalties for any of them."""
        tables = (sampling_info.acc_additive_penalties, sampling_info.acc_scaling_penalties)
        kept = next((table for table in tables if table is not None), None)
        if kept is None or not any(has_penalties(request) for request in requests):
            return None
        return cls(requests, kept.shape[1], device)

    def is_of(self, requests: Sequence[RunningRequest]) -> bool:
        return len(requests) == len(self._requests) and all(map(is_, requests, self._requests))

    def correct(self, sampling_info: Any, newest: torch.Tensor, num_output: torch.Tensor) -> None:
        """Count each newest token that the output lengths (num_requests,) include, and write the next penalties."""
        rows, num_output = self._rows, num_output[self._rows]
        is_new = (num_output - self._num_counted).clamp(0, 1)
        self._num_counted = self._num_counted + is_new
        self._times.scatter_add_(1, newest[rows, None].long(), is_new[:, None].to(self._times.dtype))
        frequency, presence, repetition, min_new_tokens = self._settings
        occurs = self._times > 0
        additive, scaling = sampling_info.acc_additive_penalties, sampling_info.acc_scaling_penalties
        if additive is not None:
            # SGLang enforces min_tokens in the same tensor.
            forbidden = torch.isneginf(additive[rows]) & (num_output[:, None] < min_new_tokens)
            penalty = -frequency * self._times - presence * occurs
            additive[rows] = penalty.masked_fill(forbidden, -math.inf).to(additive.dtype)
        if scaling is not None:
            scaling[rows] = torch.where(occurs, repetition, 1.0).to(scaling.dtype)


def _counts(params: Any) -> bool:
    return bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1)
