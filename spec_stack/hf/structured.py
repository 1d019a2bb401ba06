"""Structured output: grammar-constrained decoding by xgrammar (extra `structured`)."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import torch

from spec_stack.config import how_to_install
from spec_stack.hf.answer_format import ForcedCall
from spec_stack.hf.json_schema import check_pattern, json_rules

# Most cached formats, which bounds memory.
_MAX_CACHED_BYTES = 64 << 20
# Most cached end-token sets; each processes the whole vocabulary.
_MAX_END_IDS = 8
# Most tokens that may start a mark.
_MOST_SPELLINGS = 16
FORMATS = ("text", "json_object", "json_schema", "regex", "grammar")


@dataclass(frozen=True)
class SerializedFormat:
    """A format compiled earlier for the same tokenizer and end tokens, with its marks."""

    text: str
    marks: tuple[str, ...] = ()
    name: ClassVar[str] = "response_format"


class Compiler(NamedTuple):
    """xgrammar's compiler and tokenizer info for one set of end tokens."""

    compiler: Any
    tokenizer: Any


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
        self._compilers: dict[frozenset[int], Compiler] = {}

    def compile(
        self, response_format: object, end_ids: Collection[int], num_prompt_tokens: int, behind: str = ""
    ) -> Grammar | None:
        """A request's grammar; None for {"type": "text"}. behind: the mark after which it applies, if any."""
        compiled = self._compiled(response_format, frozenset(end_ids), behind)
        if compiled is None:
            return None
        forbidden = self._unspoken - frozenset(end_ids)
        return Grammar(
            compiled, forbidden, self._vocab_size, num_prompt_tokens, self._ids_of(_marks_of(response_format))
        )

    def serialized(
        self, response_format: object, end_ids: Collection[int], behind: str = ""
    ) -> SerializedFormat | None:
        """A compiled format for another process; None where `compile` gives None. Raises ValueError as `compile`."""
        compiled = self._compiled(response_format, frozenset(end_ids), behind)
        return None if compiled is None else SerializedFormat(compiled.serialize_json(), _marks_of(response_format))

    def warm_up(self, end_ids: Collection[int]) -> None:
        """Prepare the compiler ahead of the first format. Raises ValueError for an unsupported tokenizer."""
        with self._lock:
            self._compiler(frozenset(end_ids))

    def clear(self) -> None:
        """Drop cached formats, and all end-token sets but the first, so that timing reveals nothing between callers."""
        with self._lock:
            for end_ids in list(self._compilers)[1:]:
                del self._compilers[end_ids]
            for compiler in self._compilers.values():
                compiler.compiler.clear_cache()

    def _compiled(self, response_format: object, end_ids: frozenset[int], behind: str) -> Any:
        wanted = response_format if isinstance(response_format, SerializedFormat | ForcedCall) else None
        kind, content = ("", "") if wanted else read_format(response_format)
        if kind == "text":
            return None
        what = wanted.name if wanted else "response_format"
        problem = structured_problem()
        if problem is None and self._tokenizer is None:
            problem = f"{what} needs a tokenizer; this generator was made without one"
        if problem is None and not end_ids:
            problem = f"{what} needs an end-of-sequence token; this request has none (see ignore_eos)"
        if problem is not None:
            raise ValueError(problem)
        import xgrammar

        with self._lock:
            compiler, tokenizer = self._compiler(end_ids)
            if isinstance(wanted, SerializedFormat):
                return xgrammar.CompiledGrammar.deserialize_json(wanted.text, tokenizer)
            try:
                rules = wanted.rules() if wanted else _rules(kind, content)
                return compiler.compile_grammar(_behind_thought(rules, behind) if behind else rules)
            except Exception as error:
                # xgrammar has no common error class.
                subject = "tool_choice: the tools' parameters" if wanted else f"response_format: this {kind}"
                raise ValueError(f"{subject} cannot be compiled: {error}") from error

    def _compiler(self, end_ids: frozenset[int]) -> Compiler:
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
            self._compilers[end_ids] = Compiler(compiler, info)
        return self._compilers[end_ids]

    def _ids_of(self, marks: Collection[str]) -> tuple[int, ...]:
        """Ids of these texts that are single tokens."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return tuple(token_id for token_id, token in added.items() if token.content in marks and not token.special)

    @cached_property
    def _unspoken(self) -> frozenset[int]:
        """Ids of special tokens, and ids without a token."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        special = {token_id for token_id, token in added.items() if token.special}
        return frozenset(special) | frozenset(range(len(self._tokenizer), self._vocab_size))


def _marks_of(response_format: object) -> tuple[str, ...]:
    return response_format.marks if isinstance(response_format, SerializedFormat | ForcedCall) else ()


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
    """The matcher of one text; it advances with growing prefixes.

    forbidden: tokens that are never allowed. mark_ids: tokens that are a whole mark, forced where a mark must follow,
    since a model does not recognise a spelt-out mark in the next turn.
    """

    def __init__(
        self,
        compiled: Any,
        forbidden: Collection[int],
        vocab_size: int,
        num_prompt_tokens: int,
        mark_ids: Sequence[int] = (),
    ) -> None:
        import xgrammar

        self._forbidden, self._mark_ids = forbidden, mark_ids
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

    def only_token(self, prefix_ids: Sequence[int]) -> int | None:
        """The only allowed next token, if there is exactly one."""
        if not self._advance(prefix_ids):
            return None
        allowed = self._few_allowed()
        return allowed[0] if len(allowed) == 1 and allowed[0] not in self._forbidden else None

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
            self._take_mark()
        return True

    def _take_mark(self) -> None:
        """Where a mark or its spelling must follow, allow only the mark token."""
        if not self._mark_ids:
            return
        allowed = self._few_allowed()
        for token_id in self._mark_ids:
            if token_id in allowed:
                words = self._allowed[0].numpy()
                words[:] = 0
                # The bitmask's words are signed.
                words[token_id // 32] = -(1 << 31) if token_id % 32 == 31 else 1 << token_id % 32

    def _few_allowed(self) -> list[int]:
        """The allowed next tokens if they are few enough for a mark; else none."""
        words = self._allowed[0].numpy()
        occupied = words.nonzero()[0]
        if len(occupied) > _MOST_SPELLINGS:
            return []
        allowed = [32 * int(at) + bit for at in occupied for bit in range(32) if int(words[at]) >> bit & 1]
        return allowed if len(allowed) <= _MOST_SPELLINGS else []
