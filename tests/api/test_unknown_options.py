"""Options that people bring from `model.generate` and other servers: the error names the nearest one."""

from __future__ import annotations

import asyncio
import inspect
from functools import partial
from typing import Any

import pytest

from spec_stack import PrefillConfig, SpecStackGenerator, with_draft
from spec_stack.api.unknown_options import ALIASES

PROMPT = "def read_lines(path):\n"


@pytest.mark.parametrize("name", ["max_new_tokens", "do_sample", "typical_p", "prune", "inputs", "keeprate"])
def test_an_option_of_another_name_is_refused_by_naming_the_option(embedded: SpecStackGenerator, name: str) -> None:
    asked: dict[str, Any] = {name: None}
    nearest = ALIASES.get(name, "keep_rate")
    for call in (embedded.generate, embedded.stream, embedded.session().generate, embedded.agenerate):
        expected = rf"{call.__name__}\(\) has no option '{name}'; did you mean {nearest}=\?"
        with pytest.raises(TypeError, match=expected):
            asyncio.run(call(PROMPT, **asked)) if call == embedded.agenerate else call(PROMPT, **asked)


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("assistant_model", "the draft is given once, to SpecStackGenerator"),
        ("stopping_criteria", "closing a stream"),
        ("num_beams", "n= samples several"),
        ("past_key_values", "session"),
    ],
)
def test_what_does_the_same_elsewhere_is_named(embedded: SpecStackGenerator, option: str, instead: str) -> None:
    asked: dict[str, Any] = {option: 2}
    with pytest.raises(TypeError, match=rf"generate\(\) has no option '{option}'; .*{instead}"):
        embedded.generate(PROMPT, **asked)


def test_an_option_without_a_counterpart_is_refused_by_naming_all(embedded: SpecStackGenerator) -> None:
    asked: dict[str, Any] = {"zzz": 2}
    with pytest.raises(TypeError, match=r"generate\(\) has no option 'zzz'; it has prompt, messages"):
        embedded.generate(PROMPT, **asked)


@pytest.mark.parametrize(
    ("option", "nearest"),
    [("load_in_4bit", "precision"), ("torch_dtype", "precision"), ("pretrained_model_name_or_path", "target")],
)
def test_loading_names_the_option_too(option: str, nearest: str) -> None:
    asked: dict[str, Any] = {option: "x"}
    with pytest.raises(TypeError, match=rf"from_pretrained\(\) has no option '{option}'; did you mean {nearest}="):
        SpecStackGenerator.from_pretrained(**asked)


@pytest.mark.parametrize("option", ["streamer", "n", "records", "return_records"])
def test_a_stream_says_where_the_options_of_a_whole_answer_are(embedded: SpecStackGenerator, option: str) -> None:
    asked: dict[str, Any] = {option: 2}
    with pytest.raises(TypeError, match=rf"stream\(\) has no option '{option}': generate\(\)"):
        embedded.stream(PROMPT, **asked)


def test_a_former_field_is_refused() -> None:
    for make in (PrefillConfig, partial(with_draft, "draft")):
        with pytest.raises(TypeError, match="prune"):
            make(prune="both")  # type: ignore[call-arg, operator]


def test_no_alias_is_an_option_or_stands_for_one_that_is_none() -> None:
    functions = (SpecStackGenerator.generate, SpecStackGenerator.from_pretrained)
    known = {name for function in functions for name in inspect.signature(function).parameters}
    assert not set(ALIASES) & known
    assert set(ALIASES.values()) <= known
