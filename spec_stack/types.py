"""The types at the seams between prefill, decode and the generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch

from spec_stack.controller.base import DraftSignals, StepRecord

FinishReason = Literal["eos", "stop", "length"]


class SteppableModel(Protocol):
    """A model with its KV cache and its position counter, as both phases see it: counts in, logits out.

    `hf.model.CachedModel` is one, `tokenizers.translated_draft.TranslatedDraft` another. A token's position is where it
    stands in the whole text, so after a sparse prefill positions have gaps and `next_position` exceeds `num_cached`.
    """

    @property
    def num_cached(self) -> int:
        """Tokens that went through the model and were not rolled back."""
        ...

    @property
    def next_position(self) -> int:
        """The position after that of the last cached token; 0 for an empty cache."""
        ...

    def forward(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor:
        """Append tokens to the cache.

        Parameters
        ----------
        token_ids : sequence of int, length n
            The new tokens, one or more.
        positions : sequence of int, length n
            Where they stand in the whole text: strictly increasing, from `next_position` on.
        num_logits : int
            How many rows of logits are wanted, 1 to n.

        Returns
        -------
        torch.Tensor
            Logits (num_logits, vocab) of the last `num_logits` tokens: row i predicts the token after the i-th of them.
        """
        ...

    def rollback(self, num_tokens: int) -> None:
        """Forget the last `num_tokens` cached tokens. Called after every step, also with 0."""
        ...


class TargetModel(SteppableModel, Protocol):
    """A model whose tokens the decode loop verifies."""

    @property
    def num_to_recompute(self) -> int:
        """Tokens that the next forward computes once more, because a rollback undid a recurrent state after them."""
        ...


class DraftingModel(SteppableModel, Protocol):
    """A model that proposes tokens in the decode loop."""

    def num_unread(self, num_tokens: int) -> int:
        """How many tokens it has to take in to have caught up with a text of so many."""
        ...


@dataclass(frozen=True)
class Selection:
    """The prompt tokens that the target prefills, with their original positions.

    Parameters
    ----------
    token_ids : sequence of int, length K
        The kept tokens.
    positions : sequence of int, length K
        Where each stands in the prompt, 0 to `num_prompt_tokens` - 1: strictly increasing, those of earlier
        turns and the new ones each by themselves.
    num_prompt_tokens : int
        N, the length of the whole prompt.
    num_restored : int
        How many of them were dropped from the text of an earlier turn and come back now. They are among the first ones.
    num_held : int
        Prompt tokens that the target's cache holds, and goes on holding.
    num_rewritten : int
        How many of them the cache held behind what comes back: they are prefilled again. They, too, are among the first
        ones.
    num_new_held : int
        How many of the tokens held are of the new text: of a prompt that a store knows, or of a turn that ended early.

    Raises
    ------
    ValueError
        Where the two differ in length, are empty, or positions are not strictly increasing inside the prompt.
    """

    token_ids: Sequence[int]
    positions: Sequence[int]
    num_prompt_tokens: int
    num_restored: int = 0
    num_held: int = 0
    num_rewritten: int = 0
    num_new_held: int = 0

    def __post_init__(self) -> None:
        num_old = self.num_restored + self.num_rewritten
        if len(self.token_ids) != len(self.positions) or len(self.positions) <= num_old:
            raise ValueError(f"{len(self.token_ids)} token ids for {len(self.positions)} positions; give one for each")
        for positions in (self.positions[:num_old], self.positions[num_old:]):
            inside = not positions or 0 <= positions[0] <= positions[-1] < self.num_prompt_tokens
            if not inside or any(b <= a for a, b in pairwise(positions)):
                raise ValueError(f"positions must increase strictly within 0…{self.num_prompt_tokens - 1}")

    @classmethod
    def everything(cls, prompt_ids: Sequence[int]) -> Selection:
        """The whole prompt: dense prefill."""
        return cls(prompt_ids, range(len(prompt_ids)), len(prompt_ids))

    @property
    def num_new(self) -> int:
        """Tokens of the new text that the target has with it."""
        return self.num_new_held + len(self.positions) - self.num_restored - self.num_rewritten

    @property
    def keep_rate(self) -> float:
        """The share of the prompt that the target has with it: K / N, or in a later turn (held + K) / N."""
        return (self.num_held + len(self.positions)) / self.num_prompt_tokens


@dataclass(frozen=True)
class DraftTokenization:
    """A prompt in the tokens of a draft that has another tokenizer.

    Parameters
    ----------
    token_ids : sequence of int
        The draft's own tokens of the text.
    ranges : sequence of (int, int)
        For every token of the target the half-open range of draft tokens that share a character with it; empty where
        none does. Their starts never decrease. With target `["hell", "o"]` and draft `["he", "llo"]`: (0, 2), (1, 2).
    """

    token_ids: Sequence[int]
    ranges: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens.

    Parameters
    ----------
    token_ids : list of int, length gamma
        What the draft proposes; empty for a step of plain decoding.
    draft_probs : torch.Tensor or None
        (gamma, vocab): the warped distributions that the tokens were drawn from; a token that was chosen beside drawn
        ones has a one-hot row. None where all were chosen, not drawn (greedy requests, the look-ahead, look-ups).
    signals : DraftSignals
        The draft's own view of every token that it proposed.
    num_looked_up : int
        How many of the tokens, the last ones, were looked up instead.
    match_length : int
        Tokens that the place where they were found has in common with what stands before them.
    is_finite : bool
        False where it ended before a token for which the draft's logits were not finite.
    """

    token_ids: list[int] = field(default_factory=list)
    draft_probs: torch.Tensor | None = None
    signals: DraftSignals = field(default_factory=DraftSignals)
    num_looked_up: int = 0
    match_length: int = 0
    is_finite: bool = True

    @property
    def proposer(self) -> str:
        """Who proposed, as records have it."""
        if self.num_looked_up == 0:
            return "model"
        return "lookup" if self.num_looked_up == len(self.token_ids) else "model+lookup"


