"""Structured output: grammar-constrained decoding by xgrammar (extra `structured`)."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from spec_stack.config import how_to_install
from spec_stack.hf.answer_format import ForcedCall
from spec_stack.hf.json_schema import check_pattern, json_rules
from spec_stack.hf.prompt import special_ids

# Most cached formats, which bounds memory.
_MAX_CACHED_BYTES = 64 << 20
# Most cached end-token sets; each processes the whole vocabulary.
_MAX_END_IDS = 8
FORMATS = ("text", "json_object", "json_schema", "regex", "grammar")


@dataclass(frozen=True)
class SerializedFormat:
    """A format that was compiled for the same tokenizer and end tokens."""

    text: str
    name: ClassVar[str] = "response_format"


def structured_problem() -> str | None:
    """The reason why structured output is unavailable; None if it is available."""
    if find_spec("xgrammar") is None:
        return f"response_format needs xgrammar: {how_to_install('structured')}"
    return None


class Grammars:
    """Compiles `response_format=` for one tokenizer; thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        # xgrammar's compiler and tokenizer by end tokens.
        self._compilers: dict[frozenset[int], tuple[Any, Any]] = {}

    def compile(
        self, response_format: object, end_ids: Collection[int], num_prompt_tokens: int, behind: str = ""
    ) -> Grammar | None:
        """A request's grammar; None for {"type": "text"}. behind: the mark after which it applies, if any."""
        compiled = self._compiled(response_format, frozenset(end_ids), behind)
        if compiled is None:
            return None
        return Grammar(compiled, self._unspoken - frozenset(end_ids), self._vocab_size, num_prompt_tokens)

    def serialized(
        self, response_format: object, end_ids: Collection[int], behind: str = ""
    ) -> SerializedFormat | None:
        """A compiled format for another process; None and ValueError as in `compile`."""
        compiled = self._compiled(response_format, frozenset(end_ids), behind)
        return None if compiled is None else SerializedFormat(compiled.serialize_json())

    def warm_up(self, end_ids: Collection[int]) -> None:
        """Prepare the compiler ahead of the first format. Raises ValueError for an unsupported tokenizer."""
        with self._lock:
            self._compiler(frozenset(end_ids))

    def clear(self) -> None:
        """Drop cached formats, and all end-token sets but the first, so that timing reveals nothing between callers."""
        with self._lock:
            for end_ids in list(self._compilers)[1:]:
                del self._compilers[end_ids]
            for compiler, _ in self._compilers.values():
                compiler.clear_cache()

    def _compiled(self, response_format: object, end_ids: frozenset[int], behind: str) -> Any:
        wanted = response_format if isinstance(response_format, SerializedFormat | ForcedCall) else None
        kind, content = ("", "") if wanted else read_format(response_format)
        if kind == "text":
            return None
        self._check_available(wanted.name if wanted else "response_format", end_ids)
        import xgrammar

        with self._lock:
            compiler, tokenizer = self._compiler(end_ids)
            if isinstance(wanted, SerializedFormat):
                return xgrammar.CompiledGrammar.deserialize_json(wanted.text, tokenizer)
            try:
                rules = wanted.rules(self._plain_added) if wanted else _rules(kind, content)
                return compiler.compile_grammar(_behind_thought(rules, behind) if behind else rules)
            except Exception as error:
                # xgrammar has no common error class.
                subject = "tool_choice: the tools' parameters" if wanted else f"response_format: this {kind}"
                raise ValueError(f"{subject} cannot be compiled: {error}") from error

    def _check_available(self, what: str, end_ids: frozenset[int]) -> None:
        if problem := structured_problem():
            raise ValueError(problem)
        if self._tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer; this generator was made without one")
        if not end_ids:
            raise ValueError(f"{what} needs an end-of-sequence token; this request has none (see ignore_eos)")

    def _compiler(self, end_ids: frozenset[int]) -> tuple[Any, Any]:
        import xgrammar

        if end_ids not in self._compilers:
            try:
                info = xgrammar.TokenizerInfo.from_huggingface(
                    self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=sorted(end_ids)
                )
            except Exception as error:
                # Any error on an unsupported tokenizer; the caller can only skip it.
                raise ValueError(f"response_format cannot be had with this tokenizer: {error}") from error
            compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_MAX_CACHED_BYTES)
            if len(self._compilers) >= _MAX_END_IDS:
                # The first set is the model's own, and stays.
                del self._compilers[list(self._compilers)[1]]
            self._compilers[end_ids] = compiler, info
        return self._compilers[end_ids]

    @cached_property
    def _plain_added(self) -> dict[str, int]:
        """Added tokens that are no special ones, by text."""
        added = self._tokenizer.added_tokens_decoder
        return {token.content: token_id for token_id, token in added.items() if not token.special}

    @cached_property
    def _unspoken(self) -> frozenset[int]:
        """Ids of special tokens, and ids without a token."""
        return special_ids(self._tokenizer) | frozenset(range(len(self._tokenizer), self._vocab_size))


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


