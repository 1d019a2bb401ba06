"""The prompts of a calibration: needles hidden in texts, in the pair's own tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spec_stack.calibrate.needles import IN_OTHER_WORDS, WORDINGS, Haystack, Span, make_haystacks
from spec_stack.engine.pair import ModelPair
from spec_stack.types import DraftTokenization

LOOK_AHEADS = (8, 2)
# What fits models that are made for less than the longest length, needle and template included.
_SHARE_OF_LIMIT = 0.9
# A needle in other words than its question's is what anchors cannot find: a quarter of the prompts, a kind among eight.
_SHARE_IN_OTHER_WORDS = 0.25


@dataclass(frozen=True)
class Prompt:
    """A haystack in tokens. spans: half-open, of the evidence."""

    token_ids: list[int]
    spans: tuple[Span, ...]
    tokenization: DraftTokenization | None
    kind: str = ""


def fitting(pair: ModelPair, lengths: Sequence[int]) -> list[int]:
    """The lengths that the pair can score, the longer ones cut to what fits. Raises ValueError where none is left."""
    limit = min(pair.max_positions) - 2 * max(LOOK_AHEADS)
    longest = min(limit, pair.scoring_limit or limit)
    fitting = {length for length in lengths if length <= _SHARE_OF_LIMIT * longest}
    cut = round(_SHARE_OF_LIMIT * longest)
    # A cut length that is hardly more than the one before it says nothing new.
    if len(fitting) < len(set(lengths)) and cut >= 1.5 * max(fitting, default=min(lengths) / 4):
        fitting.add(cut)
    if not fitting:
        raise ValueError(f"no length fits models of {limit} positions and what the draft sees whole; give shorter ones")
    return sorted(fitting)


def make_prompts(pair: ModelPair, texts: Sequence[str], num_tokens: int, count: int, seed: int) -> Iterator[Prompt]:
    """Needles hidden in so many tokens of text, through the chat template where there is one."""
    sample = "\n".join(text[:4000] for text in texts)
    per_token = len(sample) / max(1, len(pair.tokenizer(sample, add_special_tokens=False, verbose=False).input_ids))
    same_words = {kind: wordings for kind, wordings in WORDINGS.items() if kind not in IN_OTHER_WORDS}
    other_words = {kind: WORDINGS[kind] for kind in IN_OTHER_WORDS}
    num_characters, num_other = round(num_tokens * per_token), max(1, round(_SHARE_IN_OTHER_WORDS * count))
    haystacks = make_haystacks(texts, num_characters, count - num_other, seed, same_words)
    haystacks += make_haystacks(texts, num_characters, num_other, seed + 1, other_words)
    for haystack in haystacks:
        prompt = encode_haystack(pair.tokenizer, haystack)
        prompt_ids = prompt.token_ids
        tokenization, problem = pair.tokenize_for_draft(prompt_ids)
        if problem:
            raise ValueError(f"the draft cannot score prompts: {problem}")
        longest = max(len(prompt_ids), 0 if tokenization is None else len(tokenization.token_ids))
        if longest + max(LOOK_AHEADS) < min(pair.max_positions):
            yield replace(prompt, tokenization=tokenization)


def encode_haystack(tokenizer: Any, haystack: Haystack) -> Prompt:
    """A haystack as the model is asked it: its tokens, and where the evidence is among them."""
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": haystack.content}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    else:
        text = haystack.content
        encoded = tokenizer(text, return_offsets_mapping=True)
    # A template may trim the ends of what it is given, never the middle.
    base = text.find(haystack.document.strip()) - (len(haystack.document) - len(haystack.document.lstrip()))
    offsets = encoded["offset_mapping"]
    spans = []
    for start, stop in haystack.spans:
        inside = [at for at, (low, high) in enumerate(offsets) if low < stop + base and high > start + base]
        spans.append((inside[0], inside[-1] + 1))
    return Prompt(list(encoded["input_ids"]), tuple(spans), None, haystack.kind)
