"""What pruning does to prompts: the time to first token over dense prefill, and the loss of the dense answers.

The dense greedy answer of each prompt is the reference. One forward over it under the pruned cache (teacher forcing)
gives the loss of its tokens, and how many are still the most likely ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, cast

from spec_stack.api.generator import SpecStackGenerator
from spec_stack.bench.intervals import Interval, mean_interval, ratio_interval
from spec_stack.bench.live import Progress
from spec_stack.bench.prompts import Prompt, call_of
from spec_stack.bench.rows import Row, Rows, digest, key_of
from spec_stack.config import PrefillConfig
from spec_stack.engine.conversation import single_turn
from spec_stack.engine.engine import Engine, PrefilledPrompt, token_logprobs
from spec_stack.engine.request import Call
from spec_stack.prefill.rule import Observer, ScoringInputs
from spec_stack.prefill.turn import Plan

KEEP_RATES = (0.1, 0.2, 0.3)
# Tokens behind a question, up to the end of the turn, from which they count as instructions.
_INSTRUCTIONS = 32
_QUESTION_CHARACTERS = 120
_ARM = "fidelity"
# Drawing from fewer prompts again gives intervals that say nothing of what one more would lose.
_LEAST_PROMPTS = 8


@dataclass(frozen=True)
class PrunedPrompt:
    """One prompt under one setting (a keep rate, "calibrated", or "checked").

    num_kept_tokens: that the target prefilled. ttft_s: time to first token, scoring included. loss: mean of the dense
    answer's tokens, in nats. agreement: share of these tokens that are still the most likely ones.
    """

    setting: str
    num_kept_tokens: int
    ttft_s: float
    loss: float
    agreement: float


@dataclass(frozen=True)
class PromptFidelity:
    """One prompt, dense and under every setting.

    key: identifies the prompt, the pair and the settings. number: place in the list of prompts, from 1 on. kind: where
    the question stands among the scoring queries: "question last", "instructions behind the question" or "question
    first". question: of the segments that ask by their place the one whose queries weigh most. answer: the dense
    greedy one. ttft_s, loss: as in `PrunedPrompt`, of dense prefill.
    """

    key: str
    number: int
    num_tokens: int
    kind: str
    question: str
    answer: str
    ttft_s: float
    loss: float
    pruned: list[PrunedPrompt]

    @classmethod
    def of_row(cls, row: Row) -> PromptFidelity:
        """A row of a file."""
        values = {name: value for name, value in row.items() if name != "arm"}
        return cls(**{**values, "pruned": [PrunedPrompt(**each) for each in row["pruned"]]})

    def of(self, setting: str) -> PrunedPrompt:
        """This prompt under a setting."""
        return next(each for each in self.pruned if each.setting == setting)

    def lost(self, setting: str) -> float:
        """Nats per token of the dense answer that a setting loses."""
        return self.of(setting).loss - self.loss


@dataclass(frozen=True)
class SettingFidelity:
    """All prompts under one setting: a keep rate, "calibrated", or "checked", the draft's check from the lowest rate.

    kept: share of all prompt tokens. whole: share of prompts of which everything is kept. speedup: dense over sparse
    time to first token. lost: loss of the dense answers' tokens above dense, in nats per token; lost_by_kind: by kind
    of prompt. token_agreement, answer_agreement: shares of tokens and of whole answers that stay the same.
    """

    setting: str
    kept: float
    speedup: Interval
    lost: Interval
    token_agreement: float
    answer_agreement: float
    lost_by_kind: dict[str, Interval]
    whole: float = 0.0

    @property
    def perplexity_ratio(self) -> Interval:
        """Perplexity of the dense answers over that after dense prefill."""
        return Interval(math.exp(self.lost.value), math.exp(self.lost.low), math.exp(self.lost.high))


@dataclass(frozen=True)
class Example:
    """A prompt, and its greedy answer after pruning."""

    what: str
    prompt: PromptFidelity
    pruned_answer: str


@dataclass(frozen=True)
class FidelityReport:
    """What pruning does to a set of prompts.

    Parameters
    ----------
    settings : list of SettingFidelity
        One per keep rate.
    prompts : list of PromptFidelity
        One per measured prompt.
    skipped : list of (int, str)
        Number and reason of each prompt that cannot be pruned or prefilled.
    num_left : int
        Prompts that the time did not allow.
    num_short : int
        Measured prompts that `sparse_prefill="auto"` leaves dense, for they are under min_prompt_tokens.
    within : float
        Accepted increase of the perplexity.
    examples : list of Example
        The prompt that loses most and the one in the middle, under the setting of `shown`.
    """

    settings: list[SettingFidelity]
    prompts: list[PromptFidelity]
    skipped: list[tuple[int, str]]
    num_left: int
    num_short: int
    within: float
    examples: Sequence[Example] = ()

    @property
    def fastest(self) -> SettingFidelity | None:
        """The setting with the largest speed-up of which the upper bound of the perplexity ratio is within the limit;
        None if there is none. Settings that drop text need 8 prompts."""
        enough = len(self.prompts) >= _LEAST_PROMPTS
        return _fastest(
            each
            for each in self.settings
            if each.perplexity_ratio.high <= 1 + self.within and (enough or each.whole == 1)
        )

    @property
    def promising(self) -> SettingFidelity | None:
        """A faster setting than `fastest` whose perplexity ratio is within the limit, and its upper bound is not."""
        found = _fastest(each for each in self.settings if each.perplexity_ratio.value <= 1 + self.within)
        return None if found is self.fastest else found

    def num_needed(self, setting: SettingFidelity) -> float:
        """About how many prompts bound a setting's loss by the limit, if they are like the measured ones."""
        room, width = math.log(1 + self.within) - setting.lost.value, setting.lost.high - setting.lost.value
        return max(_LEAST_PROMPTS, math.ceil(len(self.prompts) * (width / room) ** 2)) if room > 0 else math.inf

    @property
    def shown(self) -> SettingFidelity:
        """The fastest setting within the limit, or else the one that may be, or that loses least."""
        return self.fastest or self.promising or min(self.settings, key=lambda each: each.lost.value)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        settings = [asdict(each) | {"perplexity_ratio": asdict(each.perplexity_ratio)} for each in self.settings]
        found, promising = self.fastest, self.promising
        verdict = {
            "fastest": found and found.setting,
            "promising": promising and {"setting": promising.setting, "prompts_needed": self.num_needed(promising)},
        }
        return asdict(self) | {"settings": settings, **verdict}


