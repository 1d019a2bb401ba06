"""The prompts of a calibration: needles hidden in texts, in the pair's own tokens, in the order in which they come.

How it is used: `plan(lengths, count)` says which prompts there are; `PromptMaker(pair, documents, seed).make(task)`
makes one of them, the same one every time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count as count_from
from itertools import islice
from typing import Any

from spec_stack.calibrate.documents import default_documents
from spec_stack.calibrate.families import FAMILIES, make_prompt_text
from spec_stack.calibrate.needles import Haystack, Span
from spec_stack.calibrate.shapes import GROUPS, LONGEST, SHAPES
from spec_stack.config import PrefillConfig
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.prompt import encode_messages
from spec_stack.types import DraftTokenization

# What fits models that are made for less than the longest length, needle and template included.
_SHARE_OF_LIMIT = 0.9
# Every fourth document of the first length chooses nothing, nor does any of the others.
_GUARD_EVERY = 4
_OTHERS_SHARE = 4
# Numbers of the others' documents begin here, so that more prompts of the first length change none of them.
_OTHERS_FROM = 1000


@dataclass(frozen=True)
class Prompt:
    """A haystack in tokens. spans: half-open, of the evidence; protected: of what is not the user's text."""

    token_ids: list[int]
    spans: tuple[Span, ...]
    protected: Sequence[Span] = ()
    tokenization: DraftTokenization | None = None


@dataclass(frozen=True)
class Task:
    """One prompt that is to be judged: its length, about, its family, which of it, and its shape. is_guard: chooses
    nothing."""

    num_tokens: int
    kind: str
    number: int
    is_guard: bool
    shape: str = "question last"


def plan(lengths: Sequence[int], count: int) -> list[Task]:
    """The prompts in order: those of the shortest length, families and shapes in turn, then a quarter as many of every
    other length, lengths in turn. `count` is the number at the shortest. Prompts of one document follow each other."""
    first, *others = sorted(set(lengths))
    tasks = list(islice(_first_tasks(first), count))
    number = max(1, count // _OTHERS_SHARE)
    longer = [task for length in others for task in islice(_longer_tasks(length), number)]
    return tasks + sorted(longer, key=lambda task: task.number)


def _first_tasks(length: int) -> Iterator[Task]:
    for at in count_from():
        turn, which = divmod(at, len(FAMILIES))
        is_guard = (turn + which) % _GUARD_EVERY == _GUARD_EVERY - 1
        for shape in GROUPS[(turn + 2 * which) % len(GROUPS)]:
            yield Task(length, list(FAMILIES)[which], turn, is_guard, shape)


def _longer_tasks(length: int) -> Iterator[Task]:
    for at in count_from():
        # Neighbours in the list are alike (a log, and a log in other words).
        kind = list(FAMILIES)[at * 3 % len(FAMILIES)]
        for shape in GROUPS[at % len(GROUPS)]:
            yield Task(length, kind, _OTHERS_FROM + at, True, shape)


def fitting(pair: ModelPair, lengths: Sequence[int]) -> list[int]:
    """The lengths that the pair can score, the longer ones cut to what fits. Raises ValueError where none is left."""
    limit = min(pair.max_positions) - 2 * PrefillConfig.look_ahead
    longest = min(limit, pair.scoring_limit or limit)
    fitting = {length for length in lengths if length <= _SHARE_OF_LIMIT * longest}
    cut = round(_SHARE_OF_LIMIT * longest)
    # A cut length that is hardly more than the one before it says nothing new.
    if len(fitting) < len(set(lengths)) and cut >= 1.5 * max(fitting, default=min(lengths) / 4):
        fitting.add(cut)
    if not fitting:
        raise ValueError(f"no length fits models of {limit} positions and what the draft sees whole; give shorter ones")
    return sorted(fitting)


class PromptMaker:
    """Makes the prompts of a plan.

    Parameters
    ----------
    pair
        With a tokenizer.
    documents
        Texts to hide needles in; none is the standard library's source and manuals.
    seed
        Draws the needles.
    """

    def __init__(self, pair: ModelPair, documents: Sequence[str], seed: int) -> None:
        self._pair, self._seed = pair, seed
        made = default_documents()
        code, manuals = made[: len(made) // 2], made[len(made) // 2 :]
        own = [text for text in documents if text.strip()]
        if documents and not own:
            raise ValueError("no text to hide needles in; give documents that are not empty")
        self._texts = {"text": own or manuals, "code": own or code}

    def make(self, task: Task) -> Prompt:
        """Make a prompt, at most as long as asked for but for its needle's distractors; the shapes of a document share
        it. Raises ValueError where the draft cannot score it."""
        tokenizer = self._pair.tokenizer
        size = 3 * task.num_tokens
        # Twice is enough: the second time the tokens of such a text are known.
        for _ in range(2):
            haystack = make_prompt_text(task.kind, task.number, self._seed, self._texts, size)
            num_tokens = len(encode_haystack(tokenizer, haystack, LONGEST).token_ids)
            size = round(size * 0.98 * task.num_tokens / num_tokens)
        prompt = encode_haystack(tokenizer, haystack, task.shape)
        tokenization, problem = self._pair.tokenize_for_draft(prompt.token_ids)
        if problem:
            raise ValueError(f"the draft cannot score prompts: {problem}")
        return replace(prompt, tokenization=tokenization)


def encode_haystack(tokenizer: Any, haystack: Haystack, shape: str) -> Prompt:
    """A haystack as the model is asked it, in a shape of `SHAPES`: its tokens, and where the evidence is among them."""
    content = SHAPES[shape](haystack.document, haystack.question)
    return encode_evidence(tokenizer, [{"role": "user", "content": content}], haystack.document, haystack.spans)


def encode_evidence(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], document: str, spans: Sequence[Span]
) -> Prompt:
    """Messages in tokens; spans are half-open character offsets of the evidence in the document, which stands in one of
    the messages. Without a chat template the prompt is the last message's text."""
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        protected = encode_messages(tokenizer, messages)[1]
    else:
        text = messages[-1]["content"]
        encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
        protected = []
    # A template may trim the ends of what it is given, never the middle.
    base = text.find(document.strip()) - (len(document) - len(document.lstrip()))
    offsets = encoded["offset_mapping"]

    def tokens(start: int, stop: int) -> Span:
        inside = [at for at, (low, high) in enumerate(offsets) if low < stop + base and high > start + base]
        return inside[0], inside[-1] + 1

    return Prompt(list(encoded["input_ids"]), tuple(tokens(*span) for span in spans), protected)
