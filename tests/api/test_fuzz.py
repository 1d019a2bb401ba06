"""Every option with values that are none: a TypeError or ValueError that names it, or it works."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from spec_stack import DecodeConfig, PrefillConfig, SamplingParams, SessionConfig, SpecStackGenerator
from spec_stack.config import LoadConfig

JUNK: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    3,
    10**30,
    0.5,
    -0.5,
    1e-320,
    float("nan"),
    float("inf"),
    float("-inf"),
    1 + 2j,
    "",
    "x",
    "\ud800",
    "3",
    b"x",
    [],
    [1],
    [None],
    [[]],
    ["a", 3],
    (1, 2),
    {},
    {"a": 1},
    {1: "x"},
    {1: float("nan")},
    {-1: 2.0},
    {10**9: 2.0},
    [10**9],
    [[10**9]],
    [-1],
    {1, 2},
    range(3),
    object(),
    object,
    len,
    lambda: None,
    np.array([1.5, 2]),
    np.float64("nan"),
    np.int64(-3),
    torch.tensor(3),
    torch.ones(2, 2),
    iter([1, 2]),
    Ellipsis,
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


def try_call(generator: SpecStackGenerator, name: str, value: Any) -> str | None:
    """What is wrong with how a value is met; None where nothing is."""
    options: dict[str, Any] = {"max_tokens": 2, name: value}
    if name not in PROMPTS:
        options["messages" if name in ("tools", "documents", "chat_template_kwargs") else "prompt"] = (
            [{"role": "user", "content": "hi"}] if name in ("tools", "documents", "chat_template_kwargs") else "hi"
        )
    if name == "params":
        del options["max_tokens"]
    try:
        generator.generate(**options)
    except (TypeError, ValueError) as error:
        text = str(error)
        named = name in text.lower() or any(word in text for word in ALSO.get(name, ()))
        return None if named else f"{name}={value!r}: {type(error).__name__}: {text}"
    except Exception as error:
        return f"{name}={value!r}: {type(error).__name__}: {error}"
    return None


def try_field(config: type, name: str, value: Any) -> str | None:
    """The same of a field."""
    try:
        config(**{name: value})
    except ValueError as error:
        named = name in str(error) or any(word in str(error) for word in ALSO.get(name, ()))
        return None if named else f"{name}={value!r}: {error}"
    except Exception as error:
        return f"{name}={value!r}: {type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("name", [*PROMPTS, *options_of(SpecStackGenerator.generate)])
def test_every_junk_value_of_a_call_is_named_or_works(
    name: str, embedded: SpecStackGenerator, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problems = [try_call(embedded, name, value) for value in JUNK]
    assert not [problem for problem in problems if problem]
    # And nothing of it stays behind.
    assert embedded.generate("def main():", max_tokens=3, gamma=2).finish_reason == "length"


@pytest.mark.parametrize("config", [PrefillConfig, DecodeConfig, SamplingParams, SessionConfig, LoadConfig])
def test_every_junk_value_of_a_configuration_is_named_or_accepted(config: type) -> None:
    problems = [try_field(config, entry.name, value) for entry in fields(config) for value in JUNK]
    assert not [problem for problem in problems if problem]