def _fastest(settings: Iterable[SettingFidelity]) -> SettingFidelity | None:
    return max(settings, key=lambda each: each.speedup.value, default=None)


def measure_fidelity(
    generator: SpecStackGenerator,
    prompts: Sequence[Prompt],
    keep_rates: Sequence[float] = KEEP_RATES,
    *,
    max_dropped_attention: float | None = None,
    max_tokens: int = 48,
    minutes: float = 10.0,
    within: float = 0.02,
    rows: str | Path | None = None,
    progress: Progress | None = None,
) -> FidelityReport:
    """Measure what pruning does to prompts, against dense prefill.

    Every prompt is pruned whatever its length, by the generator's configuration at each keep rate. A prompt's
    dense and sparse prefills follow each other; the first prompt is prefilled once more before, untimed.

    Parameters
    ----------
    generator : SpecStackGenerator
        The pair and its configuration.
    prompts : sequence
        Texts, lists of messages, or mappings with "messages" (and "tools") or with "prompt" or "text". A text is a
        user's message where the target has a chat template.
    keep_rates : sequence of float
        Settings to compare. The generator's own is added where a calibration chose it.
    max_dropped_attention : float, optional
        Also measure the draft's check with this threshold. None is the generator's, if it has one.
    max_tokens : int
        Most tokens of a dense answer.
    minutes : float
        No prompt starts after so many minutes; the first one always does.
    within : float
        Accepted increase of the dense answers' perplexity: 0.02 is 2 %.
    rows : str or Path, optional
        A .jsonl file, to which every prompt's row is added; several runs may share it. Rows of the same prompt, pair
        and settings are not measured again.
    progress : callable, optional
        Called with (num_done, num_prompts, text) after every prompt.

    Returns
    -------
    FidelityReport

    Raises
    ------
    ValueError
        For an invalid option, a generator without a tokenizer, malformed prompts and rows, and if no prompt can be
        pruned.

    Examples
    --------
    >>> from spec_stack import SpecStackGenerator, measure_fidelity
    >>> generator = SpecStackGenerator.from_pretrained()
    >>> prompt = "def add(a, b):\\n    return a + b\\n\\n" * 40 + "What does add return?"
    >>> report = measure_fidelity(generator, [prompt], [0.3], max_tokens=4)
    >>> report.settings[0].kept < 0.5
    True
    """
    if not keep_rates or not all(isinstance(rate, int | float) for rate in keep_rates):
        raise ValueError(f"keep_rates must be one or more shares of the prompt, got {keep_rates!r}")
    for rate in keep_rates:
        PrefillConfig(keep_rate=rate)
    if not (max_tokens >= 1 and minutes > 0 and within > 0):
        raise ValueError(f"max_tokens, minutes and within must be over 0, got {max_tokens}, {minutes} and {within}")
    if generator.tokenizer is None:
        raise ValueError("the target has no tokenizer; fidelity is measured on texts")
    calls = [call_of(prompt, generator.tokenizer, number) for number, prompt in enumerate(prompts, start=1)]
    measuring = _Measuring(generator.engine, keep_rates, max_tokens, max_dropped_attention)
    kept = Rows(None if rows is None else Path(rows), minutes)
    measured: list[PromptFidelity] = []
    skipped: list[tuple[int, str]] = []
    for number, call in enumerate(calls, start=1):
        key = measuring.key(call)
        if (key, _ARM) not in kept:
            if measured and not kept.has_time:
                continue
            try:
                row = measuring.measure(call)
            except ValueError as error:
                skipped.append((number, str(error)))
                continue
            kept.add(key, _ARM, asdict(row) | {"key": key})
            if progress is not None:
                progress(number, len(calls), _in_words(row))
        measured.append(replace(PromptFidelity.of_row(kept.of_arm(_ARM)[key]), number=number))
    if not measured:
        reasons = "; ".join(f"prompt {number}: {reason}" for number, reason in skipped[:3])
        raise ValueError(f"no prompt was measured ({reasons or 'the list is empty'})")
    least = generator.config.prefill.min_prompt_tokens
    report = FidelityReport(
        settings=[summarise(name, measured) for name in measuring.settings],
        prompts=measured,
        skipped=skipped,
        num_left=len(calls) - len(measured) - len(skipped),
        num_short=sum(row.num_tokens < least for row in measured),
        within=within,
    )
    ranked = sorted(measured, key=lambda row: row.lost(report.shown.setting))
    chosen = [("the largest loss", ranked[-1]), ("the median", ranked[(len(ranked) - 1) // 2])]
    examples = [
        Example(what, row, measuring.answer(calls[row.number - 1], report.shown.setting))
        for what, row in chosen[: len(ranked)]
    ]
    return replace(report, examples=examples)


class _Measuring:
    """Measures single prompts under all settings."""

    def __init__(
        self, engine: Engine, keep_rates: Sequence[float], max_tokens: int, max_dropped_attention: float | None = None
    ) -> None:
        prefill, pair = engine.config.prefill, engine.pair
        if max_dropped_attention is None:
            max_dropped_attention = prefill.max_dropped_attention
        if prefill.max_dropped_attention is not None:
            # A fixed rate is measured as it is.
            prefill = replace(prefill, max_dropped_attention=None)
            engine = Engine(pair, replace(engine.config, prefill=prefill))
        self._engine, self._max_tokens = engine, max_tokens
        self.settings: dict[str, Call] = {f"{rate:g}": Call(keep_rate=rate) for rate in keep_rates}
        if prefill.calibrated_by and prefill.keep_rate not in keep_rates:
            self.settings["calibrated"] = Call()
        if max_dropped_attention is not None:
            self.settings["checked"] = Call(keep_rate=min(keep_rates), max_dropped_attention=max_dropped_attention)
        self._pair_key = key_of(pair, prefill, sorted(self.settings), max_tokens)
        if max_dropped_attention is not None:
            self._pair_key = digest([self._pair_key, max_dropped_attention])
        # Prunes where any setting does.
        self._least = f"{min(keep_rates):g}"
        self._is_warm = False

    def key(self, call: Call) -> str:
        """Identifies a prompt with the pair and everything that decides its row."""
        return digest([call, self._pair_key])

    def measure(self, call: Call) -> PromptFidelity:
        """Measure a prompt. Raises ValueError for one that cannot be pruned or prefilled."""
        request = self._engine.plan(self._sparse(call, self._least))
        plan = single_turn(self._engine.pair, request).plan
        if isinstance(plan, Plan):
            raise ValueError(f"it has {len(request.prompt_ids)} tokens and cannot be pruned ({plan.reason})")
        whole = cast(Call, {**call, "sparse_prefill": "off"})
        if not self._is_warm:
            # First forwards of a length are slower.
            self._is_warm = True
            self._prefill(whole)
            self._prefill(self._sparse(call, self._least))
        dense, seconds = self._prefill(whole)
        answer = dense.greedy(self._max_tokens)
        loss = -float(token_logprobs(dense.logits(answer), answer).mean())
        del dense
        finder = _QuestionFinder(self._engine.config.prefill)
        return PromptFidelity(
            key="",
            number=0,
            num_tokens=len(request.prompt_ids),
            pruned=[self._pruned(call, name, answer, finder) for name in self.settings],
            kind=finder.kind,
            question=finder.question,
            answer=self._text(answer),
            ttft_s=seconds,
            loss=loss,
        )

    def answer(self, call: Call, setting: str) -> str:
        """The greedy answer under a setting."""
        return self._text(self._prefill(self._sparse(call, setting))[0].greedy(self._max_tokens))

    def _pruned(self, call: Call, setting: str, answer: Sequence[int], finder: _QuestionFinder) -> PrunedPrompt:
        prefilled, seconds = self._prefill(self._sparse(call, setting), finder)
        logits = prefilled.logits(answer)
        same = [token_id == other for token_id, other in zip(answer, logits.argmax(dim=-1).tolist(), strict=True)]
        loss = -float(token_logprobs(logits, answer).mean())
        return PrunedPrompt(setting, len(prefilled.selection.positions), seconds, loss, sum(same) / len(same))

    def _sparse(self, call: Call, setting: str) -> Call:
        return cast(Call, {**call, "sparse_prefill": "on", **self.settings[setting]})

    def _prefill(self, call: Call, finder: _QuestionFinder | None = None) -> tuple[PrefilledPrompt, float]:
        """The prefilled prompt, and the seconds to its first token."""
        began = perf_counter()
        prefilled = PrefilledPrompt(self._engine, cast(Call, {**call, "max_tokens": self._max_tokens}), finder)
        # Reading a token waits for the device.
        _ = prefilled.first_token
        return prefilled, perf_counter() - began

    def _text(self, answer: Sequence[int]) -> str:
        return str(self._engine.pair.tokenizer.decode(answer, skip_special_tokens=True))


class _QuestionFinder(Observer):
    """Finds a prompt's kind and question where it is scored."""

    def __init__(self, config: PrefillConfig) -> None:
        self._config = config
        self.kind = self.question = ""

    def scored(self, inputs: ScoringInputs) -> None:
        """Take the heaviest segment of the question."""
        found, weights = inputs.candidates, inputs.weights_by_attention(self._config) or inputs.weights_by_words()
        start, stop = max(found.question or found.segments, key=lambda span: weights.get(span, 0.0))
        self.question = " ".join("".join((inputs.pieces or [])[start:stop]).split())[:_QUESTION_CHARACTERS]
        if stop <= found.start:
            self.kind = "question first"
        else:
            is_last = found.request[1] - stop < _INSTRUCTIONS
            self.kind = "question last" if is_last else "instructions behind the question"


def summarise(setting: str, rows: Sequence[PromptFidelity]) -> SettingFidelity:
    """Summarise a setting over all rows."""
    pruned = [row.of(setting) for row in rows]
    return SettingFidelity(
        setting=setting,
        kept=sum(each.num_kept_tokens for each in pruned) / sum(row.num_tokens for row in rows),
        speedup=ratio_interval([row.ttft_s for row in rows], [each.ttft_s for each in pruned]),
        lost=mean_interval([row.lost(setting) for row in rows]),
        token_agreement=sum(each.agreement for each in pruned) / len(pruned),
        answer_agreement=sum(each.agreement == 1 for each in pruned) / len(pruned),
        lost_by_kind={
            kind: mean_interval([row.lost(setting) for row in rows if row.kind == kind])
            for kind in sorted({row.kind for row in rows})
        },
        whole=sum(each.num_kept_tokens == row.num_tokens for each, row in zip(pruned, rows, strict=True)) / len(rows),
    )


def _in_words(row: PromptFidelity) -> str:
    found = ", ".join(
        f"{each.setting} {row.ttft_s / each.ttft_s:.1f}x {row.lost(each.setting):+.3f} nats" for each in row.pruned
    )
    return f"{row.num_tokens} tokens, {row.kind}: {found}"
