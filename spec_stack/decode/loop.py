"""The step loop: choose, propose, verify, commit, roll back, record, yield."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from spec_stack.controller.base import Policy, StepContext, StepRecord
from spec_stack.decode.logprobs import step_logprobs
from spec_stack.decode.proposer import DecodeRequest, Proposer
from spec_stack.decode.verify import verify
from spec_stack.types import Proposal, Selection, StepOutput, TargetModel


def decode(
    request: DecodeRequest,
    target: TargetModel,
    selection: Selection,
    proposal: Proposal,
    policy: Policy,
    proposer: Proposer,
) -> Iterator[StepOutput]:
    """Prefill the target with the selection and verify the first proposal in the same forward, then step until the end.

    Yields one StepOutput per forward of the target; the last has a `finish_reason`. Invariants at every yield: the
    target has seen every committed token but the last; its `next_position` is the number of committed tokens less one,
    however few of them are cached; the draft may be behind by any number of tokens, which it is fed when it next
    proposes.

    target: empty, or with a session's earlier turns. proposal: the look-ahead, empty without scoring. proposer: over
    the draft as scoring left it. Both caches are advanced and rolled back.
    """
    draft, sampler, stopper, clock = proposer.draft, request.sampler, request.stopper, request.clock
    policy.use(proposer.ngram_policy.times)
    committed = list(request.prompt_ids)
    unseen_ids, unseen_positions = list(selection.token_ids), list(selection.positions)
    last: StepRecord | None = None
    for step in count():
        num_seen, draft_lag = draft.next_position, draft.draft_lag(len(committed))
        reads_prompt = num_seen < len(request.prompt_ids) or draft_lag > len(committed) - len(request.prompt_ids)
        num_target_slots = target.num_cached + len(unseen_ids)
        # What the draft has cached and has to run again lags too.
        num_draft_slots = draft.num_cached + min(draft_lag, len(committed) - num_seen)
        if last is not None:
            context = StepContext(
                step=step,
                max_gamma=stopper.num_left - 1,
                last=last,
                precision=request.precision,
                task=request.task,
                draft_lag=draft_lag,
                num_target_slots=num_target_slots,
                num_draft_slots=num_draft_slots,
            )
            with clock.measure("draft"):
                proposal = proposer.propose(committed, policy, context)
        has_drafted = draft.next_position > num_seen

        gamma, num_recomputed = len(proposal.token_ids), target.num_to_recompute
        with clock.measure("verify"):
            proposed_at = range(len(committed), len(committed) + gamma)
            logits = target.forward(unseen_ids + proposal.token_ids, [*unseen_positions, *proposed_at], gamma + 1)
            verification = verify(logits, proposal, sampler, committed, request.end_ids)

        new_ids = [*proposal.token_ids[: verification.num_accepted], verification.next_token]
        token_ids, text, finish_reason = stopper.cut(new_ids)
        num_prefilled = len(unseen_ids) if step == 0 else 0
        logprobs = None
        if request.num_logprobs is not None:
            logprobs = step_logprobs(logits, verification, sampler, new_ids, request.num_logprobs)[: len(token_ids)]
        committed += new_ids
        unseen_ids, unseen_positions = committed[-1:], [len(committed) - 1]
        target.rollback(gamma - verification.num_accepted)
        draft.rollback(max(0, draft.next_position - (len(committed) - 1)))

        last = StepRecord(
            request_id=request.request_id,
            step=step,
            policy=policy.name,
            precision=request.precision,
            task=request.task,
            is_prefill=step == 0,
            keep_rate=selection.keep_rate,
            gamma=gamma,
            num_accepted=verification.num_accepted,
            num_tokens=len(token_ids),
            signals=proposal.signals,
            draft_s=clock.take("scoring") + clock.take("draft"),
            verify_s=clock.take("verify"),
            policy_s=clock.take("controller"),
            draft_prefilled_prompt=has_drafted and reads_prompt,
            num_recomputed=num_recomputed,
            draft_lag=draft_lag if has_drafted else 0,
            proposer=proposal.proposer,
            num_ngram_tokens=proposal.num_ngram_tokens,
            num_target_slots=num_target_slots,
            num_draft_slots=num_draft_slots,
            num_prefilled=num_prefilled,
        )
        output = StepOutput(token_ids, text, last, finish_reason, logprobs=logprobs)
        # No token waits for it but the last one, after which the caller may not come back.
        if finish_reason is None:
            yield output
        with clock.measure("controller"):
            policy.observe(last)
            proposer.observe(last)
        if finish_reason is not None:
            yield output
            return
