"""Prompts: plain text and chats to token ids, with the spans that must stay dense."""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

Message = Mapping[str, Any]
Span = tuple[int, int]

# Messages of these roles are never pruned.
KEPT_ROLES = ("system", "developer")
# Marks stand for texts when a chat is rendered to learn its template; the number is no request's to guess. A part that
# a template dumps as JSON is not shown.
_MARK = f"\ue000{secrets.randbits(64)}:"
_SHOWN = re.compile(rf'(?<!"text": "){_MARK}(\d+)\ue001')
_MARKED_JSON = json.dumps({_MARK: _MARK}, ensure_ascii=False)
# A content of None that a template prints.
_NULL = re.compile(r"\b(?:None|null)\b")


@dataclass(frozen=True)
class PromptSource:
    """A prompt as a call gives it: a text, a chat or token ids, exactly one of them, and how a chat is rendered.

    The meaning of each is told at `Answering.generate`. `encoded` stands for all of them where they were encoded
    before.
    """

    prompt: str | None = None
    messages: Sequence[Message] | None = None
    input_ids: Sequence[int] | torch.Tensor | None = None
    protected: Sequence[Span] = ()
    tools: Sequence[Any] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False
    encoded: EncodedPrompt | None = None


@dataclass(frozen=True)
class Cut:
    """A place at which a text may be tokenized from anew: a special token begins there.

    Parameters
    ----------
    start, stop : int
        Characters of the special token; equal where the text ends before it.
    token : int
        Its index.
    """

    start: int
    stop: int
    token: int


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as token ids.

    Parameters
    ----------
    token_ids : list of int
        N of them.
    protected : list of (int, int)
        Half-open spans of tokens that are never pruned, in order.
    note : str
        What could not be told apart, and stays dense or unprotected for that.
    text : str
        The rendered chat; empty for other prompts.
    cuts : list of Cut
        Where a longer chat may go on from this one, in order.
    question : (int, int) or None
        Half-open span of the last user message's tokens; None where it is not told apart.
    """

    token_ids: list[int]
    protected: list[Span]
    note: str = ""
    text: str = ""
    cuts: list[Cut] = field(default_factory=list)
    question: Span | None = None

    def with_answer(self, token_ids: Sequence[int], text: str) -> EncodedPrompt:
        """The chat with a generated answer behind it, in the tokens in which it was generated."""
        if not self.text:
            return self
        together = [*self.token_ids, *token_ids]
        whole = self.text + text
        return replace(
            self, token_ids=together, text=whole, cuts=[*self.cuts, Cut(len(whole), len(whole), len(together))]
        )


def encode_prompt(
    tokenizer: Any, vocab_size: int, source: PromptSource, known: EncodedPrompt | None = None
) -> EncodedPrompt:
    """Token ids of the one prompt given, and the spans of it that are never pruned.

    Parameters
    ----------
    tokenizer : object or None
        The target's; None takes input_ids only.
    vocab_size : int
        Ids that the target knows.
    source : PromptSource
        The prompt.
    known : EncodedPrompt, optional
        An earlier chat: what this one shares with it is not tokenized again, and keeps its tokens.

    Raises
    ------
    ValueError
        For none or several prompts, an empty one, one of the wrong type, ids outside the vocabulary (those of a text or
        a chat, too), messages of another form, a tokenizer without a template, a template that refuses the messages.
    """
    if source.encoded is not None:
        return source.encoded if known is None else splice(source.encoded, known)
    given = (source.prompt, source.messages, source.input_ids)
    if sum(each is not None for each in given) != 1:
        raise ValueError("give exactly one of prompt, messages or input_ids")
    _check_chat_options(source)
    if source.input_ids is not None:
        token_ids = _check_ids(source.input_ids, vocab_size)
        encoded = _protect_ids(tokenizer, token_ids, _check_spans(source.protected, len(token_ids)))
    elif tokenizer is None:
        raise ValueError("this generator was made without a tokenizer; give input_ids")
    elif source.messages is not None:
        encoded = _encode_chat(tokenizer, source, known)
    elif isinstance(source.prompt, str):
        encoded = _encode_plain(tokenizer, source.prompt, source.protected)
    else:
        raise ValueError(
            f"prompt must be one string, got {type(source.prompt).__name__}; see messages= and input_ids=, and "
            "generate_all() for several prompts"
        )
    if not encoded.token_ids:
        raise ValueError("the prompt is empty; give at least one token")
    _check_rows(tokenizer, encoded.token_ids, vocab_size)
    return encoded


def _check_rows(tokenizer: Any, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError for a token that the tokenizer has and the model has not (that of an image, say)."""
    last = max(token_ids)
    if last >= vocab_size:
        raise ValueError(
            f"the prompt holds {tokenizer.convert_ids_to_tokens(last)!r}, token {last}, which is not in the target's "
            f"vocabulary of 0…{vocab_size - 1}; leave it out"
        )


