"""Short runs of a pair on this machine, and predictions for other prompt lengths. TTFT at length n: dense a·n + b·n²,
sparse c + a·n + b·n² (layers and attention). Two lengths fit the dense curve and the draft's pass; the sparse b is the
draft's plus the target's at the keep rate, and two sparse prompts fit the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from statistics import harmonic_mean, median
from time import perf_counter
from typing import Any

from spec_stack.api.generator import SpecStackGenerator
from spec_stack.config import MAX_LOOK_AHEAD
from spec_stack.devices import synchronize
from spec_stack.prefill.cost import shortest_gain
from spec_stack.prefill.registry import needs_attention
from spec_stack.types import Metrics

Timer = Callable[[], float]
LENGTH = 512
"""Length of the shorter prompt."""
_LONGEST = 8192
# Above the first, the longer prompt is twice as long, not four times; up to the second it grows.
_SLOW_S, _QUICK_S = 10.0, 4.0
_TOLD = (2048, 8192, 32768)
_REPEATS = 2
_STEPS = 7
_CACHED = 256
_ANSWER_TOKENS = 48
# Names of what the verdict needs.
_ANSWERS, _STEPS_AND_ANSWERS = "answers", "steps and answers"
# Least gain in tokens/s or TTFT that justifies the draft's memory.
_LEAST_GAIN = 1.1
_PROMPTS = {
    "code": "Write a Python function that merges two sorted lists into one sorted list, with a docstring.",
    "maths": "A shop sells pens at 3 for 2 dollars. How much do 18 pens cost? Show the steps.",
    "chat": "Explain to a ten-year-old why the sky is blue, in five sentences.",
    "edit": "Repeat this text with 'cat' changed to 'dog': The cat sat by the door. A second cat watched it.",
}
_TEXT = (
    "The committee met on the first Tuesday of the month and went through the list of open questions. Each of them was "
    "read aloud, discussed for some minutes, and either settled or put off; the clerk wrote down who had said what. "
)


@dataclass(frozen=True)
class Curve:
    """Seconds by length: start + linear·n + square·n²."""

    linear: float
    square: float
    start: float = 0.0

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]]) -> Curve:
        """The curve through two points with start 0; a line if attention is negligible."""
        (n1, s1), (n2, s2) = points
        square = max(0.0, (s2 / n2 - s1 / n1) / (n2 - n1))
        return cls(max(0.0, s2 / n2 - square * n2), square)

    @classmethod
    def with_square(cls, points: Sequence[tuple[int, float]], square: float) -> Curve:
        """The curve through two points with a known square term."""
        (n1, s1), (n2, s2) = [(n, seconds - square * n * n) for n, seconds in points]
        linear = max(0.0, (s2 - s1) / (n2 - n1))
        return cls(linear, square, max(0.0, s2 - linear * n2))

    def at(self, num_tokens: float) -> float:
        return self.start + self.linear * num_tokens + self.square * num_tokens**2


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a target forward of one token and of five, and of a draft forward of one."""

    target_s: float
    block_s: float
    draft_s: float

    @property
    def draft_cost(self) -> float:
        """Cost of a drafted token relative to a target step."""
        return self.draft_s / self.target_s


