"""How far a batch drafts: this project's policies behind SGLang's AdaptiveSpecPolicy. No SGLang here."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from spec_stack.controller.base import DraftSignals, GammaPolicy, StepContext, StepRecord
from spec_stack.sglang.request_state import STATE, RequestState, note_step
from spec_stack.sglang.server_args import ServerConfig


@dataclass(frozen=True)
class _Step:
    number: int
    gamma: int
    policy: GammaPolicy
    requests: list[Any]
    follows_a_step: bool


class BatchGamma:
    """Chooses one gamma for each step of a batch, and learns from what the step brought.

    Requests may ask for a gamma or a policy. While some do, the smallest gamma asked for holds for the whole batch;
    else the one policy asked for, where all that ask agree; else the server's. A step's seconds run from the end of the
    step before to its own end, so they hold everything that a step costs; after a prefill they are not known. A policy
    observes one record per request, each with its share of them.
    """

    def __init__(
        self,
        config: ServerConfig,
        precision: str,
        agree: Callable[[int], int] = lambda gamma: gamma,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """agree makes the ranks of a group that must take the same step take one rank's choice."""
        self._config = config
        self._precision = precision
        self._agree = agree
        self._clock = clock
        self._policies: dict[str, GammaPolicy] = {}
        self._requests: Sequence[Any] = ()
        self._steps: deque[_Step] = deque()
        self._number = 0
        self._last: StepRecord | None = None
        self._ended_at = math.nan
        self._interrupted = True
        self._graph_sizes: list[int] | None = None

    # SGLang's AdaptiveSpecPolicy

    @property
    def candidate_steps(self) -> list[int]:
        return list(self._config.gammas)

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        self._graph_sizes = cuda_graph_bs

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """Every batch size may meet every gamma."""
        return self._graph_sizes

    def get_steps_for_batch(self, batch_size: int) -> int:
        """The gamma of the step that begins now."""
        policy, asked = self._rule()
        context = StepContext(
            step=self._number,
            max_gamma=self._config.gammas[-1],
            last=self._last,
            precision=self._precision,
            batch_size=batch_size,
        )
        gamma = asked if asked is not None else self._among_candidates(policy.choose(context))
        gamma = self._agree(gamma)
        self._steps.append(_Step(self._number, gamma, policy, list(self._requests), not self._interrupted))
        self._interrupted = False
        self._number += 1
        return gamma

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> None:
        """Learn from a step. Under overlap scheduling its result comes while the next one runs already."""
        now = self._clock()
        while self._steps and len(self._steps[0].requests) != batch_size:
            self._steps.popleft()
        if not self._steps:
            return None
        step = self._steps.popleft()
        seconds = now - self._ended_at if step.follows_a_step else math.nan
        self._ended_at = now
        for request, num_correct in zip(step.requests, num_correct_drafts_per_req, strict=True):
            if request.is_retracted or request.finished():
                # It ended, or was taken back, while this step ran: its tokens are thrown away.
                continue
            num_accepted = min(num_correct, step.gamma)
            note_step(request, step.gamma, num_accepted)
            self._last = StepRecord(
                request_id=str(request.rid),
                step=step.number,
                policy=step.policy.name,
                precision=self._precision,
                task="",
                is_prefill=False,
                keep_rate=1.0,
                gamma=step.gamma,
                num_accepted=num_accepted,
                num_tokens=num_accepted + 1,
                signals=DraftSignals(),
                draft_s=0.0,
                verify_s=seconds / batch_size,
                controller_s=0.0,
            )
            step.policy.observe(self._last)
        return None

    # The worker's side

    def begin(self, requests: Sequence[Any]) -> None:
        """Told the requests of the decode step that comes next."""
        self._requests = requests

    def interrupt(self) -> None:
        """Told that something else than a decode step runs now: the next step's seconds are not its own, nor are those
        of steps that have not ended."""
        self._interrupted = True
        self._steps = deque(replace(step, follows_a_step=False) for step in self._steps)

    def _rule(self) -> tuple[GammaPolicy, int | None]:
        states = [getattr(request, STATE, None) for request in self._requests]
        options = [state.options for state in states if isinstance(state, RequestState)]
        asked = [option.gamma for option in options if option.gamma is not None]
        if asked:
            return self._policy("fixed"), min(asked)
        names = {option.policy for option in options if option.policy is not None}
        return self._policy(names.pop() if len(names) == 1 else self._config.policy), None

    def _policy(self, name: str) -> GammaPolicy:
        if name not in self._policies:
            self._policies[name] = self._config.make_policy(name)
        return self._policies[name]

    def _among_candidates(self, gamma: int) -> int:
        below = [candidate for candidate in self._config.gammas if candidate <= gamma]
        return below[-1] if below else self._config.gammas[0]
