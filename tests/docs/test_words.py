"""The pages and the names that users read keep to the field's words."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from spec_stack.calibrate.config import CalibrateConfig
from spec_stack.cli.arguments import build_parser
from spec_stack.config import (
    DecodeConfig,
    HubConfig,
    LoadConfig,
    PrefillConfig,
    SamplingParams,
    SessionConfig,
)
from spec_stack.proxy.config import ProxyConfig
from spec_stack.serve.config import ServeConfig
from spec_stack.sglang.request import OPTIONS
from spec_stack.sglang.server_args import ServerConfig, add_flags
from spec_stack.types import Metrics
from tests.support.pages import PAGES, name_of

# Words of this project alone; the field's word stands behind each.
NOT_ANYWHERE = {
    "specprefill": "sparse_prefill",
    "beside": "with, next to, in addition to",
    "told by": "estimated from",
    "tells of": "reports",
    "who asks": "the scoring queries",
    "asks about": "is relevant to",
    "is asked": "is called, is evaluated",
    "comes? back": "recalled, returned",
    "came back": "recalled, returned",
    "brings? back": "recalls",
    "look-ups?": "n-gram lookup",
    "looked[- ]up": "proposed by n-gram lookup",
    "restored text": "recalled text",
    "rewritten tokens": "recomputed tokens",
    "the floor": "never slower than plain decoding",
    "draft's reading": "the draft's prefill",
    "what it says": "(name the thing)",
    "hangs? on": "depends on",
    "refused?": "rejected",
}
_CONFIGS = (
    *(PrefillConfig, DecodeConfig, SamplingParams, SessionConfig, LoadConfig, HubConfig),
    *(CalibrateConfig, ServeConfig, ProxyConfig, ServerConfig),
)
# The project's own name, SpecPrefill the paper, a script, a generated table or a name that the library still has.
_QUOTED = re.compile(r"SpecPrefill|`[^`\n]*`|<!-- (\w[\w ]*): begin -->.*?<!-- \1: end -->|```.*?```", re.DOTALL)


def _matches(text: str) -> list[str]:
    found = ((match[0], said) for word, said in NOT_ANYWHERE.items() for match in re.finditer(rf"(?i)\b{word}\b", text))
    return [f"{match}: {said}" for match, said in found]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_has_no_word_that_is_out(page: Path) -> None:
    text = _QUOTED.sub("", page.read_text(encoding="utf-8"))
    assert _matches(text) == []


def _shown() -> Iterator[str]:
    """Names and help of every setting, command, server flag, request option and metric."""
    for config in _CONFIGS:
        yield from (f"{entry.name} {entry.metadata.get('help', '')}" for entry in fields(config))
    server = argparse.ArgumentParser()
    add_flags(server)
    parsers = [build_parser(), server]
    for parser in parsers:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            elif action.help != argparse.SUPPRESS:
                yield f"{' '.join(action.option_strings)} {action.help or ''}"
    yield from OPTIONS
    yield from Metrics.__dataclass_fields__


def test_no_option_or_metric_has_a_word_that_is_out() -> None:
    shown = list(_shown())
    assert len(shown) > 100
    assert [match for text in shown for match in _matches(text)] == []
