"""Types shared by prefill, decode and the generator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

import torch

from spec_stack.controller.base import DraftSignals, StepRecord
from spec_stack.prefill.explanation import Explanation

FinishReason = Literal["eos", "stop", "length", "time"]


class SteppableModel(Protocol):
    """A model with its KV cache and position counter. Positions refer to the full text, so after a sparse prefill they
    have gaps and `next_position` exceeds `num_cached`."""

    @property
    def num_cached(self) -> int:
        """Tokens in the cache, after rollbacks."""
        ...

    @property
    def next_position(self) -> int:
        """The position after the last cached token; 0 for an empty cache."""
        ...

    def forward(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor:
        """Append n ≥ 1 tokens at strictly increasing positions from `next_position` on. Returns logits (num_logits,
        vocab) of the last tokens, 1 to n; row i predicts the token after the i-th of them."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Drop the last `num_tokens` cached tokens. Called after every step, also with 0."""
        ...


class TargetModel(SteppableModel, Protocol):
    """A model that verifies proposals."""

    @property
    def num_to_recompute(self) -> int:
        """Tokens that the next forward recomputes, because a rollback restored an earlier recurrent state."""
        ...


class DraftingModel(SteppableModel, Protocol):
    """A model that proposes tokens."""

    def draft_lag(self, num_tokens: int) -> int:
        """Tokens to run before a text of this length is cached; part of a model's layers counts as that part."""
        ...


@dataclass(frozen=True)
class TriedRate:
    """A keep rate that the draft's check tried, and the share of its answer's attention that is dropped there."""

    keep_rate: float
    dropped_attention: float


@dataclass(frozen=True)
class Selection:
    """The prompt tokens that the target prefills, with their original positions.

    Parameters
    ----------
    token_ids : sequence of int, length K
        The kept tokens.
    positions : sequence of int, length K
        Their positions in the prompt, 0 to `num_prompt_tokens` - 1: strictly increasing among tokens of earlier turns
        and among new tokens.
    num_prompt_tokens : int
        N, the length of the whole prompt.
    num_recalled : int
        Recalled tokens, dropped in an earlier turn. They are among the first tokens.
    num_held : int
        Prompt tokens that stay in the target's cache.
    num_recomputed : int
        Tokens that were cached after recalled ones and are prefilled again. They too are among the first tokens.
    tried : sequence of TriedRate
        What the draft's check tried, in order; the last one is this selection unless it is everything.

    Raises
    ------
    ValueError
        For empty or unequal lengths, and for positions that do not increase strictly inside the prompt.
    """

    token_ids: Sequence[int]
    positions: Sequence[int]
    num_prompt_tokens: int
    num_recalled: int = 0
    num_held: int = 0
    num_recomputed: int = 0
    tried: Sequence[TriedRate] = ()

    def __post_init__(self) -> None:
        num_old = self.num_recalled + self.num_recomputed
        if len(self.token_ids) != len(self.positions) or len(self.positions) <= num_old:
            raise ValueError(f"{len(self.token_ids)} token ids for {len(self.positions)} positions; give one for each")
        for positions in (self.positions[:num_old], self.positions[num_old:]):
            inside = not positions or 0 <= positions[0] <= positions[-1] < self.num_prompt_tokens
            if not inside or sorted(set(positions)) != list(positions):
                raise ValueError(f"positions must increase strictly within 0…{self.num_prompt_tokens - 1}")

    @property
    def num_new(self) -> int:
        """New tokens in the target's cache after prefill."""
        return len(self.positions) - self.num_recalled - self.num_recomputed

    @property
    def keep_rate(self) -> float:
        """Share of the prompt in the target's cache after prefill: K / N, or in a later turn (held + K) / N."""
        return (self.num_held + len(self.positions)) / self.num_prompt_tokens


