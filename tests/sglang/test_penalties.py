"""Penalties under speculation: by counting in lists, token by token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from spec_stack.sglang.errors import num_failures
from spec_stack.sglang.penalties import Penalties, has_penalties, is_penalised
from tests.support.sampling_settings import sampling_params

VOCABULARY = 7
_PENALTIES = st.sampled_from([0.0, 0.5, -0.25])
_PARAMS = st.builds(
    sampling_params,
    frequency_penalty=_PENALTIES,
    presence_penalty=_PENALTIES,
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    min_new_tokens=st.integers(0, 9),
)


def _request(said: list[int], it: Any, num_prompt_tokens: int = 3) -> Any:
    return SimpleNamespace(
        rid="a", origin_input_ids=[0] * num_prompt_tokens, output_ids=said, sampling_params=it, finished=lambda: False
    )


def _info(num_rows: int, additive: float = 0.0, scaling: float = 1.0, device: str = "cpu") -> Any:
    """SGLang's SamplingBatchInfo."""
    return SimpleNamespace(
        acc_additive_penalties=torch.full((num_rows, VOCABULARY), additive, device=device),
        acc_scaling_penalties=torch.full((num_rows, VOCABULARY), scaling, device=device),
    )


def _check(info: Any, row: int, said: list[int], it: Any) -> None:
    """A row's penalties, by counting what was said."""
    for token in range(VOCABULARY):
        times = said.count(token)
        additive = -it.frequency_penalty * times - it.presence_penalty * (times > 0)
        expected = -torch.inf if token == 3 and len(said) < it.min_new_tokens else additive
        assert info.acc_additive_penalties[row, token] == pytest.approx(expected)
        assert info.acc_scaling_penalties[row, token] == (it.repetition_penalty if times else 1.0)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.lists(st.integers(0, 6), min_size=1, max_size=9), _PARAMS, st.booleans()), min_size=1))
def test_every_token_that_was_said_counts_once(requests: list[tuple[list[int], Any, bool]]) -> None:
    """Also where the host does not know the last one yet, of some of a batch: under overlap, and after a retraction
    while the prefill that repeats it is on its way. Rows without penalties are left alone, and an end of the reply is
    forbidden no longer than was asked for."""
    told = [said[:-1] if lags else said for said, _, lags in requests]
    rows = [_request(ids, it) for ids, (_, it, _) in zip(told, requests, strict=True)]
    info = _info(len(rows), 9.0, 9.0)
    # SGLang forbids an end of the reply here.
    info.acc_additive_penalties[:, 3] = -torch.inf
    seq_lens = torch.tensor([3 + len(said) - 1 for said, _, _ in requests])
    Penalties().correct_step(rows, info, torch.tensor([said[-1] for said, _, _ in requests]), seq_lens)
    for row, (said, it, _) in enumerate(requests):
        if not has_penalties(rows[row]):
            assert info.acc_additive_penalties[row, 0] == 9
            continue
        _check(info, row, said, it)


@given(st.lists(st.tuples(st.lists(st.integers(0, 6), max_size=9), _PARAMS), min_size=1))
def test_a_prefill_that_repeats_a_reply_is_penalised_for_all_of_it(requests: list[tuple[list[int], Any]]) -> None:
    """After a retraction SGLang counts from nothing. First prefills are left alone."""
    rows = [_request(said, it) for said, it in requests]
    info = _info(len(rows))
    for row, (_, it) in enumerate(requests):
        if it.min_new_tokens:
            info.acc_additive_penalties[row, 3] = -torch.inf
    Penalties().correct_prefill(rows, info, torch.device("cpu"))
    for row, (said, it) in enumerate(requests):
        _check(info, row, said, it)


@given(
    st.lists(_PARAMS, min_size=1, max_size=4),
    st.lists(st.lists(st.integers(0, 6), min_size=4, max_size=4), min_size=1, max_size=8),
    st.integers(0, 1),
    st.sets(st.integers(0, 7)),
    st.sets(st.integers(0, 7)),
)
def test_what_is_added_step_by_step_is_what_was_said(
    settings: list[Any], steps: list[list[int]], lag: int, others: set[int], changes: set[int]
) -> None:
    """Whatever the host has been told, also where a prefill comes between (others) and who runs changes (changes)."""
    penalties, said = Penalties(), [[1] for _ in settings]
    rows: list[Any] = []
    failures = num_failures()
    for number, tokens in enumerate(steps):
        if not rows or number in changes:
            rows = [_request([], it) for it in settings]
        for row, ids in zip(rows, said, strict=True):
            row.output_ids = ids[: len(ids) - lag]
        if number in others:
            penalties.correct_prefill([], None, torch.device("cpu"))
        info = _info(len(rows))
        info.acc_additive_penalties[:, 3] = -torch.inf
        seq_lens = torch.tensor([3 + len(ids) - 1 for ids in said])
        penalties.correct_step(rows, info, torch.tensor([ids[-1] for ids in said], dtype=torch.int32), seq_lens)
        for row, (ids, it) in enumerate(zip(said, settings, strict=True)):
            if not has_penalties(rows[row]):
                assert info.acc_additive_penalties[row, 0] == 0
                continue
            _check(info, row, ids, it)
        for ids, token in zip(said, tokens, strict=False):
            ids.append(token)
    # Else what was tested is SGLang's own count.
    assert num_failures() == failures


class _CopiesToTheDevice(TorchDispatchMode):
    """Counts what goes from the host to the meta device, which stands for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sources = [it for it in args if isinstance(it, torch.Tensor)]
        if isinstance(found, torch.Tensor) and found.device.type == "meta":
            self.num += any(it.device.type == "cpu" and it.dim() for it in sources)
        return found


def test_a_step_of_the_same_requests_copies_nothing_to_the_device() -> None:
    rows = [
        _request([1] * 500, sampling_params(frequency_penalty=0.5, repetition_penalty=1.1)),
        _request([1], sampling_params()),
    ]
    penalties, copies, info = Penalties(), [], _info(2, device="meta")
    on_device = torch.zeros(2, dtype=torch.int64, device="meta")
    for _ in range(5):
        with _CopiesToTheDevice() as mode:
            penalties.correct_step(rows, info, on_device, on_device)
        copies.append(mode.num)
    assert copies[0] > 0
    assert copies[1:] == [0] * 4


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
    request: Any = SimpleNamespace(output_ids=[0] * num_said, sampling_params=sampling_params(**settings))
    assert is_penalised(request) is expected