def _check_chat_options(source: PromptSource) -> None:
    for name in ("messages", "tools", "documents"):
        value = getattr(source, name)
        # What can be read only once would be empty the second time.
        if value is not None and (not isinstance(value, Sequence) or isinstance(value, str | bytes)):
            raise ValueError(f"{name} must be a list, got {value!r}")
    if not isinstance(source.continue_final_message, bool):
        raise ValueError(f"continue_final_message must be True or False, got {source.continue_final_message!r}")
    if source.messages is not None:
        if source.protected:
            raise ValueError("protected= goes with prompt or input_ids; in messages the system message is protected")
        more = source.chat_template_kwargs
        if not isinstance(more, Mapping) or not all(isinstance(name, str) for name in more):
            raise ValueError(f"chat_template_kwargs must be a mapping of names, got {source.chat_template_kwargs!r}")
        return
    for name in ("tools", "documents", "chat_template_kwargs", "continue_final_message"):
        if getattr(source, name):
            raise ValueError(f"{name}= goes with messages=, which a chat template renders")


def _check_ids(input_ids: Sequence[int] | torch.Tensor, vocab_size: int) -> list[int]:
    try:
        ids = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"input_ids must be one sequence of ints, got {type(input_ids).__name__}: {error}") from error
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1 or (ids.numel() and (ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex())):
        raise ValueError(
            f"input_ids must be one sequence of ints, got {ids.dtype} of shape {tuple(ids.shape)}; "
            "generate_all() takes several"
        )
    token_ids: list[int] = ids.tolist()
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise ValueError(f"input_ids must lie in 0…{vocab_size - 1}, the target's vocabulary")
    return token_ids


def unpadded(
    input_ids: Sequence[int] | torch.Tensor | None, attention_mask: Sequence[int] | torch.Tensor | None
) -> Sequence[int] | torch.Tensor | None:
    """Token ids without the padding before and behind them, for which their mask is 0.

    Raises
    ------
    ValueError
        For a mask without ids or of another length, and for one with a 0 between ones.
    """
    if attention_mask is None:
        return input_ids
    if input_ids is None:
        raise ValueError("attention_mask= goes with input_ids=")
    ids, mask = torch.as_tensor(input_ids), torch.as_tensor(attention_mask)
    if ids.shape != mask.shape or ids.dim() == 0 or ids.numel() != ids.shape[-1]:
        raise ValueError(
            f"attention_mask of shape {tuple(mask.shape)} for input_ids of shape {tuple(ids.shape)}; give one row, and "
            "generate_all() several"
        )
    seen = mask.reshape(-1).bool().nonzero().reshape(-1).tolist()
    if not seen or len(seen) != seen[-1] - seen[0] + 1:
        raise ValueError("attention_mask must be ones with zeros before or behind them, where the padding is")
    return ids.reshape(-1)[seen[0] : seen[-1] + 1]


def _check_spans(spans: Sequence[Span], length: int) -> list[Span]:
    try:
        checked = sorted((int(start), int(stop)) for start, stop in spans)
    except (TypeError, ValueError) as error:
        raise ValueError(f"protected must be (start, stop) pairs, got {spans!r}") from error
    for start, stop in checked:
        if not 0 <= start < stop <= length:
            raise ValueError(f"protected span ({start}, {stop}) is not within 0…{length}")
    return checked


def _protect_ids(tokenizer: Any, token_ids: list[int], spans: Sequence[Span]) -> EncodedPrompt:
    """Token ids with the spans named, and the tokenizer's special tokens, protected."""
    special = special_ids(tokenizer)
    inside = {position for start, stop in spans for position in range(start, stop)}
    protected = _runs(at for at, token_id in enumerate(token_ids) if token_id in special or at in inside)
    note = "" if spans else "of input_ids nothing but special tokens is protected, unless protected= names it"
    return EncodedPrompt(token_ids, protected, note)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens that no text around them can change; none without a tokenizer."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(token_id for token_id, token in added.items() if token.special)


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The same, by what they are written as."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token.content: token_id for token_id, token in added.items() if token.special}


