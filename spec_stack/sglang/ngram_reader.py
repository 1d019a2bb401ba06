"""What SGLang's NGRAM drafts from: pruned prompts whole, where SGLang gives it only a prompt's last tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from spec_stack.sglang.errors import log_and_continue

# Tokens that are read before one step, which waits for it: a few milliseconds.
PART = 512
# Most prompt parts in the queue; the oldest are dropped.
_MOST_PARTS = 128


class NgramReader:
    """Reads prompts into a worker's corpus, a part in every round of the scheduler."""

    def __init__(self, worker: Any) -> None:
        self._corpus, self._overlap = worker.ngram_corpus, worker.max_trie_depth
        self._unread: deque[list[int]] = deque(maxlen=_MOST_PARTS)

    def read(self, token_ids: Sequence[int], num_known: int) -> None:
        """Queue a whole prompt, which may serve all requests. num_known: tokens of an earlier turn's."""
        # A part begins with the end of the one before, so that n-grams across its edge are read too.
        for start in range(num_known, len(token_ids), PART):
            self._unread.append(list(token_ids[max(0, start - self._overlap) : start + PART]))

    def forget(self) -> None:
        self._unread.clear()

    def next_round(self) -> None:
        if self._unread:
            with log_and_continue("giving NGRAM a prompt to read", "it drafts from what it has"):
                self._corpus.batch_put([self._unread.popleft()])
