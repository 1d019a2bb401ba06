"""Penalties under speculation: by counting in lists, token by token."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_stack.sglang.batch_policy import BatchPolicy
from spec_stack.sglang.penalties import count_anew, count_one_by_one, has_penalties, is_penalised
from spec_stack.sglang.server_args import ServerConfig
from tests.support.sampling_settings import asked

VOCABULARY = 7
_PENALTIES = st.sampled_from([0.0, 0.5, -0.25])
_ASKED = st.builds(
    asked,
    frequency_penalty=_PENALTIES,
    presence_penalty=_PENALTIES,
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    min_new_tokens=st.integers(0, 9),
)


@pytest.mark.parametrize("count", [count_anew, count_one_by_one])
@given(st.lists(st.tuples(st.lists(st.integers(0, 6), min_size=1, max_size=9), _ASKED, st.booleans()), min_size=1))
def test_every_token_that_was_said_counts_once(
    count: Callable[..., None], requests: list[tuple[list[int], Any, bool]]
) -> None:
    """Also where the host does not know the last one yet, of some of a batch: under overlap, and after a retraction
    while the prefill that repeats it is on its way. Rows without penalties are left alone, and an end of the reply is
    forbidden no longer than was asked for."""
    told = [said[:-1] if lags else said for said, _, lags in requests]
    rows = [SimpleNamespace(output_ids=ids, sampling_params=it) for ids, (_, it, _) in zip(told, requests, strict=True)]
    info = SimpleNamespace(
        acc_additive_penalties=torch.full((len(rows), VOCABULARY), 9.0),
        acc_scaling_penalties=torch.full((len(rows), VOCABULARY), 9.0),
    )
    # SGLang forbids an end of the reply here.
    info.acc_additive_penalties[:, 3] = -torch.inf
    num_said = torch.tensor([len(said) for said, _, _ in requests])
    count(info, rows, torch.tensor([said[-1] for said, _, _ in requests]), num_said)
    for row, (said, it, _) in enumerate(requests):
        if not has_penalties(rows[row]):
            assert info.acc_additive_penalties[row, 0] == 9
            continue
        for token in range(VOCABULARY):
            times = said.count(token)
            additive = -it.frequency_penalty * times - it.presence_penalty * (times > 0)
            expected = -torch.inf if token == 3 and len(said) < it.min_new_tokens else additive
            assert info.acc_additive_penalties[row, token] == pytest.approx(expected)
            assert info.acc_scaling_penalties[row, token] == (it.repetition_penalty if times else 1.0)


@given(st.lists(st.tuples(st.lists(st.integers(0, 6), max_size=9), _ASKED), min_size=1))
def test_a_prefill_that_repeats_a_reply_is_penalised_for_all_of_it(requests: list[tuple[list[int], Any]]) -> None:
    """After a retraction SGLang counts from nothing. First prefills are left alone."""
    rows = [SimpleNamespace(output_ids=said, sampling_params=it) for said, it in requests]
    info = SimpleNamespace(
        acc_additive_penalties=torch.zeros(len(rows), VOCABULARY),
        acc_scaling_penalties=torch.ones(len(rows), VOCABULARY),
    )
    for row, (_, it) in enumerate(requests):
        if it.min_new_tokens:
            info.acc_additive_penalties[row, 3] = -torch.inf
    policy = BatchPolicy(ServerConfig(), "fp32")
    policy.count_penalties_of_prefill(info, rows, torch.device("cpu"))  # type: ignore[arg-type]
    for row, (said, it) in enumerate(requests):
        for token in range(VOCABULARY):
            times = said.count(token)
            additive = -it.frequency_penalty * times - it.presence_penalty * (times > 0)
            expected = -torch.inf if token == 3 and len(said) < it.min_new_tokens else additive
            assert info.acc_additive_penalties[row, token] == pytest.approx(expected)
            assert info.acc_scaling_penalties[row, token] == (it.repetition_penalty if times else 1.0)


@pytest.mark.parametrize(
    ("settings", "num_said", "expected"),
    [
        ({}, 3, False),
        ({"frequency_penalty": 0.1}, 0, True),
        ({"presence_penalty": -0.1}, 0, True),
        ({"repetition_penalty": 1.1}, 0, True),
        ({"min_new_tokens": 4}, 3, True),
        ({"min_new_tokens": 4}, 4, False),
    ],
)
def test_a_request_is_penalised_where_what_it_said_matters(
    settings: dict[str, Any], num_said: int, expected: bool
) -> None:
    request: Any = SimpleNamespace(output_ids=[0] * num_said, sampling_params=asked(**settings))
    assert is_penalised(request) is expected
