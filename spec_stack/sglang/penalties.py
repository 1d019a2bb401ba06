"""Frequency, presence and repetition penalties under speculation, exactly. No SGLang here.

SGLang counts one token of each step, whatever the step brought, and penalises every drafted token alike. Where a
request that was retracted is prefilled again, it counts from nothing. So a request with penalties drafts nothing here,
and its penalties are counted anew from what it has said.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from spec_stack.sglang.protocols import RunningRequest, SamplingSettings


def is_penalised(request: RunningRequest) -> bool:
    """Return whether what a request has said so far changes what it may say next."""
    asked = request.sampling_params
    return _counts(asked) or len(request.output_ids) < asked.min_new_tokens


def has_penalties(request: RunningRequest) -> bool:
    """Return whether SGLang keeps penalties for a request, also where they have done their part: its own count of a
    reply that must not end too soon may lag behind."""
    return _counts(request.sampling_params) or request.sampling_params.min_new_tokens > 0


def count_anew(
    sampling_info: Any, requests: Sequence[RunningRequest], newest: torch.Tensor, num_said: torch.Tensor
) -> None:
    """Put the penalties of the token that each request says next right. Mutates SGLang's tensors of the batch.

    Parameters
    ----------
    sampling_info
        SGLang's SamplingBatchInfo for this step: acc_additive_penalties, added to logits, and acc_scaling_penalties,
        which divide positive logits and multiply negative ones, each (num_requests, vocab) or None.
    newest
        (num_requests,): the last token that each request has said, on its device.
    num_said
        (num_requests,): how many tokens it has said, on that device. The host may not have been told of the newest one
        yet: under overlap scheduling, and after a prefill whose result is on its way. Where it has been told of as
        many, `newest` counts for nothing.
    """
    for row, request in enumerate(requests):
        asked = request.sampling_params
        if not has_penalties(request):
            continue
        known = torch.tensor(list(request.output_ids), dtype=torch.int64).to(newest.device)
        said = torch.cat([known, newest[row : row + 1].long()])
        # Whether the newest is new is known on the device alone, which is not waited for.
        times = torch.ones(len(said), device=said.device)
        times[-1] = (num_said[row] - len(known)).clamp(0, 1)
        for penalties in _additive(sampling_info):
            counts = torch.zeros_like(penalties[row]).index_add_(0, said, times.to(penalties.dtype))
            penalty = -float(asked.frequency_penalty) * counts - float(asked.presence_penalty) * (counts > 0)
            # SGLang forbids a reply to end too soon in the same tensor.
            forbidden = torch.isneginf(penalties[row]) & (num_said[row] < asked.min_new_tokens)
            penalties[row] = penalty.masked_fill(forbidden, float("-inf"))
        for scaling in _scaling(sampling_info):
            counts = torch.zeros_like(scaling[row]).index_add_(0, said, times.to(scaling.dtype))
            scaling[row] = torch.where(counts > 0, float(asked.repetition_penalty), 1.0)


def count_one_by_one(
    sampling_info: Any, requests: Sequence[RunningRequest], newest: torch.Tensor, num_said: torch.Tensor
) -> None:
    """The same as `count_anew`, token by token on the host: for when that failed. The device is waited for."""
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


def _additive(sampling_info: Any) -> list[torch.Tensor]:
    return [] if sampling_info.acc_additive_penalties is None else [sampling_info.acc_additive_penalties]


def _scaling(sampling_info: Any) -> list[torch.Tensor]:
    return [] if sampling_info.acc_scaling_penalties is None else [sampling_info.acc_scaling_penalties]
