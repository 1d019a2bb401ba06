"""Which rounds of the scheduler's loop scoring may use. No SGLang here.

SGLang prefills before it decodes, and a part of a scoring stands before both. Whoever has got no token since the last
of either must not wait for another: so between two prefill batches, two parts, or one of each, there is a decode step
while anything runs, and its tokens come no later than one chunk's work and a step.
"""

from __future__ import annotations

from spec_stack.sglang.protocols import RunningRequest, Scheduler

# Most tokens of a part while anything runs: its forward holds up the running requests' next tokens.
_MOST_BESIDE = 2048


class Rounds:
    """One scheduler's rounds. Asked once at the beginning of each in which prompts wait for their scoring.

    decode_interval: decode steps after a prefill batch, where the launch set no `--prefill-decode-interval`. Below a
    `--prefill-decode-interval-min-bs` (SGLang 0.5.23) prefills come in every round, as the launch wants it, and parts
    in every other one.
    """

    def __init__(self, scheduler: Scheduler, decode_interval: int) -> None:
        self._scheduler = scheduler
        self._scored_last = False
        # SGLang reads it before every prefill batch.
        if not scheduler.prefill_decode_interval:
            scheduler.prefill_decode_interval = decode_interval

    def may_prefill(self) -> bool:
        """Return whether the round that begins may hold a prefill batch. Where one has just run, those who waited for
        it get their tokens first."""
        if not self._scheduler._prefill_decode_interval_remaining or not self._anything_runs():
            return True
        # Below it SGLang puts nothing off, whatever remains of the interval.
        least = getattr(self._scheduler, "prefill_decode_interval_min_bs", 0)
        return bool(least) and self._num_running() < least

    def most_of_a_part(self, chunk: int) -> int:
        """Return how many tokens the draft may take in at once, where it could take a chunk."""
        return min(chunk, _MOST_BESIDE) if self._anything_runs() else chunk

    def is_for_scoring(self, unscored: set[int]) -> bool:
        """Return whether the round that begins does a part of a scoring, and then no prefill while anything runs.

        unscored: id() of the waiting requests that are not ready to be prefilled. Mutates the scheduler: it puts the
        round's prefill off by one round.
        """
        scheduler = self._scheduler
        if not self.may_prefill():
            return False
        is_ready = scheduler.chunked_req is not None or any(id(it) not in unscored for it in scheduler.waiting_queue)
        if is_ready and self._scored_last:
            self._scored_last = False
            return False
        self._scored_last = True
        if self._anything_runs():
            scheduler._prefill_decode_interval_remaining = 1
        return True

    def _anything_runs(self) -> bool:
        return not self._scheduler.running_batch.is_empty() or bool(self._just_prefilled())

    def _num_running(self) -> int:
        """The size of the running batch when SGLang asks for it, later in this round: without those that have ended."""
        running = [request for request in self._scheduler.running_batch.reqs if not request.finished()]
        return len({id(request) for request in (*running, *self._just_prefilled())})

    def _just_prefilled(self) -> list[RunningRequest]:
        """Those of the last batch that join the running batch later in this round, or are in it."""
        scheduler = self._scheduler
        last: list[RunningRequest] = [] if scheduler.last_batch is None else scheduler.last_batch.reqs
        return [request for request in last if request is not scheduler.chunked_req and not request.finished()]