def _runs(positions: Iterable[int]) -> list[Span]:
    """Increasing positions as half-open spans."""
    spans: list[Span] = []
    for position in positions:
        if spans and spans[-1][1] == position:
            spans[-1] = spans[-1][0], position + 1
        else:
            spans.append((position, position + 1))
    return spans


def _encode_plain(tokenizer: Any, text: str, protected: Sequence[Span]) -> EncodedPrompt:
    spans = _check_spans(protected, len(text))
    token_ids = encode_text(tokenizer, text) if text else []
    if not spans:
        return EncodedPrompt(token_ids, [])
    if not tokenizer.is_fast:
        return EncodedPrompt(token_ids, [(0, len(token_ids))], "the tokenizer gives no offsets, so all is protected")
    offsets = tokenizer(text, return_offsets_mapping=True, verbose=False).offset_mapping[: len(token_ids)]
    inside = _runs(
        index for index, (start, stop) in enumerate(offsets) if any(start < last and stop > at for at, last in spans)
    )
    return EncodedPrompt(token_ids, inside)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a plain prompt, with the special tokens the tokenizer puts before one.

    An end-of-sequence token that it puts after is dropped: the text is to go on. Raises ValueError for text that
    is not valid Unicode.
    """
    _check_unicode(text)
    # verbose=False: a prompt over the models' positions is refused in our own words.
    ids = list(tokenizer(text, verbose=False).input_ids)
    plain = (
        tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        if ids[-1:] == [tokenizer.eos_token_id]
        else ids
    )
    return ids[:-1] if len(ids) > len(plain) else ids


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not valid Unicode: {error}") from error


def encode_messages(tokenizer: Any, messages: Sequence[Message]) -> tuple[list[int], list[Span]]:
    """Token ids of a chat rendered by the tokenizer's template, and the protected token spans: everything that
    is not the content of a user, assistant or tool message (the template's own tokens, the system message).

    Raises ValueError for messages of another form, or a tokenizer without a template.
    """
    encoded = _encode_chat(tokenizer, PromptSource(messages=messages), None)
    return encoded.token_ids, encoded.protected


def _encode_chat(tokenizer: Any, source: PromptSource, known: EncodedPrompt | None) -> EncodedPrompt:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template; give prompt= instead of messages=")
    messages, skeleton = fit_messages(tokenizer, source)
    text = _render(tokenizer, messages, source)
    _check_unicode(text)
    if not tokenizer.is_fast:
        # Without character offsets there is no telling what is content.
        ids = list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        return EncodedPrompt(ids, [(0, len(ids))], "the tokenizer gives no offsets, so all is protected", text)
    prunable, num_edited, asked = _content_spans(text, skeleton, messages)
    special = special_ids(tokenizer)
    head, tail_ids, offsets = _tokenize(tokenizer, text, special, known)
    protected = (
        [(start, min(stop, head.token)) for start, stop in known.protected if start < head.token] if known else []
    )
    starts, first = [start for start, _ in prunable], head.token
    for index, (start, stop) in enumerate(offsets):
        within = bisect_right(starts, start) - 1
        if within < 0 or stop > prunable[within][1]:
            if protected and protected[-1][1] == first + index:
                protected[-1] = protected[-1][0], first + index + 1
            else:
                protected.append((first + index, first + index + 1))
    cuts = [cut for cut in known.cuts if cut.token < first] if known else []
    cuts += [Cut(*offsets[index], first + index) for index, token_id in enumerate(tail_ids) if token_id in special]
    token_ids = [*known.token_ids[:first], *tail_ids] if known else tail_ids
    note = f"the chat template edits {num_edited} of {len(messages)} messages, which stay dense" if num_edited else ""
    question = None
    if asked is not None and known is not None and asked[1] <= head.start:
        question = _asked_in_known(tokenizer, text, known, asked)
    elif asked is not None:
        inside = [index for index, (start, stop) in enumerate(offsets) if asked[0] <= start and stop <= asked[1]]
        question = (first + inside[0], first + inside[-1] + 1) if inside else None
    return EncodedPrompt(token_ids, protected, note, text, cuts, question)


def _asked_in_known(tokenizer: Any, text: str, known: EncodedPrompt, asked: Span) -> Span | None:
    """Return the tokens of a known chat that stand for some characters of a user's message.

    They are counted from the special token before the message, behind which they are what they always are.
    """
    special = [cut for cut in known.cuts if cut.stop > cut.start]
    before = [cut for cut in special if cut.stop <= asked[0]]
    cut = before[-1] if before else Cut(0, 0, 0)
    end = next((after.start for after in special if after.start >= asked[1]), asked[1])
    encoded = tokenizer(text[cut.start : end], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = [(start + cut.start, stop + cut.start) for start, stop in encoded.offset_mapping]
    inside = [index for index, (start, stop) in enumerate(offsets) if asked[0] <= start and stop <= asked[1]]
    return (cut.token + inside[0], cut.token + inside[-1] + 1) if inside else None


def _tokenize(
    tokenizer: Any, text: str, special: frozenset[int], known: EncodedPrompt | None
) -> tuple[Cut, list[int], list[Span]]:
    """Where the rest of a text begins that has to be tokenized, its tokens, and their characters in the whole text.

    A special token splits a text: what comes before it does not matter to the tokens after it. So it is enough to begin
    with the last one that the text shares with a known one.
    """
    beginning = Cut(0, 0, 0)
    head = _last_shared_cut(known, text) if known else beginning
    for cut in (head, beginning):
        # The template has rendered the special tokens already.
        encoded = tokenizer(text[cut.start :], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        if cut == beginning or special.intersection(encoded.input_ids[:1]):
            break
    return (
        cut,
        list(encoded.input_ids),
        [(cut.start + start, cut.start + stop) for start, stop in encoded.offset_mapping],
    )


def _last_shared_cut(known: EncodedPrompt, text: str) -> Cut:
    length = len(known.text) if text.startswith(known.text) else num_shared(known.text, text)
    index = bisect_right(known.cuts, length, key=lambda cut: cut.stop)
    return known.cuts[index - 1] if index else Cut(0, 0, 0)


def splice(encoded: EncodedPrompt, known: EncodedPrompt) -> EncodedPrompt:
    """Return a chat as it is encoded when an earlier one is known, without tokenizing anything.

    A special token splits a text, so behind one that both have at the same place the tokens of the one go on from
    those of the other.

    Parameters
    ----------
    encoded : EncodedPrompt
        The chat, encoded by itself.
    known : EncodedPrompt
        An earlier one, whose tokens are kept for what both share.
    """
    length = num_shared(known.text, encoded.text)
    starts = {cut.start: cut for cut in encoded.cuts if cut.stop > cut.start}
    shared = [cut for cut in known.cuts if cut.stop <= length and cut.start in starts]
    if not shared:
        return encoded
    head, tail = shared[-1].token, starts[shared[-1].start].token
    move = head - tail
    protected = [(start, min(stop, head)) for start, stop in known.protected if start < head]
    for start, stop in encoded.protected:
        if stop <= tail:
            continue
        start, stop = max(start, tail) + move, stop + move
        if protected and protected[-1][1] == start:
            protected[-1] = protected[-1][0], stop
        else:
            protected.append((start, stop))
    cuts = [cut for cut in known.cuts if cut.token < head]
    cuts += [replace(cut, token=cut.token + move) for cut in encoded.cuts if cut.token >= tail]
    token_ids = [*known.token_ids[:head], *encoded.token_ids[tail:]]
    question = encoded.question
    if question is not None:
        # It stands as far behind the special token before it as ever.
        moves = [cut.token - starts[cut.start].token for cut in shared if starts[cut.start].token <= question[0]]
        move = moves[-1] if moves else 0
        question = question[0] + move, question[1] + move
    return replace(encoded, token_ids=token_ids, protected=protected, cuts=cuts, question=question)


def num_shared(one: Any, other: Any) -> int:
    """Length of the longest common beginning of two texts, or of two lists."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with each content None, a text or a list of text parts."""
    if not isinstance(messages, Sequence) and not isinstance(messages, Mapping):
        messages = list(messages)
    if not messages:
        raise ValueError("messages is empty; give at least one {'role': ..., 'content': ...}")
    return [_check_message(message) for message in messages]


def _check_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"messages must be a list of {{'role': ..., 'content': ...}}, got {message!r} in it")
    role, content = message.get("role"), message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        content = [_check_part(part) for part in content]
    elif not isinstance(content, str) and not (content is None and role == "assistant"):
        raise ValueError(f"a message needs a 'role' and a text 'content', got {dict(message)!r}")
    if not isinstance(role, str):
        raise ValueError(f"a message needs a 'role' and a text 'content', got {dict(message)!r}")
    return {**message, "content": content}


