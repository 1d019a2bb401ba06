"""JSON schemas for xgrammar: rules that it would ignore are rewritten, or rejected by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

# Annotations, which constrain nothing.
_ANNOTATIONS = {"title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"} | {
    *("$comment", "$schema", "$anchor", "discriminator", "contentMediaType", "contentEncoding", "contentSchema")
}
_DEFINITIONS = ("$defs", "definitions")
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
# Enforced keywords by instance type; the standard ignores them for other types.
_ENFORCED: dict[str, set[str]] = {
    "object": {"properties", "required", "minProperties", "maxProperties", "patternProperties", "propertyNames"}
    | {"additionalProperties", "unevaluatedProperties"},
    "array": {"items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": _BOUNDS,
    "integer": _BOUNDS | {"multipleOf"},
    "boolean": set(),
    "null": set(),
}
# xgrammar ignores siblings of these keywords.
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_PYTHON_TYPES = {dict: "object", list: "array", str: "string", int: "integer", bool: "boolean", type(None): "null"}
# xgrammar's limits for multipleOf.
_LONGEST_CHAIN = 32
_LARGEST_MULTIPLE, _WIDEST_RANGE = 1024, 9_999

# 29 February is excluded: a grammar cannot compute leap years.
_DATE = r"\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_ATOM, _LABEL = r"[A-Za-z0-9_!#$%&'*+/=?`{|}~-]+", r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
# xgrammar's own patterns accept invalid days, bytes with leading zeros, and escapes that JSON lacks.
_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": rf"{_ATOM}(\.{_ATOM})*@{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
}
_FORMATS = {"duration", "hostname", "ipv6", "uri", "uri-reference", "uri-template", "uuid"}
# Content hints; any text matches.
_FREE = {("format", name) for name in ("binary", "directory-path", "file-path", "password", "path")}
# Characters that JSON writes unescaped. The last one is never written; it makes xgrammar use the class in a repeated
# rule, not in an automaton with a state per character.
_PLAIN = '[^"\\\\\\x00-\\x1f\uffff]'

_PIECE = re.compile(r"\\.|\[\^?(?:\\.|[^\\\]])*\]|\(\?<?[=!]|.", re.DOTALL)
_ESCAPES = {*"dDwWsSnrtfv0xuc"}


def enforceable(schema: Any) -> Any:
    """A schema whose grammar accepts nothing that the given schema rejects."""
    reader = _Reader(schema)
    read = reader.schema(schema, "#")
    reader.check_references()
    return read


def json_rules(schema: str) -> Any:
    """The grammar of JSON texts that match a schema."""
    from xgrammar import Grammar

    # Only json.dumps' whitespace: with free whitespace a small model may never end. It also equals the text of earlier
    # calls in templates, so that the cache stays valid.
    return Grammar.from_json_schema(json.dumps(enforceable(json.loads(schema))), any_whitespace=False)


def check_pattern(pattern: str) -> None:
    """Reject regular expression features that xgrammar ignores."""
    depth, pieces = 0, ["|", *_PIECE.findall(pattern), "|"]
    for before, piece, after in zip(pieces, pieces[1:], pieces[2:], strict=False):
        depth += (piece == "(") - (piece == ")")
        is_anchor = (piece == "^" and (depth or before != "|")) or (piece == "$" and (depth or after != "|"))
        unknown = [char for char in re.findall(r"\\(.)", piece) if char.isalnum() and char not in _ESCAPES]
        if is_anchor or unknown or piece.startswith("(?"):
            raise ValueError(f"the grammar cannot enforce {piece} in the pattern {pattern!r}; write it without")


class _Reader:
    """Rewrites a schema recursively from its root."""

    def __init__(self, root: Any) -> None:
        self._root = root
        # Rewritten schemas by path.
        self._read: dict[str, Any] = {}

    def schema(self, schema: Any, path: str) -> Any:
        self._read[path] = schema
        if isinstance(schema, bool):
            return {} if schema else False
        unsaid = _ANNOTATIONS | {*_DEFINITIONS, "$id" if path == "#" else ""}
        names = {name for name in _expect(dict, schema, path) if name not in unsaid and not name.startswith("x-")}
        read = {name: self._each(schema[name], f"{path}/{name}") for name in _DEFINITIONS if name in schema}
        alone = next((name for name in _ALONE if name in names), None)
        if alone is None:
            return self._typed(schema, names, path) | read
        if beside := names - {alone} - ({"type"} if alone in ("const", "enum") else set()):
            raise _refusal(path, beside, f" beside {alone}")
        return self._alone(alone, schema, path) | read

    def check_references(self) -> None:
        """Reject references to non-schemas, and references that lead back to themselves."""
        for path, schema in self._read.items():
            seen = [path]
            while isinstance(schema, dict) and "$ref" in schema:
                seen.append(schema["$ref"])
                if seen[-1] not in self._read or seen[-1] in seen[:-1]:
                    raise ValueError(f"{path}: $ref {seen[1]!r} leads to no schema in this one, as #/$defs/NAME does")
                schema = self._read[seen[-1]]

    def _each(self, schemas: Any, path: str) -> Any:
        if isinstance(schemas, list):
            return [self.schema(schema, f"{path}/{at}") for at, schema in enumerate(schemas)]
        return {name: self.schema(schema, f"{path}/{name}") for name, schema in _expect(dict, schemas, path).items()}

    def _alone(self, name: str, schema: dict[str, Any], path: str) -> dict[str, Any]:
        if name == "$ref":
            return {name: _expect(str, schema[name], f"{path}/{name}")}
        if name in ("const", "enum"):
            return {"enum": _values(schema, path)}
        branches = _expect(list, schema[name], f"{path}/{name}")
        if not branches or (name == "allOf" and len(branches) > 1):
            raise _refusal(path, [name], "; write one schema in its place")
        if name == "oneOf" and not self._exclude_each_other(branches):
            raise _refusal(path, [name], ", as its branches may overlap; anyOf may be what is meant")
        return {"allOf" if name == "allOf" else "anyOf": self._each(branches, f"{path}/{name}")}

    def _exclude_each_other(self, branches: list[Any]) -> bool:
        known = [self._resolved(branch) for branch in branches]
        return all(self._is_disjoint(one, other) for at, one in enumerate(known) for other in known[:at])

    def _is_disjoint(self, one: Any, other: Any) -> bool:
        if _have_no_value_in_common(one, other):
            return True
        types = [_families(each) for each in (one, other)]
        if all(types) and not types[0] & types[1]:
            return True
        return types == [{"object"}, {"object"}] and any(
            _have_no_value_in_common(*(self._resolved(each.get("properties", {}).get(name)) for each in (one, other)))
            for name in set(one.get("required", ())) & set(other.get("required", ()))
        )

    def _resolved(self, schema: Any) -> Any:
        """The schema behind a reference; a schema without one is returned unchanged."""
        for _ in range(_LONGEST_CHAIN):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            names, schema = str(schema["$ref"]).split("/")[1:], self._root
            for name in names:
                schema = schema.get(name) if isinstance(schema, dict) else None
        return schema

    def _typed(self, schema: dict[str, Any], names: set[str], path: str) -> dict[str, Any]:
        if schema.get("uniqueItems") is False:
            names = names - {"uniqueItems"}
        if unknown := names - {"type"} - set().union(*_ENFORCED.values()):
            raise _refusal(path, unknown)
        if "type" in names:
            types = _types(schema, path)
        else:
            types = [name for name, about in _ENFORCED.items() if about & names and name != "integer"]
        if len(types) > 1 and "type" not in names:
            raise ValueError(f"{path}: {', '.join(sorted(names))} are about {' and '.join(types)}; give a type too")
        if not types and names:
            raise _refusal(path, names)
        read: dict[str, Any] = {"type": types[0] if len(types) == 1 else types} if types else {}
        readers = {"object": self._object, "array": self._array, "string": _string, "number": _number}
        readers["integer"] = _integer
        for name in types:
            read |= readers[name](schema, path) if name in readers else {}
        return read

    def _object(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        properties = self._each(schema.get("properties", {}), f"{path}/properties")
        extra = self._first(schema, ("additionalProperties", "unevaluatedProperties"), path)
        required = _expect(list, schema.get("required", []), f"{path}/required")
        missing = [name for name in required if name not in properties]
        keys = [name for name in ("patternProperties", "propertyNames") if schema.get(name, True) not in (True, {})]
        if len(keys) > 1 or (keys and (properties or missing)):
            raise _refusal(path, keys, " beside properties, required or each other")
        if missing and extra is False:
            raise ValueError(f"{path}: required names {missing[0]!r}, and additionalProperties forbids it")
        properties |= {name: extra or {} for name in missing}
        least = _expect(int, schema.get("minProperties", 0), f"{path}/minProperties")
        if extra is None and not keys and ("properties" not in schema or least > len(properties)):
            extra = {}
        read = _copied(schema, ("required", "minProperties", "maxProperties")) | {"properties": properties}
        read |= {} if extra is None else {"additionalProperties": extra}
        return read | (self._keys(keys[0], schema, extra, path) if keys else {})

    def _keys(self, name: str, schema: dict[str, Any], extra: Any, path: str) -> dict[str, Any]:
        if name == "propertyNames" and extra is not False:
            names = self._resolved(schema[name])
            return {name: self.schema({"type": "string", **_expect(dict, names, path)}, f"{path}/{name}")}
        if name == "propertyNames" or extra not in (None, False) or len(schema[name]) > 1:
            raise _refusal(path, [name], " of several patterns, or beside additionalProperties")
        for pattern in schema[name]:
            _check_text_pattern(pattern, f"{path}/{name}")
        return {name: self._each(schema[name], f"{path}/{name}")}

    def _array(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        prefix = self._each(_expect(list, schema.get("prefixItems", []), f"{path}/prefixItems"), f"{path}/prefixItems")
        items = self._first(schema, ("items", "unevaluatedItems"), path)
        least = _expect(int, schema.get("minItems", 0), f"{path}/minItems")
        if items is None and (not prefix or least > len(prefix)):
            items = {}
        read = _copied(schema, ("minItems", "maxItems"))
        read |= {"prefixItems": prefix} if prefix else {}
        return read | ({} if items is None else {"items": items})

    def _first(self, schema: dict[str, Any], names: Iterable[str], path: str) -> Any:
        """The schema under the first of these keywords that is present; None without any."""
        return next((self.schema(schema[name], f"{path}/{name}") for name in names if name in schema), None)


def _string(schema: dict[str, Any], path: str) -> dict[str, Any]:
    named = [name for name in ("pattern", "format") if name in schema and (name, schema[name]) not in _FREE]
    low, high = (_expect(int, schema.get(name, 0), f"{path}/{name}") for name in ("minLength", "maxLength"))
    is_bounded = low > 0 or "maxLength" in schema
    if len(named) + is_bounded > 1:
        raise _refusal(path, [*named, *(name for name in ("minLength", "maxLength") if name in schema)], " together")
    if is_bounded:
        if "maxLength" in schema and low > high:
            raise ValueError(f"{path}: no text has minLength {low} and maxLength {high}")
        return {"pattern": f"^{_PLAIN}{{{low},{high if 'maxLength' in schema else ''}}}$"}
    if not named:
        return {}
    text = _expect(str, schema[named[0]], f"{path}/{named[0]}")
    if named == ["pattern"]:
        _check_text_pattern(text, f"{path}/pattern")
        return {"pattern": text}
    if text not in _PATTERNS and text not in _FORMATS:
        raise _refusal(path, [f"format {text!r}"])
    return {"pattern": _PATTERNS[text]} if text in _PATTERNS else {"format": text}


def _check_text_pattern(pattern: str, path: str) -> None:
    """Reject a string pattern that cannot be enforced inside JSON text."""
    try:
        check_pattern(pattern)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not _is_escaped(pattern):
        raise ValueError(f"{path}: the grammar cannot write {pattern!r} in JSON: it takes plain characters of ASCII")


@lru_cache(maxsize=1024)
def _is_escaped(pattern: str) -> bool:
    """Whether xgrammar applies JSON's escapes to this pattern: its automata do, its rules do not."""
    from xgrammar import Grammar

    rules = str(Grammar.from_json_schema(json.dumps({"type": "string", "pattern": pattern}))).splitlines()
    return any(rule.startswith("root_1 ::= Regex(") for rule in rules)


