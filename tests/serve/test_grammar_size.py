"""Sizes of patterns and schemas, and what they forbid."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi")
from spec_stack.serve.grammar_size import check_grammar_size, pattern_size, schema_size


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("abc", 3),
        ("(ab){1,300}", 600),
        ("((a{2}){3}){4}", 24),
        (r"\d{4}-\w+", 7),
        ("[a-z{9}]{5}", 5),
        ("a{,7}b{3,}", 10),
    ],
)
def test_a_pattern_is_as_large_as_its_parts_times_their_repetitions(pattern: str, size: int) -> None:
    assert pattern_size(pattern, 10**6) == size


# Patterns as trees: letters, rows of patterns, and one that is repeated.
trees = st.recursive(
    st.just("a"),
    lambda inner: st.one_of(st.lists(inner, min_size=1, max_size=3), st.tuples(inner, st.integers(1, 4))),
    max_leaves=6,
)


def written(tree: Any) -> str:
    if isinstance(tree, str):
        return tree
    if isinstance(tree, tuple):
        return f"({written(tree[0])}){{{tree[1]}}}"
    return "".join(map(written, tree))


@given(trees)
def test_the_size_is_the_length_of_what_it_matches_where_counts_are_fixed(tree: Any) -> None:
    pattern, size = written(tree), pattern_size(written(tree), 10**6)
    assert re.fullmatch(pattern, "a" * size)


def test_a_schema_is_as_large_as_its_parts_times_their_counts() -> None:
    item = {"type": "string", "maxLength": 10}
    assert schema_size(item, 10**6) == 30
    assert schema_size({"type": "array", "maxItems": 5, "items": item}, 10**6) == 5 * (1 + 1 + 1 + 30)
    assert schema_size({"type": "array", "maxItems": float("inf")}, 99) > 99
    assert schema_size({"maxItems": float("nan"), "minItems": -3}, 99) == 3
    deep: Any = {}
    for _ in range(200):
        deep = {"items": deep}
    assert schema_size(deep, 10**6) > 10**6


@pytest.mark.parametrize(
    "wanted",
    [{"type": "regex", "pattern": "a{51}"}, {"type": "grammar", "grammar": '"a"{51}'}],
    ids=["regex", "grammar"],
)
def test_a_format_and_a_tool_are_measured_before_anything_else(wanted: Any) -> None:
    for parts in ((wanted, None), (None, [wanted])):
        check_grammar_size(*parts, 60)
        with pytest.raises(ValueError, match="larger than this server compiles"):
            check_grammar_size(*parts, 50)


def test_long_strings_are_large_and_an_unfinished_escape_is_refused() -> None:
    check_grammar_size(None, [{"name": "x" * 1000}], 50)
    with pytest.raises(ValueError, match="a tool is larger"):
        check_grammar_size(None, [{"name": "x" * 10000}], 50)
    for pattern in ("\\", "a\\", "[\\"):
        with pytest.raises(ValueError, match="escapes the character after it"):
            check_grammar_size({"type": "regex", "pattern": pattern}, None, 50)
    check_grammar_size({"type": "regex", "pattern": "\\\\"}, None, 50)


VALUE = {"pattern": "C:\\", "maxItems": 10**6, "text": ["a{900}"]}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "default": VALUE},
        {"type": "object", "examples": [VALUE], "description": "a pattern such as C:\\"},
        {"enum": [VALUE], "const": VALUE, "example": VALUE},
        {"properties": {"pattern": {"type": "string", "default": "C:\\"}}},
    ],
    ids=["default", "examples", "const", "property"],
)
def test_values_are_no_schemas(schema: Any) -> None:
    tool = {"type": "function", "function": {"name": "find", "parameters": schema}}
    check_grammar_size({"type": "json_schema", "json_schema": {"schema": schema}}, [tool], 60)


@pytest.mark.parametrize("name", ["default", "const", "examples", "properties", "$ref"])
@pytest.mark.parametrize("keyword", ["properties", "patternProperties", "$defs", "definitions"])
def test_names_of_schemas_are_no_keywords(keyword: str, name: str) -> None:
    with pytest.raises(ValueError, match="larger than this server compiles"):
        check_grammar_size({keyword: {name: {"items": {"pattern": "a{900}"}}}}, None, 99)
    with pytest.raises(ValueError, match="escapes the character after it"):
        check_grammar_size({keyword: {name: {"pattern": "C:\\"}}}, None, 99)


@pytest.mark.parametrize(
    "ref",
    [
        "#/default",
        "#/%64efault",
        "here#/$defs/a%2Fexamples/0",
        "#/properties",
        "#/$defs/properties/enum",
        "#/items/const",
    ],
)
def test_a_reference_to_what_is_not_measured_as_a_schema_is_refused(ref: str) -> None:
    with pytest.raises(ValueError, match="must point at a schema"):
        check_grammar_size({"properties": {"next": {"$ref": ref}}}, None, 99)


@pytest.mark.parametrize(
    "ref", ["#", "#/$defs/Item", "#/properties/default", "#/$defs/properties", "#/items/anyOf/0", "#default", "other"]
)
def test_a_reference_to_a_schema_is_not_refused(ref: str) -> None:
    check_grammar_size({"properties": {"next": {"$ref": ref}}}, None, 99)
