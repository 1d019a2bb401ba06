"""How far a batch drafts: this project's policies behind SGLang's AdaptiveSpecPolicy. No SGLang here."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from time import perf_counter, process_time
from typing import Any

import torch

from spec_stack.config import MAX_GAMMA
from spec_stack.controller.base import BatchMember, DraftSignals, Policy, StepContext, StepRecord
from spec_stack.controller.batch import BatchThroughput
from spec_stack.devices import to_device
from spec_stack.sglang.guards import harmless, note_failure
from spec_stack.sglang.launch_notes import graph_sizes
from spec_stack.sglang.penalties import SaidTokens, count_one_by_one, has_penalties, is_penalised, tables
from spec_stack.sglang.protocols import RunningRequest
from spec_stack.sglang.request_state import RequestOptions, note_step, options_of
from spec_stack.sglang.server_args import ServerConfig
from spec_stack.sglang.signals import as_signals

# Without captured graphs.
_SHOWN_SIZES = (1, 2, 4, 8, 16, 32)


@dataclass
class Pending:
    """A decode step that has begun and whose result has not come yet.

    follows_a_step: nothing but decode steps ran since the step before it began, so that the end of that step is the
    beginning of this one's seconds. caps: the most tokens that may be accepted of each request's proposal. lag: as in
    StepContext. signals: the draft's, as `DraftSignalBuffers.of_step` gives them, on their way to the host.
    """

    number: int
    gamma: int
    policy: Policy
    requests: list[RunningRequest]
    follows_a_step: bool
    caps: list[int]
    lag: int
    signals: torch.Tensor | None = None

    def ended(self, now: float, previous_end: float | None) -> float | None:
        """Seconds the step took, now that its result is here; None where they are not known to be its own."""
        return now - previous_end if self.follows_a_step and previous_end is not None else None


class BatchPolicy:
    """Chooses one gamma for each step of a batch, and learns from what the step brought.

    Requests may ask for a gamma or a policy. A gamma is a request's own cap: the batch drafts as far as the others
    want, and no token of that request beyond its cap is accepted. Where all of a batch ask for one, it drafts as far as
    the largest. The policy is the one asked for, where all that ask agree, else the server's.

    Notes
    -----
    A step's seconds run from the end of the step before to its own end, so they hold everything that a step costs.
    Under overlap scheduling the next step begins before the result of this one is known::

        begins       1    2    3    prefill    4    5    6
        result            1    2    3               4    5
        has seconds       no   yes  no              no   yes

    Step 1 has no step before it. Step 3 is still to end when the prefill begins, and step 4 follows the prefill, so
    the seconds of both may hold it: they teach about acceptance alone. A policy observes one record per request, each
    with its share of the seconds, unless its cap cut it: its gamma is its own then, and the seconds are of another.

    When step 3 is chosen, the newest result is that of step 1: a lag of 2. Without overlap it is 1.
    """

    def __init__(
        self,
        config: ServerConfig,
        precision: str,
        agree: Callable[[int, bool], tuple[int, bool]] = lambda gamma, knows: (gamma, knows),
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """agree makes the ranks of a group that must take the same step take one rank's gamma, and tells whether all of
        them know their requests' caps. It is asked once in every step, whatever has failed."""
        self._config = config
        self._precision = precision
        self._agree = agree
        self._clock = clock
        self._policies: dict[str, Policy] = {}
        # Stands for a policy that failed.
        self._cautious = config.make_policy("fixed")
        self._requests: Sequence[RunningRequest] = ()
        self._pending: deque[Pending] = deque()
        self._number = 0
        self._last: StepRecord | None = None
        self._previous_end: float | None = None
        self._only_steps_ran = False
        self._said: _Said | None = None
        self.graph_sizes: list[int] | None = None
        self.num_proposed = self.num_accepted = self.num_steps = 0

    # SGLang's AdaptiveSpecPolicy

    @property
    def candidate_steps(self) -> list[int]:
        return list(self._config.gammas)

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        self.graph_sizes = cuda_graph_bs

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """The batch sizes that may meet this gamma, for which alone its graphs are captured; None without graphs."""
        if self.graph_sizes is None:
            return None
        return graph_sizes(self._config, self.graph_sizes, step)

    def get_steps_for_batch(self, batch_size: int) -> int:
        """The gamma of the step that begins now."""
        padded = self._padded(batch_size)
        gammas = self._config.gammas_at(padded)
        caps, knows, num_slots, options = [0] * len(self._requests), False, 0, list[RequestOptions]()
        with harmless("reading requests' gammas", "the step drafts as little as it may"):
            options = [options_of(request) for request in self._requests]
            caps, knows = list(map(_cap, self._requests, options)), True
            num_slots = _mean_slots(self._requests)
        context = StepContext(
            step=self._number,
            max_gamma=gammas[-1],
            last=self._last,
            precision=self._precision,
            batch_size=padded,
            lag=len(self._pending) + 1,
            members=tuple(
                BatchMember(str(request.rid), cap) for request, cap in zip(self._requests, caps, strict=True)
            ),
            num_target_slots=num_slots,
        )
        policy, wanted = self._cautious, 0
        with harmless("choosing gamma", "the step drafts as little as it may"):
            name, asked = self._rule(caps, options)
            policy = self._policy(name)
            wanted = policy.choose(context) if asked is None else asked
        gamma, all_know = self._agree(_largest_up_to(wanted, gammas), knows)
        if not all_know:
            # Where one rank accepts nothing of a proposal, none may.
            caps, gamma = [0] * len(caps), gammas[0]
        self._pending.append(
            Pending(self._number, gamma, policy, list(self._requests), self._only_steps_ran, caps, context.lag)
        )
        self._only_steps_ran = True
        self._number += 1
        return gamma

    def on_state_activated(self, steps: int) -> None:
        """Told by later versions of SGLang which gamma holds now, which is the one that was chosen."""

    def on_verify_complete(
        self, num_correct_drafts_per_req: list[int], batch_size: int, num_steps: int | None = None
    ) -> None:
        """Learn from the oldest step whose result has not come yet. num_steps: its gamma, which is known here too; only
        later versions of SGLang tell it."""
        now = self._clock()
        while self._pending and len(self._pending[0].requests) != batch_size:
            self._pending.popleft()
        if not self._pending:
            return
        step = self._pending.popleft()
        seconds = step.ended(now, self._previous_end)
        self._previous_end = now
        self.num_steps += 1
        signals = [_NO_SIGNALS] * batch_size
        with harmless("reading the draft's signals", "none are known of the step"):
            if step.signals is not None:
                signals = as_signals(step.signals)
        for request, num_correct, cap, known in zip(
            step.requests, num_correct_drafts_per_req, step.caps, signals, strict=True
        ):
            if request.is_retracted or request.finished():
                # It ended, or was taken back, while this step ran: its tokens are thrown away.
                continue
            # `harmless` at this place would cost as much as what it guards.
            try:
                record = self._record(step, request, num_correct, cap, known, seconds)
                note_step(request, record)
                self.num_proposed += record.gamma
                self.num_accepted += record.num_accepted
                self._last = record
                step.policy.observe(record)
            except Exception:
                note_failure("learning from a step", "nothing is learned from it")

    def _record(
        self,
        step: Pending,
        request: RunningRequest,
        num_correct: int,
        cap: int,
        known: tuple[DraftSignals, DraftSignals | None],
        seconds: float | None,
    ) -> StepRecord:
        gamma = min(step.gamma, cap)
        proposed, upcoming = known
        num_accepted = min(num_correct, gamma)
        return StepRecord(
            request_id=str(request.rid),
            step=step.number,
            policy=step.policy.name,
            precision=self._precision,
            task="",
            is_prefill=False,
            keep_rate=1.0,
            gamma=gamma,
            num_accepted=num_accepted,
            num_tokens=num_accepted + 1,
            signals=proposed
            if len(proposed) <= gamma
            else DraftSignals(proposed.entropy[:gamma], proposed.confidence[:gamma]),
            draft_s=0.0,
            # Not finite is how a record says that its seconds are not known.
            verify_s=math.nan if seconds is None or gamma < step.gamma else seconds / len(step.requests),
            controller_s=0.0,
            lag=step.lag,
            upcoming=upcoming,
        )

    def step_seconds(self) -> dict[int, dict[int, float]]:
        """Seconds of a step by batch size, by gamma, as the server's policy knows them; empty where it has none."""
        policy = self._policies.get(self._config.policy)
        sizes = self.graph_sizes or _SHOWN_SIZES
        return policy.step_seconds(sizes) if isinstance(policy, BatchThroughput) else {}

    # The worker's side

    def begin_step(self, requests: Sequence[RunningRequest]) -> None:
        """Told the requests of the decode step that comes next."""
        self._requests = requests

    @property
    def caps(self) -> list[int]:
        """The most tokens that may be accepted of each request's proposal, in the step that was chosen last."""
        return self._pending[-1].caps

    def count_penalties(self, sampling_info: Any, newest: torch.Tensor, num_held: torch.Tensor) -> None:
        """Make SGLang's penalties exact for the step that was chosen last.

        newest: (num_requests,), the tokens it goes on from. num_held: (num_requests,), the tokens before them, prompts
        and what was said.
        """
        step, said, self._said = self._pending[-1], self._said, None
        try:
            if said is None or not said.holds_for(step):
                said = _Said.of(step.requests, sampling_info, num_held.device)
            if said is None:
                return
            said.tokens.count(sampling_info, newest, num_held + 1 - said.tokens.num_prompt_tokens)
            said.number = step.number
            self._said = said
        except Exception:
            num_said = num_held.cpu() + 1 - torch.tensor([len(request.origin_input_ids) for request in step.requests])
            _count_one_by_one(sampling_info, step.requests, newest, num_said)

    def count_penalties_of_prefill(
        self, sampling_info: Any, requests: Sequence[RunningRequest], device: torch.device
    ) -> None:
        """Make SGLang's penalties exact for a prefill, which may repeat what requests had said before they were
        retracted. device: where SGLang's tensors are."""
        if not any(request.output_ids and has_penalties(request) for request in requests):
            return
        num_said = to_device(torch.tensor([len(request.output_ids) for request in requests]), device)
        newest = torch.zeros_like(num_said)
        try:
            if said := _Said.of(requests, sampling_info, device):
                said.tokens.count(sampling_info, newest, num_said)
        except Exception:
            _count_one_by_one(sampling_info, requests, newest, num_said)

    def carry(self, signals: torch.Tensor) -> None:
        """Given the draft's signals in the step that was chosen last, which are read when its result is."""
        self._pending[-1].signals = signals

    def something_else_runs(self) -> None:
        """Told that a prefill, or the scoring of a prompt, runs now: no seconds that hold it are a step's own."""
        self._only_steps_ran = False
        # A prefill may be of a request whose tokens were taken back.
        self._said = None
        for step in self._pending:
            step.follows_a_step = False

    def _rule(self, caps: Sequence[int], options: Sequence[RequestOptions]) -> tuple[str, int | None]:
        if caps and not max(caps):
            return "fixed", 0
        asked = [option.gamma for option in options if option.gamma is not None]
        if asked and len(asked) == len(options):
            return "fixed", max(asked)
        names = {option.policy for option in options if option.policy is not None and option.gamma is None}
        return (names.pop() if len(names) == 1 else self._config.policy), None

    def _policy(self, name: str) -> Policy:
        if name not in self._policies:
            self._policies[name] = self._config.make_policy(name)
        return self._policies[name]

    def _padded(self, batch_size: int) -> int:
        """The size of the captured graph that a batch runs in, if one does."""
        return min((size for size in self.graph_sizes or () if size >= batch_size), default=batch_size)