def _number(schema: dict[str, Any], path: str) -> dict[str, Any]:
    if "multipleOf" in schema:
        raise _refusal(path, ["multipleOf"], " of numbers; of integers it does")
    return _copied(schema, _BOUNDS)


def _integer(schema: dict[str, Any], path: str) -> dict[str, Any]:
    read = _copied(schema, _BOUNDS)
    if "multipleOf" not in schema:
        return read
    step = _expect(int, schema["multipleOf"], f"{path}/multipleOf")
    lows = [read[name] for name in ("minimum", "exclusiveMinimum") if name in read]
    highs = [read[name] for name in ("maximum", "exclusiveMaximum") if name in read]
    is_bounded = lows and highs and min(highs) - max(lows) < _WIDEST_RANGE
    if not 1 <= step <= _LARGEST_MULTIPLE or (read and not is_bounded):
        raise _refusal(path, ["multipleOf"], f" over {_LARGEST_MULTIPLE}, or in a range that is open or wide")
    return read | {"multipleOf": step}


def _values(schema: dict[str, Any], path: str) -> list[Any]:
    """The values of `const` or `enum` that match the sibling `type`."""
    values = [schema["const"]] if "const" in schema else _expect(list, schema["enum"], f"{path}/enum")
    types = {*_types(schema, path)} if "type" in schema else {*_ENFORCED}
    types |= {"integer"} if "number" in types else set()
    fitting = [value for value in values if _type_of(value) in types]
    if not fitting:
        raise ValueError(f"{path}: no value of const or enum has the type beside it")
    integers: list[int] = []
    json.loads(json.dumps(fitting), parse_int=lambda digits: integers.append(int(digits)))
    if any(not -(2**63) <= integer < 2**63 for integer in integers):
        raise ValueError(f"{path}: the grammar cannot write integers of more than 64 bits")
    return fitting


