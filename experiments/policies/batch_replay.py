"""Replay of a server's batches: several recorded texts decode side by side, one gamma for all, records a lag late."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from experiments.policies.replay import ReplayText, check_lag
from spec_stack.config import MAX_GAMMA
from spec_stack.controller.base import BatchMember, DraftSignals, Policy, StepContext, StepRecord


@dataclass(frozen=True)
class BatchCosts:
    """Seconds of a server's step, by how many tokens each forward takes in.

    A forward takes base_s for its weights and per_token_s for every token over the first, whichever request that is of;
    of the draft and of the target alike. A step of gamma drafts gamma tokens in gamma forwards, of which the one that
    catches up with the step before takes in every request's gamma + 1 slots, as SGLang's does; at gamma 0 it is that
    one alone.

    Parameters
    ----------
    draft_base_s, draft_per_token_s, target_base_s, target_per_token_s : float
        Seconds.
    """

    draft_base_s: float
    draft_per_token_s: float
    target_base_s: float
    target_per_token_s: float

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) and value >= 0 for value in vars(self).values()):
            raise ValueError(f"costs must be finite and not negative, got {self}")
        if self.target_base_s == 0:
            raise ValueError("a forward of the target must take some time")

    def draft_s(self, gamma: int, batch_size: int) -> float:
        """All of the draft's forwards in a step."""
        one_by_one = max(gamma - 1, 0) * self._draft_forward_s(batch_size)
        return one_by_one + self._draft_forward_s((gamma + 1) * batch_size)

    def verify_s(self, num_tokens: int) -> float:
        """The target's forward over so many tokens, of all requests together."""
        return self.target_base_s + self.target_per_token_s * (num_tokens - 1)

    def step_s(self, gamma: int, batch_size: int) -> float:
        return self.draft_s(gamma, batch_size) + self.verify_s((gamma + 1) * batch_size)

    def _draft_forward_s(self, num_tokens: int) -> float:
        return self.draft_base_s + self.draft_per_token_s * (num_tokens - 1)


@dataclass(frozen=True)
class BatchScore:
    """num_tokens in seconds of a batch's steps, whose gammas these were."""

    num_tokens: int
    seconds: float
    gammas: list[int]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass
class _Running:
    """A text at its place in the batch. number: tells two runs of one text apart."""

    text: ReplayText
    number: int
    position: int = field(init=False)

    def __post_init__(self) -> None:
        self.position = self.text.start

    @property
    def request_id(self) -> str:
        return f"{self.text.prompt}#{self.number}"

    @property
    def is_done(self) -> bool:
        return self.position >= self.text.end

    def proposal(self, gamma: int) -> tuple[DraftSignals, int]:
        """Signals of gamma tokens drafted from here on, and how many of them are right."""
        num_right = self.text.run_length(self.position, gamma)
        signals = DraftSignals()
        for index in range(gamma):
            signals.append(*self.text.signal(self.position, index, num_right))
        return signals, num_right


def replay_batch(
    texts: Sequence[ReplayText],
    policy: Policy,
    costs: BatchCosts,
    batch_size: int,
    *,
    lag: int = 1,
    max_gamma: int = MAX_GAMMA,
) -> BatchScore:
    """Decode the texts in order, batch_size of them at a time: where one ends, the next takes its place at once.

    Parameters
    ----------
    texts : sequence of ReplayText
        Of one precision; one text may come several times.
    policy : Policy
        Mutated. What it chooses holds for all of a batch; `keep_drafting` is not asked.
    costs : BatchCosts
        Its clock. A step costs what its batch and gamma say.
    batch_size : int
        Requests that run side by side, while there are so many.
    lag : int
        As in `replay`: 1, or 2 for what a server with overlap knows.
    max_gamma : int
        Most tokens in a step.

    Returns
    -------
    BatchScore

    Raises
    ------
    ValueError
        For no texts, several precisions, and a batch size or a lag under 1.

    Notes
    -----
    Prefills cost nothing here, and take no time from others. The score ends with the first step of a batch that is no
    longer full, since a server's queue is not empty at its load; a batch that never fills counts to its end.
    """
    check_lag(lag)
    if batch_size < 1:
        raise ValueError(f"batch_size must be 1 or more, got {batch_size}")
    if len({text.precision for text in texts}) != 1:
        raise ValueError("give one or more texts, all of one precision")
    waiting = iter(_Running(text, number) for number, text in enumerate(texts))
    running = list(_next(waiting, batch_size))
    full = len(running)
    late: deque[list[StepRecord]] = deque()
    last: StepRecord | None = None
    gammas: list[int] = []
    num_tokens, seconds, step = 0, 0.0, 0
    while len(running) == full:
        context = StepContext(
            step=step,
            max_gamma=max_gamma,
            last=last,
            precision=texts[0].precision,
            batch_size=len(running),
            lag=lag,
            members=tuple(BatchMember(each.request_id) for each in running),
        )
        gamma = max(0, min(policy.choose(context), max_gamma))
        proposals = [each.proposal(gamma) for each in running]
        draft_s = costs.draft_s(gamma, len(running))
        verify_s = costs.verify_s((gamma + 1) * len(running))
        seconds += draft_s + verify_s
        gammas.append(gamma)
        records = []
        for each, (signals, num_right) in zip(running, proposals, strict=True):
            num_accepted = min(num_right, gamma)
            num_new = min(num_accepted + 1, each.text.end - each.position)
            each.position += num_accepted + 1
            num_tokens += num_new
            records.append(
                StepRecord(
                    request_id=each.request_id,
                    step=step,
                    policy=policy.name,
                    precision=each.text.precision,
                    task=each.text.task,
                    is_prefill=False,
                    keep_rate=1.0,
                    gamma=gamma,
                    num_accepted=num_accepted,
                    num_tokens=num_accepted + 1,
                    signals=signals,
                    draft_s=draft_s / len(running),
                    verify_s=verify_s / len(running),
                    controller_s=0.0,
                    lag=lag,
                )
            )
        late.append(records)
        if len(late) == lag:
            for last in late.popleft():
                policy.observe(last)
        running = [each for each in running if not each.is_done]
        running += _next(waiting, full - len(running))
        step += 1
    return BatchScore(num_tokens, seconds, gammas)


def _next(waiting: Iterator[_Running], most: int) -> Iterator[_Running]:
    for _ in range(most):
        following = next(waiting, None)
        if following is None:
            return
        yield following