def _rules(kind: str, content: str) -> Any:
    from xgrammar import Grammar as Rules

    if kind == "json_schema":
        return json_rules(content)
    if kind == "regex":
        check_pattern(content)
        return Rules.from_regex(content)
    return Rules.from_ebnf(content)


def _behind_thought(rules: Any, closes: str) -> Any:
    """The rules after an open thought, its closing mark and the blank line that templates add."""
    from xgrammar import Grammar as Rules

    elements = [
        {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": closes},
        {"type": "const_string", "value": "\n\n"},
    ]
    thought = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    return Rules.concat(Rules.from_structural_tag(thought), rules)


class Grammar:
    """The matcher of one text; it advances with growing prefixes. forbidden: tokens that are never allowed."""

    def __init__(self, compiled: Any, forbidden: Collection[int], vocab_size: int, num_prompt_tokens: int) -> None:
        import xgrammar

        self._forbidden = forbidden
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._num_seen = num_prompt_tokens
        # Allowed tokens of the last prefix.
        self._allowed_after = -1
        self._allowed = xgrammar.allocate_token_bitmask(1, vocab_size)
        self._never = torch.tensor(sorted(forbidden), dtype=torch.long)

    def fork(self) -> Grammar:
        """A copy at the same state."""
        other = copy(self)
        other._matcher, other._allowed = self._matcher.fork(), self._allowed.clone()
        return other

    def mask(self, prefix_ids: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
        """Scores (1, vocab) with -inf for disallowed tokens, in place."""
        import xgrammar

        if self._advance(prefix_ids):
            xgrammar.apply_token_bitmask_inplace(scores, self._allowed.to(scores.device))
            if len(self._never):
                scores[:, self._never.to(scores.device)] = -torch.inf
        return scores

    def forced_token(self, prefix_ids: Sequence[int]) -> int | None:
        """The only allowed next token, if there is exactly one."""
        if not self._advance(prefix_ids):
            return None
        words = self._allowed[0].numpy()
        occupied = words.nonzero()[0]
        # The bitmask's words are signed.
        word = int(words[occupied[0]]) & 0xFFFFFFFF if len(occupied) == 1 else 0
        token_id = 32 * int(occupied[0]) + word.bit_length() - 1 if word.bit_count() == 1 else None
        return None if token_id in self._forbidden else token_id

    def _advance(self, prefix_ids: Sequence[int]) -> bool:
        """Accept unseen tokens and update the allowed set; False after the end of the text."""
        for token_id in prefix_ids[self._num_seen :]:
            if self._matcher.is_terminated():
                return False
            if not self._matcher.accept_token(token_id):
                raise RuntimeError(f"the grammar does not allow token {token_id}, which was generated all the same")
            self._num_seen += 1
        if self._matcher.is_terminated():
            return False
        if self._allowed_after != self._num_seen:
            self._matcher.fill_next_token_bitmask(self._allowed)
            self._allowed_after = self._num_seen
        return True
