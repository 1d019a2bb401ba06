"""Prompts: plain text and chats to token ids, with protected spans; and the text behind them."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from spec_stack.decode.stopping import TextStream
from spec_stack.hf.chat_template import ChatTemplate
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.prompt_text import ChatTurn, union

Message = Mapping[str, Any]
# Halves of characters: clients cut texts by UTF-16 units.
_SURROGATE, _REPLACEMENT = re.compile("[\ud800-\udfff]"), "\ufffd"
# Prompt tokens used as decoding context for the first generated token.
_NUM_CONTEXT = 8


@dataclass(frozen=True)
class PromptSource:
    """A call's prompt: exactly one of text, chat or token ids (see `Answering.generate`), or already encoded."""

    prompt: str | None = None
    messages: Sequence[Message] | None = None
    input_ids: Sequence[int] | torch.Tensor | None = None
    protected: Sequence[Span] = ()
    tools: Sequence[Any] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False
    encoded: EncodedPrompt | None = None

    def template(self, tokenizer: Any) -> ChatTemplate:
        """The tokenizer's template with this chat's options."""
        options = {
            "tools": list(self.tools) if self.tools else None,
            "documents": list(self.documents) if self.documents else None,
            "add_generation_prompt": not self.continue_final_message,
            "continue_final_message": self.continue_final_message,
        }
        return ChatTemplate(tokenizer, options, self.chat_template_kwargs)


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as N token ids, before it is read (`tokenizers.prompt_reader`).

    protected: half-open token spans that the caller wants kept. text: a rendered chat. turns: its turns by its
    messages; none where the template edits a message, and of a prompt that is no chat.
    """

    token_ids: list[int]
    protected: list[Span] = field(default_factory=list)
    text: str = ""
    turns: list[ChatTurn] = field(default_factory=list)

    def with_answer(self, token_ids: Sequence[int], text: str) -> EncodedPrompt:
        """The chat plus a generated answer, with its generated token ids."""
        if not self.text:
            return self
        turns, stop = list(self.turns), len(self.token_ids) + len(token_ids)
        if turns and token_ids:
            turns.append(ChatTurn("assistant", (len(self.token_ids), stop)))
        return replace(self, token_ids=[*self.token_ids, *token_ids], text=self.text + text, turns=turns)

    def going_on(self, other: EncodedPrompt, start: int = 0) -> EncodedPrompt:
        """This chat followed by another one's tokens from `start` on; its text is the other's."""
        shift = len(self.token_ids) - start
        behind = [(turn.role, turn.span) for turn in other.turns if turn.span[0] >= start]
        turns = [*self.turns, *(ChatTurn(role, (first + shift, stop + shift)) for role, (first, stop) in behind)]
        return replace(other, token_ids=[*self.token_ids, *other.token_ids[start:]], turns=turns)


def encode_prompt(
    tokenizer: Any, vocab_size: int, source: PromptSource, known: EncodedPrompt | None = None
) -> EncodedPrompt:
    """Token ids and protected spans of a prompt. tokenizer: None allows only input_ids. known: an earlier chat, whose
    token ids are kept where this one continues it. Raises ValueError for user errors."""
    if source.encoded is not None:
        return source.encoded if known is None else splice(tokenizer, source.encoded, known)
    if (source.prompt is None) + (source.messages is None) + (source.input_ids is None) != 2:
        raise ValueError("give exactly one of prompt, messages or input_ids")
    _check_chat_options(source)
    if source.input_ids is not None:
        token_ids = _check_ids(source.input_ids, vocab_size)
        encoded = EncodedPrompt(token_ids, _check_spans(source.protected, len(token_ids)))
    elif tokenizer is None:
        raise ValueError("this generator was made without a tokenizer; give input_ids")
    elif source.messages is not None:
        encoded = _encode_chat(tokenizer, source, known)
    elif isinstance(source.prompt, str):
        encoded = _encode_plain(tokenizer, source.prompt, source.protected)
    else:
        raise ValueError(
            f"prompt must be one string, got {type(source.prompt).__name__}; see messages= and input_ids=, and call "
            "generate() once for each of several prompts"
        )
    if not encoded.token_ids:
        raise ValueError("the prompt is empty; give at least one token")
    if (last := max(encoded.token_ids)) >= vocab_size:
        # Image tokens, e.g., have no row in the embedding.
        raise ValueError(
            f"the prompt holds {tokenizer.convert_ids_to_tokens(last)!r}, token {last}, which is not in the target's "
            f"vocabulary of 0…{vocab_size - 1}; leave it out"
        )
    return encoded


def _check_chat_options(source: PromptSource) -> None:
    for name in ("messages", "tools", "documents"):
        value = getattr(source, name)
        # An iterator can be read only once.
        if value is not None and (not isinstance(value, Sequence) or isinstance(value, str | bytes)):
            raise ValueError(f"{name} must be a list, got {value!r}")
    for tool in source.tools or ():
        named = tool.get("function") or tool.get("custom") or tool if isinstance(tool, Mapping) else None
        if not callable(tool) and not (isinstance(named, Mapping) and isinstance(named.get("name"), str)):
            raise ValueError(
                f"tools must be a list of {{'type': 'function', 'function': {{'name': ..., ...}}}}, got {tool!r} in it"
            )
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
    if isinstance(input_ids, Mapping):
        raise ValueError("input_ids must be one sequence of ints, got a mapping; give its 'input_ids', or **encoded")
    try:
        ids = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"input_ids must be one sequence of ints, got {type(input_ids).__name__}: {error}") from error
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1 or (ids.numel() and (ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex())):
        raise ValueError(
            f"input_ids must be one sequence of ints, got {ids.dtype} of shape {tuple(ids.shape)}; "
            "call generate() once for each of several"
        )
    token_ids: list[int] = ids.tolist()
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise ValueError(f"input_ids must lie in 0…{vocab_size - 1}, the target's vocabulary")
    return token_ids


def unpadded(
    input_ids: Sequence[int] | torch.Tensor | None, attention_mask: Sequence[int] | torch.Tensor
) -> torch.Tensor:
    """Token ids without padding at either end. Raises ValueError for a mask of another shape or with inner zeros."""
    if input_ids is None:
        raise ValueError("attention_mask= goes with input_ids=")
    ids, mask = torch.as_tensor(input_ids), torch.as_tensor(attention_mask)
    if ids.shape != mask.shape or ids.dim() == 0 or ids.numel() != ids.shape[-1]:
        raise ValueError(
            f"attention_mask of shape {tuple(mask.shape)} for input_ids of shape {tuple(ids.shape)}; give one row, and "
            "call generate() once for each of several"
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


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of special tokens, whose tokenization ignores context; none without a tokenizer."""
    return frozenset(special_tokens(tokenizer).values())


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Texts of the special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token.content: token_id for token_id, token in added.items() if token.special and token.content}


