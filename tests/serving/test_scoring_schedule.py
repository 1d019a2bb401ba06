"""Between two pieces of work that make running requests wait there is a decode step, and nobody is left out."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import pytest

from spec_stack.sglang.manager import ScoringSchedule

SCORE, PREFILL, DECODE, NOTHING = "score", "prefill", "decode", "nothing"


@dataclass
class Request:
    num_unscored: int
    num_chunks: int
    num_new: int
    priority: int = 0

    def finished(self) -> bool:
        return self.num_chunks == 0 and self.num_new == 0


@dataclass
class Batch:
    reqs: list[Request] = field(default_factory=list)
    batch_is_full: bool = False

    def is_empty(self) -> bool:
        return not self.reqs


class Loop:
    """SGLang's loop in small: prefill batches before decode steps, one chunk each, an interval between them."""

    def __init__(
        self, decode_interval: int, min_batch_size: int = 0, max_running: int = 100, given: int | None = None
    ) -> None:
        self.max_running_requests = max_running
        self.enable_priority_scheduling = self.schedule_low_priority_values_first = False
        self.server_args = SimpleNamespace(prefill_decode_interval=given)
        self.waiting_queue: list[Request] = []
        self.running_batch = Batch()
        self.last_batch: Batch | None = None
        self.chunked_req: Request | None = None
        self.prefill_decode_interval = given or 0
        self.chunked_prefill_size: int | None = None
        self._prefill_decode_interval_remaining = 0
        self.prefill_decode_interval_min_bs = min_batch_size
        self.rounds = ScoringSchedule(self, decode_interval)  # type: ignore[arg-type]
        self.done: list[str] = []

    def turn(self) -> None:
        unscored = [request for request in self.waiting_queue if request.num_unscored]
        unscored.sort(key=self.rounds.rank_of)  # type: ignore[arg-type]
        if unscored and self.rounds.is_for_scoring(unscored[0], {id(request) for request in unscored}):  # type: ignore[arg-type]
            unscored[0].num_unscored -= 1
            self.done.append(SCORE)
        if self.last_batch is not None:
            self.running_batch.reqs += [it for it in self.last_batch.reqs if not it.num_chunks and not it.finished()]
        self.last_batch = None
        if self._prefill_decode_interval_remaining and not self.is_small:
            self._prefill_decode_interval_remaining -= 1
        else:
            self._prefill_decode_interval_remaining = 0
            if self.chunked_req is None:
                ready = [request for request in self.waiting_queue if not request.num_unscored]
                ready.sort(key=self.rounds.rank_of)  # type: ignore[arg-type]
                if ready and self.rounds.num_startable():
                    self.chunked_req = ready[0]
                    self.waiting_queue.remove(ready[0])
            if self.chunked_req is not None:
                return self.prefill(self.chunked_req)
        if self.running_batch.is_empty():
            self.done.append(NOTHING)
            return None
        self.done.append(DECODE)
        for request in self.running_batch.reqs:
            request.num_new -= 1
        self.running_batch.reqs = [request for request in self.running_batch.reqs if request.num_new]
        return None

    @property
    def is_small(self) -> bool:
        return len(self.running_batch.reqs) < self.prefill_decode_interval_min_bs

    def prefill(self, request: Request) -> None:
        self.done.append(PREFILL)
        request.num_chunks -= 1
        self.last_batch = Batch([request])
        if not request.num_chunks:
            self.chunked_req = None
        self._prefill_decode_interval_remaining = self.prefill_decode_interval


@pytest.mark.parametrize("seed", range(20))
def test_running_requests_wait_for_one_part_or_one_chunk_and_every_prompt_gets_its_turn(seed: int) -> None:
    rng = random.Random(seed)
    loop = Loop(decode_interval=1)
    loop.running_batch.reqs = [Request(0, 0, 100_000)]
    for _ in range(400):
        if rng.random() < 0.05:
            loop.waiting_queue.append(Request(rng.choice((0, 3, 12)), rng.randint(1, 5), rng.randint(1, 9)))
        loop.turn()
    while loop.waiting_queue or loop.chunked_req:
        assert len(loop.done) < 5000, "somebody is never served"
        loop.turn()
    assert {SCORE, PREFILL, DECODE} == set(loop.done)
    assert not [pair for pair in pairwise(loop.done) if DECODE not in pair]


def test_prompts_are_scored_and_prefilled_in_a_row_while_nothing_runs() -> None:
    loop = Loop(decode_interval=1)
    loop.waiting_queue = [Request(4, 1, 1)]
    for _ in range(6):
        loop.turn()
    assert [each for each in loop.done if each != NOTHING] == [SCORE] * 4 + [PREFILL, DECODE]


