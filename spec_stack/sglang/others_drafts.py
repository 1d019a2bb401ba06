"""SGLang's own drafts on a scheduler that scores. No SGLang import."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from spec_stack.sglang.guards import harmless
from spec_stack.sglang.server_args import ServerConfig
from spec_stack.sglang.support import NAME

logger = logging.getLogger(__name__)
# Tokens that NGRAM reads before one step, which waits for it: a few milliseconds.
PART = 512
# Most prompt parts in the queue; the oldest are dropped.
_MOST_PARTS = 128


class OthersDrafts:
    """SGLang's own drafts, known by name only; "" for none.

    SGLang gives NGRAM only a prompt's last tokens. Here it reads pruned prompts whole, a part before each step.
    """

    def __init__(self, name: str, worker: Any) -> None:
        self._name = name
        self._corpus: Any = getattr(worker, "ngram_corpus", None)
        self._overlap = getattr(worker, "max_trie_depth", 0)
        self._unread: deque[list[int]] = deque(maxlen=_MOST_PARTS)

    def announce(self, config: ServerConfig, refusal: str | None) -> None:
        logger.info("%s: drafting: %s, by SGLang itself", NAME, self._name or "none")

    def state(self) -> dict[str, Any]:
        return {}

    def something_else_runs(self) -> None:
        pass

    def read(self, token_ids: Sequence[int], num_known: int) -> None:
        if self._corpus is None:
            return
        # A part begins with the end of the one before, so that n-grams across its edge are read too.
        for start in range(num_known, len(token_ids), PART):
            self._unread.append(list(token_ids[max(0, start - self._overlap) : start + PART]))

    def forget(self) -> None:
        self._unread.clear()

    def next_round(self) -> None:
        if self._unread:
            with harmless("giving NGRAM a prompt to read", "it drafts from what it has"):
                self._corpus.batch_put([self._unread.popleft()])