@dataclass(frozen=True)
class Measured:
    """Measurements of the runs, in seconds of the given timer.

    dense, sparse, draft: TTFT of dense and sparse prompts and the draft's pass, by length. plain, drafted: tokens per
    second by prompt, without and with the draft. max_positions: of both models. left_out: what the time did not allow,
    and its estimated seconds; then there may be one length, no steps and no answers.
    """

    dense: dict[int, list[float]]
    sparse: dict[int, list[float]]
    draft: dict[int, list[float]]
    keep_rate: float
    steps: StepTimes | None = None
    plain: dict[str, float] = field(default_factory=dict)
    drafted: dict[str, float] = field(default_factory=dict)
    num_proposed: int = 0
    num_accepted: int = 0
    max_positions: int = 0
    left_out: dict[str, float] = field(default_factory=dict)

    @property
    def is_extrapolated(self) -> bool:
        """Whether other lengths follow from the measured ones."""
        return len(self.dense) > 1

    @property
    def dense_curve(self) -> Curve:
        return Curve.through(_medians(self.dense))

    @property
    def sparse_curve(self) -> Curve:
        square = self.keep_rate**2 * self.dense_curve.square + Curve.through(_medians(self.draft)).square
        return Curve.with_square(_medians(self.sparse), square)

    @property
    def spread(self) -> float:
        """Largest relative deviation of a run from its median; the width of reported ranges."""
        runs = [each for kind in (self.dense, self.sparse) for each in kind.values()]
        return max(max(abs(run / median(each) - 1) for run in each) for each in runs)

    @property
    def decode_gain(self) -> float:
        """Decoding speed-up by the draft over all prompts; 1 without runs."""
        return harmonic_mean([*self.drafted.values()]) / harmonic_mean([*self.plain.values()]) if self.plain else 1.0

    def break_even(self) -> int | None:
        """The shortest prompt with a TTFT gain, exact to 9 %; None if there is none."""
        return shortest_gain(self.dense_curve.at, self.sparse_curve.at, max(self.max_positions, 64)) or None


def _medians(runs: dict[int, list[float]]) -> list[tuple[int, float]]:
    return [(length, median(seconds)) for length, seconds in sorted(runs.items())]


class _Budget:
    """The time of a measurement, and what does not fit it, with its estimated seconds."""

    def __init__(self, minutes: float) -> None:
        self._began, self._seconds = perf_counter(), 60 * minutes
        self.left_out: dict[str, float] = {}

    def allows(self, what: str, seconds: float, share: float = 1.0) -> bool:
        """Whether something of so many seconds ends within a share of the time; it is left out if not."""
        fits = perf_counter() - self._began + seconds <= share * self._seconds
        if not fits:
            self.left_out[what] = seconds
        return fits


def measure(generator: SpecStackGenerator, minutes: float = 10.0, timer: Timer = perf_counter) -> Measured:
    """Measure a pair. Every variant runs once before it is timed, since first runs load kernels and capture graphs.

    The shorter prompt always runs once. Whatever follows runs if its seconds, by those that were measured, fit
    `minutes`; where nothing is repeated, first runs count. timer: returns seconds; use processor seconds on a shared
    machine."""
    budget = _Budget(minutes)
    most = min(min(generator.pair.max_positions) - MAX_LOOK_AHEAD, _LONGEST)
    window = generator.config.prefill.draft_window
    if isinstance(window, tuple) and window[0] >= 2 * LENGTH:
        # One curve does not fit prompts both with and without a window.
        most = min(most, window[0] - 1)
    prompt = long_prompt(generator, most)
    dense, sparse, draft = (defaultdict[int, list[float]](list) for _ in range(3))

    def run(length: int, share: float) -> float:
        """Run a length's prompts, again up to a share of the time; seconds of one round."""
        ids, taken = prompt[:length], 0.0
        for repeat in range(1 + _REPEATS):
            if repeat and not budget.allows(f"repeats at {length} tokens", taken, share):
                break
            began = perf_counter()
            dense[length].append(ttft(generator, ids, False, timer))
            sparse[length].append(ttft(generator, ids, True, timer))
            draft[length].append(_draft_pass(generator, ids, timer))
            taken = perf_counter() - began
        for runs in (dense, sparse, draft):
            runs[length] = runs[length][1:] or runs[length]
        return taken

    taken = run(LENGTH, 1 / 3)
    longer = _longer(LENGTH, median(dense[LENGTH]), len(prompt))
    if budget.allows(f"prompts of {longer} tokens", taken * longer / LENGTH):
        run(longer, 2 / 3)
    pair = generator.pair
    steps, answers = None, {}
    # The steps' own prompts take half as long as the shorter one, twice.
    if budget.allows(_STEPS_AND_ANSWERS, taken):
        steps = StepTimes(
            target_s=_step(generator, pair.target, 1, timer),
            block_s=_step(generator, pair.target, 5, timer),
            draft_s=_step(generator, pair.draft, 1, timer),
        )
        answers = _answers(generator, budget, steps.target_s, timer)
    return Measured(
        dense=dense,
        sparse=sparse,
        draft=draft,
        keep_rate=generator.config.prefill.rate_for(longer),
        steps=steps,
        max_positions=min(pair.max_positions),
        left_out=budget.left_out,
        **answers,
    )