def open_text_stream(tokenizer: Any, prompt_ids: Sequence[int], shown: Collection[str] = ()) -> TextStream | None:
    """The text stream after a prompt; None without a tokenizer. shown: special tokens that the text contains."""
    if tokenizer is None:
        return None
    decode = partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if shown:
        hidden = {token_id for text, token_id in special_tokens(tokenizer).items() if text not in shown}
        decode = partial(_decode_without, tokenizer, hidden)
    return TextStream(decode, prompt_ids[-_NUM_CONTEXT:], tokenizer.convert_ids_to_tokens)


def _decode_without(tokenizer: Any, hidden: Collection[int], token_ids: Sequence[int]) -> str:
    kept = [token_id for token_id in token_ids if token_id not in hidden]
    return str(tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _encode_plain(tokenizer: Any, text: str, protected: Sequence[Span]) -> EncodedPrompt:
    text = readable(text)
    token_ids = encode_text(tokenizer, text) if text else []
    spans = _check_spans(protected, len(text))
    if not spans:
        return EncodedPrompt(token_ids)
    if not tokenizer.is_fast:
        # Without character offsets the spans cannot be located.
        return EncodedPrompt(token_ids, [(0, len(token_ids))])
    offsets = tokenizer(text, return_offsets_mapping=True, verbose=False).offset_mapping[: len(token_ids)]
    inside = [
        index for index, (start, stop) in enumerate(offsets) if any(start < last and stop > at for at, last in spans)
    ]
    return EncodedPrompt(token_ids, union((index, index + 1) for index in inside))


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a plain prompt, with leading but no closing special tokens. A rendered chat that begins with the
    leading token gets no second one."""
    # verbose=False: our own error reports prompts over the position limit.
    ids = list(tokenizer(text, verbose=False).input_ids)
    if ids[:2] == [tokenizer.bos_token_id] * 2:
        del ids[0]
    if ids[-1:] != [tokenizer.eos_token_id]:
        return ids
    plain = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids[:-1] if len(ids) > len(plain) else ids


def readable(text: str) -> str:
    """The text with U+FFFD for each lone surrogate, which no tokenizer reads."""
    return _SURROGATE.sub(_REPLACEMENT, text)


def encode_messages(tokenizer: Any, messages: Sequence[Message]) -> EncodedPrompt:
    """A chat without options in tokens."""
    return _encode_chat(tokenizer, PromptSource(messages=messages), None)


def _encode_chat(tokenizer: Any, source: PromptSource, known: EncodedPrompt | None) -> EncodedPrompt:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template; give prompt= instead of messages=")
    template = source.template(tokenizer)
    chat = template.fit(source.messages or ())
    rendered = template.render(chat.messages)
    text, spans = readable(rendered), chat.turns(rendered)
    if not tokenizer.is_fast:
        # Without character offsets the texts cannot be located.
        return EncodedPrompt(list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids), text=text)
    if known is not None and _joint(tokenizer, text, known) is not None:
        encoded = known.going_on(_tokenize(tokenizer, text, len(known.text), spans))
    else:
        encoded = _tokenize(tokenizer, text, 0, spans)
    return replace(encoded, text=text, turns=encoded.turns if spans else [])


def _tokenize(tokenizer: Any, text: str, begin: int, spans: Sequence[tuple[str, int, int]]) -> EncodedPrompt:
    """Tokens of a rendered chat from a character index on. spans: role and characters of its turns."""
    # The template has already rendered the special tokens.
    encoded = tokenizer(text[begin:], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = [(begin + start, begin + stop) for start, stop in encoded.offset_mapping]
    starts, stops = ([offset[side] for offset in offsets] for side in (0, 1))
    turns = [
        ChatTurn(role, (bisect_left(starts, first), bisect_right(stops, last)))
        for role, first, last in spans
        if first >= begin
    ]
    turns = [turn for turn in turns if turn.span[0] < turn.span[1]]
    return EncodedPrompt(list(encoded.input_ids), turns=turns)


def _joint(tokenizer: Any, text: str, known: EncodedPrompt) -> str | None:
    """The special token at which a chat continues a known one, if any; later tokens do not depend on earlier text."""
    if not known.text or not text.startswith(known.text):
        return None
    return next((token for token in special_tokens(tokenizer) if text.startswith(token, len(known.text))), None)


def splice(tokenizer: Any, encoded: EncodedPrompt, known: EncodedPrompt) -> EncodedPrompt:
    """A separately encoded chat, with a known chat's token ids where it continues that chat. Tokenizes nothing."""
    joint = _joint(tokenizer, encoded.text, known)
    if joint is None:
        return encoded
    joint_id = tokenizer.convert_tokens_to_ids(joint)
    places = [at for at, token_id in enumerate(encoded.token_ids) if token_id == joint_id]
    if len(places) != encoded.text.count(joint):
        return encoded
    spliced = known.going_on(encoded, places[encoded.text.count(joint, 0, len(known.text))])
    return spliced if encoded.turns else replace(spliced, turns=[])


def num_shared(one: Any, other: Any) -> int:
    """Length of the longest common prefix of two texts or lists."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
