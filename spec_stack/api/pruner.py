"""Pruner: shortens messages for any engine, with a draft alone."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from spec_stack.api.unknown_options import shows_options
from spec_stack.config import LoadConfig, PrefillConfig, SessionConfig
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.architectures import text_config
from spec_stack.hf.chat_template import KEPT_ROLES, chat_parts
from spec_stack.hf.loading import ASSETS, load_alone, load_tokenizer
from spec_stack.hf.prompt import Message, Span, num_shared
from spec_stack.prefill.decide import decide_scoring, sees_whole
from spec_stack.prefill.queries import MOST_REPEATED
from spec_stack.prefill.recall import clip_spans, dropped_positions, recall_dropped, select_turn
from spec_stack.prefill.registry import needs_attention
from spec_stack.prefill.rule import Evidence
from spec_stack.prefill.scoring import look_at, num_layers_needed
from spec_stack.prefill.shipped import choose_calibration, sketch
from spec_stack.prefill.units import line_borders
from spec_stack.types import Proposal
from spec_stack.warning import warn_caller

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from spec_stack.hf.model import CachedModel

Prunable = str | Sequence[Message]
# A text with its message index and part index.
_Place = tuple[int, int | None, str]
# Separates a message's texts; the question follows on its own.
_JOINT, _QUESTION = "\n", -1
# Most attempts to shrink a selection that exceeds max_tokens.
_MOST_TRIES = 4


class PruneOptions(TypedDict, total=False):
    """The keywords of `Pruner.prune`."""

    keep_rate: float | None
    max_tokens: int | None
    question: str | None
    protect: Sequence[str]
    marker: str


@dataclass(frozen=True)
class _Asked:
    """The options of a call with their defaults. Raises ValueError for invalid ones."""

    keep_rate: float | None = None
    max_tokens: int | None = None
    question: str | None = None
    protect: Sequence[str] = ()
    marker: str = ""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and (type(self.max_tokens) is not int or self.max_tokens < 1):
            raise ValueError(f"max_tokens must be 1 or more, or None, got {self.max_tokens!r}")
        if not isinstance(self.question, str | None):
            raise ValueError(f"question must be a string or None, got {self.question!r}")
        is_list = isinstance(self.protect, Sequence) and not isinstance(self.protect, str)
        if not is_list or not all(isinstance(each, str) for each in self.protect):
            raise ValueError(f"protect must be a list of strings, got {self.protect!r}")
        if not isinstance(self.marker, str):
            raise ValueError(f"marker must be a string, got {self.marker!r}")
        if self.keep_rate is not None and self.max_tokens is not None:
            raise ValueError("give keep_rate or max_tokens, not both")

    def apply(self, config: PrefillConfig) -> PrefillConfig:
        """The configuration with this call's keep rate; it prunes any length where the call names an amount."""
        if self.max_tokens is not None:
            # Any rate under 1 lets `decide_scoring` agree; the budget sets it.
            return replace(config, keep_rate=0.5, sparse_prefill="on")
        if self.keep_rate is not None:
            return replace(config, keep_rate=self.keep_rate, sparse_prefill="on")
        return replace(config, sparse_prefill="auto")


@dataclass(frozen=True)
class KeptText:
    """The kept part of one text.

    Parameters
    ----------
    message : int
        Index of its message; 0 for a plain text.
    part : int or None
        Index of its content part; None where the content is a string.
    spans : list of (int, int)
        Half-open spans of its characters, in order.
    """

    message: int
    part: int | None
    spans: list[Span]


@dataclass(frozen=True)
class PruneResult:
    """A shorter prompt.

    Parameters
    ----------
    messages : str or list of dict
        In the given format: a text, or messages in which only the texts are shorter.
    kept : list of KeptText
        The kept spans of each text.
    num_tokens, num_kept_tokens : int
        Tokens of the whole and of the pruned prompt, by the draft's tokenizer, chat template included.
    num_recalled_tokens : int
        Kept tokens that an earlier turn of the conversation had dropped.
    reason : str
        Why the prompt was pruned or not.
    """

    messages: Any
    kept: list[KeptText]
    num_tokens: int
    num_kept_tokens: int
    num_recalled_tokens: int
    reason: str


