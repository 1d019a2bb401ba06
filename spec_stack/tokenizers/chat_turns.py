"""Which tokens of a prompt are a chat's content, learnt from the tokenizer's own template.

A server's scheduler gets token ids, without the messages they were rendered from. So the template is rendered once at
start with marked contents, and what stands between the marks is remembered token by token: what opens a turn of each
role, and what ends it. In a prompt, all that does not lie inside a user, assistant or tool turn is protected: system
messages, tool definitions, the template's own tokens. That is the rule of `spec_stack.hf.prompt`, which sees the
messages.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spec_stack.prefill.alignment import Span

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opening:
    """The opening of a turn whose content may be pruned.

    ids: the tokens to find. num_tokens: how many the template puts there in all; the blanks at its end are not among
    ids, because they may become one token with what the content begins with. (As many tokens are protected then, and
    the last of them may be the content's first.) end_id: the token that ends the turn.
    """

    ids: tuple[int, ...]
    num_tokens: int
    end_id: int


@dataclass(frozen=True)
class Protected:
    """Half-open token spans that are kept whole, and what could not be recognised ("" for nothing)."""

    spans: tuple[Span, ...] = ()
    unrecognised: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(stop - start for start, stop in self.spans)


@dataclass(frozen=True)
class ChatTurns:
    """The turns of one chat template. unrecognised: what it does not let be told from what users write."""

    openings: tuple[Opening, ...] = ()
    unrecognised: str = ""

    @classmethod
    def learn(cls, tokenizer: Any, chat_template: str | None = None) -> ChatTurns:
        """Render the template with marked contents, and remember what stands around them.

        Parameters
        ----------
        tokenizer
            A Transformers tokenizer that knows its tokens' places in a text; None where the server has none.
        chat_template
            The server's own template in place of the tokenizer's, a file; anything else cannot be learnt.

        Returns
        -------
        ChatTurns
            Never an error: a template that cannot be learnt protects nothing, and `unrecognised` says so.
        """
        try:
            return _learn(tokenizer, _template(chat_template))
        except Exception as error:
            # Templates are programs of strangers; whatever one raises, prompts are still served.
            logger.warning("system messages and template tokens cannot be protected: %s", error, exc_info=True)
            return cls(unrecognised=f"nothing is protected, since the chat template could not be learnt ({error})")

    def protected(self, prompt_ids: Sequence[int]) -> Protected:
        """Return what to keep whole of a prompt: all that is not the content of a user's, assistant's or tool's turn.

        Parameters
        ----------
        prompt_ids
            A rendered chat. Nothing is protected of a prompt in which no turn is found, such as a plain text.

        Returns
        -------
        Protected
            Sorted spans that do not overlap, and what could not be recognised.
        """
        if not self.openings:
            return Protected(unrecognised=self.unrecognised)
        contents = self.contents(prompt_ids)
        if contents is None:
            return Protected(unrecognised="no chat turn was found in the prompt, so nothing of it is protected")
        edges = [0, *(edge for span in contents for edge in span), len(prompt_ids)]
        spans = tuple((start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop)
        return Protected(spans, self.unrecognised)

    def contents(self, prompt_ids: Sequence[int]) -> list[Span] | None:
        """Spans of the turns' contents, in order; None where no turn opens."""
        ids = np.asarray(prompt_ids, dtype=np.int64)
        wanted = {opening.ids[0] for opening in self.openings} | {opening.end_id for opening in self.openings}
        spans: list[Span] = []
        found = False
        begin, end_id = -1, -1

        def close(at: int) -> None:
            if 0 <= begin < at:
                spans.append((begin, at))

        for at in np.flatnonzero(np.isin(ids, list(wanted))).tolist():
            opening = next((it for it in self.openings if tuple(prompt_ids[at : at + len(it.ids)]) == it.ids), None)
            if opening is not None:
                close(at)
                found, begin, end_id = True, at + opening.num_tokens, opening.end_id
            elif begin >= 0 and prompt_ids[at] == end_id:
                close(at)
                begin = -1
        close(len(ids))
        return spans if found else None


def _template(chat_template: str | None) -> str | None:
    if chat_template is None:
        return None
    path = Path(chat_template)
    if not path.is_file():
        raise ValueError(f"the server's own chat template {chat_template!r} is no file that can be read here")
    return path.read_text(encoding="utf-8")


def _learn(tokenizer: Any, template: str | None) -> ChatTurns:
    if tokenizer is None:
        raise ValueError("the server has no tokenizer")
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template")
    if not tokenizer.is_fast:
        raise ValueError("the tokenizer does not tell where its tokens stand in the text")
    template_kwargs = {} if template is None else {"chat_template": template}
    chat = _Rendered(tokenizer, ["user", "assistant", "user", "assistant", "user"], template_kwargs)
    openings = [chat.opening(2), chat.opening(1)]
    try:
        chat = _Rendered(tokenizer, ["user", "assistant", "tool", "assistant", "user"], template_kwargs)
        openings.append(chat.opening(2))
    except Exception as error:
        # Many templates know no tool messages, or want a call before one: those stay protected.
        logger.info("the chat template does not show how tool messages open: %s", error)
    # The longest first: one role's opening may begin like another's.
    turns = ChatTurns(tuple(sorted(set(openings), key=lambda opening: -len(opening.ids))))
    return ChatTurns(turns.openings, _unprotected(tokenizer, turns, template_kwargs))


class _Rendered:
    """A chat rendered with a mark for each content: its token ids, and the marks' token spans."""

    def __init__(self, tokenizer: Any, roles: Sequence[str], template_kwargs: Mapping[str, Any], **more: Any) -> None:
        self.marks = [f"marked{index}content" for index in range(len(roles))]
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, self.marks, strict=True)]
        text = str(
            tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **template_kwargs, **more
            )
        )
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        self._tokenizer = tokenizer
        self._offsets = encoded.offset_mapping
        self._text = text
        self.ids = list(encoded.input_ids)

    def span(self, mark: str) -> Span | None:
        """The tokens that hold some of the mark; None where the template left it out."""
        start = self._text.find(mark)
        if start < 0:
            return None
        inside = [at for at, (a, b) in enumerate(self._offsets) if a < start + len(mark) and b > start]
        return inside[0], inside[-1] + 1

    def opening(self, index: int) -> Opening:
        """How the turn of message `index` opens, out of what the template puts before it and after it.

        Raises ValueError where that is not marked by special tokens, which no user's text can become.
        """
        before, own = self.span(self.marks[index - 1]), self.span(self.marks[index])
        after = self.span(self.marks[index + 1])
        if before is None or own is None or after is None:
            raise ValueError("the chat template leaves messages out")
        special = set(self._tokenizer.added_tokens_decoder)
        # What ends the turn before, then what opens this one; where one token does both, it opens.
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
        """Without the blank tokens at the beginning."""
        first = next((at for at, token_id in enumerate(ids) if not self._is_blank(token_id)), len(ids))
        return list(ids[first:])

    def _is_blank(self, token_id: int) -> bool:
        return not self._tokenizer.decode([token_id], skip_special_tokens=False).strip()


def _unprotected(tokenizer: Any, turns: ChatTurns, template_kwargs: Mapping[str, Any]) -> str:
    """Tries the turns on a chat with a system message, and on one with a tool."""
    tool = {
        "type": "function",
        "function": {
            "name": "marked_tool_name",
            "description": "a tool",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
    tries: list[tuple[str, list[str], str, dict[str, Any]]] = [
        ("system messages", ["system", "user"], "marked0content", {}),
        ("tool definitions", ["user"], "marked_tool_name", {"tools": [tool]}),
    ]
    lost = []
    for what, roles, mark, more in tries:
        try:
            chat = _Rendered(tokenizer, roles, template_kwargs, **more)
        except Exception as error:
            # A template without such messages has nothing of the kind to protect.
            logger.info("the chat template renders no %s: %s", what, error)
            continue
        where = chat.span(mark)
        contents = turns.contents(chat.ids) or []
        if where is not None and any(start < where[1] and where[0] < stop for start, stop in contents):
            lost.append(what)
    return f"this chat template does not tell {' and '.join(lost)} from what users write" if lost else ""
