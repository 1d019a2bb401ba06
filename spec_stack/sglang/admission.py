"""The scheduler's side: decides for each arriving request, scores and prunes its prompt while it waits.

Scored requests stay in SGLang's waiting queue (limits, aborts, timeouts), but out of prefill batches; see `rounds`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from time import perf_counter
from typing import Any

from spec_stack.prefill.decide import decide_scoring
from spec_stack.sglang import self_test
from spec_stack.sglang.calibration import with_calibration
from spec_stack.sglang.draft_pool import PoolFullError
from spec_stack.sglang.drafting import drafting_of
from spec_stack.sglang.follow_up import Beginning, Placement, Turns, new_spans, place
from spec_stack.sglang.guards import harmless, note_failure, num_failures
from spec_stack.sglang.launch_notes import follow_up_note, prunes, pruning_note, slots_note
from spec_stack.sglang.pooled_draft import PooledDraft
from spec_stack.sglang.protocols import RunningRequest, Scheduler
from spec_stack.sglang.ranks import all_say_yes, num_ranks
from spec_stack.sglang.request_state import STATE, RequestOptions, dense_reason
from spec_stack.sglang.rounds import Rounds
from spec_stack.sglang.scoring import DraftScorer, Prompt, Score, needs_the_draft
from spec_stack.sglang.scoring_model import ScoringModel
from spec_stack.sglang.server_args import ServerConfig
from spec_stack.sglang.settling import Settler
from spec_stack.sglang.support import NAME
from spec_stack.sglang.threshold import with_threshold
from spec_stack.sglang.waiting import Waiting
from spec_stack.tokenizers.chat_turns import ChatTurns, Protected
from spec_stack.tokenizers.pieces import Pieces

logger = logging.getLogger(__name__)
_MOST_REMEMBERED = 16
# Remembered turns cost a few bytes per token, and the draft's pool evicts texts too: so many times its length is
# enough.
_TURNS_PER_POOL = 16
# Most tokens that the draft prefills in one round beside a prefill batch: little against the target's chunk.
_MOST_QUICK_TOKENS = 512


class RequestPruner:
    """One scheduler's sparse prefill, made in its first round. A failure here never fails a request.

    The ranks of a tensor-parallel group run the same rounds over the same requests and pools, so they decide alike. A
    failure of one rank makes all of them prefill densely.
    """

    def __init__(self, scheduler: Scheduler, model: ScoringModel) -> None:
        self._scheduler: Any = scheduler
        self._drafting = drafting_of(scheduler)
        config = ServerConfig.from_environment()
        self.config = with_calibration(
            config,
            model.source,
            scheduler.model_config.hf_text_config,
            model.runner.model_config.hf_text_config,
        )
        self._refusal = model.refusal
        # A draft with slots of its own cannot score.
        self.prunes = self._refusal is None and self.config.prefill.sparse_prefill != "draft_only"
        self._template = ChatTurns.learn(self._scheduler.tokenizer, scheduler.server_args.chat_template)
        self._pieces = None if self._scheduler.tokenizer is None else Pieces(self._scheduler.tokenizer)
        decode_interval = self.config.prefill_decode_interval if prunes(self.config, self._refusal) else 0
        self._rounds = Rounds(scheduler, decode_interval)
        self._scorer = DraftScorer(scheduler, model.pool, self._rounds.most_of_a_part)
        # The same prompt repeats at once with n replies, and after a client's retry.
        self._remembered: OrderedDict[Prompt, tuple[Placement, str]] = OrderedDict()
        self._turns = Turns(_TURNS_PER_POOL * model.pool.index.num_slots)
        self._waiting: list[Waiting] = []
        self._at_work: Waiting | None = None
        self._set_aside: list[RunningRequest] | None = None
        forget_with(scheduler.tree_cache, self.forget)
        if self.prunes:
            seconds = self_test.run(scheduler, self._testing_scorer(model), self.config.prefill)
            logger.info("%s: a synthetic prompt went through every part in %.2f s", NAME, seconds)
            self.config = with_threshold(self.config, scheduler.tp_worker.model_runner, model.runner)
        self._settler = Settler(self.config, self._turns)
        self._announce()

    def _testing_scorer(self, model: ScoringModel) -> DraftScorer:
        """The self-test's scorer; on a small pool where prompts are pruned on request alone."""
        if prunes(self.config, self._refusal):
            return self._scorer
        return DraftScorer(self._scheduler, PooledDraft(model.runner, self_test.most_tokens(self.config.prefill)))

    @staticmethod
    def of(scheduler: Scheduler) -> RequestPruner | None:
        """The scheduler's pruner, made on first use; None where no model scores."""
        pruner = getattr(scheduler, STATE, None)
        if pruner is None and (model := ScoringModel.of(scheduler)) is not None:
            pruner = RequestPruner(scheduler, model)
            setattr(scheduler, STATE, pruner)
        return pruner

    def _announce(self) -> None:
        """Log once, at launch, how prompts are pruned and how far the server drafts."""
        config = self.config
        self._drafting.announce(config, self._refusal)
        level = logging.WARNING if self._refusal or prunes(config, self._refusal) else logging.INFO
        logger.log(level, "%s: %s", NAME, pruning_note(config, self._refusal, self._template.unrecognised))
        if prunes(config, self._refusal):
            pool, num_tokens = self._scorer.pool_state(), self._scheduler.token_to_kv_pool_allocator.size
            logger.info("%s: %s", NAME, follow_up_note(config, pool, num_tokens))
        slots = getattr(self._scheduler.draft_worker, "slots", None)
        if slots is not None:
            logger.info("%s: %s", NAME, slots_note(**slots.state()))

    # Arrival

    def arrive(self, request: RunningRequest) -> None:
        """Decide for a request before it is first queued. Mutates it."""
        if getattr(request, STATE, None) is not None:
            return
        failure: Exception | None = None
        try:
            self._decide(request)
        except Exception as error:
            if self._failures_end_it:
                raise
            note_failure("deciding for a prompt", "it is prefilled densely")
            failure = error
        # Dense prefill is safe only where all ranks failed: a rank that has decided may have pruned.
        if not all_say_yes(failure is None) and not all_say_yes(failure is not None):
            raise RuntimeError("deciding for a prompt failed on a part of the ranks, which would go apart") from failure
        if failure is not None:
            with harmless("reporting on a prompt", "its reply has no report"):
                self._give_up(request, failure)

    def _give_up(self, request: RunningRequest, error: Exception) -> None:
        """Prefill the unchanged prompt densely."""
        self._waiting = [waiting for waiting in self._waiting if waiting.request is not request]
        if getattr(request, STATE, None) is None:
            reason = f"off: deciding failed: {type(error).__name__}: {error}"
            self._settler.leave_whole(request, RequestOptions(), reason, "failed")

    def _decide(self, request: RunningRequest) -> None:
        options = self._options(request)
        prefill = options.prefill(self.config)
        scores, reason = decide_scoring(prefill, len(request.origin_input_ids), ())
        refusal = self._refusal or dense_reason(request)
        if not scores:
            self._settler.leave_whole(request, options, reason, "not_wanted")
            return
        if refusal is not None:
            self._settler.leave_whole(request, options, f"off: {refusal}", "not_possible")
            return
        prompt = Prompt(
            tuple(request.origin_input_ids),
            request.extra_key,
            request.cache_salt,
            prefill,
            options.follow_up or self.config.follow_up,
            end_ids=frozenset(self._end_ids(request)),
        )
        waiting = Waiting(request, options, prompt, Protected(), reason)
        # A follow-up of a dense turn is decided by the cache alone, without reading its long history.
        if self._is_mostly_cached(waiting):
            return
        protected = options.protect
        found = self._template.protected(prompt.token_ids) if protected is None else Protected(protected)
        scores, reason = decide_scoring(prefill, len(prompt.token_ids), found.spans)
        waiting.prompt, waiting.protected = replace(prompt, protected=found.spans), found
        if not scores:
            self._settler.leave_whole(request, options, reason, "not_wanted", found)
        elif not self._is_settled_by_what_is_known(waiting):
            self._waiting.append(waiting)

    def after_queueing(self, request: RunningRequest) -> None:
        """Keep a request that must be scored out of the prefill batch that is being made."""
        with self._guarded("setting a request aside", "its prompt is prefilled densely"):
            queue = self._scheduler.waiting_queue
            is_unscored = any(waiting.request is request for waiting in self._waiting)
            if self._set_aside is not None and is_unscored and queue and queue[-1] is request:
                self._set_aside.append(queue.pop())

    # The scheduler's loop

    def work(self) -> None:
        """Do one part of the oldest scoring, if this round allows it. Called once per round, before SGLang's next
        batch.
        """
        self._at_work = None
        try:
            self._work()
        except Exception as error:
            # Other ranks may wait in a collective of the part that this rank did not begin.
            if self._failures_end_it or num_ranks() > 1:
                raise
            note_failure("scoring", "the prompt is prefilled densely")
            self._release(error)

    def _release(self, error: Exception) -> None:
        """Release the current request without a score; all waiting ones where the failure may be any's."""
        failed = [self._at_work] if self._at_work in self._waiting else list(self._waiting)
        for waiting in failed:
            if waiting is None:
                continue
            with harmless("giving a scoring up", "what it held of the draft's pool may stay held"):
                self._restart(waiting)
            if getattr(waiting.request, STATE, None) is None:
                with harmless("reporting on a prompt", "its reply has no report"):
                    self._give_up(waiting.request, error)
            self._waiting = [other for other in self._waiting if other is not waiting]

    def _guarded(self, what: str, instead: str) -> AbstractContextManager[None]:
        """Contain a failure on one rank; with several, end the server: a rank with another queue makes other batches,
        and the others hang.
        """
        return harmless(what, instead) if num_ranks() == 1 else nullcontext()

    @property
    def _failures_end_it(self) -> bool:
        return self.config.prefill.on_scoring_error == "raise"

    def _work(self) -> None:
        self._drafting.next_round()
        self._turns.take_in_replies()
        if not self._waiting:
            return
        self._drop_those_gone()
        self._score_the_quick()
        while self._waiting and self._waiting[0].work is None:
            self._at_work = self._waiting[0]
            # Earlier requests may have brought this prefix, or this very selection, into the cache.
            if not self._is_settled_by_what_is_known(self._waiting[0]):
                break
            self._waiting.pop(0)
        unscored = {id(waiting.request) for waiting in self._waiting}
        if self._waiting and self._rounds.is_for_scoring(unscored):
            self._do_a_part(self._waiting[0])

    def _score_the_quick(self) -> None:
        """Score follow-ups with little draft prefill in the round of their prefill batch."""
        if not self._rounds.may_prefill():
            return
        left = most = min(_MOST_QUICK_TOKENS, self._scorer.chunk(self.config.prefill))
        for waiting in [it for it in self._waiting if it.work is None and it.asks_little and not it.is_long]:
            if left <= 0:
                break
            self._at_work = waiting
            if self._is_settled_by_what_is_known(waiting):
                self._waiting.remove(waiting)
                continue
            num_tokens = self._scorer.num_to_prefill(waiting.prompt)
            waiting.is_long = num_tokens > most
            # Where a longer prompt's scoring holds the draft's pool, it waits for its turn.
            if num_tokens <= left and waiting.asks_little and self._scorer.has_room(num_tokens):
                left -= num_tokens
                while waiting in self._waiting:
                    self._do_a_part(waiting)

    @contextmanager
    def unscored_set_aside(self) -> Iterator[None]:
        """Remove unscored requests from SGLang's waiting queue for the block; their order is restored afterwards."""
        before = list(self._scheduler.waiting_queue)
        with self._guarded("setting requests aside", "their prompts are prefilled densely"):
            self._set_unscored_aside(before)
        try:
            yield
        finally:
            aside, self._set_aside = self._set_aside, None
            if aside:
                together = [*self._scheduler.waiting_queue, *aside]
                with self._guarded("ordering the queue", "those that were set aside come last"):
                    together = _in_order(before, together)
                self._scheduler.waiting_queue = together

    def _set_unscored_aside(self, queue: Sequence[RunningRequest]) -> None:
        unscored = {id(waiting.request) for waiting in self._waiting}
        aside = [request for request in queue if id(request) in unscored]
        if aside:
            self._scheduler.waiting_queue = [request for request in queue if id(request) not in unscored]
        self._set_aside = aside

    def state(self) -> dict[str, Any]:
        """Settings and counters, as /server_info shows them."""
        slots = getattr(self._scheduler.draft_worker, "slots", None)
        return {
            "settings": asdict(self.config),
            "prompts_are_pruned": self.prunes,
            "why_not": self._refusal or "",
            "unrecognised": self._template.unrecognised,
            "num_requests": dict(self._settler.num_by_outcome),
            "num_waiting_for_their_score": len(self._waiting),
            "num_turns_remembered": len(self._turns),
            "draft_pool": self._scorer.pool_state() if self.prunes else {},
            "draft_slots": slots.state() if slots is not None else {},
            **self._drafting.state(),
            "num_failures": num_failures(),
        }

    def forget(self) -> None:
        """Drop remembered turns and the draft's KV: SGLang has emptied its caches."""
        for waiting in self._waiting:
            self._restart(waiting)
        self._remembered.clear()
        self._turns.clear()
        self._scorer.forget()
        self._drafting.forget()

    def _drop_those_gone(self) -> None:
        """Drop requests that SGLang has aborted, timed out or refused."""
        queued = {id(request) for request in self._scheduler.waiting_queue}
        for waiting in self._waiting:
            if id(waiting.request) not in queued:
                self._restart(waiting)
        self._waiting = [waiting for waiting in self._waiting if id(waiting.request) in queued]

    def _restart(self, waiting: Waiting) -> None:
        if waiting.work is not None:
            with self._scorer.working():
                waiting.work.close()
            waiting.work = None

    def _do_a_part(self, waiting: Waiting) -> None:
        """Run the next part of the scoring; settle the request at its end or failure."""
        self._at_work = waiting
        self._drafting.something_else_runs()
        started = perf_counter()
        score, failure = None, None
        try:
            with self._scorer.working():
                if waiting.work is None:
                    waiting.work = self._scorer.score(waiting.prompt, self._pieces_of(waiting.prompt))
                next(waiting.work)
        except StopIteration as end:
            score = end.value
        except PoolFullError as error:
            # Pools are the same on all ranks, so all of them come here.
            waiting.work = None
            self._settle_unscored(waiting, f"{error}; see --spec-stack-draft-pool-tokens", "no_room")
            return
        except Exception as error:
            failure = error
        waiting.took(perf_counter() - started)
        if not all_say_yes(failure is None):
            self._failed(waiting, failure)
        elif score is not None:
            waiting.work = None
            self._settle_anew(waiting, score)
            self._waiting.remove(waiting)

    def _failed(self, waiting: Waiting, failure: Exception | None) -> None:
        if failure is not None and self.config.prefill.on_scoring_error == "raise":
            raise failure
        # The engine has not started the request, so it can go on without a score after any failure.
        num_tokens = len(waiting.prompt.token_ids)
        logger.error("scoring a prompt of %d tokens failed; nothing of it is dropped", num_tokens, exc_info=failure)
        what = f"{type(failure).__name__}: {failure}" if failure is not None else "on another rank"
        self._restart(waiting)
        self._settle_unscored(waiting, f"scoring failed: {what}", "failed")

    # What becomes of a request

    def _is_mostly_cached(self, waiting: Waiting) -> bool:
        """Settle the request if nearly all of its prompt is cached densely; else note its beginning."""
        prompt, waiting.beginning = waiting.prompt, Beginning()
        if prompt.follow_up == "afresh":
            return False
        waiting.beginning = self._turns.find(prompt.tenant, prompt.token_ids)
        if prompt.config.sparse_prefill == "on":
            return False
        num_tokens, num_cached = len(prompt.token_ids), self._scorer.num_cached(prompt)
        if num_cached < waiting.beginning.num_tokens:
            return False
        # A selection for another question says nothing about this prompt.
        num_cached = self._turns.num_unchosen(prompt.tenant, prompt.token_ids, num_cached)
        if num_cached < waiting.beginning.num_tokens:
            return False
        waiting.beginning = Beginning.dense(num_cached)
        if num_tokens - num_cached >= prompt.config.min_prompt_tokens:
            return False
        reason = f"off: {num_cached} of {num_tokens} tokens are cached"
        self._settler.leave_whole(waiting.request, waiting.options, reason, "cached", waiting.protected)
        return True

    def _is_settled_by_what_is_known(self, waiting: Waiting) -> bool:
        """Settle a request without scoring: a mostly cached prompt, a follow-up, or a repeated prompt. Else find its
        beginning.
        """
        prompt = waiting.prompt
        known = self._remembered.get(prompt)
        if known is not None:
            self._remembered.move_to_end(prompt)
            self._settler.give_part(waiting, *known)
            return True
        if self._is_mostly_cached(waiting):
            return True
        waiting.prunes, waiting.recalls = True, False
        num_tokens, beginning = len(prompt.token_ids), waiting.beginning
        if not beginning.is_worth_it(num_tokens):
            waiting.beginning = Beginning()
            return self._is_settled_without_the_draft(waiting)
        num_new = num_tokens - beginning.num_tokens
        spans = new_spans(prompt.protected, beginning)
        waiting.prunes, waiting.why_new = decide_scoring(prompt.config, num_new, spans, text="new text")
        waiting.recalls = prompt.follow_up == "recall" and self.config.recall.restore and not beginning.is_dense
        return self._is_settled_without_the_draft(waiting)

    def _is_settled_without_the_draft(self, waiting: Waiting) -> bool:
        if (waiting.prunes or waiting.recalls) and needs_the_draft(waiting.prompt.config):
            return False
        self._settle_anew(waiting, None)
        return True

    def _settle_anew(self, waiting: Waiting, score: Score | None) -> None:
        prompt, beginning = waiting.prompt, waiting.beginning
        given = place(
            prompt.token_ids,
            beginning,
            None if score is None else score.importance,
            waiting.prunes,
            self.config.recall if waiting.recalls else None,
            prompt.config,
            prompt.protected,
            pieces=self._pieces_of(prompt),
        )
        reason, num_tokens = waiting.reason, given.num_prompt_tokens
        if given.is_whole:
            reason = "off: chunks and protected spans cover the whole prompt"
        elif given.num_cached:
            origin = "cached and kept" if beginning.is_dense else f"of earlier turns: {prompt.follow_up}"
            reason = f"{waiting.why_new}; {given.num_cached} of {num_tokens} tokens are {origin}"
        self._remembered[prompt] = given, reason
        self._remembered.move_to_end(prompt)
        if len(self._remembered) > _MOST_REMEMBERED:
            self._remembered.popitem(last=False)
        self._settler.give_part(waiting, given, reason, score)
        # Tenants are separated for drafts too, since lookup drafts reach every request.
        if not given.is_whole and not any(prompt.tenant):
            self._drafting.read(prompt.token_ids, given.num_cached)

    def _pieces_of(self, prompt: Prompt) -> list[str] | None:
        """The text of every token; None without a tokenizer."""
        return None if self._pieces is None else self._pieces.of(prompt.token_ids)

    def _settle_unscored(self, waiting: Waiting, why: str, outcome: str) -> None:
        """Keep an earlier turn's selection, and all of the new text."""
        self._waiting.remove(waiting)
        prompt, beginning = waiting.prompt, waiting.beginning
        if beginning.is_dense:
            reason = f"off: {why}"
            request, options = waiting.request, waiting.options
            self._settler.leave_whole(request, options, reason, outcome, waiting.protected, waiting.scoring_s)
            return
        given = place(prompt.token_ids, beginning, None, False, None, prompt.config, prompt.protected)
        reason = f"on for earlier turns, of which nothing comes back, and new text is kept whole: {why}"
        self._settler.give_part(waiting, given, reason, outcome=outcome)

    # A request's wishes

    def _options(self, request: RunningRequest) -> RequestOptions:
        try:
            return RequestOptions.parse(request.sampling_params.custom_params, self.config)
        except ValueError as error:
            # The server has refused bad options already, except on other entry points; the scheduler loop must survive
            # them.
            logger.warning("a request's options are left aside, and its prompt is prefilled densely: %s", error)
            return RequestOptions(sparse_prefill="off")

    def _end_ids(self, request: RunningRequest) -> Collection[int]:
        if request.sampling_params.ignore_eos:
            return ()
        return self._scheduler.model_config.hf_eos_token_id or ()


def forget_with(tree_cache: Any, forget: Callable[[], None]) -> None:
    """Call `forget` whenever SGLang empties this radix cache. Changes this object alone."""
    reset = tree_cache.reset

    def reset_all() -> None:
        reset()
        with harmless("forgetting what was cached", "it is forgotten as new texts come"):
            forget()

    tree_cache.reset = reset_all


def _in_order(before: Sequence[RunningRequest], together: Sequence[RunningRequest]) -> list[RunningRequest]:
    """A queue's requests: those of `before` at their places, then the others."""
    stayed, known = {id(request) for request in together}, {id(request) for request in before}
    old = [request for request in before if id(request) in stayed]
    return old + [request for request in together if id(request) not in known]
