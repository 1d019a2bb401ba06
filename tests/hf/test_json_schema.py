"""JSON schemas: a grammar takes what a validator calls valid, and what it cannot enforce is refused by name."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from transformers import AutoTokenizer

from spec_stack.hf.answer_parser import ForcedCall, ToolFormat
from spec_stack.hf.loading import ASSETS
from spec_stack.hf.structured import Grammar, Grammars

pytest.importorskip("llguidance", reason="needs the extra `structured`")
jsonschema = pytest.importorskip("jsonschema", reason="needs the extra `dev`")

TOKENIZER = AutoTokenizer.from_pretrained(ASSETS / "target")
GRAMMARS = Grammars(TOKENIZER, len(TOKENIZER))
END = TOKENIZER.eos_token_id
NAMES = {"A": {"type": "object", "properties": {"next": {"$ref": "#/$defs/A"}, "n": {"type": "integer"}}}}
BRANCHES = {
    "cat": {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}},
    "dog": {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}},
}
KIND = {"propertyName": "kind"}
BOTH = [{"type": "object", "properties": {"b": {}}}, {"required": ["a"], "properties": {"a": {"type": "integer"}}}]
PAIRED = {"properties": {"a": {"type": "integer"}}, "patternProperties": {"a": {"minimum": 3}}}
LEFT_OPEN = {"patternProperties": {"a": {"type": "integer"}}, "additionalProperties": True}
PETS = {name: branch | {"required": ["kind"]} for name, branch in BRANCHES.items()}


class Colour(Enum):
    RED, BLUE = "red", "blue"


class Inner(BaseModel):
    kind: Literal["inner"]
    tags: list[str] = Field(min_length=1, description="some")


class Other(BaseModel):
    kind: Literal["other"]


class Model(BaseModel):
    colour: Colour = Colour.RED
    part: Inner | Other = Field(discriminator="kind")
    weight: float | None = Field(default=None, ge=0)
    shares: dict[str, int] = {}


def grammar_of(schema: Any) -> Grammar:
    grammar = GRAMMARS.compile({"type": "json_schema", "schema": schema}, [END], 0)
    assert grammar is not None
    return grammar


def takes(grammar: Grammar, text: str) -> bool:
    import torch

    begun = grammar.fork()
    ids = [*TOKENIZER(text, add_special_tokens=False).input_ids, END]
    return all(begun.mask(ids[:at], torch.zeros(1, len(TOKENIZER)))[0, ids[at]] == 0 for at in range(len(ids)))


@pytest.mark.parametrize(
    ("schema", "instances"),
    [
        ({"required": ["a"]}, [{"a": 1}, {"a": None, "b": 2}, {}, {"b": 1}]),
        ({"type": "object", "required": ["b"], "properties": {"a": {"type": "integer"}}}, [{"a": 1, "b": 2}, {"a": 1}]),
        ({"type": "object", "minProperties": 2}, [{"a": 1, "b": 2}, {"a": 1}, {}]),
        ({"type": "array", "uniqueItems": False}, [[1, 1]]),
        ({"type": "array", "prefixItems": [True, {"type": "string"}], "minItems": 3}, [[1, "a", 2], [1, "a"]]),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, [[], [1, 2], [1, 2, 3], ["a"]]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["éa", "abc", "a", "abcd", "", 7]),
        ({"type": "string", "pattern": "^a+$|^(b|c)$"}, ["aa", "b", "ab", "d", ""]),
        ({"type": "string", "format": "date"}, ["2024-01-31", "2024-02-30", "2024-13-01", "now"]),
        ({"type": "string", "format": "password"}, ["anything", 3]),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 2}, [-0.5, 0, 1.99, 2, -0.51, "a"]),
        ({"type": ["integer", "null"], "minimum": 3, "minLength": 5}, [3, None, 2, "abcde"]),
        ({"enum": [{"a": 1}, "a/b", 0.1]}, ["a", {"a": 2}, {}]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}], "title": "N", "default": None}, [1, None, "a"]),
        ({"oneOf": [PETS["cat"], PETS["dog"]]}, [{"kind": "cat"}, {"kind": "wolf"}, {"kind": "cow"}, {}]),
        ({"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": PETS, "discriminator": KIND}, [{}]),
        ({"allOf": [{"type": "integer"}], "description": "one"}, [1, "a"]),
        ({"$ref": "#/$defs/cat", "properties": {"b": {}}, "$defs": PETS}, [{"kind": "cat", "b": 1}, {"kind": "dog"}]),
        ({"allOf": BOTH}, [{"b": 0, "a": 1}, {"b": 0}, {"a": "c"}, 3]),
        ({"anyOf": [{"required": ["a"]}], "properties": {"a": {}}}, [{"a": 1}, {}, 4]),
        ({"$ref": "#/$defs/A", "$defs": NAMES, "required": ["n"]}, [{"n": 1}, {}, {"n": "a"}, 3]),
        ({"type": "string", "pattern": "^\"+$"}, ['"', '""', "a"]),
        ({"type": "string", "pattern": "é.*"}, ["xé", "é1", "e"]),
        ({"type": "number", "multipleOf": 0.5}, [0.5, 1, 0.3]),
        ({"type": "integer", "multipleOf": 3, "minimum": 2}, [3, 0, 4, 6]),
        ({"type": "object"} | PAIRED, [{"a": 3}, {"a": 2}, {"ba": 2}, {"ba": 4}]),
        ({"type": "object"} | LEFT_OPEN, [{"a": 1}, {"a": "b"}, {"b": "c"}]),
        ({"minimum": 1, "minLength": 2}, [0, 1, "a", "ab", None]),
        ({"$ref": "#/$defs/A", "$defs": NAMES}, [{"next": {"next": {}, "n": 1}}, {"next": {"n": "a"}}]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"x": 1}, {"x": "a"}]),
        ({"$schema": jsonschema.Draft202012Validator.META_SCHEMA["$id"], "type": "boolean", "x-y": 1}, [True, 1]),
        ({}, [{"a": [1, -2.5e3, "\t", None, True]}]),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)  # fmt: skip
def test_a_grammar_takes_the_instances_that_a_validator_calls_valid(schema: Any, instances: list[Any]) -> None:
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    grammar = grammar_of(schema)
    for instance in instances:
        assert takes(grammar, json.dumps(instance, ensure_ascii=False)) == validator.is_valid(instance), instance


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {"type": "string"}}, '"not"'),
        ({"items": {"uniqueItems": True}}, '"uniqueItems"'),
        ({"type": "array", "contains": {"type": "string"}}, '"contains"'),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, '"unevaluatedProperties"'),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, '"propertyNames"'),
        ({"properties": {"a": {"if": {}, "then": {"minimum": 1}}}}, '"if", "then"'),
        ({"dependentRequired": {"a": ["b"]}}, '"dependentRequired"'),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"$ref": "#/$defs/No"}, "'/\\$defs/No' does not exist"),
        ({"type": "string", "format": "idn-email"}, "Unknown format: idn-email"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
        ({"type": "string", "pattern": "^(?!a)b"}, "look-around"),
        ({"type": "string", "pattern": "\\bword\\b"}, "WordUnicode"),
        ({"type": "nonsense"}, "Invalid type: nonsense"),
        ({"enum": ["a", 1 << 70]}, "more than 64 bits"),
    ],
)  # fmt: skip
def test_what_no_grammar_enforces_is_refused_by_its_name(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grammar_of(schema)


def test_the_parameters_of_a_forced_tool_are_held_to_the_same() -> None:
    for keyword in ("uniqueItems", "contains", "not"):
        schema = {"properties": {"a": {keyword: {"type": "string"}}}}
        forced = ForcedCall(ToolFormat('{"name": "', '", "arguments": ', "}"), {"f": json.dumps(schema)})
        with pytest.raises(ValueError, match=rf'tool_choice: .*"{keyword}"'):
            GRAMMARS.compile(forced, [END], 0)


def test_models_of_pydantic_are_taken() -> None:
    grammar = grammar_of(Model.model_json_schema())
    for text, is_valid in (
        ('{"part": {"kind": "inner", "tags": ["a"]}}', True),
        ('{"colour": "blue", "part": {"kind": "other"}, "weight": 2.5, "shares": {"red": 3}}', True),
        ('{"colour": "green", "part": {"kind": "other"}}', False),
        ('{"part": {"kind": "inner", "tags": []}}', False),
        ('{"part": {"kind": "other"}, "weight": -1}', False),
        ('{"part": {"kind": "other"}, "shares": {"green": "a"}}', False),
        ('{"colour": "red"}', False),
    ):
        assert takes(grammar, text) == is_valid, text


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        # A tool without arguments is called with none, and others have the named ones.
        ({"type": "object", "properties": {}}, '{"a": 1}'),
        ({"type": "object", "properties": {"a": {"properties": {"b": {}}}}}, '{"a": {"c": 1}}'),
        ({"properties": {"properties": {}, "required": {}, "format": {}}, "default": {"format": "path"}}, '{"a": 1}'),
        ({"type": "string", "maxLength": 9}, '"a\tb"'),
        ({"type": "string", "pattern": "^.*$"}, '"a"b"'),
        ({"type": "string", "format": "email"}, '"\\"\\z\\"@a"'),
        ({"type": "string", "format": "date-time"}, '"2024-02-30T00:00:00Z"'),
    ],
)
def test_a_text_that_clients_cannot_use_is_not_written(schema: Any, text: str) -> None:
    assert not takes(grammar_of(schema), text)
