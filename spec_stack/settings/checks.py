"""Checks of configuration values; each raises ValueError with the field's name and valid values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from typing import Literal, TypeVar, get_args, get_origin, get_type_hints

Config = TypeVar("Config")

MOST_SHAPING = 1e15
"""Largest logit_bias and repetition_penalty: divided by the lowest temperature their product is finite in fp32."""


def require(condition: bool, message: str) -> None:
    """Raise ValueError unless the condition holds."""
    if not condition:
        raise ValueError(message)


def require_config(config: object, kind: type[Config]) -> Config:
    """The configuration, which must be of this kind; None is the default one."""
    config = kind() if config is None else config
    if not isinstance(config, kind):
        raise ValueError(f"config must be a {kind.__name__}, got {type(config).__name__}")
    return config


def require_number(name: str, value: object) -> None:
    """Require an int or float, not a bool."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    require(number, f"{name} must be a number, got {value!r}")


@cache
def _choices(config: type) -> dict[str, tuple[object, ...]]:
    """The known names by field; once per class, since types are read from their source text."""
    kinds = get_type_hints(config)
    return {name: get_args(kind) for name, kind in kinds.items() if get_origin(kind) is Literal}


def require_int(name: str, value: object, least: int, most: float = math.inf, hint: str = "") -> None:
    """Require an int (not a bool or 2.0) within range."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    bounds = f"{least} or more" if most == math.inf else f"{least} to {most}"
    require(whole and least <= value <= most, f"{name} must be a whole number, {bounds}, got {value!r}{hint}")  # type: ignore[operator]


def plain(value: object) -> object:
    """Numbers of numpy or torch as Python numbers, lists and arrays as nested tuples; other values unchanged."""
    if isinstance(value, str | bytes) or type(value) in (bool, int, float):
        return value
    if callable(getattr(value, "tolist", None)):
        return plain(value.tolist())  # type: ignore[attr-defined]
    if isinstance(value, Sequence):
        return tuple(map(plain, value))
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def check_fields(config: object) -> None:
    """Make a configuration's values plain, and require bools, numbers, whole numbers within the bounds of their
    `options.option`, and known names. None passes where the field's type has it."""
    for entry in fields(config):  # type: ignore[arg-type]
        value, kind = plain(getattr(config, entry.name)), str(entry.type)
        object.__setattr__(config, entry.name, value)
        if value is None and kind.endswith("| None"):
            continue
        if "bounds" in entry.metadata:
            require_int(entry.name, value, *entry.metadata["bounds"])
        elif kind == "bool":
            require(isinstance(value, bool), f"{entry.name} must be True or False, got {value!r}")
        elif kind in ("float", "float | None"):
            require_number(entry.name, value)
    for name, known in _choices(type(config)).items():  # type: ignore[arg-type]
        chosen = getattr(config, name)
        require(isinstance(chosen, str) and chosen in known, f"{name} must be one of {list(known)}, got {chosen!r}")


def require_ids(name: str, token_ids: object) -> None:
    """Require a list of token ids."""
    listed = isinstance(token_ids, Sequence) and not isinstance(token_ids, str | bytes)
    require(listed, f"{name} must be a list of token ids, got {token_ids!r}")
    for token_id in token_ids:  # type: ignore[attr-defined]
        require_int(f"a token id of {name}", token_id, 0)


def require_heads(heads: object) -> None:
    """Require a list of (layer, head) pairs."""
    pairs = isinstance(heads, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in heads)
    require(pairs and bool(heads), f"scoring_heads must be (layer, head) pairs or None, got {heads!r}")
    for layer, head in heads:  # type: ignore[attr-defined]
        require_int("a layer of scoring_heads", layer, 0)
        require_int("a head of scoring_heads", head, 0)


def require_window(window: object) -> None:
    """Require a window, a pair (shortest prompt, window), or None."""
    if window is None:
        return
    if isinstance(window, tuple) and len(window) == 2:
        require_int("the shortest prompt of draft_window", window[0], 0)
        window = window[1]
    hint = "; (8192, 512) is 512 in prompts of 8,192 tokens and more, None is dense"
    require_int("draft_window", window, 1, hint=hint)


def require_bias(logit_bias: object) -> None:
    """Require a mapping of token ids to numbers; -inf is allowed."""
    require(isinstance(logit_bias, Mapping), f"logit_bias must map token ids to what is added, got {logit_bias!r}")
    for token_id, bias in logit_bias.items():  # type: ignore[attr-defined]
        require_int("a token id of logit_bias", plain(token_id), 0)
        require_number("a value of logit_bias", plain(bias))
        is_in_range = bias == bias and bias <= MOST_SHAPING
        require(is_in_range, f"a value of logit_bias must be {MOST_SHAPING:g} or less, or -inf, got {bias}")


def require_rates(name: str, rates: object) -> None:
    """Require increasing keep rates in (0, 1)."""
    require(isinstance(rates, tuple), f"{name} must be a list of keep rates, got {rates!r}")
    for rate in rates:  # type: ignore[attr-defined]
        require_number(f"a rate of {name}", rate)
    is_rising = list(rates) == sorted(set(rates)) and all(0 < rate < 1 for rate in rates)  # type: ignore[call-overload,attr-defined]
    require(is_rising, f"{name} must increase within 0 to 1, got {rates!r}; the whole prompt comes last anyway")


def require_keep_rate(keep_rate: object) -> None:
    """Require a rate in (0, 1], or a curve of rates over increasing lengths."""
    hint = f"got {keep_rate!r}; 1.0 is dense prefill"
    if not isinstance(keep_rate, tuple):
        require_number("keep_rate", keep_rate)
        require(0 < keep_rate <= 1, f"keep_rate must be in (0, 1], {hint}")  # type: ignore[operator]
        return
    pairs = bool(keep_rate) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in keep_rate)
    require(pairs, f"keep_rate must be a number or (num_tokens, keep_rate) pairs, {hint}")
    for num_tokens, rate in keep_rate:
        require_int("a length of the keep_rate curve", num_tokens, 1)
        require_number("a rate of the keep_rate curve", rate)
        require(0 < rate <= 1, f"every rate of the keep_rate curve must be in (0, 1], {hint}")
    lengths = [num_tokens for num_tokens, _ in keep_rate]
    require(lengths == sorted(set(lengths)), f"the lengths of the keep_rate curve must increase, got {lengths}")
