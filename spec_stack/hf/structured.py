"""Structured output: grammar-constrained decoding by llguidance (extra `structured`)."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from spec_stack.config import how_to_install
from spec_stack.hf.answer_parser import ForcedCall
from spec_stack.hf.prompt import special_ids

FORMATS = ("text", "json_object", "json_schema", "regex", "grammar")
# Keywords of JSON schemas that hold values.
_OF_VALUES = ("const", "enum", "default", "examples")
# Content hints, e.g. of pydantic's types; any text matches.
_HINTS = ("binary", "directory-path", "file-path", "password", "path")
# Only json.dumps' whitespace: with free whitespace a small model may never end. It also equals the text of earlier
# calls in templates, so that the cache stays valid.
_AS_DUMPED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def structured_problem() -> str | None:
    """The reason why structured output is unavailable; None if it is available."""
    if find_spec("llguidance") is None:
        return f"response_format needs llguidance: {how_to_install('structured')}"
    return None


class Grammars:
    """Compiles `response_format=` for one tokenizer; thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    def compile(
        self, response_format: object, end_ids: Collection[int], num_prompt_tokens: int, behind: str = ""
    ) -> Grammar | None:
        """A request's grammar; None for {"type": "text"}. behind: the mark after which it applies, if any."""
        forced = response_format if isinstance(response_format, ForcedCall) else None
        kind, content = ("", "") if forced else read_format(response_format)
        if kind == "text":
            return None
        self._check_available("a forced tool_choice" if forced else "response_format", end_ids)
        from llguidance import LLMatcher

        vocabulary = self._vocabulary
        try:
            rules = _forced_rules(forced, self._plain_added) if forced else [_rules(kind, content)]
            matcher = LLMatcher(vocabulary, json.dumps({"grammars": _with_start(rules, behind)}), log_level=0)
            if matcher.is_error():
                raise ValueError(matcher.get_error())
        except Exception as error:
            # The conversion from EBNF has no common error class.
            subject = "tool_choice: the tools' parameters" if forced else f"response_format: this {kind}"
            # A panic comes with its stack.
            reason = " ".join(str(error).partition("\n<backtrace>")[0].split())
            raise ValueError(f"{subject} cannot be compiled: {reason}") from error
        return Grammar(matcher, end_ids, self._unspoken, num_prompt_tokens)

    def warm_up(self) -> None:
        """Read the vocabulary ahead of the first format. Raises ValueError for an unsupported tokenizer."""
        _ = self._vocabulary

    def _check_available(self, what: str, end_ids: Collection[int]) -> None:
        if problem := structured_problem():
            raise ValueError(problem)
        if self._tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer; this generator was made without one")
        if not end_ids:
            raise ValueError(f"{what} needs an end-of-sequence token; this request has none (see ignore_eos)")

    @cached_property
    def _vocabulary(self) -> Any:
        """llguidance's view of the tokenizer."""
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self._tokenizer, n_vocab=max(self._vocab_size, len(self._tokenizer)))
        except Exception as error:
            # Any error on an unsupported tokenizer; the caller can only skip it.
            raise ValueError(f"response_format cannot be had with this tokenizer: {error}") from error

    @cached_property
    def _plain_added(self) -> dict[str, int]:
        """Added tokens that are no special ones, by text."""
        added = self._tokenizer.added_tokens_decoder
        return {token.content: token_id for token_id, token in added.items() if not token.special}

    @cached_property
    def _unspoken(self) -> list[int]:
        """Ids of special tokens, ids without a token, and tokens without a row of the model."""
        beyond = range(*sorted((len(self._tokenizer), self._vocab_size)))
        return [*special_ids(self._tokenizer), *beyond]