@dataclass(frozen=True)
class Verification:
    """The target's answer to a proposal.

    Parameters
    ----------
    num_accepted : int
        Length of the accepted prefix of the proposal.
    next_token : int
        The correction of the first rejected token, or the bonus token where all were accepted.
    rows : torch.Tensor or None
        (num_accepted + 1, vocab): the target's rows after the request's logits processors; None where it has none.
    """

    num_accepted: int
    next_token: int
    rows: torch.Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely the target held a token that was generated, in natural logarithms.

    Parameters
    ----------
    token_id : int
        The token.
    logprob : float
        Under the target's own distribution.
    warped_logprob : float
        Under the distribution that it was taken from: after logits processors, temperature, top_k, top_p and min_p. A
        greedy request takes the likeliest token of what the processors leave.
    top, warped_top : list of (int, float)
        The likeliest tokens of both, as many as were asked for, with theirs; forbidden ones are left out.
    """

    token_id: int
    logprob: float
    warped_logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)
    warped_top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that an answer holds.

    Parameters
    ----------
    id : str
        Its own, nine letters and digits; the tool's message names it.
    name : str
        The tool's.
    arguments : str
        A JSON object.
    """

    id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        """The call as OpenAI's messages have it, ready for the next prompt's `tool_calls`."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class AnswerPart:
    """A piece of an answer to a chat: text for the user, a thought, or a call of a tool (which has no text)."""

    kind: Literal["content", "reasoning", "call"]
    text: str = ""
    call: ToolCall | None = None


@dataclass
class Metrics:
    """The cost of a request, and what it did.

    Durations are in seconds, without the time that the caller of a stream lets pass; `precision` is the target's; the
    bytes are those of the weights in memory. `proposer` is who might propose ("model", "lookup", "both"); of the
    proposed and the accepted tokens those that were looked up are counted by themselves too. `sparse_prefill` is
    whether the prompt was pruned, `sparse_prefill_reason` why or why not, and `decode_reason` whether the draft can
    propose to this target. `seed` is what a sampled request drew with: given to the same call with the same `gamma`, it
    gives the same tokens; under a policy that watches the clock the drafted lengths were those of that run only.
    """

    num_prompt_tokens: int
    num_kept_tokens: int
    num_scored_tokens: int
    sparse_prefill: bool
    sparse_prefill_reason: str
    policy: str
    precision: str
    draft_precision: str
    target_weight_bytes: int
    draft_weight_bytes: int
    seed: int | None
    num_new_tokens: int
    num_cached_tokens: int = 0
    num_restored_tokens: int = 0
    num_rewritten_tokens: int = 0
    decode_reason: str = ""
    scoring_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    num_tokens: int = 0
    num_first_tokens: int = 0
    num_look_ahead: int = 0
    num_look_ahead_accepted: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    proposer: str = "model"
    num_looked_up: int = 0
    num_looked_up_accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    controller_s: float = 0.0
    forward_s: float = 0.0
    gamma_trace: list[int] = field(default_factory=list)

    def add(self, record: StepRecord, elapsed_s: float) -> None:
        """Take in a step that ended `elapsed_s` seconds after the request began."""
        if record.is_prefill:
            self.ttft_s = elapsed_s
            self.num_first_tokens = record.num_tokens
            self.num_look_ahead, self.num_look_ahead_accepted = record.gamma, record.num_accepted
        self.total_s = elapsed_s
        self.num_tokens += record.num_tokens
        self.num_proposed += record.gamma
        self.num_accepted += record.num_accepted
        self.num_looked_up += record.num_looked_up
        self.num_looked_up_accepted += record.num_accepted - record.num_drafted_accepted
        self.draft_s += record.draft_s
        self.verify_s += record.verify_s
        self.controller_s += record.controller_s
        self.gamma_trace.append(record.gamma)

    @property
    def keep_rate(self) -> float:
        """Share of the prompt that the target prefilled, in this turn or before."""
        return self.num_kept_tokens / self.num_prompt_tokens

    @property
    def num_steps(self) -> int:
        """Forwards of the target."""
        return len(self.gamma_trace)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over proposed tokens; None where nothing was proposed."""
        return self.num_accepted / self.num_proposed if self.num_proposed else None

    @property
    def look_ahead_acceptance(self) -> float | None:
        """Share of the look-ahead, drafted with the whole prompt, that the target took with what it was given of it;
        None without a look-ahead."""
        return self.num_look_ahead_accepted / self.num_look_ahead if self.num_look_ahead else None

    @property
    def tokens_per_step(self) -> float:
        """Tokens handed out per forward of the target."""
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
        Their text; it may lag behind while it could still become a stop string, is half a character or a run of bytes.
    record : StepRecord
        What the step did.
    finish_reason : "eos", "stop", "length" or None
        Why the request ends here; None while it goes on.
    metrics : Metrics or None
        With the last step only.
    logprobs : list of TokenLogprobs or None
        One per token, where they were asked for.
    """

    token_ids: list[int]
    text: str
    record: StepRecord
    finish_reason: FinishReason | None = None
    metrics: Metrics | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class GenerationResult:
    """A drained stream.

    Parameters
    ----------
    token_ids : list of int
        Generated tokens, with the end-of-sequence token or the tokens of the stop string that ended them.
    text : str
        Their text, without either.
    finish_reason : "eos", "stop" or "length"
        Why it ended.
    metrics : Metrics
        What it cost.
    records : list of StepRecord or None
        One per step, where `return_records=True` asked for them.
    logprobs : list of TokenLogprobs or None
        One per token, where `logprobs=` asked for them.
    others : list of GenerationResult
        The other samples of the prompt, where `n=` asked for some.
    content, reasoning : str
        The text for the user, and the thought ahead of it where the chat template has thoughts.
    tool_calls : list of ToolCall
        Calls of tools, as the chat template writes them; what cannot be parsed stays in `content`.
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

    @property
    def choices(self) -> list[GenerationResult]:
        """All n samples of the prompt, this one first."""
        return [self, *self.others]
