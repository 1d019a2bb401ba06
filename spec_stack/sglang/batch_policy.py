"""Gamma for a batch: this project's policies behind SGLang's AdaptiveSpecPolicy. No SGLang import."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter, process_time
from typing import Any

import torch

from spec_stack.config import MAX_GAMMA
from spec_stack.controller.base import BatchRequest, DraftSignals, Policy, StepContext, StepRecord, chosen_gamma
from spec_stack.controller.batch import BatchThroughput
from spec_stack.sglang.errors import log_failure
from spec_stack.sglang.penalties import is_penalised
from spec_stack.sglang.request import KEY, NO_OPTIONS, RequestOptions, RunningRequest, note_step
from spec_stack.sglang.server_args import ServerConfig

# Without captured graphs.
_SHOWN_SIZES = (1, 2, 4, 8, 16, 32)
_NO_SIGNALS = DraftSignals()
# Steps without a result when one arrives: its own, and under overlap scheduling the next one.
_MOST_PENDING = 2
# A request's stays the same for many steps.
_member = lru_cache(maxsize=4096)(BatchRequest)


@dataclass
class Pending:
    """A running decode step without a result.

    follows_a_step: only decode steps ran since the step before began. caps: most accepted tokens per request.
    """

    number: int
    gamma: int
    policy: Policy
    requests: list[RunningRequest]
    follows_a_step: bool
    caps: list[int]


class BatchPolicy:
    """Chooses one gamma for each step of a batch, and learns from the results.

    A request's own gamma is a cap on its accepted tokens. Where all requests have a gamma, the largest holds. The
    policy is the requested one where all requests that name one agree, else the server's.

    Notes
    -----
    A step's seconds run from the end of the step before to its own end. Under overlap scheduling the next step begins
    before the result of this one is known::

        begins       1    2    3    prefill    4    5    6
        result            1    2    3               4    5
        has seconds       no   yes  no              no   yes

    Step 3 may overlap the prefill, and step 4 follows it, so both update acceptance alone. A policy observes one record
    per request with an equal share of the seconds; a record whose cap cut it has no seconds. When step 3 is chosen, the
    newest result is that of step 1.
    """

    def __init__(
        self,
        config: ServerConfig,
        precision: str,
        agree: Callable[[int, bool], tuple[int, bool]] = lambda gamma, knows: (gamma, knows),
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """agree: called once per step, whatever has failed. It returns the first rank's gamma to all ranks, and whether
        all of them know their requests' caps.
        """
        self._config, self._gammas_at = config, lru_cache(config.gammas_at)
        self._precision = precision
        self._agree = agree
        self._clock = clock
        self._policies: dict[str, Policy] = {}
        # Replaces a policy that failed.
        self._cautious = config.make_policy("fixed")
        self._requests: Sequence[RunningRequest] = ()
        self._pending: deque[Pending] = deque()
        self._number = 0
        self._last: StepRecord | None = None
        self._previous_end = math.nan
        self._only_steps_ran = False
        # Batch sizes and gammas of the steps so far.
        self._known_shapes: set[tuple[int, int]] = set()
        self.graph_sizes: list[int] | None = None
        self.num_proposed = self.num_accepted = self.num_steps = 0

    # SGLang's AdaptiveSpecPolicy

    @property
    def candidate_steps(self) -> list[int]:
        return list(self._config.gammas)

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        self.graph_sizes = None if cuda_graph_bs is None else sorted(cuda_graph_bs)

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """The batch sizes for which this gamma's graphs are captured; None without graphs."""
        return None if self.graph_sizes is None else self._config.sizes_for(step, self.graph_sizes)

    def get_steps_for_batch(self, batch_size: int) -> int:
        padded = self._padded(batch_size)
        gammas = self._gammas_at(padded)
        policy, wanted, knows = self._cautious, 0, True
        # `log_and_continue` would cost as much as what it guards.
        try:
            options = [getattr(request, KEY, NO_OPTIONS) for request in self._requests]
            caps = list(map(_cap, self._requests, options))
            name, requested = self._rule(caps, options)
            policy = self._policy(name)
            context = self._context(padded, gammas[-1], caps)
            wanted = chosen_gamma(policy, context) if requested is None else requested
        except Exception:
            log_failure("choosing gamma", "the step drafts as little as it may, and nothing of it is accepted")
            policy, knows = self._cautious, False
        fitting = max((candidate for candidate in gammas if candidate <= wanted), default=gammas[0])
        gamma, all_know = self._agree(fitting, knows)
        if not all_know:
            # Where one rank accepts nothing of a proposal, none may.
            caps, gamma = [0] * len(self._requests), gammas[0]
        if (padded, gamma) not in self._known_shapes:
            # Its kernels are compiled on the host while the results of the steps before it wait.
            self._known_shapes.add((padded, gamma))
            self.invalidate_step_timing()
        self._pending.append(Pending(self._number, gamma, policy, list(self._requests), self._only_steps_ran, caps))
        self._only_steps_ran = True
        self._number += 1
        return gamma

    def _context(self, batch_size: int, max_gamma: int, caps: list[int]) -> StepContext:
        members = [_member(str(request.rid), cap) for request, cap in zip(self._requests, caps, strict=True)]
        return StepContext(
            step=self._number,
            max_gamma=max_gamma,
            last=self._last,
            precision=self._precision,
            batch_size=batch_size,
            members=tuple(members),
            num_target_slots=_mean_slots(self._requests),
        )

    def on_state_activated(self, steps: int) -> None:
        """SGLang runs with this gamma from now on."""

    def on_verify_complete(
        self, num_correct_drafts_per_req: list[int], batch_size: int, num_steps: int | None = None
    ) -> None:
        """Learn from the pending step that this is the result of. num_steps: its gamma, where SGLang tells it."""
        now = self._clock()
        step = self._step_of(batch_size, max(num_correct_drafts_per_req, default=0), num_steps)
        if step is None:
            return
        # Each request's share of the step's seconds; NaN where other work may be in them.
        share_s = (now - self._previous_end) / batch_size if step.follows_a_step else math.nan
        self._previous_end = now
        self.num_steps += 1
        for request, num_correct, cap in zip(step.requests, num_correct_drafts_per_req, step.caps, strict=True):
            try:
                if request.is_retracted or request.finished():
                    # It ended, or was retracted, while this step ran: its tokens are discarded.
                    continue
                record = self._record(step, request, min(step.gamma, cap), num_correct, share_s)
                note_step(request, record)
                self.num_proposed += record.gamma
                self.num_accepted += record.num_accepted
                self._last = record
                step.policy.observe(record)
            except Exception:
                log_failure("learning from a step", "nothing is learned from it")

    def _step_of(self, batch_size: int, most_correct: int, num_steps: int | None) -> Pending | None:
        """Take the oldest pending step with such a result; the ones before it have lost theirs."""
        while len(self._pending) > _MOST_PENDING:
            self._pending.popleft()
        for number, step in enumerate(self._pending):
            fits = step.gamma >= most_correct if num_steps is None else step.gamma == num_steps
            if fits and len(step.requests) == batch_size:
                for _ in range(number + 1):
                    self._pending.popleft()
                return step
        return None

    def _record(
        self, step: Pending, request: RunningRequest, gamma: int, num_correct: int, share_s: float
    ) -> StepRecord:
        num_accepted = min(num_correct, gamma)
        # By place: keywords take twice as long, and this is made for every request and step.
        return StepRecord(
            str(request.rid),
            step.number,
            step.policy.name,
            self._precision,
            "",  # task
            False,  # is_prefill
            1.0,  # keep_rate
            gamma,
            num_accepted,
            num_accepted + 1,
            _NO_SIGNALS,
            0.0,  # draft_s
            # Not finite marks unknown seconds in a record.
            share_s if gamma == step.gamma else math.nan,
            0.0,  # policy_s
        )

    def state(self) -> dict[str, Any]:
        """Counters, and the server's policy's seconds of a step by batch size and gamma, where it has them."""
        policy, sizes = self._policies.get(self._config.policy), self.graph_sizes or _SHOWN_SIZES
        return {
            "num_steps": self.num_steps,
            "num_proposed": self.num_proposed,
            "num_accepted": self.num_accepted,
            "step_seconds": policy.step_seconds(sizes) if isinstance(policy, BatchThroughput) else {},
        }

    # The worker's side

    def begin_step(self, requests: Sequence[RunningRequest]) -> None:
        self._requests = requests

    @property
    def caps(self) -> list[int]:
        """Most accepted tokens per request in the step chosen last."""
        return self._pending[-1].caps

    def invalidate_step_timing(self) -> None:
        """A prefill or a scoring runs: seconds that include it are not a step's own."""
        self._only_steps_ran = False
        for step in self._pending:
            step.follows_a_step = False

    def _rule(self, caps: Sequence[int], options: Sequence[RequestOptions]) -> tuple[str, int | None]:
        if caps and not max(caps):
            return "fixed", 0
        requested = [option.gamma for option in options if option.gamma is not None]
        if requested and len(requested) == len(options):
            return "fixed", max(requested)
        names = {option.policy for option in options if option.policy is not None and option.gamma is None}
        return (names.pop() if len(names) == 1 else self._config.policy), None

    def _policy(self, name: str) -> Policy:
        if name not in self._policies:
            self._policies[name] = self._config.make_policy(name)
        return self._policies[name]

    def _padded(self, batch_size: int) -> int:
        sizes = self.graph_sizes or ()
        at = bisect_left(sizes, batch_size)
        return sizes[at] if at < len(sizes) else batch_size


def step_clock(device: str) -> Callable[[], float]:
    """The clock of step seconds: on one core process CPU time, which other load on the machine does not stretch."""
    return process_time if device == "cpu" and torch.get_num_threads() == 1 else perf_counter


def end_chains(next_tokens: torch.Tensor, caps: Sequence[int]) -> None:
    """Let no request's proposal be accepted beyond its own cap. Mutates next_tokens (n, gamma + 1).

    SGLang's verification follows these pointers, -1 for the end: a shortened chain is a shorter, lossless proposal.
    """
    for row, cap in enumerate(caps):
        if cap < next_tokens.shape[1] - 1:
            next_tokens[row, cap].fill_(-1)


def _cap(request: RunningRequest, options: RequestOptions) -> int:
    if is_penalised(request):
        return 0
    return MAX_GAMMA if options.gamma is None else options.gamma


def _mean_slots(requests: Sequence[RunningRequest]) -> int:
    """Mean tokens that a request attends to."""
    return sum(len(request.origin_input_ids) + len(request.output_ids) for request in requests) // max(len(requests), 1)