def read_format(response_format: object) -> tuple[str, str]:
    """A format's kind, and its schema (as JSON), pattern or grammar."""
    schema_of = getattr(response_format, "model_json_schema", None)
    if callable(schema_of):
        return "json_schema", json.dumps(schema_of())
    if not isinstance(response_format, Mapping) or response_format.get("type") not in FORMATS:
        raise ValueError(
            'response_format must be {"type": "json_schema", "json_schema": {"schema": {…}}}, {"type": "json_object"}, '
            f'{{"type": "regex", "pattern": …}} or {{"type": "grammar", "grammar": …}}, got {response_format!r}'
        )
    kind = str(response_format["type"])
    if kind == "text":
        return kind, ""
    if kind == "json_object":
        return "json_schema", json.dumps({"type": "object"})
    if kind == "json_schema":
        inner = response_format.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else response_format.get("schema")
        if not isinstance(schema, Mapping):
            raise ValueError(f"response_format: the json_schema holds no schema, got {response_format!r}")
        try:
            return kind, json.dumps(schema)
        except (TypeError, ValueError) as error:
            raise ValueError(f"response_format: the schema is no JSON: {error}") from error
    text = response_format.get("pattern" if kind == "regex" else "grammar")
    if not isinstance(text, str) or not text:
        raise ValueError(f"response_format of the type {kind!r} holds no text, got {response_format!r}")
    return kind, text


