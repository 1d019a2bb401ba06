"""The report of a fidelity measurement: rows per prompt, summaries per setting with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np

_NUM_DRAWS = 2000


@dataclass(frozen=True)
class PrunedPrompt:
    """One prompt under one setting (a keep rate, or "calibrated").

    num_kept_tokens: that the target prefilled. ttft_s: time to first token, scoring included. loss: mean of the dense
    answer's tokens, in nats. agreement: share of these tokens that are still the most likely ones. first_divergence:
    index of the first other token of the greedy answer, or None. num_words_lost: pruned words of protected text (system
    messages, tools, template).
    """

    setting: str
    num_kept_tokens: int
    ttft_s: float
    loss: float
    agreement: float
    first_divergence: int | None
    num_words_lost: int


@dataclass(frozen=True)
class PromptFidelity:
    """One prompt, dense and under every setting.

    key: identifies the prompt, the pair and the settings. number: place in the list of prompts, from 1 on. kind: where
    the question stands among the scoring queries: "question last", "instructions behind the question", "question
    first", or "no question mark". question: the segment whose queries weigh most, one with a question mark where there
    is one. answer: the dense greedy one. ttft_s, loss: as in `PrunedPrompt`, of dense prefill.
    """

    key: str
    number: int
    num_tokens: int
    kind: str
    question: str
    answer: str
    num_answer_tokens: int
    ttft_s: float
    loss: float
    pruned: list[PrunedPrompt]

    def of(self, setting: str) -> PrunedPrompt:
        """This prompt under a setting."""
        return next(each for each in self.pruned if each.setting == setting)

    def lost(self, setting: str) -> float:
        """Nats per token of the dense answer that a setting loses."""
        return self.of(setting).loss - self.loss


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval, by bootstrap over prompts."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class SettingFidelity:
    """All prompts under one setting.

    Parameters
    ----------
    setting : str
        The keep rate, or "calibrated".
    kept : float
        Kept share of all prompt tokens.
    speedup : Interval
        Dense over sparse time to first token.
    lost : Interval
        Loss of the dense answers' tokens above dense, in nats per token; mean over prompts.
    perplexity_ratio : Interval
        exp(lost).
    token_agreement, answer_agreement : float
        Shares of tokens and of whole answers that stay the same.
    first_divergence : float or None
        Median index of the first different token; None if no answer differs.
    num_words_lost : int
        Words of protected text that were pruned; 0 unless something is broken.
    lost_by_kind : dict of str to Interval
        `lost` by kind of prompt.
    """

    setting: str
    kept: float
    speedup: Interval
    lost: Interval
    perplexity_ratio: Interval
    token_agreement: float
    answer_agreement: float
    first_divergence: float | None
    num_words_lost: int
    lost_by_kind: dict[str, Interval]


@dataclass(frozen=True)
class Example:
    """A prompt's dense answer beside the one after pruning."""

    what: str
    number: int
    setting: str
    kind: str
    question: str
    lost: float
    dense_answer: str
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
    examples: list[Example] = field(default_factory=list)

    @property
    def fastest(self) -> SettingFidelity | None:
        """The setting with the largest speed-up whose perplexity ratio is within the limit; None if there is none."""
        fitting = [
            each for each in self.settings if each.perplexity_ratio.value <= 1 + self.within and not each.num_words_lost
        ]
        return max(fitting, key=lambda each: each.speedup.value, default=None)

    @property
    def shown(self) -> SettingFidelity:
        """The fastest setting within the limit, or else the one that loses least."""
        return self.fastest or min(self.settings, key=lambda each: each.lost.value)

    @property
    def worst_kind(self) -> str:
        """The kind of prompt that loses most under the setting of `shown`."""
        by_kind = self.shown.lost_by_kind
        return max(by_kind, key=lambda kind: by_kind[kind].value)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        fastest = self.fastest
        named = {"fastest": None if fastest is None else fastest.setting, "worst_kind": self.worst_kind}
        return asdict(self) | named


def summarise(setting: str, rows: Sequence[PromptFidelity]) -> SettingFidelity:
    """Summarise a setting over all rows."""
    pruned = [row.of(setting) for row in rows]
    diverging = [each.first_divergence for each in pruned if each.first_divergence is not None]
    lost = mean_interval([row.lost(setting) for row in rows])
    return SettingFidelity(
        setting=setting,
        kept=sum(each.num_kept_tokens for each in pruned) / sum(row.num_tokens for row in rows),
        speedup=_ratio_interval([row.ttft_s for row in rows], [each.ttft_s for each in pruned]),
        lost=lost,
        perplexity_ratio=Interval(math.exp(lost.value), math.exp(lost.low), math.exp(lost.high)),
        token_agreement=sum(each.agreement for each in pruned) / len(pruned),
        answer_agreement=1 - len(diverging) / len(pruned),
        first_divergence=median(diverging) if diverging else None,
        num_words_lost=sum(each.num_words_lost for each in pruned),
        lost_by_kind={
            kind: mean_interval([row.lost(setting) for row in rows if row.kind == kind])
            for kind in sorted({row.kind for row in rows})
        },
    )


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of one value per prompt."""
    return _ratio_interval(values, [1.0] * len(values))


def _ratio_interval(over: Sequence[float], under: Sequence[float]) -> Interval:
    """The ratio of two sums over the same prompts, in order."""
    above, below = np.array(over, dtype=float), np.array(under, dtype=float)
    draws = np.random.default_rng(0).integers(len(above), size=(_NUM_DRAWS, len(above)))
    low, high = np.percentile(above[draws].sum(1) / below[draws].sum(1), [2.5, 97.5])
    return Interval(float(above.sum() / below.sum()), float(low), float(high))
