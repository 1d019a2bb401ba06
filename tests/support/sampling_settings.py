"""What SGLang's sampling settings hold, for requests that are made without SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def sampling_params(**settings: Any) -> Any:
    """Settings with SGLang's defaults for what is not given."""
    defaults = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    return SimpleNamespace(**{**defaults, **settings})