@dataclass(frozen=True)
class _Text:
    """A text and its token span start…stop - 1."""

    message: int
    part: int | None
    text: str
    is_whole: bool
    char: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Prompt:
    """A prompt to score: token ids, their character offsets, pieces, texts, and protected token spans."""

    token_ids: list[int]
    begins: list[int]
    pieces: list[str]
    texts: list[_Text]
    protected: list[Span]
    borders: list[int]

    def segments(self, text: _Text) -> list[Span]:
        """Lines and sentences of a text, as half-open token spans."""
        inside = self.borders[bisect_right(self.borders, text.start) : bisect_left(self.borders, text.stop)]
        return [span for span in pairwise([text.start, *inside, text.stop]) if span[0] < span[1]]

    def characters(self, text: _Text, span: Span) -> Span:
        """A segment's character span, relative to its text."""
        start, stop = span
        first = 0 if start == text.start else self._border(text, start)
        return first, len(text.text) if stop == text.stop else self._border(text, stop)

    def _border(self, text: _Text, token: int) -> int:
        """The first character of a segment. A line's indentation belongs to it, even if its token contains the line
        break."""
        at = self.begins[token] - text.char
        line = text.text.rfind("\n", 0, at) + 1
        return line if line and text.text[line:at].isspace() else at


class Pruner:
    """Shortens prompts for any engine: whole lines and sentences stay, verbatim and in order.

    The draft scores the prompt as in `SpecStackGenerator`, with the prompt's own queries; no target is needed. System
    and developer messages, tool definitions and non-text parts are never pruned.

    Parameters
    ----------
    draft : PreTrainedModel
        A loaded draft, whose attention is replaced in place.
    tokenizer : object
        Its tokenizer.
    config : PrefillConfig, optional
        Scoring and keep rate. The unit is always lines, and the queries are the prompt's own.

    Raises
    ------
    ValueError
        For a draft that cannot score, and for an invalid configuration.

    Examples
    --------
    >>> from spec_stack import Pruner
    >>> pruner = Pruner.from_pretrained()  # the draft embedded in the package, offline
    >>> text = "def add(a, b):\\n    return a + b\\n" * 40
    >>> result = pruner.prune(text, max_tokens=200, question="What does add return?")
    >>> result.num_kept_tokens <= 200 < result.num_tokens
    True
    """

    def __init__(self, draft: PreTrainedModel, tokenizer: Any, config: PrefillConfig | None = None) -> None:
        if config is not None and not isinstance(config, PrefillConfig):
            raise ValueError(f"config must be a PrefillConfig, got {type(config).__name__}")
        if tokenizer is None:
            raise ValueError("a Pruner needs the draft's tokenizer")
        self._pair = ModelPair.assemble(draft, draft, tokenizer)
        self.config = replace(config or PrefillConfig(), unit="lines", scoring_queries="prompt", positions="contiguous")

    @classmethod
    def from_pretrained(
        cls,
        draft: str | Path | None = None,
        tokenizer: Any = None,
        *,
        config: PrefillConfig | None = None,
        precision: str = LoadConfig.draft_precision,
        device: str | None = None,
        calibration: str | Path | bool | None = None,
    ) -> Pruner:
        """Load a draft.

        Parameters
        ----------
        draft : str or Path, optional
            A folder, hub id or GGUF file; None is the draft embedded in the package.
        tokenizer : str, Path or object, optional
            The tokenizer or its source; None is the draft's own.
        config : PrefillConfig, optional
            Scoring and keep rate.
        precision : str
            Of the weights (see `LoadConfig`).
        device : str, optional
            None takes CUDA where there is one.
        calibration : str, Path or bool, optional
            As for `SpecStackGenerator.from_pretrained`.

        Raises
        ------
        ValueError
            For a missing draft, a draft that cannot score, and a draft without a tokenizer.
        """
        if draft is None:
            draft, tokenizer = ASSETS / "draft", tokenizer or ASSETS / "target"
        model = load_alone(draft, LoadConfig(draft_precision=precision), device)
        if tokenizer is None or isinstance(tokenizer, str | Path):
            tokenizer = load_tokenizer(str(draft if tokenizer is None else tokenizer))
        found, problem = choose_calibration(
            draft,
            calibration,
            (None, text_config(model.config)),
            lambda: sketch(model.get_input_embeddings().weight),
        )
        if problem:
            warn_caller(f"the calibration beside the draft is left aside: {problem}")
        config = config or PrefillConfig()
        return cls(model, tokenizer, config if found is None else found.complete(config))

    @property
    def tokenizer(self) -> Any:
        """The draft's tokenizer."""
        return self._pair.tokenizer

    @property
    def max_positions(self) -> int:
        """Most tokens that the draft reads."""
        return self._pair.max_positions[1]

    @shows_options(PruneOptions, protect=(), marker="")
    def prune(self, messages: Prunable, **options: Unpack[PruneOptions]) -> PruneResult:
        """Shorten a prompt.

        Parameters
        ----------
        messages : str or sequence of dict
            A text, or messages in OpenAI's format, with strings or lists of parts as contents.
        keep_rate : float, optional
            Share of tokens to keep. Without it and max_tokens: the configuration's, from min_prompt_tokens on.
        max_tokens : int, optional
            Most tokens to keep, by the draft's tokenizer, protected tokens included.
        question : str, optional
            The question about the prompt, if the prompt does not contain it.
        protect : sequence of str
            Strings whose lines are kept.
        marker : str
            Replaces every gap, on its own line where lines were dropped.

        Raises
        ------
        ValueError
            For invalid values, malformed messages, and a tokenizer without character offsets.
        """
        return self.conversation().prune(messages, **options)

    def conversation(self, config: SessionConfig | None = None) -> PrunerConversation:
        """A conversation; each turn passes all of its messages.

        Parameters
        ----------
        config : SessionConfig, optional
            Recall of dropped text.
        """
        return PrunerConversation(self._pair, self.config, config or SessionConfig())