def test_a_prompt_that_is_ready_goes_before_the_next_part_of_a_scoring() -> None:
    """Without anybody running: what arrives during a part waits for the rest of that part alone."""
    loop = Loop(decode_interval=1)
    loop.waiting_queue = [Request(8, 1, 1)]
    loop.turn()
    loop.waiting_queue.append(Request(0, 1, 1))
    loop.turn()
    assert loop.done == [SCORE, NOTHING, PREFILL]


@pytest.mark.parametrize("min_batch_size", [0, 1, 3, 4, 100])
@pytest.mark.parametrize("num_running", [0, 1, 3, 5])
def test_ready_prompts_do_not_keep_others_from_being_scored_below_the_size_of_an_interval(
    min_batch_size: int, num_running: int
) -> None:
    """SGLang 0.5.23 prefills in every round there. From the size on there is a decode step between two pieces."""
    loop = Loop(decode_interval=1, min_batch_size=min_batch_size)
    loop.running_batch.reqs = [Request(0, 0, 1000) for _ in range(num_running)]
    loop.waiting_queue = [Request(10, 1, 1)]
    for _ in range(60):
        loop.waiting_queue.append(Request(0, 2, 1))
        loop.turn()
    assert loop.done.count(SCORE) == 10
    assert loop.done.count(PREFILL) >= 10
    if num_running and num_running >= min_batch_size:
        assert not [pair for pair in pairwise(loop.done) if DECODE not in pair]


def test_who_has_just_been_prefilled_counts_for_the_size_of_an_interval() -> None:
    loop = Loop(decode_interval=1, min_batch_size=2)
    loop.running_batch.reqs = [Request(0, 0, 3)]
    loop._prefill_decode_interval_remaining = 1
    assert loop.rounds.may_prefill()
    loop.last_batch = Batch([Request(0, 0, 3)])
    assert not loop.rounds.may_prefill()
    # The last batch of a decode step is the running one.
    loop.last_batch = loop.running_batch
    assert loop.rounds.may_prefill()


def test_the_launchs_own_interval_stays() -> None:
    assert [Loop(1, given=given).prefill_decode_interval for given in (None, 0, 4)] == [1, 0, 4]


def test_one_prompt_is_scored_ahead_while_none_can_start() -> None:
    loop = Loop(decode_interval=1, max_running=2)
    loop.running_batch.reqs = [Request(0, 0, 50), Request(0, 0, 60)]
    loop.waiting_queue = [Request(3, 1, 1) for _ in range(8)]
    for _ in range(45):
        loop.turn()
    assert loop.done.count(SCORE) == 3
    while loop.waiting_queue or loop.chunked_req:
        assert len(loop.done) < 500, "somebody is never served"
        loop.turn()
    assert loop.done.count(SCORE) == 24


def test_short_prompts_that_come_later_do_not_keep_a_prompt_unscored() -> None:
    loop = Loop(decode_interval=1, max_running=1)
    loop.running_batch.reqs = [Request(0, 0, 5)]
    loop.waiting_queue = [Request(0, 1, 3), Request(4, 1, 1)]
    for _ in range(60):
        loop.waiting_queue.append(Request(0, 1, 3))
        loop.turn()
    assert loop.done.count(SCORE) == 4


@pytest.mark.parametrize("low_first", [False, True])
def test_prompts_are_scored_in_the_order_of_their_priorities(low_first: bool) -> None:
    loop = Loop(decode_interval=1)
    loop.enable_priority_scheduling, loop.schedule_low_priority_values_first = True, low_first
    urgent = Request(2, 1, 1, priority=-9 if low_first else 9)
    loop.waiting_queue = [*(Request(2, 1, 1) for _ in range(4)), urgent]
    for _ in range(2):
        loop.turn()
    assert urgent.num_unscored == 0
    assert all(request.num_unscored == 2 for request in loop.waiting_queue if request is not urgent)


def test_a_part_is_short_while_anybody_waits_for_it() -> None:
    loop = Loop(1)
    lengths = (16, 512, 2048, 2049, 8192)
    assert [loop.rounds.most_of_a_part(length) for length in lengths] == [*lengths]
    short = [16, 512, 2048, 2048, 2048]
    loop.last_batch = Batch([Request(0, 0, 3)])
    assert [loop.rounds.most_of_a_part(length) for length in lengths] == short
    loop.last_batch, loop.running_batch.reqs = None, [Request(0, 0, 3)]
    assert [loop.rounds.most_of_a_part(length) for length in lengths] == short
    # What is prefilled in chunks waits for parts anyway.
    loop.running_batch.reqs, loop.chunked_req = [], Request(0, 2, 3)
    loop.last_batch = Batch([loop.chunked_req])
    assert loop.rounds.most_of_a_part(8192) == 8192
    loop.chunked_prefill_size = 512
    assert loop.rounds.most_of_a_part(8192) == 512
