"""Every option with values that are none: a TypeError or ValueError that names it, or it works."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from spec_stack import DecodeConfig, PrefillConfig, SamplingParams, SessionConfig, SpecStackGenerator
from spec_stack.config import LoadConfig

JUNK: list[Any] = [
    *(None, True, False, Ellipsis, object(), object, len, lambda: None, iter([1, 2])),
    *(0, -1, 3, 10**30, 0.5, -0.5, 1e-320, float("nan"), float("inf"), float("-inf"), 1 + 2j),
    *("", "x", "\ud800", "3", b"x"),
    *([], [1], [None], [[]], ["a", 3], (1, 2), [10**9], [[10**9]], [-1], {1, 2}, range(3)),
    *({}, {"a": 1}, {1: "x"}, {1: float("nan")}, {-1: 2.0}, {10**9: 2.0}),
    *(np.array([1.5, 2]), np.float64("nan"), np.int64(-3), torch.tensor(3), torch.ones(2, 2)),
]
PROMPTS = ("prompt", "messages", "input_ids")
# What an option may be called in a message about it beside its name.
ALSO = {
    "prompt": ("exactly one", "encode", "Unicode"),
    "messages": ("exactly one", "message", "role"),
    "input_ids": ("exactly one", "token ids", "the prompt is empty"),
    "tools": ("template",),
    "documents": ("template",),
    "chat_template_kwargs": ("template",),
    "on_progress": ("positional argument", "argument"),
    "logits_processor": ("logits processor", "argument"),
    "max_tokens": ("positions",),
    "min_tokens": ("positions", "end-of-sequence"),
    "stop_token_ids": ("token id",),
    "protected": ("template",),
    "records": (".jsonl", "path", "No such file", "directory", "null"),
    "policy": ("unknown policy",),
    "gamma": ("gamma",),
    "stop": ("stop",),
    "continue_final_message": ("final message", "assistant"),
}


def options_of(call: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(call).parameters if name not in ("self", *PROMPTS)]


def problem_of(call: Callable[[], object], refusal: Any, name: str, value: Any) -> str | None:
    """What is wrong with how a value is met; None where nothing is."""
    try:
        call()
    except refusal as error:
        text = str(error)
        named = name in text.lower() or any(word in text for word in ALSO.get(name, ()))
        return None if named else f"{name}={value!r}: {type(error).__name__}: {text}"
    except Exception as error:
        return f"{name}={value!r}: {type(error).__name__}: {error}"
    return None


def options_with(name: str, value: Any) -> dict[str, Any]:
    """A call's options, of which this is one."""
    options: dict[str, Any] = {name: value} if name == "params" else {"max_tokens": 2, name: value}
    if name in ("tools", "documents", "chat_template_kwargs"):
        return {"messages": [{"role": "user", "content": "hi"}]} | options
    return options if name in PROMPTS else {"prompt": "hi"} | options


@pytest.mark.parametrize("name", [*PROMPTS, *options_of(SpecStackGenerator.generate)])
def test_every_junk_value_of_a_call_is_named_or_works(
    name: str, embedded: SpecStackGenerator, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problems = [
            problem_of(partial(embedded.generate, **options_with(name, value)), (TypeError, ValueError), name, value)
            for value in JUNK
        ]
    assert not [problem for problem in problems if problem]
    # And nothing of it stays behind.
    assert embedded.generate("def main():", max_tokens=3, gamma=2).finish_reason == "length"


@pytest.mark.parametrize("config", [PrefillConfig, DecodeConfig, SamplingParams, SessionConfig, LoadConfig])
def test_every_junk_value_of_a_configuration_is_named_or_accepted(config: type) -> None:
    problems = [
        problem_of(partial(config, **{entry.name: value}), ValueError, entry.name, value)
        for entry in fields(config)
        for value in JUNK
    ]
    assert not [problem for problem in problems if problem]
