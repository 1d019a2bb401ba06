"""Exact frequency, presence and repetition penalties under speculation. No SGLang import.

SGLang counts one token per step and forgets a retracted request's output. Here penalised requests draft nothing, and
their output is counted on the device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from spec_stack.devices import to_device
from spec_stack.sglang.protocols import RunningRequest, SamplingSettings


def is_penalised(request: RunningRequest) -> bool:
    """Return whether a request's output changes its next token's logits."""
    asked = request.sampling_params
    return _counts(asked) or len(request.output_ids) < asked.min_new_tokens


def has_penalties(request: RunningRequest) -> bool:
    """Return whether SGLang keeps penalties for a request, expired ones included: its min_tokens count may lag
    behind.
    """
    return _counts(request.sampling_params) or request.sampling_params.min_new_tokens > 0


def tables(sampling_info: Any) -> list[torch.Tensor]:
    """SGLang's penalties of a batch, each (num_requests, vocab); none where it keeps none."""
    return [*_additive(sampling_info), *_scaling(sampling_info)]


class SaidTokens:
    """Counts the output tokens of penalised requests, on their device from step to step.

    requests: the batch, in row order. Output that the host knows is counted now; each later step adds the newest token.
    num_tokens: of the vocabulary. device: of SGLang's tensors. num_prompt_tokens: (num_requests,).
    """

    def __init__(self, requests: Sequence[RunningRequest], num_tokens: int, device: torch.device) -> None:
        rows = [row for row, request in enumerate(requests) if has_penalties(request)]
        said = [torch.tensor(list(requests[row].output_ids), dtype=torch.int64) for row in rows]
        lengths = torch.tensor([len(ids) for ids in said])
        settings = [_numbers(requests[row].sampling_params) for row in rows]
        self.num_prompt_tokens = to_device(torch.tensor([len(it.origin_input_ids) for it in requests]), device)
        self._rows, self._num_counted = to_device(torch.tensor(rows), device), to_device(lengths, device)
        self._settings = to_device(torch.tensor(settings).T.contiguous(), device)[..., None]
        owners = to_device(torch.arange(len(rows)).repeat_interleave(lengths), device)
        ids = to_device(torch.cat(said), device)
        self._times = torch.zeros(len(rows), num_tokens, device=device)
        self._times.index_put_((owners, ids), torch.ones(len(ids), device=device), accumulate=True)

    def count(self, sampling_info: Any, newest: torch.Tensor, num_said: torch.Tensor) -> None:
        """Correct the penalties of each request's next token. Mutates SGLang's tensors of the batch.

        sampling_info: SGLang's SamplingBatchInfo, with acc_additive_penalties, added to logits, and
        acc_scaling_penalties, which divide positive logits and multiply negative ones, each (num_requests, vocab) or
        None. newest: (num_requests,), the last output tokens. num_said: (num_requests,), output lengths; where as many
        are counted, `newest` is ignored: under overlap scheduling, and after a prefill with a pending result, the host
        does not know.
        """
        rows, num_said = self._rows, num_said[self._rows]
        is_new = (num_said - self._num_counted).clamp(0, 1)
        self._num_counted = self._num_counted + is_new
        self._times.scatter_add_(1, newest[rows, None].long(), is_new[:, None].to(self._times.dtype))
        frequency, presence, repetition, least = self._settings
        is_said = self._times > 0
        for penalties in _additive(sampling_info):
            # SGLang enforces min_tokens in the same tensor.
            forbidden = torch.isneginf(penalties[rows]) & (num_said[:, None] < least)
            penalty = -frequency * self._times - presence * is_said
            penalties[rows] = penalty.masked_fill(forbidden, -math.inf).to(penalties.dtype)
        for scaling in _scaling(sampling_info):
            scaling[rows] = torch.where(is_said, repetition, 1.0).to(scaling.dtype)


def count_one_by_one(
    sampling_info: Any, requests: Sequence[RunningRequest], newest: torch.Tensor, num_said: torch.Tensor
) -> None:
    """The fallback of `SaidTokens`, token by token on the host; waits for the device."""
    for row, request in enumerate(requests):
        asked = request.sampling_params
        if not has_penalties(request):
            continue
        said = Counter(request.output_ids)
        if int(num_said[row]) > len(request.output_ids):
            said[int(newest[row])] += 1
        for penalties in _additive(sampling_info):
            may_end = int(num_said[row]) >= asked.min_new_tokens
            infinite = {token for token, value in enumerate(penalties[row].tolist()) if value == -math.inf}
            forbidden = set() if may_end else infinite
            penalties[row] = 0.0
            for token, times in said.items():
                penalties[row, token] = -asked.frequency_penalty * times - asked.presence_penalty
            for token in forbidden:
                penalties[row, token] = -math.inf
        for scaling in _scaling(sampling_info):
            scaling[row] = 1.0
            for token in said:
                scaling[row, token] = asked.repetition_penalty


def _counts(asked: SamplingSettings) -> bool:
    return bool(asked.frequency_penalty or asked.presence_penalty or asked.repetition_penalty != 1)


def _numbers(asked: SamplingSettings) -> tuple[float, ...]:
    return asked.frequency_penalty, asked.presence_penalty, asked.repetition_penalty, float(asked.min_new_tokens)


def _additive(sampling_info: Any) -> list[torch.Tensor]:
    return [] if sampling_info.acc_additive_penalties is None else [sampling_info.acc_additive_penalties]


def _scaling(sampling_info: Any) -> list[torch.Tensor]:
    return [] if sampling_info.acc_scaling_penalties is None else [sampling_info.acc_scaling_penalties]