@dataclass(frozen=True)
class DraftTokenization:
    """A prompt in the tokens of a draft with another tokenizer.

    ranges: per target token, the half-open range of draft tokens that share a character (empty if none); starts never
    decrease. Target `["hell", "o"]`, draft `["he", "llo"]`: (0, 2), (1, 2).
    """

    token_ids: Sequence[int]
    ranges: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens, gamma of them (0 in plain decoding).

    draft_probs: (gamma, vocab) warped distributions, one-hot rows for tokens not sampled; None if none was sampled.
    signals: per-token statistics of the draft. num_ngram_tokens: looked-up tokens, the last ones. is_finite: False if
    drafting stopped at non-finite logits.
    """

    token_ids: list[int] = field(default_factory=list)
    draft_probs: torch.Tensor | None = None
    signals: DraftSignals = field(default_factory=DraftSignals)
    num_ngram_tokens: int = 0
    is_finite: bool = True

    @property
    def proposer(self) -> str:
        """The proposer's name in records."""
        if self.num_ngram_tokens == 0:
            return "model"
        return "ngram" if self.num_ngram_tokens == len(self.token_ids) else "model+ngram"


@dataclass(frozen=True)
class Verification:
    """The target's answer to a proposal.

    num_accepted: length of the accepted prefix. next_token: the correction, or the bonus token after full acceptance.
    rows: (num_accepted + 1, vocab) after the request's logits processors, if any.
    """

    num_accepted: int
    next_token: int
    rows: torch.Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural) of a generated token under the target.

    Parameters
    ----------
    token_id : int
        The token.
    logprob : float
        Under the target's own distribution.
    warped_logprob : float
        Under the sampled distribution: after logits processors, temperature, top_k, top_p and min_p. A greedy request
        takes the most likely token after the processors.
    top, warped_top : list of (int, float)
        The most likely tokens of both distributions with their log-probabilities; forbidden tokens are left out.
    """

    token_id: int
    logprob: float
    warped_logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)
    warped_top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class ToolCall:
    """A tool call in an answer.

    Parameters
    ----------
    id : str
        The call's id, nine letters and digits; the tool message refers to it.
    name : str
        The tool's name.
    arguments : str
        The arguments, a JSON object.
    """

    id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        """The call in OpenAI's format, for the next prompt's `tool_calls`."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class AnswerPart:
    """Part of a chat answer: text, reasoning, or a tool call (without text)."""

    kind: Literal["content", "reasoning", "call"]
    text: str = ""
    call: ToolCall | None = None