def _longer(length: int, seconds: float, most: int) -> int:
    """The longer prompt's length, from the shorter one's time."""
    longer = length * (2 if seconds > _SLOW_S else 4)
    while 2 * longer <= _LONGEST and seconds * 2 * longer / length <= _QUICK_S:
        longer *= 2
    return min(longer, most)


def long_prompt(generator: SpecStackGenerator, num_tokens: int) -> list[int]:
    """Token ids of a text of this length."""
    ids: list[int] = list(generator.tokenizer(_TEXT, add_special_tokens=False).input_ids)
    return list(islice(cycle(ids), num_tokens))


def ttft(generator: SpecStackGenerator, ids: list[int], is_sparse: bool, timer: Timer) -> float:
    """Seconds to the first token after dense or sparse prefill."""
    began = _now(generator, timer)
    generator.generate(input_ids=ids, max_tokens=1, ignore_eos=True, sparse_prefill="on" if is_sparse else "off")
    return _now(generator, timer) - began


def _draft_pass(generator: SpecStackGenerator, ids: list[int], timer: Timer) -> float:
    """Seconds of the draft's scoring pass, in its own tokens."""
    pair, config = generator.pair, generator.config.prefill
    if not needs_attention(config.scorer):
        return 0.0
    tokenization, _ = pair.tokenize_for_draft(ids)
    own_ids = ids if tokenization is None else list(tokenization.token_ids)
    index = pair.new_draft_cache(config.prefill_chunk)
    window = config.window_for(len(ids))
    began = _now(generator, timer)
    index.prefill(own_ids, range(len(own_ids)), window, config.draft_sinks, config.num_scoring_layers)
    return _now(generator, timer) - began


def _now(generator: SpecStackGenerator, timer: Timer) -> float:
    """The time after the models' devices have finished their queued work."""
    for device in {generator.pair.target.device, generator.pair.draft.device}:
        synchronize(device)
    return timer()


def _step(generator: SpecStackGenerator, model: object, num_tokens: int, timer: Timer) -> float:
    """Seconds of a forward of num_tokens after a few hundred cached tokens."""
    pair, chunk = generator.pair, generator.config.prefill.prefill_chunk
    cached = pair.open_target(chunk) if model is pair.target else pair.new_draft_cache(chunk)
    cached.prefill([5] * _CACHED, range(_CACHED))
    taken = []
    for _ in range(_STEPS):
        began = _now(generator, timer)
        cached.forward([7] * num_tokens, range(_CACHED, _CACHED + num_tokens), num_tokens)
        taken.append(_now(generator, timer) - began)
        cached.rollback(num_tokens)
    return median(taken[1:])


def _answers(generator: SpecStackGenerator, budget: _Budget, step_s: float, timer: Timer) -> dict[str, Any]:
    """Tokens per second of the built-in prompts, alternately without and with the draft. step_s: of a plain token."""

    def answer(text: str, gamma: int | None) -> tuple[float, Metrics]:
        began = _now(generator, timer)
        result = generator.generate(
            **_prompt(generator, text),
            max_tokens=_ANSWER_TOKENS,
            ignore_eos=True,
            gamma=gamma,
            sparse_prefill="draft_only",
        )
        return len(result.token_ids) / (_now(generator, timer) - began), result.metrics

    both = 2 * _ANSWER_TOKENS * step_s
    if budget.allows("a warm-up of answers", 2 * both):
        for gamma in (0, None):
            answer(next(iter(_PROMPTS.values())), gamma)
    plain: dict[str, float] = {}
    drafted: dict[str, float] = {}
    num_proposed = num_accepted = 0
    for name, text in _PROMPTS.items():
        if not budget.allows("further answers" if plain else _ANSWERS, both):
            break
        began = perf_counter()
        plain[name], _ = answer(text, 0)
        drafted[name], metrics = answer(text, None)
        both = perf_counter() - began
        num_proposed += metrics.num_proposed
        num_accepted += metrics.num_accepted
    return {"plain": plain, "drafted": drafted, "num_proposed": num_proposed, "num_accepted": num_accepted}


