"""Token spans of chat contents, learnt from the tokenizer's template: a server's scheduler sees token ids without
messages. Everything outside user, assistant and tool turns is protected, as in `spec_stack.hf.prompt`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spec_stack.hf.chat_template import MARKED_TOOL, ChatTemplate
from spec_stack.prefill.alignment import Span

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opening:
    """The opening of a prunable turn: the tokens to match, their number with trailing whitespace, which may merge with
    the content, and the turn's last token."""

    ids: tuple[int, ...]
    num_tokens: int
    end_id: int


@dataclass(frozen=True)
class Protected:
    """Half-open protected token spans, and a note on unrecognised parts ("" for none)."""

    spans: tuple[Span, ...] = ()
    unrecognised: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(stop - start for start, stop in self.spans)


@dataclass(frozen=True)
class ChatTurns:
    """The turns of one chat template. unrecognised: parts that user text could imitate."""

    openings: tuple[Opening, ...] = ()
    unrecognised: str = ""

    @classmethod
    def learn(cls, tokenizer: Any, chat_template: str | None = None) -> ChatTurns:
        """Learn a tokenizer's template, or the server's template file. Never raises: `unrecognised` has the reason."""
        try:
            return _learn(tokenizer, _options(chat_template))
        except Exception as error:
            # Templates may raise anything; prompts are still served.
            logger.warning("system messages and template tokens cannot be protected: %s", error, exc_info=True)
            return cls(unrecognised=f"nothing is protected, since the chat template could not be learnt ({error})")

    def protected(self, prompt_ids: Sequence[int]) -> Protected:
        """The prompt without contents of user, assistant and tool turns; nothing without a turn."""
        if not self.openings:
            return Protected(unrecognised=self.unrecognised)
        contents = self.contents(prompt_ids)
        if contents is None:
            return Protected(unrecognised="no chat turn was found in the prompt, so nothing of it is protected")
        edges = [0, *(edge for span in contents for edge in span), len(prompt_ids)]
        spans = tuple((start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop)
        return Protected(spans, self.unrecognised)

    def contents(self, prompt_ids: Sequence[int]) -> list[Span] | None:
        """Content spans of the turns in order; None without a turn."""
        wanted = {opening.ids[0] for opening in self.openings} | {opening.end_id for opening in self.openings}
        places = np.flatnonzero(np.isin(np.asarray(prompt_ids, dtype=np.int64), list(wanted))).tolist()
        spans: list[Span] = []
        found, begin, end_id = False, len(prompt_ids), -1
        for at in places:
            opening = next((it for it in self.openings if tuple(prompt_ids[at : at + len(it.ids)]) == it.ids), None)
            if opening is None and prompt_ids[at] != end_id:
                continue
            spans.append((begin, at))
            begin, end_id = len(prompt_ids), -1
            if opening is not None:
                found, begin, end_id = True, at + opening.num_tokens, opening.end_id
        spans.append((begin, len(prompt_ids)))
        return [(start, stop) for start, stop in spans if start < stop] if found else None


def _options(chat_template: str | None) -> dict[str, str]:
    """Options of `apply_chat_template` for the server's template."""
    if chat_template is None:
        return {}
    path = Path(chat_template)
    if not path.is_file():
        raise ValueError(f"the server's own chat template {chat_template!r} is no file that can be read here")
    return {"chat_template": path.read_text(encoding="utf-8")}


def _learn(tokenizer: Any, options: Mapping[str, Any]) -> ChatTurns:
    if tokenizer is None:
        raise ValueError("the server has no tokenizer")
    if not options and not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template")
    if not tokenizer.is_fast:
        raise ValueError("the tokenizer does not tell where its tokens stand in the text")
    chat = _MarkedChat(tokenizer, ["user", "assistant", "user", "assistant", "user"], options)
    openings = [chat.opening(2), chat.opening(1)]
    try:
        openings.append(_MarkedChat(tokenizer, ["user", "assistant", "tool", "assistant", "user"], options).opening(2))
    except ValueError as error:
        # Templates that reject tool messages, or need a call first, keep them protected.
        logger.info("the chat template does not show how tool messages open: %s", error)
    # Longest first: one opening may be a prefix of another.
    turns = ChatTurns(tuple(sorted(set(openings), key=lambda opening: -len(opening.ids))))
    return ChatTurns(turns.openings, _unprotected(tokenizer, turns, options))


class _MarkedChat:
    """A chat rendered with marked contents: token ids and the marks' token spans."""

    def __init__(self, tokenizer: Any, roles: Sequence[str], options: Mapping[str, Any]) -> None:
        self._marks = [f"marked{index}content" for index in range(len(roles))]
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, self._marks, strict=True)]
        self._text = ChatTemplate(tokenizer, {"add_generation_prompt": True}, options).render(messages)
        encoded = tokenizer(self._text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        self._tokenizer, self._offsets = tokenizer, encoded.offset_mapping
        self.ids = list(encoded.input_ids)

    def span(self, mark: str) -> Span | None:
        """Tokens that overlap the mark; None if the template dropped it."""
        start = self._text.find(mark)
        inside = [at for at, (a, b) in enumerate(self._offsets) if a < start + len(mark) and b > start]
        return (inside[0], inside[-1] + 1) if start >= 0 else None

    def opening(self, index: int) -> Opening:
        """The opening of turn `index`. Raises ValueError without special tokens, which users cannot write."""
        before, own, after = (self.span(self._marks[at]) for at in (index - 1, index, index + 1))
        if before is None or own is None or after is None:
            raise ValueError("the chat template leaves messages out")
        special = set(self._tokenizer.added_tokens_decoder)
        # The previous turn's end, then this turn's opening; a single shared token counts as the opening.
        between = self._without_blanks(self.ids[before[1] : own[0]])
        header = self._without_blanks(between[1:]) or between
        end = self._without_blanks(self.ids[own[1] : after[0]])
        core = header
        while core and core[-1] not in special and self._is_blank(core[-1]):
            core = core[:-1]
        if not special.intersection(core) or not end or end[0] not in special:
            raise ValueError("its turns are not marked by special tokens")
        return Opening(tuple(core), len(header), end[0])

    def _without_blanks(self, ids: Sequence[int]) -> list[int]:
        """The ids without leading whitespace tokens."""
        first = next((at for at, token_id in enumerate(ids) if not self._is_blank(token_id)), len(ids))
        return list(ids[first:])

    def _is_blank(self, token_id: int) -> bool:
        return not self._tokenizer.decode([token_id], skip_special_tokens=False).strip()


def _unprotected(tokenizer: Any, turns: ChatTurns, options: Mapping[str, Any]) -> str:
    """A note on system messages or tool definitions that these turns would leave prunable; empty without any."""
    tries: list[tuple[str, list[str], str, dict[str, Any]]] = [
        ("system messages", ["system", "user"], "marked0content", {}),
        ("tool definitions", ["user"], MARKED_TOOL["function"]["name"], {"tools": [MARKED_TOOL]}),
    ]
    lost = []
    for what, roles, mark, more in tries:
        try:
            chat = _MarkedChat(tokenizer, roles, {**options, **more})
        except ValueError as error:
            # A template without such messages needs no protection for them.
            logger.info("the chat template renders no %s: %s", what, error)
            continue
        where = chat.span(mark)
        if where and any(start < where[1] and where[0] < stop for start, stop in turns.contents(chat.ids) or []):
            lost.append(what)
    return f"this chat template does not tell {' and '.join(lost)} from what users write" if lost else ""