def step_clock(device: str) -> Callable[[], float]:
    """Return what a step's seconds are read from: this process's own CPU seconds where it computes on one core, which
    other work on the machine does not stretch."""
    return process_time if device == "cpu" and torch.get_num_threads() == 1 else perf_counter


_NO_SIGNALS: tuple[DraftSignals, DraftSignals | None] = (DraftSignals(), None)


@dataclass
class _Said:
    """What a batch's requests have said, up to the step of this number."""

    requests: Sequence[RunningRequest]
    tokens: SaidTokens
    number: int = -1

    @classmethod
    def of(cls, requests: Sequence[RunningRequest], sampling_info: Any, device: torch.device) -> _Said | None:
        """None where SGLang keeps no penalties for any of them."""
        kept = tables(sampling_info)
        if not kept or not any(has_penalties(request) for request in requests):
            return None
        return cls(requests, SaidTokens(requests, kept[0].shape[1], device))

    def holds_for(self, step: Pending) -> bool:
        """Return whether this step is the next one, of the same requests: each has said one token since."""
        return (
            step.number == self.number + 1
            and len(step.requests) == len(self.requests)
            and all(map(is_, step.requests, self.requests))
        )


def _count_one_by_one(
    sampling_info: Any, requests: Sequence[RunningRequest], newest: torch.Tensor, num_said: torch.Tensor
) -> None:
    """With other penalties the text would be wrong, so there is a second way, slow and plain."""
    note_failure("counting penalties", "they are counted one by one")
    count_one_by_one(sampling_info, requests, newest, num_said)


def _cap(request: RunningRequest, options: RequestOptions) -> int:
    if is_penalised(request):
        return 0
    return MAX_GAMMA if options.gamma is None else options.gamma


def _mean_slots(requests: Sequence[RunningRequest]) -> int:
    """Tokens that a request's rows attend to, in the mean."""
    return sum(len(request.origin_input_ids) + len(request.output_ids) for request in requests) // max(len(requests), 1)


def _largest_up_to(gamma: int, gammas: Sequence[int]) -> int:
    """The largest of the candidates that is not over gamma; the smallest candidate where all are."""
    return max((candidate for candidate in gammas if candidate <= gamma), default=gammas[0])
