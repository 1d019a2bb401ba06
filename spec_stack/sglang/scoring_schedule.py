"""The scheduler rounds that scoring may use. No SGLang import.

Between two prefill batches, two scoring parts, or one of each, there is a decode step while anything runs.
"""

from __future__ import annotations

from typing import Any

from spec_stack.sglang.request_state import RunningRequest

# Most tokens of a part while anything runs: its forward delays the running requests' next tokens.
_MOST_BESIDE = 2048


class ScoringSchedule:
    """One scheduler's rounds. Asked once at the beginning of each in which prompts wait for their scoring.

    decode_interval: decode steps after a prefill batch, where the launch set no `--prefill-decode-interval`. Below a
    `--prefill-decode-interval-min-bs` (SGLang 0.5.23) every round may prefill, and every other one score.
    """

    def __init__(self, scheduler: Any, decode_interval: int) -> None:
        self._scheduler = scheduler
        self._scored_last = False
        # SGLang reads it before every prefill batch.
        if not scheduler.prefill_decode_interval:
            scheduler.prefill_decode_interval = decode_interval

    def may_prefill(self) -> bool:
        """Return whether this round may hold a prefill batch: after one, the running requests decode first."""
        if not self._scheduler._prefill_decode_interval_remaining or not self._anything_runs():
            return True
        # Below it SGLang delays nothing, whatever remains of the interval.
        least = getattr(self._scheduler, "prefill_decode_interval_min_bs", 0)
        return bool(least) and self._num_running() < least

    def most_of_a_part(self, chunk: int) -> int:
        return min(chunk, _MOST_BESIDE) if self._anything_runs() else chunk

    def is_for_scoring(self, unscored: set[int]) -> bool:
        """Return whether this round scores a part; it then holds no prefill while anything runs.

        unscored: id() of the waiting requests that are not ready to be prefilled. Mutates the scheduler: delays the
        round's prefill by one round.
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
        """The running batch's size later in this round, without ended requests."""
        running = [request for request in self._scheduler.running_batch.reqs if not request.finished()]
        return len({id(request) for request in (*running, *self._just_prefilled())})

    def _just_prefilled(self) -> list[RunningRequest]:
        """Requests of the last batch that join the running batch in this round, or are in it."""
        scheduler = self._scheduler
        last: list[RunningRequest] = [] if scheduler.last_batch is None else scheduler.last_batch.reqs
        return [request for request in last if request is not scheduler.chunked_req and not request.finished()]
