"""The step loop: choose, propose, verify, commit, roll back, record, yield."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import perf_counter

from spec_stack.config import MAX_GAMMA
from spec_stack.controller.base import DraftSignals, GammaPolicy, StepContext, StepRecord
from spec_stack.decode.propose import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.decode.stopping import Stopper
from spec_stack.decode.verify import verify
from spec_stack.types import FinishReason, Proposal, Selection, StepOutput, SteppableModel, TargetModel


@dataclass(frozen=True)
class RequestLabels:
    """What a request's records carry beside their measurements."""

    request_id: str
    precision: str
    task: str = ""


class _TimedPolicy:
    """A policy and the seconds it has taken since they were last asked for."""

    def __init__(self, policy: GammaPolicy) -> None:
        self._policy = policy
        self._elapsed_s = 0.0

    def choose(self, context: StepContext) -> int:
        started = perf_counter()
        gamma = self._policy.choose(context)
        self._elapsed_s += perf_counter() - started
        return max(0, min(gamma, context.max_gamma, MAX_GAMMA))

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        started = perf_counter()
        goes_on = self._policy.keep_drafting(context, signals)
        self._elapsed_s += perf_counter() - started
        return goes_on

    def observe(self, record: StepRecord) -> None:
        started = perf_counter()
        self._policy.observe(record)
        self._elapsed_s += perf_counter() - started

    def take_elapsed(self) -> float:
        elapsed, self._elapsed_s = self._elapsed_s, 0.0
        return elapsed


def decode(
    target: TargetModel,
    draft: SteppableModel,
    prompt_ids: Sequence[int],
    selection: Selection,
    proposal: Proposal,
    policy: GammaPolicy,
    sampler: Sampler,
    stopper: Stopper,
    end_ids: Collection[int],
    labels: RequestLabels,
    scoring_s: float = 0.0,
) -> Iterator[StepOutput]:
    """Prefill the target with the selection and verify the first proposal in one forward, then step until the end.

    Both models' caches are advanced and rolled back. The target has always seen every committed token but the
    last; its next_position is the number of committed tokens less one, however few slots are cached. The draft
    may be behind by any number of tokens: it is fed them when it next proposes. scoring_s, what the draft's part of
    the prefill took, goes into the first record.
    """
    timed_policy = _TimedPolicy(policy)
    committed = list(prompt_ids)
    unread_ids, unread_positions = list(selection.token_ids), list(selection.positions)
    last: StepRecord | None = None
    finish_reason: FinishReason | None = None
    for step in count():
        started, controller_s, choosing_s = perf_counter(), timed_policy.take_elapsed(), 0.0
        draft_read_prompt = False
        if last is not None:
            context = StepContext(
                step=step,
                max_gamma=stopper.num_left - 1,
                num_prompt_tokens=len(prompt_ids),
                num_cached=target.num_cached,
                num_generated=len(committed) - len(prompt_ids),
                last=last,
                precision=labels.precision,
                task=labels.task,
            )
            gamma = timed_policy.choose(context)
            draft_read_prompt = gamma > 0 and draft.next_position < len(prompt_ids)
            proposal = propose(draft, committed, gamma, sampler, end_ids, partial(timed_policy.keep_drafting, context))
            choosing_s = timed_policy.take_elapsed()
        proposed = perf_counter()

        gamma, num_recomputed = len(proposal.token_ids), target.num_to_recompute
        proposed_at = range(len(committed), len(committed) + gamma)
        logits = target.forward(unread_ids + proposal.token_ids, [*unread_positions, *proposed_at], gamma + 1)
        verification = verify(logits, proposal, sampler)
        verified = perf_counter()

        new_ids = [*proposal.token_ids[: verification.num_accepted], verification.next_token]
        token_ids, text, finish_reason = stopper.cut(new_ids)
        committed += new_ids
        unread_ids, unread_positions = committed[-1:], [len(committed) - 1]
        target.rollback(gamma - verification.num_accepted)
        draft.rollback(max(0, draft.next_position - (len(committed) - 1)))

        last = StepRecord(
            request_id=labels.request_id,
            step=step,
            policy=policy.name,
            precision=labels.precision,
            task=labels.task,
            is_prefill=step == 0,
            keep_rate=selection.keep_rate,
            gamma=gamma,
            num_accepted=verification.num_accepted,
            num_tokens=len(token_ids),
            signals=proposal.signals,
            draft_s=scoring_s if step == 0 else proposed - started - choosing_s,
            verify_s=verified - proposed,
            controller_s=controller_s + choosing_s,
            draft_read_prompt=draft_read_prompt,
            num_recomputed=num_recomputed,
        )
        timed_policy.observe(last)
        yield StepOutput(token_ids, text, last, finish_reason)
        if finish_reason is not None:
            return
