"""Short runs of a pair on this machine: the time to first token by prompt length, and the speed of answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from time import perf_counter
from typing import Literal

from spec_stack.api.generator import SpecStackGenerator
from spec_stack.bench.leaderboard import Leaderboard, Line
from spec_stack.bench.live import bench
from spec_stack.bench.prompts import BUILT_IN, read_prompts
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
class PairReport:
    """Measurements of a pair. answers: plain decoding and the default. left_out: what the time did not allow."""

    first_tokens: Sequence[FirstToken]
    answers: Leaderboard | None = None
    left_out: Sequence[str] = ()

    @property
    def verdict(self) -> str:
        """Whether the pair pays off, and the reason."""
        longest = self.first_tokens[-1]
        first = f"the first token of {longest.num_tokens} prompt tokens comes"
        decoding = self.answer("default").speed.value if self.answers else 1.0
        gains = []
        if longest.speedup >= _LEAST_GAIN:
            gains.append(f"{first} {longest.speedup:.1f}x sooner")
        if decoding >= _LEAST_GAIN:
            gains.append(f"answers come {decoding:.2f}x faster")
        if gains:
            return f"worth it, because {' and '.join(gains)}"
        if self.left_out:
            return "undecided: the time did not allow every measurement; give more --minutes"
        return f"not worth it, because {first} {longest.speedup:.2f}x as soon and answers {decoding:.2f}x as fast"

    def answer(self, name: str) -> Line:
        """The line of the default or of plain decoding."""
        (line,) = [each for each in self.answers.lines if (each.policy, each.task) == (name, "all")]  # type: ignore[union-attr]
        return line


def measure_pair(generator: SpecStackGenerator, minutes: float = 10.0, lengths: Sequence[int] = LENGTHS) -> PairReport:
    """Measure a pair. The shortest prompt always runs; what follows runs if it fits the time, by the last run's
    seconds."""
    began, seconds = perf_counter(), 60 * minutes
    most = min(generator.pair.max_positions) - MAX_LOOK_AHEAD
    fitting = [length for length in lengths if length <= most] or [most]
    first_tokens = _first_tokens(generator, fitting, began + _SHARE_OF_PROMPTS * seconds)
    left_out = [f"prompts of {length} tokens" for length in fitting[len(first_tokens) :]]
    left_s = began + seconds - perf_counter()
    if left_s <= 0:
        return PairReport(first_tokens, left_out=[*left_out, "answers"])
    prompts = read_prompts(BUILT_IN)
    answers = bench(generator, prompts, {}, max_tokens=_ANSWER_TOKENS, rivals=False, minutes=left_s / 60)
    return PairReport(first_tokens, answers, left_out)


def _first_tokens(generator: SpecStackGenerator, lengths: Sequence[int], until: float) -> list[FirstToken]:
    """Prompts from short to long, as far as the time goes."""
    prompt = list(islice(cycle(generator.tokenizer(_TEXT, add_special_tokens=False).input_ids), lengths[-1]))
    found: list[FirstToken] = []
    token_s = 0.0
    for length in lengths:
        rounds: list[tuple[float, float, float]] = []
        for _ in range(_ROUNDS):
            began = perf_counter()
            if (found or rounds) and began + token_s * length > until:
                break
            dense, sparse = (_first_token(generator, prompt[:length], how) for how in ("off", "on"))
            rounds.append((dense.ttft_s, sparse.ttft_s, sparse.scoring_s))
            token_s = (perf_counter() - began) / length
        if not rounds:
            break
        found.append(FirstToken(length, *map(min, zip(*rounds, strict=True))))
    return found


def _first_token(generator: SpecStackGenerator, ids: list[int], how: Literal["off", "on"]) -> Metrics:
    return generator.generate(input_ids=ids, max_tokens=1, ignore_eos=True, sparse_prefill=how).metrics