@dataclass
class Metrics:
    """The cost and the statistics of a request.

    Durations are in seconds, without the pauses of a stream's caller. `precision` is the target's. `proposer` is the
    enabled proposer ("model", "ngram", "both"); looked-up tokens are also counted separately. `sparse_prefill` is
    whether the prompt, in a session its new text, was pruned, `sparse_prefill_reason` the reason, and `decode_reason`
    whether the draft can propose to this target. `seed` is a sampled request's seed: the same call with the same
    `gamma` gives the same tokens. Under a policy that depends on timing, drafted lengths differ between runs.
    `draft_step` and `target_step` are how short forwards of each model ran, and why eagerly (`LoadConfig`).
    `tried_rates` is what the draft's check tried, and `dropped_attention` what it found last
    (`PrefillConfig.max_dropped_attention`).
    """

    num_prompt_tokens: int
    num_kept_tokens: int
    num_scored_tokens: int
    sparse_prefill: bool
    sparse_prefill_reason: str
    policy: str
    precision: str
    draft_precision: str
    seed: int | None
    num_new_tokens: int
    num_cached_tokens: int = 0
    num_recalled_tokens: int = 0
    num_recomputed_tokens: int = 0
    decode_reason: str = ""
    draft_step: str = ""
    target_step: str = ""
    scoring_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    num_tokens: int = 0
    num_first_tokens: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    proposer: str = "model"
    num_ngram_tokens: int = 0
    num_ngram_accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    policy_s: float = 0.0
    gamma_trace: list[int] = field(default_factory=list)
    tried_rates: list[TriedRate] = field(default_factory=list)

    def add(self, record: StepRecord, elapsed_s: float) -> None:
        """Add a step that ended `elapsed_s` seconds after the request's start."""
        if record.is_prefill:
            self.ttft_s = elapsed_s
            self.num_first_tokens = record.num_tokens
        self.total_s = elapsed_s
        self.num_tokens += record.num_tokens
        self.num_proposed += record.gamma
        self.num_accepted += record.num_accepted
        self.num_ngram_tokens += record.num_ngram_tokens
        self.num_ngram_accepted += record.num_accepted - record.num_drafted_accepted
        self.draft_s += record.draft_s
        self.verify_s += record.verify_s
        self.policy_s += record.policy_s
        self.gamma_trace.append(record.gamma)

    @property
    def keep_rate(self) -> float:
        """Share of the prompt that the target prefilled, in this turn or before."""
        return self.num_kept_tokens / self.num_prompt_tokens

    @property
    def dropped_attention(self) -> float | None:
        """Share of the draft's attention that the check's last try drops; None without a check."""
        return self.tried_rates[-1].dropped_attention if self.tried_rates else None

    @property
    def num_steps(self) -> int:
        """Forwards of the target."""
        return len(self.gamma_trace)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over proposed tokens; None without proposals."""
        return self.num_accepted / self.num_proposed if self.num_proposed else None

    @property
    def tokens_per_step(self) -> float:
        """Generated tokens per target forward."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first step over the time after it; None where the first step was the last."""
        later = self.num_tokens - self.num_first_tokens
        return later / (self.total_s - self.ttft_s) if later else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, the derived ones included, ready for JSON."""
        derived = (name for name, member in vars(Metrics).items() if isinstance(member, property))
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True)
class StepOutput:
    """The output of one step.

    Parameters
    ----------
    token_ids : list of int
        The step's new tokens.
    text : str
        Their text; held back while it may become a stop string or ends in a partial character or a run of bytes.
    record : StepRecord
        The step's record.
    finish_reason : "eos", "stop", "length", "time" or None
        Why the request ended; None before its end.
    metrics : Metrics or None
        With the last step only.
    logprobs : list of TokenLogprobs or None
        One per token, if requested.
    explanation : Explanation or None
        With the last step, if requested.
    """

    token_ids: list[int]
    text: str
    record: StepRecord
    finish_reason: FinishReason | None = None
    metrics: Metrics | None = None
    logprobs: list[TokenLogprobs] | None = None
    explanation: Explanation | None = None


@dataclass(frozen=True)
class GenerationResult:
    """A complete answer.

    Parameters
    ----------
    token_ids : list of int
        Generated tokens, with the end-of-sequence token or the tokens of the stop string that ended them.
    text : str
        Their text, without either.
    finish_reason : "eos", "stop", "length" or "time"
        Why the request ended.
    metrics : Metrics
        Its cost.
    records : list of StepRecord or None
        One per step, with `return_records=True`.
    logprobs : list of TokenLogprobs or None
        One per token, with `logprobs=`.
    others : list of GenerationResult
        The other samples of the prompt, with `n=`.
    content, reasoning : str
        The text for the user, and the reasoning before it if the chat template has reasoning.
    tool_calls : list of ToolCall
        Parsed tool calls; text that does not parse stays in `content`.
    explanation : Explanation or None
        What was kept of the prompt, and why, with `explain=True`.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    metrics: Metrics
    records: list[StepRecord] | None = None
    logprobs: list[TokenLogprobs] | None = None
    others: list[GenerationResult] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    explanation: Explanation | None = None

    @property
    def choices(self) -> list[GenerationResult]:
        """All n samples of the prompt, this one first."""
        return [self, *self.others]

    @property
    def parsed(self) -> Any:
        """The answer as JSON, with `response_format=`. Raises ValueError where it is none, or was cut by max_tokens."""
        try:
            return json.loads(self.content)
        except ValueError as error:
            raise ValueError(f"the answer is not JSON (finish_reason {self.finish_reason!r}): {error}") from error