def _rules(kind: str, content: str) -> dict[str, Any]:
    """A format as a grammar of llguidance."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if kind == "json_schema":
        return _json_grammar(content)
    if kind == "grammar":
        return {"lark_grammar": gbnf_to_lark(_on_one_line(content))}
    grammar: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(content))
    return grammar["grammars"][0]  # type: ignore[no-any-return]


def _on_one_line(ebnf: str) -> str:
    """Alternatives of a rule that begin a line are part of the line before, as in EBNF."""
    first, *others = ebnf.split("\n")
    lines = [first]
    for line in others:
        if not line.lstrip().startswith("|"):
            lines.append(f"\n{line}")
            continue
        while len(lines) > 1 and not lines[-1].strip():
            lines.pop()
        rule = lines[-1]
        comment = rule.find("#", rule.rfind('"') + 1)
        lines[-1] = rule[: None if comment < 0 else comment].rstrip(" \t")
        lines.append(f" {line.lstrip()}")
    return "".join(lines)


def _with_start(rules: Sequence[dict[str, Any]], closes: str) -> list[dict[str, Any]]:
    """The rules, after an open thought, its closing mark and the blank line that templates add, if there is a mark."""
    answer, *others = rules
    # Without forcing, a text that the grammar fixes has any tokens that the model prefers.
    start = '%llguidance {"no_forcing": true}\nstart: @answer'
    if closes:
        start = start.replace("@answer", 'thought "\\n\\n" @answer')
        start += f"\nthought[suffix={json.dumps(closes)}]: /(?s:.*)/"
    return [{"lark_grammar": start}, {**answer, "name": "answer"}, *others]


def _forced_rules(forced: ForcedCall, token_ids: Mapping[str, int]) -> list[dict[str, Any]]:
    """A forced call as grammars of llguidance, the first of which uses the others. Markers among these tokens are
    written as tokens, since a model does not recognise a spelt-out one in the next turn."""
    tools = forced.tools
    marks = {mark: token_ids[mark] for mark in (tools.opener, tools.closer) if mark in token_ids}
    calls = [f"call_{at}" for at in range(len(forced.schemas))]
    lines, arguments = [f"start: {' | '.join(calls)}"], []
    for call, (name, schema) in zip(calls, forced.schemas.items(), strict=True):
        begin = tools.begin + json.dumps(name)[1:-1] + tools.middle
        lines.append(f"{call}: {_verbatim(begin, marks)} @{call} {_verbatim(tools.end, marks)}")
        arguments.append({**_json_grammar(schema), "name": call})
    return [{"lark_grammar": "\n".join(lines)}, *arguments]


def _verbatim(text: str, marks: Mapping[str, int]) -> str:
    """This text in a Lark rule, with its marks as tokens."""
    pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    return " ".join(f"<[{marks[piece]}]>" if piece in marks else json.dumps(piece) for piece in pieces if piece)


def _json_grammar(schema: str) -> dict[str, Any]:
    """A grammar of llguidance for the JSON texts that match a schema. Raises ValueError for what is no schema."""
    from llguidance import LLMatcher

    # A composed object takes its keys from several schemas, of which none may exclude those of another.
    parsed = json.loads(schema)
    rewritten = json.dumps(_rewritten(parsed, not _composes(parsed)))
    grammar: dict[str, Any] = json.loads(LLMatcher.grammar_from_json_schema(rewritten, defaults=_AS_DUMPED))
    return grammar["grammars"][0]  # type: ignore[no-any-return]


def _rewritten(schema: Any, closes: bool) -> Any:
    """An equal schema in the keywords that llguidance takes; objects have no keys but those that are named."""
    if isinstance(schema, list):
        return [_rewritten(part, closes) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {name: part if name in _OF_VALUES else _rewritten(part, closes) for name, part in schema.items()}
    values = schema.get("enum")
    for number in (schema.get("const"), *(values if isinstance(values, list) else ())):
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


def _composes(schema: Any) -> bool:
    """Whether an object takes its keys from several schemas, anywhere in a schema."""
    if isinstance(schema, list):
        return any(map(_composes, schema))
    if not isinstance(schema, dict):
        return False
    is_composed = "properties" in schema and not {"$ref", "anyOf", "oneOf"}.isdisjoint(schema)
    return is_composed or "allOf" in schema or any(map(_composes, schema.values()))


def _names_all_keys(schema: dict[str, Any]) -> bool:
    """Whether an object that has only the named properties can match."""
    named, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list) or not set(required) <= set(named):
        return False
    return {"additionalProperties", "patternProperties", "minProperties"}.isdisjoint(schema)


class Grammar:
    """The matcher of one text; it advances with growing prefixes. end_ids: tokens that end the text, allowed where it
    is complete. unspoken: other tokens that are never allowed."""

    def __init__(self, matcher: Any, end_ids: Collection[int], unspoken: Sequence[int], num_prompt_tokens: int) -> None:
        self._matcher, self._end_ids, self._unspoken = matcher, list(end_ids), unspoken
        self._num_seen = num_prompt_tokens
        self._is_over = False
        # Whether each token is allowed next, and after how many tokens.
        self._allowed = np.empty(0, dtype=bool)
        self._allowed_after = -1

    def fork(self) -> Grammar:
        """A copy at the same state."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def mask(self, prefix_ids: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
        """Scores (1, vocab) with -inf for disallowed tokens, in place."""
        if self._advance(prefix_ids):
            hidden = ~torch.from_numpy(self._allowed[: scores.shape[1]])
            scores.masked_fill_(hidden.to(scores.device), -torch.inf)
        return scores

    def _advance(self, prefix_ids: Sequence[int]) -> bool:
        """Accept unseen tokens and update the allowed set; False after the end of the text."""
        for token_id in prefix_ids[self._num_seen :]:
            self._is_over = self._is_over or token_id in self._end_ids
            if self._is_over:
                return False
            if not self._matcher.consume_token(token_id):
                # A large grammar may reach llguidance's own limits here; the whole grammar follows the first line.
                reason = self._matcher.get_error().partition("\n")[0]
                raise ValueError(f"the grammar stopped at token {token_id}: {reason}")
            self._num_seen += 1
        if self._allowed_after != self._num_seen:
            self._allowed = self._find_allowed()
            self._allowed_after = self._num_seen
        return True

    def _find_allowed(self) -> np.ndarray:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little").astype(bool)
        allowed[self._unspoken] = False
        allowed[self._end_ids] = self._matcher.is_accepting()
        return allowed