def _check_part(part: Any) -> Mapping[str, Any]:
    part = _text_part(part) if isinstance(part, str) else part
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        raise ValueError(f"content parts must be {{'type': 'text', 'text': ...}}, got {part!r}")
    return part


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _texts(content: Any) -> list[str]:
    """The texts of a content in any form."""
    return [part["text"] for part in content] if isinstance(content, list) else [content or ""]


def _as_given(content: Any) -> Any:
    return content


def _as_text(content: Any) -> str:
    return "\n".join(_texts(content))


def _as_parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [_text_part(content or "")]


def fit_messages(tokenizer: Any, source: PromptSource) -> tuple[list[dict[str, Any]], str]:
    """The messages in the form that the chat template takes, and the chat rendered with marks for their texts.

    Templates differ: a content is a text or a list of parts, or None beside calls, and the arguments of a call are a
    mapping or JSON text. The given form is preferred, then the one whose marks the template shows.

    Parameters
    ----------
    tokenizer : object
        Its template renders the messages.
    source : PromptSource
        The messages, and the options of the template.

    Returns
    -------
    messages : list of dict
        The messages.
    skeleton : str
        Empty where the template refuses marks.

    Raises
    ------
    ValueError
        For messages of another form.
    """
    given = _check_messages(source.messages or ())
    fits: list[_Fit] = []
    for form in (_as_given, _as_text, _as_parts):
        fits.append(_fit(tokenizer, [{**message, "content": form(message["content"])} for message in given], source))
        if fits[-1].is_complete:
            return fits[-1].messages, fits[-1].skeleton
    # Some templates take the contents of one role as parts, and of another as text.
    best = [next((fit for fit in fits if index in fit.shown), fits[0]) for index in range(len(given))]
    fits.append(_fit(tokenizer, [fit.messages[index] for index, fit in enumerate(best)], source))
    # max() returns the first of equals.
    fit = max(fits, key=lambda fit: (len(fit.shown), fit.takes_text, -fit.num_nulls))
    return fit.messages, fit.skeleton