def _prompt(generator: SpecStackGenerator, text: str) -> dict[str, Any]:
    """A text as the target takes it: a chat or a plain text."""
    if getattr(generator.tokenizer, "chat_template", None) is None:
        return {"prompt": text}
    return {"messages": [{"role": "user", "content": text}]}


def verdict(measured: Measured) -> str:
    """Whether the pair pays off, and the reason."""
    decoding = measured.decode_gain
    gains, losses = [], []
    if measured.is_extrapolated:
        longest = min(_TOLD[-1], measured.max_positions)
        sooner = measured.dense_curve.at(longest) / measured.sparse_curve.at(longest)
        if measured.break_even() is not None and sooner >= _LEAST_GAIN:
            gains.append(f"the first token of {longest} prompt tokens comes {sooner:.1f}x sooner")
        losses.append(f"the first token of {longest} prompt tokens comes {sooner:.2f}x as soon")
    if decoding >= _LEAST_GAIN:
        gains.append(f"answers come {decoding:.2f}x faster")
    losses.append(f"answers {decoding:.2f}x as fast")
    if gains:
        return f"worth it, because {' and '.join(gains)}"
    if not measured.is_extrapolated or not {_ANSWERS, _STEPS_AND_ANSWERS}.isdisjoint(measured.left_out):
        return "undecided: the time did not allow every measurement; give more --minutes"
    return f"not worth it, because {' and '.join(losses)}"


def lines(measured: Measured) -> list[str]:
    """The report, line by line."""
    told = []
    for length, seconds in _medians(measured.dense):
        r = median(measured.draft[length]) / seconds
        rest = (median(measured.sparse[length]) - median(measured.draft[length])) / seconds
        told.append(
            f"at {length} tokens: dense {seconds:.2f} s, sparse {median(measured.sparse[length]):.2f} s; of the dense "
            f"prefill the draft costs r = {r:.2f}, all the rest s = {rest:.2f}"
        )
    if measured.steps is not None:
        cost, block = measured.steps.draft_cost, measured.steps.block_s / measured.steps.target_s
        told.append(
            f"a drafted token costs c = {cost:.2f} of a step: decoding at most {1 / cost:.1f}x; five tokens are "
            f"verified in {block:.2f} steps"
        )
    if measured.plain:
        acceptance = measured.num_accepted / max(1, measured.num_proposed)
        plain, drafted = (harmonic_mean([*each.values()]) for each in (measured.plain, measured.drafted))
        told.append(
            f"answers: {plain:.1f} tokens/s plain, {drafted:.1f} with the draft ({measured.decode_gain:.2f}x; "
            f"{acceptance:.0%} of {measured.num_proposed} proposed tokens accepted, {len(measured.plain)} prompts)"
        )
    if measured.is_extrapolated:
        told += _expected(measured)
    if measured.left_out:
        names = ", ".join(f"{what} (about {seconds:.0f} s)" for what, seconds in measured.left_out.items())
        told.append(f"left out, for the time: {names}")
    told.append(verdict(measured))
    return told


def _expected(measured: Measured) -> list[str]:
    """What other lengths are expected to take."""
    dense, sparse, spread = measured.dense_curve, measured.sparse_curve, measured.spread
    even = measured.break_even()
    told = ["no prompt gains" if even is None else f"prompts gain from about {even} tokens on"]
    for length in _TOLD:
        if length <= measured.max_positions:
            seconds, low, high = sparse.at(length), 1 - spread, 1 + spread
            told.append(
                f"expected at {length}: dense {dense.at(length):.1f} s, sparse {seconds:.1f} s "
                f"({seconds * low:.1f} to {seconds * high:.1f}), {dense.at(length) / seconds:.1f}x"
            )
    return told