class PrunerConversation:
    """Prunes the turns of one conversation: kept text stays, and dropped text is recalled to its place.

    Unless text is recalled, a turn's pruned messages start with the previous turn's, so that an engine's prefix cache
    applies. New answers are kept whole. The draft keeps its cache of the conversation.
    """

    def __init__(self, pair: ModelPair, config: PrefillConfig, session: SessionConfig) -> None:
        self._pair, self._config, self._session = pair, config, session
        self._draft: CachedModel = pair.open_index(config.prefill_chunk)
        self._token_ids: list[int] = []
        self._kept: set[int] = set()

    @shows_options(PruneOptions, protect=(), marker="")
    def prune(self, messages: Prunable, **options: Unpack[PruneOptions]) -> PruneResult:
        """Prune a turn; messages: the whole conversation (see `Pruner.prune`)."""
        asked = _Asked(**options)
        config, max_tokens = asked.apply(self._config), asked.max_tokens
        prompt, num_old = self._read(messages, asked.question, asked.protect)
        num_tokens = len(prompt.token_ids)
        held = sorted(at for at in self._kept if at < num_old)
        kept, num_recalled, reason = {*held, *range(num_old, num_tokens)}, 0, self._obstacle(num_tokens)
        if not reason:
            scores, reason = self._decide(prompt, config, len(held), num_old, max_tokens)
            if scores or len(held) < num_old:
                kept, num_recalled = self._select(prompt, config if scores else None, held, num_old, max_tokens)
        self._token_ids, self._kept = prompt.token_ids, _whole_segments(prompt, kept, bool(asked.marker))
        if max_tokens is not None and len(self._kept) > max_tokens:
            reason += f"; what is never pruned, or was kept before, is over max_tokens={max_tokens}"
        return _result(messages, prompt, self._kept, asked.marker, num_recalled, reason)

    def _obstacle(self, num_tokens: int) -> str:
        """The reason why the draft cannot score a prompt of this length; empty if it can."""
        limit = self._pair.max_positions[1]
        if needs_attention(self._config.scorer) and num_tokens + MOST_REPEATED > limit:
            return f"off: the prompt has {num_tokens} tokens, and the draft {limit} positions"
        window = self._pair.scoring_limit
        if needs_attention(self._config.scorer) and not sees_whole(self._config, num_tokens, window):
            return f"off: every attention layer of the draft slides over {window} tokens, and none sees more"
        return ""

    def _decide(
        self, prompt: _Prompt, config: PrefillConfig, num_held: int, num_old: int, max_tokens: int | None
    ) -> tuple[bool, str]:
        """Whether the new text is pruned, and the reason."""
        num_tokens = len(prompt.token_ids)
        num_left = num_held + num_tokens - num_old
        if max_tokens is not None and num_left <= max_tokens:
            return False, f"off: {num_left} tokens are no more than max_tokens={max_tokens}"
        text = "new text" if num_old else "prompt"
        new = clip_spans(prompt.protected, num_old)
        return decide_scoring(config, num_tokens - num_old, new, num_tokens, self._pair.scoring_limit, text)

    def _select(
        self, prompt: _Prompt, config: PrefillConfig | None, held: list[int], num_old: int, max_tokens: int | None
    ) -> tuple[set[int], int]:
        """The kept tokens, and the number of recalled ones. config: None keeps all new text."""
        evidence = self._evidence(prompt)
        dropped = dropped_positions(held, num_old)
        recalled = recall_dropped(evidence, dropped, num_old, self._config, self._session)
        num_new = len(prompt.token_ids) - num_old
        num_protected = sum(stop - start for start, stop in clip_spans(prompt.protected, num_old))
        room = (max_tokens or 0) - len(held) - len(recalled) - num_protected
        for _ in range(_MOST_TRIES):
            if config is not None and max_tokens is not None:
                config = replace(config, keep_rate=min(1.0, max(1, room) / num_new))
            turn = select_turn(evidence, held, num_old, recalled, config, prompt.protected, in_place=True)
            kept = {*held, *recalled, *turn.positions}
            over = len(_whole_segments(prompt, kept, True)) - (max_tokens or 0)
            if max_tokens is None or over <= 0 or room <= 1:
                break
            room -= over
        return kept, len(recalled)

    def _evidence(self, prompt: _Prompt) -> Evidence:
        config, token_ids = self._config, prompt.token_ids
        if not needs_attention(config.scorer):
            return Evidence(token_ids, None, prompt.protected, prompt.pieces)
        draft = self._draft
        draft.forget_from(min(num_shared(draft.token_ids, token_ids), len(token_ids) - 1))
        try:
            attention, _ = look_at(
                draft,
                token_ids,
                lambda *_: Proposal(),
                config,
                num_layers=num_layers_needed(config, draft.num_layers),
                pieces=prompt.pieces,
                protected=prompt.protected,
            )
        except BaseException:
            self._draft = self._pair.open_index(config.prefill_chunk)
            raise
        return Evidence(token_ids, attention, prompt.protected, prompt.pieces, attention.importance(config))

    def _read(self, messages: Prunable, question: str | None, protect: Sequence[str]) -> tuple[_Prompt, int]:
        """The prompt as the draft reads it, and its number of tokens from earlier turns."""
        tokenizer, chat = self._pair.tokenizer, _as_messages(messages)
        contents = _contents(chat)
        if question is not None:
            if chat[-1]["role"] != "user":
                chat, contents = [*chat, {"role": "user"}], [*contents, []]
            contents[-1].append((_QUESTION, None, question))
        parts: list[str | int] = [0]
        if not isinstance(messages, str) or getattr(tokenizer, "chat_template", None):
            joined = [_JOINT.join(text for _, _, text in each) for each in contents]
            parts = chat_parts(
                tokenizer, [{**message, "content": text} for message, text in zip(chat, joined, strict=True)]
            )
        elif tokenizer(_JOINT).input_ids[:1] == [tokenizer.bos_token_id]:
            parts = [tokenizer.bos_token, 0]
        written, places = _write(parts, contents)
        token_ids, begins, ends = _tokenize(self._pair, written)
        num_old = max(0, min(num_shared(self._token_ids, token_ids), len(token_ids) - 1))
        texts = []
        for message, part, text, char in places:
            start, stop = bisect_left(begins, char), bisect_right(ends, char + len(text))
            role = chat[message]["role"]
            is_new_answer = role == "assistant" and 0 < num_old < stop
            is_whole = message == _QUESTION or role in KEPT_ROLES or is_new_answer
            texts.append(_Text(message, part, text, is_whole, char, start, max(start, stop)))
        pieces = self._pair.pieces(token_ids) or []
        prompt = _Prompt(token_ids, begins, pieces, texts, [], line_borders(pieces))
        return replace(prompt, protected=_protected(prompt, protect)), num_old


