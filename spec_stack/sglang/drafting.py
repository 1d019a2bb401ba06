"""The drafts on a scheduler that scores: this project's worker, or SGLang's own algorithm or none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from spec_stack.sglang.active_gamma import num_overrides_kept
from spec_stack.sglang.launch_notes import DRAFT_AT_SLOTS, drafting_note, graphs_note, prunes
from spec_stack.sglang.others_drafts import OthersDrafts
from spec_stack.sglang.protocols import Scheduler
from spec_stack.sglang.server_args import ServerConfig
from spec_stack.sglang.support import NAME, draft_positions_are_mapped

logger = logging.getLogger(__name__)


class Drafting(Protocol):
    """The interface of scoring to decoding."""

    def announce(self, config: ServerConfig, refusal: str | None) -> None:
        """Log once how this server drafts. refusal: why no prompt may be pruned, or None."""

    def state(self) -> dict[str, Any]:
        """Counters, as /server_info shows them."""

    def something_else_runs(self) -> None:
        """Other work runs between decode steps: its time is not theirs."""

    def read(self, token_ids: Sequence[int], num_known: int) -> None:
        """Learn a pruned prompt, given whole; it may serve all requests. num_known: tokens of an earlier turn's."""

    def forget(self) -> None:
        """SGLang has emptied its caches."""

    def next_round(self) -> None:
        """A round of the scheduler begins."""


class OwnDrafts:
    """Those of SPEC_STACK."""

    def __init__(self, worker: Any) -> None:
        self._worker, self._policy = worker, worker.batch_policy

    def announce(self, config: ServerConfig, refusal: str | None) -> None:
        logger.info("%s: drafting: %s", NAME, drafting_note(config))
        graphs = graphs_note(config, self._policy.graph_sizes)
        memory = getattr(self._worker, "graph_memory_usage", None)
        logger.info("%s: CUDA graphs: %s; memory of the draft's in GB: %s", NAME, graphs, memory)
        if prunes(config, refusal) and not draft_positions_are_mapped(self._worker.draft_worker.draft_runner):
            logger.warning("%s: %s", NAME, DRAFT_AT_SLOTS)

    def state(self) -> dict[str, Any]:
        policy = self._policy
        return {
            "num_steps": policy.num_steps,
            "num_proposed": policy.num_proposed,
            "num_accepted": policy.num_accepted,
            "step_seconds": policy.step_seconds(),
            "num_overrides_kept": num_overrides_kept(),
        }

    def something_else_runs(self) -> None:
        self._policy.something_else_runs()

    def read(self, token_ids: Sequence[int], num_known: int) -> None:
        pass

    def forget(self) -> None:
        pass

    def next_round(self) -> None:
        pass


def drafting_of(scheduler: Scheduler) -> Drafting:
    algorithm = scheduler.spec_algorithm
    if algorithm.is_none():
        return OthersDrafts("", None)
    if algorithm.name == NAME:
        return OwnDrafts(scheduler.draft_worker)
    return OthersDrafts(str(algorithm.name), scheduler.draft_worker)
