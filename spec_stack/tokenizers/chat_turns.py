"""A chat's turns found in its token ids, by what the tokenizer's template writes around each message. Everything
outside user, assistant and tool turns is the template's."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

import numpy as np

from spec_stack.hf.chat_template import MARKED_TOOL, ChatTemplate
from spec_stack.prefill.prompt_text import ChatTurn

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opening:
    """The opening of a turn: whose it is, the tokens to match, their number with trailing whitespace, which may merge
    with the content, and the turn's last token."""

    role: str
    ids: tuple[int, ...]
    num_tokens: int
    end_id: int


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
            logger.info("system messages and template tokens cannot be protected: %s", error, exc_info=True)
            return cls(unrecognised=f"nothing is protected, since the chat template could not be learnt ({error})")

    def find(self, prompt_ids: Sequence[int]) -> list[ChatTurn] | None:
        """The turns with any text, in order; None for a plain text, where no turn opens."""
        wanted = {opening.ids[0] for opening in self.openings} | {opening.end_id for opening in self.openings}
        places = np.flatnonzero(np.isin(np.asarray(prompt_ids, dtype=np.int64), list(wanted))).tolist()
        turns: list[ChatTurn] = []
        current: Opening | None = None
        found, begin = False, 0
        for at in places:
            opening = next((it for it in self.openings if tuple(prompt_ids[at : at + len(it.ids)]) == it.ids), None)
            if opening is None and (current is None or prompt_ids[at] != current.end_id):
                continue
            if current is not None:
                turns.append(ChatTurn(current.role, (begin, at)))
            current, found = opening, found or opening is not None
            begin = at + (0 if opening is None else opening.num_tokens)
        if current is not None:
            turns.append(ChatTurn(current.role, (begin, len(prompt_ids))))
        return [turn for turn in turns if turn.span[0] < turn.span[1]] if found else None


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
    turns = _template_texts(tokenizer, ["user", "assistant", "user", "assistant", "user"], options)
    openings = [_opening(tokenizer, role, *turns[at : at + 2]) for at, role in ((2, "user"), (1, "assistant"))]
    try:
        turns = _template_texts(tokenizer, ["user", "assistant", "tool", "assistant", "user"], options)
        openings.append(_opening(tokenizer, "tool", *turns[2:4]))
    except ValueError as error:
        # Templates that reject tool messages, or need a call first, keep them protected.
        logger.info("the chat template does not show how tool messages open: %s", error)
    # Some templates open two roles' turns alike, and one opening may be a prefix of another.
    by_ids = {opening.ids: opening for opening in reversed(openings)}
    found = ChatTurns(tuple(sorted(by_ids.values(), key=lambda opening: -len(opening.ids))))
    return ChatTurns(found.openings, _unprotected(tokenizer, found, options))


def _template_texts(tokenizer: Any, roles: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """The texts before every message of a chat, and after the last."""
    messages = [{"role": role, "content": "text"} for role in roles]
    parts = ChatTemplate(tokenizer, {"add_generation_prompt": True}, options).fit(messages).parts
    if parts[1::2] != list(range(len(roles))):
        raise ValueError("the chat template leaves messages out")
    return [str(part) for part in parts[::2]]


def _opening(tokenizer: Any, role: str, before: str, after: str) -> Opening:
    """A turn's opening, between two texts. Raises ValueError without special tokens, which users cannot write."""
    special = set(tokenizer.added_tokens_decoder)

    def is_blank(token_id: int) -> bool:
        return not tokenizer.decode([token_id], skip_special_tokens=False).strip()

    between, end = (
        list(dropwhile(is_blank, tokenizer(text, add_special_tokens=False, verbose=False).input_ids))
        for text in (before, after)
    )
    # The previous turn's end, then this turn's opening; a single shared token counts as the opening.
    header = list(dropwhile(is_blank, between[1:])) or between
    core = list(header)
    while core and core[-1] not in special and is_blank(core[-1]):
        core.pop()
    if not special.intersection(core) or not end or end[0] not in special:
        raise ValueError("its turns are not marked by special tokens")
    return Opening(role, tuple(core), len(header), end[0])


def _unprotected(tokenizer: Any, turns: ChatTurns, options: Mapping[str, Any]) -> str:
    """A note on system messages or tool definitions that these turns would leave prunable; empty without any."""
    system, user = {"role": "system", "content": "marked_system"}, {"role": "user", "content": "text"}
    tries: list[tuple[str, list[dict[str, str]], str, dict[str, Any]]] = [
        ("system messages", [system, user], "marked_system", {}),
        ("tool definitions", [user], MARKED_TOOL["function"]["name"], {"tools": [MARKED_TOOL]}),
    ]
    lost = []
    for what, messages, mark, more in tries:
        try:
            text = ChatTemplate(tokenizer, {"add_generation_prompt": True}, {**options, **more}).render(messages)
        except ValueError as error:
            # A template without such messages needs no protection for them.
            logger.info("the chat template renders no %s: %s", what, error)
            continue
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        start = text.find(mark)
        marked = {at for at, (a, b) in enumerate(encoded.offset_mapping) if a < start + len(mark) and b > start >= 0}
        if any(marked.intersection(range(*turn.span)) for turn in turns.find(encoded.input_ids) or []):
            lost.append(what)
    return f"this chat template does not tell {' and '.join(lost)} from what users write" if lost else ""
