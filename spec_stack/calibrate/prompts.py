"""The prompts of a calibration, in tokens and in order. `plan(lengths, count)` lists the tasks; `PromptMaker(pair,
documents, seed).make(task)` makes one, deterministically."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count as count_from
from itertools import islice
from typing import Any

from spec_stack.calibrate.documents import default_documents
from spec_stack.calibrate.needles import FAMILIES, Haystack, Span, make_prompt_text
from spec_stack.calibrate.shapes import GROUPS, LONGEST, SHAPES
from spec_stack.config import PrefillConfig
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.prompt import encode_messages
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.tokenizers.prompt_reader import PromptReader
from spec_stack.types import DraftTokenization

# Share of the models' length limit; the rest is for needle and template.
_SHARE_OF_LIMIT = 0.9
# Every fourth document of the first length is held out, and every document of other lengths.
_GUARD_EVERY = 4
_OTHERS_SHARE = 4
# Document numbers of other lengths start here, so that more prompts at the first length change none of them.
_OTHERS_FROM = 1000


@dataclass(frozen=True)
class EncodedHaystack:
    """A haystack in tokens. spans: half-open, of the evidence."""

    text: PromptText
    spans: tuple[Span, ...] = ()
    tokenization: DraftTokenization | None = None

    @property
    def token_ids(self) -> Sequence[int]:
        return self.text.token_ids


@dataclass(frozen=True)
class Task:
    """A prompt to judge: approximate length, family, number and shape. is_guard: held out from the choice."""

    num_tokens: int
    kind: str
    number: int
    is_guard: bool
    shape: str = "question last"


def plan(lengths: Sequence[int], count: int) -> list[Task]:
    """The tasks in order: `count` at the shortest length, then a quarter as many at every other length. Families and
    shapes alternate, then lengths. Prompts of one document are adjacent."""
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
        # Adjacent families are similar (a log, and a log in other words).
        kind = list(FAMILIES)[at * 3 % len(FAMILIES)]
        for shape in GROUPS[at % len(GROUPS)]:
            yield Task(length, kind, _OTHERS_FROM + at, True, shape)


def fitting(pair: ModelPair, lengths: Sequence[int]) -> list[int]:
    """The lengths that the pair can score, longer ones truncated. Raises ValueError if none is left."""
    limit = min(pair.max_positions) - 2 * PrefillConfig.look_ahead
    longest = min(limit, pair.scoring_limit or limit)
    fitting = {length for length in lengths if length <= _SHARE_OF_LIMIT * longest}
    cut = round(_SHARE_OF_LIMIT * longest)
    # A truncated length close to the previous one adds nothing.
    if len(fitting) < len(set(lengths)) and cut >= 1.5 * max(fitting, default=min(lengths) / 4):
        fitting.add(cut)
    if not fitting:
        raise ValueError(f"no length fits models of {limit} positions and what the draft sees whole; give shorter ones")
    return sorted(fitting)


class PromptMaker:
    """Makes a plan's prompts. documents: texts for needles; by default the standard library's source and manuals."""

    def __init__(self, pair: ModelPair, documents: Sequence[str], seed: int) -> None:
        self._pair, self._seed = pair, seed
        own = [text for text in documents if text.strip()]
        if documents and not own:
            raise ValueError("no text to hide needles in; give documents that are not empty")
        self._texts = {"text": own, "code": own} if own else default_documents()

    def make(self, task: Task) -> EncodedHaystack:
        """Make a prompt of at most the task's length plus distractors; a document's shapes share it. Raises ValueError
        if the draft cannot score it."""
        tokenizer = self._pair.tokenizer
        size = 3 * task.num_tokens
        # Two tries suffice: the second knows the text's token count.
        for _ in range(2):
            haystack = make_prompt_text(task.kind, task.number, self._seed, self._texts, size)
            num_tokens = len(encode_haystack(tokenizer, haystack, LONGEST).token_ids)
            size = round(size * 0.98 * task.num_tokens / num_tokens)
        prompt = encode_haystack(tokenizer, haystack, task.shape)
        tokenization, problem = self._pair.tokenize_for_draft(prompt.token_ids)
        if problem:
            raise ValueError(f"the draft cannot score prompts: {problem}")
        return replace(prompt, tokenization=tokenization)


def encode_haystack(tokenizer: Any, haystack: Haystack, shape: str) -> EncodedHaystack:
    """Tokens of a haystack in a shape of `SHAPES`, and the evidence's token spans."""
    content = SHAPES[shape](haystack.document, haystack.question)
    return encode_evidence(tokenizer, [{"role": "user", "content": content}], haystack.document, haystack.spans)


def encode_evidence(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], document: str, spans: Sequence[Span]
) -> EncodedHaystack:
    """Messages in tokens, and the evidence's token spans. spans: half-open character spans in the document. The
    document is part of one message. Without a chat template the prompt is the last message's text."""
    if getattr(tokenizer, "chat_template", None):
        chat = encode_messages(tokenizer, messages)
        text, turns = chat.text, chat.turns
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    else:
        text, turns = messages[-1]["content"], None
        encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    # A template may strip a content's ends, never its middle.
    base = text.find(document.strip()) - (len(document) - len(document.lstrip()))
    offsets = encoded["offset_mapping"]

    def tokens(start: int, stop: int) -> Span:
        inside = [at for at, (low, high) in enumerate(offsets) if low < stop + base and high > start + base]
        return inside[0], inside[-1] + 1

    read = PromptReader(tokenizer).read(list(encoded["input_ids"]), written=turns)
    return EncodedHaystack(read, tuple(tokens(*span) for span in spans))