def _write(
    parts: Sequence[str | int], contents: Sequence[list[_Place]]
) -> tuple[str, list[tuple[int, int | None, str, int]]]:
    """The whole prompt, and each text with its message, part and first character."""
    written, places = "", []
    for each in parts:
        if isinstance(each, str):
            written += each
            continue
        for at, (message, part, text) in enumerate(contents[each]):
            written += _JOINT if at else ""
            places.append((message, part, text, len(written)))
            written += text
    return written, places


def _as_messages(messages: Prunable) -> list[Message]:
    if not isinstance(messages, Sequence):
        raise ValueError(f"messages must be a text or a list of messages, got {messages!r}")
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def _contents(chat: Sequence[Message]) -> list[list[_Place]]:
    """Each message's texts, with message and part index. Raises ValueError for malformed messages."""
    found: list[list[_Place]] = []
    for message in chat:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages must be a list of {{'role': ..., 'content': ...}}, got {message!r} in it")
        content = message.get("content")
        if content is None or isinstance(content, str):
            found.append([(len(found), None, content)] if content else [])
        elif isinstance(content, Sequence):
            found.append([(len(found), at, part["text"]) for at, part in enumerate(content) if _is_text(part)])
        else:
            raise ValueError(f"a content must be a string or a list of parts, got {content!r}")
    if not any(found):
        raise ValueError("there is no text to prune; give a text, or messages with some")
    return found


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _tokenize(pair: ModelPair, text: str) -> tuple[list[int], list[int], list[int]]:
    """Token ids and character offsets of a text. Raises ValueError without offsets."""
    tokenizer = pair.tokenizer
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        begins, ends = zip(*encoded.offset_mapping, strict=True) if encoded.input_ids else ((), ())
        return list(encoded.input_ids), list(begins), list(ends)
    token_ids = list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    pieces = pair.pieces(token_ids) or []
    if "".join(pieces) != text:
        raise ValueError(
            f"{type(tokenizer).__name__} gives no offsets, and its tokens do not spell this text; use a fast tokenizer"
        )
    bounds = [0, *accumulate(map(len, pieces))]
    return token_ids, bounds[:-1], bounds[1:]


