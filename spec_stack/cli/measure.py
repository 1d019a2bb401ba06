"""Short runs of a pair on this machine: the time to first token by prompt length, and tokens per second of answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import harmonic_mean
from time import perf_counter
from typing import Any

from spec_stack.api.generator import SpecStackGenerator
from spec_stack.config import MAX_LOOK_AHEAD
from spec_stack.types import Metrics

LENGTHS = (512, 2048, 8192, 32768)
# Of each length; the fastest counts, since first runs load kernels and other programs take time.
_ROUNDS = 2
# Part of the time for prompts; answers have the rest.
_SHARE_OF_PROMPTS = 2 / 3
_ANSWER_TOKENS = 48
# Least gain in tokens/s or TTFT that justifies the draft's memory.
_LEAST_GAIN = 1.1
_ANSWERED = (
    "Write a Python function that merges two sorted lists into one sorted list, with a docstring.",
    "A shop sells pens at 3 for 2 dollars. How much do 18 pens cost? Show the steps.",
    "Explain to a ten-year-old why the sky is blue, in five sentences.",
    "Repeat this text with 'cat' changed to 'dog': The cat sat by the door. A second cat watched it.",
)
_TEXT = (
    "The committee met on the first Tuesday of the month and went through the list of open questions. Each of them was "
    "read aloud, discussed for some minutes, and either settled or put off; the clerk wrote down who had said what. "
)


@dataclass(frozen=True)
class FirstToken:
    """Seconds to a prompt's first token, dense and sparse; scoring_s: of the draft, part of the sparse ones."""

    num_tokens: int
    dense_s: float
    sparse_s: float
    scoring_s: float

    @property
    def speedup(self) -> float:
        return self.dense_s / self.sparse_s


@dataclass(frozen=True)
class Answer:
    """Tokens per second of an answer, without and with the draft, and the draft's tokens."""

    plain: float
    drafted: float
    num_proposed: int
    num_accepted: int


@dataclass(frozen=True)
class Measured:
    """Measurements of the runs. left_out: what the time did not allow, in words."""

    first_tokens: Sequence[FirstToken]
    answers: Sequence[Answer]
    left_out: Sequence[str] = ()

    @property
    def plain(self) -> float:
        """Tokens per second without the draft, over all answers."""
        return harmonic_mean([answer.plain for answer in self.answers])

    @property
    def drafted(self) -> float:
        return harmonic_mean([answer.drafted for answer in self.answers])


def measure(generator: SpecStackGenerator, minutes: float = 10.0, lengths: Sequence[int] = LENGTHS) -> Measured:
    """Measure a pair. The shortest prompt always runs; what follows runs if it fits the time, by the last run's
    seconds."""
    began, seconds = perf_counter(), 60 * minutes
    most = min(generator.pair.max_positions) - MAX_LOOK_AHEAD
    fitting = [length for length in lengths if length <= most] or [most]
    first_tokens = _first_tokens(generator, fitting, began + _SHARE_OF_PROMPTS * seconds)
    left_out = [f"prompts of {length} tokens" for length in fitting[len(first_tokens) :]]
    answers = _answers(generator, began + seconds)
    left_out += [] if answers else ["answers"]
    return Measured(first_tokens, answers, left_out)


def _first_tokens(generator: SpecStackGenerator, lengths: Sequence[int], until: float) -> list[FirstToken]:
    """Prompts from short to long, as far as the time goes."""
    text_ids = generator.tokenizer(_TEXT, add_special_tokens=False).input_ids
    prompt = list(islice(cycle(text_ids), lengths[-1]))
    runs: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    token_s = 0.0
    for length in (each for each in lengths for _ in range(_ROUNDS)):
        began = perf_counter()
        if runs and began + token_s * length > until:
            break
        dense, sparse = (_first_token(generator, prompt[:length], way) for way in ("off", "on"))
        runs[length].append((dense.ttft_s, sparse.ttft_s, sparse.scoring_s))
        token_s = (perf_counter() - began) / length
    return [FirstToken(length, *map(min, zip(*rounds, strict=True))) for length, rounds in runs.items()]


def _first_token(generator: SpecStackGenerator, ids: list[int], sparse_prefill: Any) -> Metrics:
    return generator.generate(input_ids=ids, max_tokens=1, ignore_eos=True, sparse_prefill=sparse_prefill).metrics


def _answers(generator: SpecStackGenerator, until: float) -> list[Answer]:
    """Answers, each without and with the draft, as far as the time goes."""
    answers: list[Answer] = []
    expected_s = 0.0
    # The first one is a warm-up.
    for text in (_ANSWERED[0], *_ANSWERED):
        began = perf_counter()
        if began + expected_s > until:
            break
        plain, drafted = (_answer(generator, text, gamma) for gamma in (0, None))
        plain_speed, drafted_speed = (metrics.decode_tokens_per_s or 0.0 for metrics in (plain, drafted))
        answers.append(Answer(plain_speed, drafted_speed, drafted.num_proposed, drafted.num_accepted))
        expected_s = perf_counter() - began
    return answers[1:] or answers


def _answer(generator: SpecStackGenerator, text: str, gamma: int | None) -> Metrics:
    """Answer a text as the target takes it: a chat or a plain text."""
    has_template = getattr(generator.tokenizer, "chat_template", None) is not None
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if has_template else {"prompt": text}
    options: dict[str, Any] = {"max_tokens": _ANSWER_TOKENS, "ignore_eos": True, "sparse_prefill": "draft_only"}
    return generator.generate(**prompt, **options, gamma=gamma).metrics


def verdict(measured: Measured) -> str:
    """Whether the pair pays off, and the reason."""
    longest = measured.first_tokens[-1]
    first = f"the first token of {longest.num_tokens} prompt tokens comes"
    decoding = measured.drafted / measured.plain if measured.answers else 1.0
    gains = []
    if longest.speedup >= _LEAST_GAIN:
        gains.append(f"{first} {longest.speedup:.1f}x sooner")
    if decoding >= _LEAST_GAIN:
        gains.append(f"answers come {decoding:.2f}x faster")
    if gains:
        return f"worth it, because {' and '.join(gains)}"
    if measured.left_out:
        return "undecided: the time did not allow every measurement; give more --minutes"
    return f"not worth it, because {first} {longest.speedup:.2f}x as soon and answers {decoding:.2f}x as fast"


def lines(measured: Measured) -> list[str]:
    """The report, line by line."""
    told = []
    for run in measured.first_tokens:
        r, rest = run.scoring_s / run.dense_s, (run.sparse_s - run.scoring_s) / run.dense_s
        told.append(
            f"at {run.num_tokens} tokens: dense {run.dense_s:.2f} s, sparse {run.sparse_s:.2f} s, {run.speedup:.1f}x; "
            f"of the dense prefill the draft costs r = {r:.2f}, all the rest s = {rest:.2f}"
        )
    if measured.answers:
        num_proposed = sum(answer.num_proposed for answer in measured.answers)
        acceptance = sum(answer.num_accepted for answer in measured.answers) / max(1, num_proposed)
        told.append(
            f"answers: {measured.plain:.1f} tokens/s plain, {measured.drafted:.1f} with the draft "
            f"({measured.drafted / measured.plain:.2f}x; {acceptance:.0%} of {num_proposed} proposed tokens accepted, "
            f"{len(measured.answers)} prompts)"
        )
    if measured.left_out:
        told.append(f"left out, for the time: {', '.join(measured.left_out)}")
    told.append(verdict(measured))
    return told
