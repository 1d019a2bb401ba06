"""The scheduler's side of sparse prefill: decides for each arriving request, and scores prompts while they wait.

Requests that wait for a score stay in SGLang's waiting queue (limits, aborts, timeouts), but out of prefill batches.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from spec_stack.prefill.attention import Parts, run
from spec_stack.prefill.registry import needs_draft
from spec_stack.prefill.turn import Cached
from spec_stack.sglang.decide import (
    Decision,
    KnownTexts,
    Prompt,
    UnscoredPrompt,
    apply,
    decide,
    decide_scored,
    decide_unscored,
)
from spec_stack.sglang.draft_prefixes import PoolFullError
from spec_stack.sglang.errors import log_and_continue, log_failure, num_failures
from spec_stack.sglang.launch import describe
from spec_stack.sglang.metrics import SchedulerMetrics
from spec_stack.sglang.ranks import all_say_yes, contained, num_ranks, own_rank, same_on_all
from spec_stack.sglang.request import KEY, NO_OPTIONS, RequestOptions, RunningRequest, dense_reason
from spec_stack.sglang.scoring import DraftScorer
from spec_stack.sglang.server_args import NAME

logger = logging.getLogger(__name__)
# Remembered turns cost a few bytes per token, and the draft's pool evicts texts too: so many times its length is
# enough.
_TURNS_PER_POOL = 16
# Most tokens of a part while anything runs: its forward delays the running requests' next tokens.
_MOST_WHILE_RUNNING = 2048
# Most tokens that the draft prefills in one round with a prefill batch: little against the target's chunk.
_MOST_QUICK_TOKENS = 512
_TEST_TEXT, _NUM_TEST_CHUNKS = "The quick brown fox jumps over the lazy dog.\n", 6


class ScoringSchedule:
    """The rounds of one scheduler that scoring may use. Asked once at the beginning of each in which prompts wait.

    Between two prefill batches, two scoring parts, or one of each, there is a decode step while anything runs.
    decode_interval: decode steps after a prefill batch, where the launch set no `--prefill-decode-interval`. Below a
    `--prefill-decode-interval-min-bs` (SGLang 0.5.23) every round may prefill, and every other one score.
    """

    def __init__(self, scheduler: Any, decode_interval: int) -> None:
        self._scheduler = scheduler
        self._scored_last = False
        # SGLang reads it before every prefill batch. Its record has what the launch gave.
        if scheduler.server_args.prefill_decode_interval is None and not scheduler.prefill_decode_interval:
            scheduler.prefill_decode_interval = decode_interval

    def may_prefill(self) -> bool:
        """Return whether this round may hold a prefill batch: after one, the running requests decode first."""
        scheduler, num_running = self._scheduler, self._num_running()
        # Below it SGLang delays nothing, whatever remains of the interval.
        least = getattr(scheduler, "prefill_decode_interval_min_bs", 0)
        return bool(num_running < max(1, least) or not scheduler._prefill_decode_interval_remaining)

    def most_of_a_part(self, chunk: int) -> int:
        """Most tokens of the next part of a scoring. chunk: those of a forward by the settings."""
        limits = (self._scheduler.chunked_prefill_size, _MOST_WHILE_RUNNING if self._num_running() else None)
        return min([chunk, *(limit for limit in limits if limit and limit > 0)])

    def rank_of(self, request: RunningRequest) -> int:
        """SGLang's order of waiting requests, the least first; those of one rank are served as they came."""
        scheduler = self._scheduler
        if not scheduler.enable_priority_scheduling:
            return 0
        return int(request.priority) * (1 if scheduler.schedule_low_priority_values_first else -1)

    def num_startable(self) -> int:
        """Requests that may begin to be prefilled, as far as SGLang's rows and its last batch tell."""
        scheduler = self._scheduler
        num_free = scheduler.max_running_requests - self._num_running()
        return 0 if scheduler.running_batch.batch_is_full else max(0, num_free)

    def is_for_scoring(self, first: RunningRequest, unscored: set[int]) -> bool:
        """Return whether this round scores a part; it then holds no prefill while anything runs.

        first: whose turn to be scored it is. unscored: id() of the waiting requests that are not ready to be prefilled.
        Mutates the scheduler: delays the round's prefill by one round.
        """
        scheduler = self._scheduler
        if not self.may_prefill():
            return False
        queue = sorted(scheduler.waiting_queue, key=self.rank_of)
        before_it = [id(it) for it in queue[: [*map(id, queue)].index(id(first))]]
        # One is scored ahead, to begin as soon as another ends.
        if sum(each not in unscored for each in before_it) >= max(1, self.num_startable()):
            return False
        is_ready = scheduler.chunked_req is not None or any(id(it) not in unscored for it in queue)
        if is_ready and self._scored_last:
            self._scored_last = False
            return False
        self._scored_last = True
        if self._num_running():
            scheduler._prefill_decode_interval_remaining = 1
        return True

    def _num_running(self) -> int:
        """The running batch's size later in this round: without ended requests, with those of the last batch."""
        scheduler = self._scheduler
        last = () if scheduler.last_batch is None else scheduler.last_batch.reqs
        joining = (request for request in last if request is not scheduler.chunked_req)
        running = {id(request): request for request in (*scheduler.running_batch.reqs, *joining)}
        return sum(not request.finished() for request in running.values())