def _protected(prompt: _Prompt, protect: Sequence[str]) -> list[Span]:
    """Protected token spans: everything outside the texts' segments, and segments with a protected string."""
    free = bytearray(len(prompt.token_ids))
    for text in prompt.texts:
        if text.is_whole:
            continue
        for span in prompt.segments(text):
            first, last = prompt.characters(text, span)
            if not any(_meets(text.text, each, first, last) for each in protect):
                free[slice(*span)] = b"\x01" * (span[1] - span[0])
    edges = [0, *(at for at in range(1, len(free)) if free[at] != free[at - 1]), len(free)]
    return [(start, stop) for start, stop in pairwise(edges) if start < stop and not free[start]]


def _meets(text: str, wanted: str, first: int, last: int) -> bool:
    """Whether an occurrence of a string overlaps the characters first…last - 1."""
    return bool(wanted) and text.find(wanted, max(0, first - len(wanted) + 1), last + len(wanted) - 1) >= 0


def _whole_segments(prompt: _Prompt, kept: set[int], may_be_empty: bool) -> set[int]:
    """Kept tokens rounded up to whole segments. If a text must not be empty and nothing of it is kept, its first
    segment stays."""
    inside = {at for text in prompt.texts for at in range(text.start, text.stop)}
    whole = {at for at in range(len(prompt.token_ids)) if at not in inside}
    for text in prompt.texts:
        segments = prompt.segments(text)
        chosen = [span for span in segments if text.is_whole or any(at in kept for at in range(*span))]
        if not chosen and not may_be_empty:
            chosen = segments[:1]
        whole.update(at for span in chosen for at in range(*span))
    return whole


def _kept_spans(prompt: _Prompt, text: _Text, whole: set[int]) -> list[Span]:
    spans: list[Span] = []
    segments = prompt.segments(text)
    if not segments:
        return [(0, len(text.text))] if text.text else []
    for span in segments:
        if span[0] in whole:
            first, last = prompt.characters(text, span)
            spans = [*spans[:-1], (spans[-1][0], last)] if spans and spans[-1][1] == first else [*spans, (first, last)]
    return spans


def _result(
    messages: Prunable, prompt: _Prompt, kept: set[int], marker: str, num_recalled: int, reason: str
) -> PruneResult:
    given: Any = messages if isinstance(messages, str) else [dict(message) for message in messages]
    spans = [
        KeptText(text.message, text.part, _kept_spans(prompt, text, kept))
        for text in prompt.texts
        if text.message != _QUESTION
    ]
    for own, text in zip(spans, prompt.texts, strict=False):
        given = _replaced(given, text, _shortened(text.text, own.spans, marker))
    return PruneResult(given, spans, len(prompt.token_ids), len(kept), num_recalled, reason)


def _shortened(text: str, spans: list[Span], marker: str) -> str:
    """The kept spans, with the marker in every gap."""
    written, at = "", 0
    for start, stop in [*spans, (len(text), len(text))]:
        if start > at and marker:
            written += marker + ("\n" if text[at:start].endswith("\n") else "")
        written, at = written + text[start:stop], stop
    return written


def _replaced(given: Any, text: _Text, shorter: str) -> Any:
    """The messages with one text replaced by a shorter one."""
    if isinstance(given, str):
        return shorter
    if text.part is None:
        given[text.message]["content"] = shorter
    else:
        parts = list(given[text.message]["content"])
        parts[text.part] = {**parts[text.part], "text": shorter}
        given[text.message]["content"] = parts
    return given