def chat_parts(tokenizer: Any, messages: Sequence[Message]) -> list[str | int]:
    """A chat in order: the template's own texts, and for each content, which is one string, its message's number.

    Without a template, or where it refuses these messages, the roles stand in its place.
    """
    skeleton = ""
    if getattr(tokenizer, "chat_template", None):
        try:
            _, skeleton = fit_messages(tokenizer, PromptSource(messages=messages))
        except ValueError:
            skeleton = ""
    if not skeleton:
        written = [(f"{message['role']}: ", at, "\n\n") for at, message in enumerate(messages)]
        return [*(part for each in written for part in each), "assistant:"]
    return [int(part) if at % 2 else part for at, part in enumerate(_SHOWN.split(skeleton))]


@dataclass(frozen=True)
class _Fit:
    """Messages in one form, the skeleton of the chat, and whether the template shows JSON arguments as they are."""

    messages: list[dict[str, Any]]
    skeleton: str
    takes_text: bool

    @property
    def is_complete(self) -> bool:
        return bool(self.skeleton) and len(self.shown) == len(self.messages) and not self.num_nulls

    @cached_property
    def shown(self) -> frozenset[int]:
        """The messages all of whose texts the template shows; none where it refuses marks."""
        found, marks = set(_SHOWN.findall(self.skeleton)), iter(_marks(self.messages))
        numbers = [[_SHOWN.findall(next(marks)) for _ in _texts(message["content"])] for message in self.messages]
        return frozenset(
            index for index, own in enumerate(numbers) if self.skeleton and all(found.issuperset(each) for each in own)
        )

    @property
    def num_nulls(self) -> int:
        return len(_NULL.findall(self.skeleton))


def _fit(tokenizer: Any, messages: list[dict[str, Any]], source: PromptSource) -> _Fit:
    messages, takes_text = _fit_arguments(tokenizer, messages, source)
    return _Fit(messages, _try_render(tokenizer, _marked(messages), source), takes_text)


def _marks(messages: Sequence[Message]) -> list[str]:
    """A mark for each text of the messages; none for an empty one."""
    texts = [text for message in messages for text in _texts(message["content"])]
    return [f"{_MARK}{index}\ue001" if text else "" for index, text in enumerate(texts)]