def _types(schema: dict[str, Any], path: str) -> list[str]:
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    unknown = [name for name in types if not isinstance(name, str) or name not in _ENFORCED]
    if unknown or not types:
        raise ValueError(f"{path}: the type must be of {', '.join(_ENFORCED)}, got {schema['type']!r}")
    return types


def _type_of(value: Any) -> str:
    return _PYTHON_TYPES.get(type(value)) or ("integer" if value.is_integer() else "number")


def _finite(schema: Any) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _have_no_value_in_common(one: Any, other: Any) -> bool:
    values, others = _finite(one), _finite(other)
    return values is not None and others is not None and not any(value in others for value in values)


def _families(schema: Any) -> set[str]:
    """The possible instance types, integers counted as numbers; none if undetermined."""
    if not isinstance(schema, dict):
        return set()
    values, types = _finite(schema), schema.get("type", [])
    names = types if values is None else [_type_of(value) for value in values]
    return {"number" if name == "integer" else name for name in ([names] if isinstance(names, str) else names)}


def _copied(schema: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: schema[name] for name in names if name in schema}


def _expect(kind: type, value: Any, path: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{path}: must be {_PYTHON_TYPES[kind]}, got {value!r}")
    return value


def _refusal(path: str, names: Iterable[str], why: str = "") -> ValueError:
    return ValueError(f"{path}: the grammar cannot enforce {', '.join(sorted(names))}{why}")
