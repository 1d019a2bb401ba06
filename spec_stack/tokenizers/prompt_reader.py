"""Reads prompts into `PromptText`, from token ids: alike at every entry point, whatever way a prompt came."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from spec_stack.hf.prompt import readable, special_ids
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.prompt_text import ChatTurn, PromptText, between, union
from spec_stack.tokenizers.chat_turns import ChatTurns
from spec_stack.tokenizers.vocabulary import Pieces

_EDITED = "the chat template edits a message and its turns are not marked, so the whole chat is kept"


class PromptReader:
    """Reads the prompts of one tokenizer; shared by requests.

    Parameters
    ----------
    tokenizer : object
        The target's; None reads token ids alone.
    chat_template : str, optional
        A file with the template that prompts are rendered by, instead of the tokenizer's own.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self._tokenizer, self._chat_template = tokenizer, chat_template
        self._special = special_ids(tokenizer)
        self._has_template = bool(chat_template or getattr(tokenizer, "chat_template", None))

    @cached_property
    def turns(self) -> ChatTurns:
        """What opens the turns of a chat. Learnt by rendering the template, at the first prompt."""
        return ChatTurns.learn(self._tokenizer, self._chat_template)

    @cached_property
    def pieces(self) -> Pieces | None:
        """The texts of tokens; None without a tokenizer."""
        return None if self._tokenizer is None else Pieces(self._tokenizer)

    def read(
        self,
        token_ids: Sequence[int],
        protected: Sequence[Span] = (),
        question: str | None = None,
        written: Sequence[ChatTurn] | None = None,
    ) -> PromptText:
        """Read a prompt.

        Parameters
        ----------
        token_ids : sequence of int, length N
            The prompt.
        protected : sequence of (int, int)
            Half-open token spans that the caller wants kept.
        question : str, optional
            The question: where the prompt holds it last, or else to be read behind the prompt.
        written : sequence of ChatTurn, optional
            The turns as they are known from messages, empty where the template edits one. They count where the tokens
            do not show what is a turn, or a system message imitates one.
        """
        turns, note = self.turns.find(token_ids), self.turns.unrecognised
        if written is not None:
            if written and (note or turns is None or _exceeds(turns, written)):
                turns, note = list(written), ""
            elif note:
                turns, note = [], _EDITED
            elif written:
                turns = _with_answers(turns or (), written)
        elif not self._has_template:
            note = ""
        template: list[Span] = []
        if turns is not None:
            template = between([turn.span for turn in turns], len(token_ids))
        special = [(at, at + 1) for at, token_id in enumerate(token_ids) if token_id in self._special]
        # A session has the model's own answers in its cache; the other entry points keep them too.
        answers = [turn.span for turn in turns or () if turn.role == "assistant"]
        text = PromptText(
            token_ids=token_ids,
            template=tuple(template),
            protected=tuple(union([*protected, *special, *answers])),
            turns=tuple(turns or ()),
            note=note,
        )
        return text if question is None else self._with_question(self.with_pieces(text), question)

    def with_pieces(self, text: PromptText) -> PromptText:
        """The text with the text of each token, where there is a tokenizer."""
        if text.pieces is not None or self.pieces is None:
            return text
        return replace(text, pieces=self.pieces.of(text.token_ids))

    def _with_question(self, text: PromptText, question: str) -> PromptText:
        if text.pieces is None or self.pieces is None:
            raise ValueError("question= needs a tokenizer; this generator was made without one")
        wanted = readable(question).strip()
        if not wanted:
            raise ValueError("question is empty; give its text, or leave it out")
        begin = "".join(text.pieces).rfind(wanted)
        if begin >= 0:
            stops = list(accumulate(map(len, text.pieces)))
            span = bisect_right(stops, begin), bisect_left(stops, begin + len(wanted)) + 1
            return replace(text, question=span)
        ids = list(self._tokenizer(wanted, add_special_tokens=False, verbose=False).input_ids)
        span = len(text), len(text) + len(ids)
        return replace(text, question=span, question_ids=ids, question_pieces=self.pieces.of(ids))


def _with_answers(turns: Sequence[ChatTurn], written: Sequence[ChatTurn]) -> list[ChatTurn]:
    """The turns, of which the written ones tell which are answers: some templates open results like answers."""
    starts = [turn.span[0] for turn in written]

    def role_of(turn: ChatTurn) -> str:
        first = max(0, bisect_right(starts, turn.span[0]) - 1)
        near = written[first : first + 2]
        inside = (it.role for it in near if it.span[0] < turn.span[1] and turn.span[0] < it.span[1])
        role = next(inside, turn.role)
        return role if "assistant" in (role, turn.role) else turn.role

    return [ChatTurn(role_of(turn), turn.span) for turn in turns]


def _exceeds(turns: Sequence[ChatTurn], written: Sequence[ChatTurn]) -> bool:
    """Whether turns hold more than the written ones and the blanks that a token may share with the template."""
    inside = {at for turn in written for at in range(*turn.span)}
    return sum(at not in inside for turn in turns for at in range(*turn.span)) > len(turns)
