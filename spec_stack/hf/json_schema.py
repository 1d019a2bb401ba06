"""JSON schemas as grammars of llguidance, which enforces a keyword or rejects it by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not")
# Content hints, e.g. of pydantic's types; any text matches.
_HINTS = ("binary", "directory-path", "file-path", "password", "path")
# Only json.dumps' whitespace: with free whitespace a small model may never end. It also equals the text of earlier
# calls in templates, so that the cache stays valid.
_AS_DUMPED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_grammar(schema: str) -> dict[str, Any]:
    """A grammar of llguidance for the JSON texts that match a schema. Raises ValueError for what is no schema."""
    from llguidance import LLMatcher

    # A composed object takes its keys from several schemas, of which none may exclude those of another.
    parsed = json.loads(schema)
    rewritten = json.dumps(_rewritten(parsed, not _composes(parsed)))
    grammar: dict[str, Any] = json.loads(LLMatcher.grammar_from_json_schema(rewritten, defaults=_AS_DUMPED))
    return grammar["grammars"][0]  # type: ignore[no-any-return]


def _rewritten(schema: Any, closes: bool) -> Any:
    """An equal schema in the keywords that llguidance takes; objects have no keys but those that are named."""
    if not isinstance(schema, dict):
        return schema
    schema = _with_parts(schema, lambda part: _rewritten(part, closes))
    for number in (schema.get("const"), *_as_list(schema.get("enum"))):
        if isinstance(number, int) and abs(number) >= 1 << 63:
            raise ValueError(f"{number} has more than 64 bits; write it as a string")
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    if schema.get("format") in _HINTS:
        del schema["format"]
    if "discriminator" in schema and "oneOf" in schema and "anyOf" not in schema:
        # A discriminator tells the branches apart, so that at most one matches.
        schema["anyOf"] = schema.pop("oneOf")
    if closes and _names_all_keys(schema):
        schema["additionalProperties"] = False
    return schema


def _as_list(values: Any) -> list[Any]:
    return values if isinstance(values, list) else []


def _composes(schema: Any) -> bool:
    """Whether an object takes its keys from several schemas, anywhere in a schema."""
    if isinstance(schema, list):
        return any(map(_composes, schema))
    if not isinstance(schema, dict):
        return False
    is_composed = "properties" in schema and not {"$ref", "anyOf", "oneOf"}.isdisjoint(schema)
    return is_composed or "allOf" in schema or any(map(_composes, _parts(schema)))


def _parts(schema: dict[str, Any]) -> Iterator[Any]:
    """The subschemas of a schema, and lists of some."""
    for name in _OF_SCHEMAS:
        if isinstance(schema.get(name), dict):
            yield from schema[name].values()
    for name in (*_LISTS, *_SINGLE):
        yield schema.get(name)


def _with_parts(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A copy of a schema with changed subschemas."""
    schema = dict(schema)
    for name in _OF_SCHEMAS:
        if isinstance(schema.get(name), dict):
            schema[name] = {key: change(part) for key, part in schema[name].items()}
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            schema[name] = [change(part) for part in schema[name]]
    for name in _SINGLE:
        if name in schema:
            schema[name] = change(schema[name])
    return schema


def _names_all_keys(schema: dict[str, Any]) -> bool:
    """Whether an object that has only the named properties can match."""
    named = schema.get("properties")
    if not isinstance(named, dict) or not {"additionalProperties", "patternProperties"}.isdisjoint(schema):
        return False
    return set(schema.get("required", ())) <= set(named) and schema.get("minProperties", 0) <= len(named)
