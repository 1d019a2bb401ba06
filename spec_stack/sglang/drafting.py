"""The drafts on a scheduler that scores: this project's worker, or SGLang's own algorithm or none."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from spec_stack.sglang.guards import harmless
from spec_stack.sglang.launch_notes import DRAFT_AT_SLOTS, drafting_note, graphs_note, others_note, prunes
from spec_stack.sglang.protocols import Scheduler
from spec_stack.sglang.server_args import ServerConfig
from spec_stack.sglang.support import NAME, draft_positions_are_mapped

logger = logging.getLogger(__name__)
# Tokens that NGRAM reads before one step, which waits for it: a few milliseconds.
PART = 512
# Most prompt parts in the queue; the oldest are dropped.
_MOST_PARTS = 128


class Drafting:
    """The interface of scoring to decoding, for an algorithm of SGLang's that needs nothing. name: "" for none."""

    def __init__(self, name: str) -> None:
        self._name = name

    def announce(self, config: ServerConfig, refusal: str | None) -> None:
        """Log once how this server drafts. refusal: why no prompt may be pruned, or None."""
        logger.info("%s: drafting: %s", NAME, others_note(self._name))

    def state(self) -> dict[str, Any]:
        """Counters, as /server_info shows them."""
        return {}

    def something_else_runs(self) -> None:
        """Other work runs between decode steps: its time is not theirs."""

    def read(self, token_ids: Sequence[int], num_known: int) -> None:
        """Learn a pruned prompt, given whole; it may serve all requests. num_known: tokens of an earlier turn's."""

    def forget(self) -> None:
        """SGLang has emptied its caches."""

    def next_round(self) -> None:
        """A round of the scheduler begins."""


class NgramDrafts(Drafting):
    """SGLang gives NGRAM only a prompt's last tokens. Here it reads pruned prompts whole, a part before each step."""

    def __init__(self, worker: Any) -> None:
        super().__init__("NGRAM")
        self._corpus, self._overlap = worker.ngram_corpus, worker.max_trie_depth
        self._unread: deque[list[int]] = deque(maxlen=_MOST_PARTS)

    def read(self, token_ids: Sequence[int], num_known: int) -> None:
        # A part begins with the end of the one before, so that n-grams across its edge are read too.
        for start in range(num_known, len(token_ids), PART):
            self._unread.append(list(token_ids[max(0, start - self._overlap) : start + PART]))

    def forget(self) -> None:
        self._unread.clear()

    def next_round(self) -> None:
        if self._unread:
            with harmless("giving NGRAM a prompt to read", "it drafts from what it has"):
                self._corpus.batch_put([self._unread.popleft()])


class OwnDrafts(Drafting):
    """Those of SPEC_STACK."""

    def __init__(self, worker: Any) -> None:
        super().__init__(NAME)
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
            "num_overrides_kept": self._worker.num_overrides_kept,
        }

    def something_else_runs(self) -> None:
        self._policy.something_else_runs()


def drafting_of(scheduler: Scheduler) -> Drafting:
    algorithm = scheduler.spec_algorithm
    if algorithm.is_none():
        return Drafting("")
    if algorithm.name == NAME:
        return OwnDrafts(scheduler.draft_worker)
    if hasattr(scheduler.draft_worker, "ngram_corpus"):
        return NgramDrafts(scheduler.draft_worker)
    return Drafting(str(algorithm.name))
