"""Frequency, presence and repetition penalties under speculation, exactly. No SGLang here.

SGLang counts one token of each step, whatever the step brought, and penalises every drafted token alike. So a request
with penalties drafts nothing here, and its penalties are counted anew from what it has said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spec_stack.sglang.protocols import RunningRequest


def is_penalised(request: RunningRequest) -> bool:
    """Return whether what a request has said so far changes what it may say next."""
    asked = request.sampling_params
    if asked.frequency_penalty or asked.presence_penalty or asked.repetition_penalty != 1:
        return True
    return len(request.output_ids) < asked.min_new_tokens


def count_anew(sampling_info: Any, requests: Sequence[RunningRequest], newest: torch.Tensor, *, lags: bool) -> None:
    """Put the penalties of the token that each request says next right. Mutates SGLang's tensors of the batch.

    Parameters
    ----------
    sampling_info
        SGLang's SamplingBatchInfo for this step: acc_additive_penalties, added to logits, and acc_scaling_penalties,
        which divide positive logits and multiply negative ones, each (num_requests, vocab) or None.
    newest
        (num_requests,): the last token that each request has said, on its device.
    lags
        Whether the host has not been told of that token yet, as under overlap scheduling.
    """
    for row, request in enumerate(requests):
        asked = request.sampling_params
        if not (asked.frequency_penalty or asked.presence_penalty or asked.repetition_penalty != 1):
            continue
        said = torch.tensor(list(request.output_ids), dtype=torch.int64).to(newest.device)
        if lags or not len(said):
            said = torch.cat([said, newest[row : row + 1].long()])
        if sampling_info.acc_additive_penalties is not None:
            _count_additive(sampling_info.acc_additive_penalties[row], said, asked)
        if sampling_info.acc_scaling_penalties is not None:
            scaling = sampling_info.acc_scaling_penalties[row]
            scaling.fill_(1.0)
            scaling[said] = float(asked.repetition_penalty)


def _count_additive(penalties: torch.Tensor, said: torch.Tensor, asked: Any) -> None:
    """Count one request's penalties (vocab,)."""
    # SGLang forbids a reply to end too soon in the same tensor.
    forbidden = torch.isneginf(penalties)
    penalties.zero_()
    penalties.index_add_(0, said, torch.full(said.shape, -float(asked.frequency_penalty), device=said.device))
    penalties[torch.unique(said)] -= float(asked.presence_penalty)
    penalties.masked_fill_(forbidden, float("-inf"))