@dataclass(eq=False)
class PendingScore:
    """A request in SGLang's waiting queue whose prompt is to be scored first.

    scoring_s: seconds so far. is_long: too many of its tokens are missing in the draft's pool for one round.
    since: when it began to wait.
    """

    request: RunningRequest
    needs: UnscoredPrompt
    work: Parts[Decision] | None = None
    scoring_s: float = 0.0
    is_long: bool = False
    since: float = field(default_factory=perf_counter)

    @property
    def is_quick(self) -> bool:
        """Whether it may be scored in one round; the draft's check takes many forwards."""
        is_checked = self.needs.prompt.config.max_dropped_attention is not None
        return self.needs.is_recall_only and not is_checked and not self.is_long


class SparsePrefillManager:
    """One scheduler's sparse prefill, made in its first round. A failure here never fails a request.

    The ranks of a tensor-parallel group run the same rounds over the same requests and pools, so they decide alike. A
    failure of one rank makes all of them prefill densely.
    """

    def __init__(self, scheduler: Any, scorer: DraftScorer) -> None:
        self._scheduler: Any = scheduler
        self._launch, self._scorer = scorer.launch, scorer
        # Another algorithm's has no clock of steps, and no state of this package's.
        self._worker: Any = scheduler.draft_worker if self._launch.is_own else None
        self.config, prunes = self._launch.config, self._launch.prunes
        self._failures_end_it = self.config.prefill.on_scoring_failure == "raise"
        self._schedule = ScoringSchedule(scheduler, self.config.prefill_decode_interval if prunes else 0)
        num_pool_tokens = scorer.index.num_slots
        template = scheduler.server_args.chat_template
        self._known = KnownTexts(
            self.config,
            scheduler.tokenizer,
            template,
            self._num_cached,
            _TURNS_PER_POOL * num_pool_tokens,
            scorer.max_positions,
        )
        # Queued since the last round.
        self._arrived: list[RunningRequest] = []
        self._pending: list[PendingScore] = []
        self._at_work: PendingScore | None = None
        # While SGLang makes a batch: unscored requests, out of its queue.
        self._aside: list[RunningRequest] | None = None
        self._forget_with(scheduler.tree_cache)
        if prunes:
            self._test_itself()
        sizes = None if self._worker is None else self._worker.batch_policy.graph_sizes
        unrecognised = self._known.reader.turns.unrecognised
        report = describe(self._launch, unrecognised, sizes, num_pool_tokens, scorer.max_positions)
        args = self._launch.args
        has_metrics = args.enable_metrics and own_rank() == 0
        self._metrics = SchedulerMetrics(str(args.served_model_name)) if has_metrics else None
        self._tell_metrics()
        for warning in report.pop("warnings"):
            logger.warning("%s: %s", NAME, warning)
        for topic, text in report.items():
            is_loud = topic == "prompts" and (prunes or self._launch.refusal)
            logger.log(logging.WARNING if is_loud else logging.INFO, "%s: %s: %s", NAME, topic, text)

    @staticmethod
    def of(scheduler: Any) -> SparsePrefillManager | None:
        manager = getattr(scheduler, KEY, None)
        if manager is None and (scorer := DraftScorer.of(scheduler)) is not None:
            manager = SparsePrefillManager(scheduler, scorer)
            setattr(scheduler, KEY, manager)
        return manager

    def _num_cached(self, prompt: Prompt) -> int:
        """Prefix tokens whose KV the target has, were the prompt prefilled densely."""
        # SGLang prefills at least one token, so the last one counts as not cached.
        limit = max(len(prompt.token_ids) - 1, 0)
        key = RadixKey(array("q", prompt.token_ids), prompt.extra_key, limit=limit, cache_salt=prompt.cache_salt)
        found = self._scheduler.tree_cache.match_prefix(MatchPrefixParams(key=key))
        # A number since SGLang 0.5.22, slots before.
        return int(found.device_prefix_len) if hasattr(found, "device_prefix_len") else len(found.device_indices)

    # Arrival

    def on_request(self, request: RunningRequest) -> None:
        """Note a request that SGLang has queued; the next round decides for it, and none prefills it before."""
        if getattr(request, KEY, None) is None:
            self._arrived.append(request)
            self._set_unscored_aside()

    def _decide_for_arrived(self) -> None:
        """Decide for those that still wait. Mutates them; the ranks agree once on all of them."""
        queued = {id(request) for request in self._scheduler.waiting_queue}
        arrived = [request for request in self._arrived if id(request) in queued]
        self._arrived.clear()
        if not arrived:
            return
        decisions = [self._decide(request) for request in arrived]
        # Dense prefill is safe only where all ranks failed: a rank that has decided may prune.
        if not same_on_all([isinstance(decision, Exception) for decision in decisions]):
            raise RuntimeError("deciding for a prompt failed on a part of the ranks, which would go apart")
        for request, decision in zip(arrived, decisions, strict=True):
            if isinstance(decision, UnscoredPrompt):
                self._pending.append(PendingScore(request, decision))
                continue
            with log_and_continue("reporting on a prompt", "its reply has no report"):
                if isinstance(decision, Exception):
                    reason = f"off: deciding failed: {type(decision).__name__}: {decision}"
                    decision = Decision.dense(self._prompt(request, NO_OPTIONS), reason, "failed")
                self._apply(request, decision)

    def _decide(self, request: RunningRequest) -> Decision | UnscoredPrompt | Exception:
        try:
            prompt = self._prompt(request, self._options(request))
            refusal = self._launch.refusal or dense_reason(request, bool(self._launch.args.enable_session_radix_cache))
            return decide(prompt, self._known, refusal or self._scorer.check_refusal(prompt.config))
        except Exception as error:
            if self._failures_end_it:
                raise
            log_failure("deciding for a prompt", "it is prefilled densely")
            return error

    def _options(self, request: RunningRequest) -> RequestOptions:
        try:
            return RequestOptions.parse(request.sampling_params.custom_params, self.config)
        except ValueError as error:
            # The tokenizer's process has refused bad options, except on other entry points. A client's mistake is no
            # failure of this server.
            logger.warning("a request's options are left aside, and its prompt is prefilled densely: %s", error)
            return RequestOptions(sparse_prefill="off")

    def _apply(self, request: RunningRequest, decision: Decision, scoring_s: float = 0.0) -> None:
        apply(request, decision, self._known, scoring_s)
        if not decision.is_whole:
            num_kept, num_tokens = len(decision.positions), len(decision.prompt.token_ids)
            logger.debug("%s: %s: %d of %d tokens kept, %s", NAME, request.rid, num_kept, num_tokens, decision.reason)

    def _prompt(self, request: RunningRequest, options: RequestOptions) -> Prompt:
        end_ids: Collection[int] = self._scheduler.model_config.hf_eos_token_id or ()
        return Prompt(
            tuple(request.origin_input_ids),
            request.extra_key,
            request.cache_salt,
            options.prefill(self.config),
            options.follow_up or self.config.follow_up,
            frozenset(() if request.sampling_params.ignore_eos else end_ids),
            options,
        )

    # The scheduler's loop

    def step(self) -> None:
        """Decide for those that have come, and do one part of a scoring, if this round allows it.

        Called before SGLang's next batch.
        """
        self._at_work = None
        try:
            self._decide_for_arrived()
            self._step()
            self._tell_metrics()
        except Exception as error:
            # Other ranks may wait in a collective of the part that this rank did not begin.
            if self._failures_end_it or num_ranks() > 1:
                raise
            log_failure("scoring", "the prompt is prefilled densely")
            # All waiting ones, where the failure may be any's.
            for pending in [it for it in self._pending if it is self._at_work] or list(self._pending):
                with log_and_continue("giving a scoring up", "what it held of the draft's pool may stay held"):
                    self._fail(pending, error)
                self._pending = [it for it in self._pending if it is not pending]

    def _tell_metrics(self) -> None:
        if self._metrics is None:
            return
        with log_and_continue("writing metrics", "they are the last round's"):
            waited = max((perf_counter() - pending.since for pending in self._pending), default=0.0)
            self._metrics.tell(len(self._pending), waited, self._scorer.pool_state())

    def _unscored(self) -> set[int]:
        """id() of the waiting requests that may not be prefilled yet."""
        return {*map(id, self._arrived), *(id(pending.request) for pending in self._pending)}

    def _step(self) -> None:
        if not self._pending:
            return
        self._drop_those_gone()
        # A scoring that has begun holds slots of the draft's pool.
        self._pending.sort(key=lambda it: (it.work is None, self._schedule.rank_of(it.request)))
        self._score_the_quick()
        # Earlier requests may have brought this prefix, or this very selection, into the cache.
        while self._pending and self._pending[0].work is None and self._is_settled(self._pending[0]):
            pass
        if self._pending and self._schedule.is_for_scoring(self._pending[0].request, self._unscored()):
            self._do_a_part(self._pending[0])

    def _drop_those_gone(self) -> None:
        queued = {id(request) for request in self._scheduler.waiting_queue}
        for pending in [it for it in self._pending if id(it.request) not in queued]:
            self._restart(pending)
            self._pending.remove(pending)

    def _score_the_quick(self) -> None:
        """Score follow-ups with little draft prefill in the round of their prefill batch."""
        if not self._schedule.may_prefill() or not self._schedule.num_startable():
            return
        left = most = min(_MOST_QUICK_TOKENS, self._schedule.most_of_a_part(self.config.prefill.prefill_chunk))
        for pending in [it for it in self._pending if it.work is None and it.is_quick]:
            if left <= 0:
                break
            if self._is_settled(pending):
                continue
            num_tokens = self._scorer.num_to_prefill(pending.needs.prompt)
            pending.is_long = num_tokens > most
            # Where a longer prompt's scoring holds the draft's pool, it waits for its turn.
            if num_tokens <= left and pending.is_quick and self._scorer.has_room(pending.needs.prompt):
                left -= num_tokens
                while pending in self._pending:
                    self._do_a_part(pending)

    def _is_settled(self, pending: PendingScore) -> bool:
        self._at_work = pending
        decision = decide(pending.needs.prompt, self._known)
        if isinstance(decision, UnscoredPrompt):
            pending.needs = decision
        else:
            self._settle(pending, decision)
        return isinstance(decision, Decision)

    def _settle(self, pending: PendingScore, decision: Decision) -> None:
        self._apply(pending.request, decision, pending.scoring_s)
        self._pending.remove(pending)

    def _do_a_part(self, pending: PendingScore) -> None:
        """Run the next part of the scoring; settle the request at its end or failure."""
        self._at_work = pending
        if self._worker is not None:
            self._worker.batch_policy.invalidate_step_timing()
        needs, started = pending.needs, perf_counter()
        decision, failure = None, None
        try:
            with self._scorer.working(self._scheduler):
                if pending.work is None:
                    pending.work = self._scorer.decide(needs, self._known, self._schedule.most_of_a_part)
                next(pending.work)
        except StopIteration as end:
            decision = end.value
        except PoolFullError as error:
            # Pools are the same on all ranks, so all of them come here.
            why = f"{error}; see --spec-stack-draft-pool-tokens"
            self._settle(pending, decide_unscored(needs, why, "draft_pool_full"))
            return
        except Exception as error:
            failure = error
            log_failure("scoring a prompt", "nothing of it is dropped")
        pending.scoring_s += perf_counter() - started
        if not all_say_yes(failure is None):
            if failure is not None and self._failures_end_it:
                raise failure
            self._fail(pending, failure)
        elif decision is not None:
            self._settle(pending, decision)

    def _fail(self, pending: PendingScore, failure: Exception | None) -> None:
        """Keep all of the new text. failure: None for another rank's."""
        what = f"{type(failure).__name__}: {failure}" if failure is not None else "on another rank"
        self._restart(pending)
        self._settle(pending, decide_unscored(pending.needs, f"scoring failed: {what}", "failed"))

    def _restart(self, pending: PendingScore) -> None:
        if pending.work is not None:
            with self._scorer.working(self._scheduler):
                pending.work.close()
            pending.work = None

    @contextmanager
    def unscored_set_aside(self) -> Iterator[None]:
        """Remove unscored requests from SGLang's waiting queue for the block; they have their places afterwards."""
        before, aside = list(self._scheduler.waiting_queue), list[RunningRequest]()
        self._aside = aside
        self._set_unscored_aside()
        try:
            yield
        finally:
            self._aside = None
            if aside:
                places = {id(request): place for place, request in enumerate(before)}
                queue = [*self._scheduler.waiting_queue, *aside]
                self._scheduler.waiting_queue = sorted(queue, key=lambda it: places.get(id(it), len(places)))

    def _set_unscored_aside(self) -> None:
        if self._aside is None:
            return
        with contained("setting requests aside", "their prompts are prefilled densely"):
            unscored, queue = self._unscored(), self._scheduler.waiting_queue
            self._aside += [request for request in queue if id(request) in unscored]
            self._scheduler.waiting_queue = [request for request in queue if id(request) not in unscored]

    def state(self) -> dict[str, Any]:
        """Settings and counters, as /server_info shows them."""
        return {
            "settings": asdict(self.config),
            "why_not": self._launch.refusal or "",
            "num_requests": dict(self._known.num_by_outcome),
            "num_waiting_for_their_score": len(self._pending),
            "num_turns_remembered": len(self._known.turns),
            "draft_pool": self._scorer.pool_state(),
            **(self._worker.state() if self._worker is not None else {}),
            "num_failures": num_failures(),
        }

    def forget(self) -> None:
        """Drop decisions, remembered turns and the draft's KV: SGLang has emptied its caches, or has other weights."""
        for pending in self._pending:
            self._restart(pending)
        self._known.clear()
        self._scorer.index.clear()

    def _forget_with(self, tree_cache: Any) -> None:
        """Forget whenever SGLang empties its radix cache. Changes this object alone."""
        reset = tree_cache.reset

        def reset_all() -> None:
            reset()
            with log_and_continue("forgetting what was cached", "it is forgotten as new texts come"):
                self.forget()

        tree_cache.reset = reset_all

    def _test_itself(self) -> None:
        """Prune a prompt of a few chunks: what cannot score fails here, not at the first long prompt, hours later."""
        begun, config = perf_counter(), self.config.prefill
        try:
            prompt = Prompt(self._any_text(), NAME, None, config, "recall")
            self._num_cached(prompt)
            needs = UnscoredPrompt(self._known.text_of(prompt), Cached(), True, False, "", (), prompt)
            if needs_draft(config):
                with self._scorer.working(self._scheduler):
                    run(self._scorer.decide(needs, self._known, lambda chunk: chunk))
            else:
                decide_scored(needs, None, 0, self._known)
        except Exception as error:
            raise RuntimeError(
                f"{NAME} cannot serve: a synthetic prompt failed at launch ({type(error).__name__}: {error}). "
                "The installed SGLang is not one that the plugin was tested with, or is changed by another plugin"
            ) from error
        finally:
            self._scorer.index.clear()
        logger.info("%s: a synthetic prompt went through every part in %.2f s", NAME, perf_counter() - begun)

    def _any_text(self) -> tuple[int, ...]:
        """A text's tokens, which a scoring model with another tokenizer reads too; without a tokenizer any."""
        model, tokenizer = self._scheduler.model_config, self._scheduler.tokenizer
        room = min(int(model.context_len) // 2, _NUM_TEST_CHUNKS * self.config.prefill.chunk_size)
        if tokenizer is not None:
            return tuple(tokenizer(_TEST_TEXT * room, add_special_tokens=False).input_ids[:room])
        return tuple(at * 7 % min(int(model.vocab_size), 1000) for at in range(room))
