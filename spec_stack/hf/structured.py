"""Structured output: grammar-constrained decoding by llguidance (extra `structured`)."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
import torch

from spec_stack.config import how_to_install
from spec_stack.hf.answer_format import ForcedCall
from spec_stack.hf.json_schema import json_grammar
from spec_stack.hf.prompt import special_ids

FORMATS = ("text", "json_object", "json_schema", "regex", "grammar")


@dataclass(frozen=True)
class SerializedFormat:
    """A format as a grammar that llguidance has accepted for the same tokenizer."""

    text: str
    name: ClassVar[str] = "response_format"


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
        compiled = self._compiled(response_format, end_ids, behind)
        return None if compiled is None else Grammar(compiled[1], end_ids, self._unspoken, num_prompt_tokens)

    def serialized(
        self, response_format: object, end_ids: Collection[int], behind: str = ""
    ) -> SerializedFormat | None:
        """A checked format for another process; None and ValueError as in `compile`."""
        compiled = self._compiled(response_format, end_ids, behind)
        return None if compiled is None else SerializedFormat(compiled[0])

    def warm_up(self) -> None:
        """Read the vocabulary ahead of the first format. Raises ValueError for an unsupported tokenizer."""
        _ = self._vocabulary

    def _compiled(self, response_format: object, end_ids: Collection[int], behind: str) -> tuple[str, Any] | None:
        """A format's grammar and a matcher of it."""
        wanted = response_format if isinstance(response_format, SerializedFormat | ForcedCall) else None
        kind, content = ("", "") if wanted else read_format(response_format)
        if kind == "text":
            return None
        self._check_available(wanted.name if wanted else "response_format", end_ids)
        from llguidance import LLMatcher

        vocabulary = self._vocabulary
        try:
            if isinstance(wanted, SerializedFormat):
                text = wanted.text
            else:
                rules = wanted.rules(self._plain_added) if wanted else [_rules(kind, content)]
                text = json.dumps({"grammars": _with_start(rules, behind)})
            matcher = LLMatcher(vocabulary, text, log_level=0)
            if matcher.is_error():
                raise ValueError(matcher.get_error())
        except Exception as error:
            # The conversion from EBNF has no common error class.
            subject = "tool_choice: the tools' parameters" if wanted else f"response_format: this {kind}"
            raise ValueError(f"{subject} cannot be compiled: {error}") from error
        return text, matcher

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
        return json_grammar(content)
    if kind == "grammar":
        return {"lark_grammar": gbnf_to_lark(_on_one_line(content))}
    grammar: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(content))
    return grammar["grammars"][0]  # type: ignore[no-any-return]


def _on_one_line(ebnf: str) -> str:
    """Alternatives of a rule that begin a line are part of the line before, as in EBNF."""
    return re.sub(r"[ \t]*(?:#[^\n\"]*)?\n\s*\|", " |", ebnf)


def _with_start(rules: Sequence[dict[str, Any]], closes: str) -> list[dict[str, Any]]:
    """The rules, after an open thought, its closing mark and the blank line that templates add, if there is a mark."""
    answer, *others = rules
    # Without forcing, a text that the grammar fixes has any tokens that the model prefers.
    start = '%llguidance {"no_forcing": true}\nstart: @answer'
    if closes:
        start = start.replace("@answer", 'thought "\\n\\n" @answer')
        start += f"\nthought[suffix={json.dumps(closes)}]: /(?s:.*)/"
    return [{"lark_grammar": start}, {**answer, "name": "answer"}, *others]


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

    def forced_token(self, prefix_ids: Sequence[int]) -> int | None:
        """The only allowed next token, if there is exactly one."""
        if not self._advance(prefix_ids) or np.count_nonzero(self._allowed) != 1:
            return None
        return int(self._allowed.argmax())

    def _advance(self, prefix_ids: Sequence[int]) -> bool:
        """Accept unseen tokens and update the allowed set; False after the end of the text."""
        for token_id in prefix_ids[self._num_seen :]:
            self._is_over = self._is_over or token_id in self._end_ids
            if self._is_over:
                return False
            if not self._matcher.consume_token(token_id):
                raise RuntimeError(f"the grammar does not allow token {token_id}: {self._matcher.get_error()}")
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