def _marked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with marks in place of their texts."""
    marks = iter(_marks(messages))
    return [{**message, "content": _with_marks(message["content"], marks)} for message in messages]


def _with_marks(content: Any, marks: Iterator[str]) -> Any:
    if isinstance(content, list):
        return [{**part, "text": next(marks)} for part in content]
    mark = next(marks)
    return content if content is None else mark


def _fit_arguments(
    tokenizer: Any, messages: list[dict[str, Any]], source: PromptSource
) -> tuple[list[dict[str, Any]], bool]:
    """The messages with arguments that are JSON text as mappings, unless the template shows the text as it is."""
    probe = [_with_arguments(message, lambda _: _MARKED_JSON) for message in messages]
    if probe == messages:
        return messages, False
    if _MARKED_JSON in _try_render(tokenizer, probe, source):
        return messages, True
    return [_with_arguments(message, _parsed) for message in messages], False


def _with_arguments(message: dict[str, Any], change: Callable[[str], Any]) -> dict[str, Any]:
    """A message with another form of its calls' arguments where these are text."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_changed(call, change) for call in calls]} if calls else message


def _with_changed(call: Any, change: Callable[[str], Any]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": change(function["arguments"])}}


def _parsed(text: str) -> Any:
    """The value of JSON; the text itself where a prompt could not show that value."""
    try:
        value = json.loads(text)
        # Infinite numbers and halves of characters raise.
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return text
    return value


def _try_render(tokenizer: Any, messages: Sequence[Message], source: PromptSource) -> str:
    try:
        return _render(tokenizer, messages, source)
    except ValueError:
        return ""


def _render(tokenizer: Any, messages: Sequence[Message], source: PromptSource) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages),
                tools=list(source.tools) if source.tools else None,
                documents=list(source.documents) if source.documents else None,
                tokenize=False,
                add_generation_prompt=not source.continue_final_message,
                continue_final_message=source.continue_final_message,
                **source.chat_template_kwargs,
            )
        )
    except Exception as error:
        # A template is a program of a stranger's: for what messages lack it may raise anything.
        raise ValueError(f"the chat template refuses these messages: {error}") from error


def _content_spans(text: str, skeleton: str, messages: Sequence[Message]) -> tuple[list[Span], int, Span | None]:
    """Character spans of the contents that may be pruned, how many messages the template edits, which may not, and the
    last user message's span.

    The skeleton is the chat rendered with marks in place of its texts, so that the text between the marks is the
    template's own: for one user message "hi" that renders to `<user>hi<end>`, the skeleton is `<user>#0#<end>`, split
    into `<user>` and `<end>`, and the span is (6, 8). A text is found where it, as it is or stripped, stands between
    the template's two parts; where it does not, the template does more with it (drops a thought, say), and the search
    goes on behind the next part.
    """
    if not skeleton:
        return [], len(messages), None
    owners = [(index, content) for index, message in enumerate(messages) for content in _texts(message["content"])]
    head, *rest = _SHOWN.split(skeleton)
    spans: list[Span] = []
    edited: set[int] = set()
    asked: dict[int, Span] = {}
    at = len(head) if text.startswith(head) else -1
    for number, part in zip(rest[::2], rest[1::2], strict=True):
        index, content = owners[int(number)]
        # Two texts may have nothing between them; behind the last one the chat ends.
        end = part if part or number != rest[-2] else None
        stop = _content_end(text, at, content, end) if at >= 0 else None
        if stop is None:
            edited.add(index)
            found = text.find(part, at) if part and at >= 0 else -1
            at = found + len(part) if found >= 0 else -1
            continue
        if messages[index]["role"] not in KEPT_ROLES:
            # A token may stand across two texts that have nothing between them.
            start = spans.pop()[0] if spans and spans[-1][1] == at else at
            spans.append((start, stop))
        if messages[index]["role"] == "user":
            asked = {index: (asked[index][0] if index in asked else at, stop)}
        at = stop + len(part)
    return spans, len(edited), next(iter(asked.values()), None)


def _content_end(text: str, at: int, content: str, part: str | None) -> int | None:
    """Where a content that begins at `at` ends, given the template's part after it, or None for the end of the chat;
    None where it is not there."""
    for written in (content, content.strip(), content.lstrip(), content.rstrip()):
        stop = at + len(written)
        if text.startswith(written, at) and (stop == len(text) if part is None else text.startswith(part, stop)):
            return stop
    return None
