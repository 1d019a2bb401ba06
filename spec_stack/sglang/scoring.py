"""Scoring a prompt with the engine's own draft: chunked prefill, look-ahead, importance (SpecPrefill, section 3.2).

A scoring is done in parts, between which the scheduler goes on with its own batches. The draft reads the text into its
own KV pool, and no more of it than the pool lacks; of the engine's slots and rows it takes none.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from spec_stack.config import PrefillConfig
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.chunks import DRAFT_FREE
from spec_stack.sglang.draft_pool import Ints
from spec_stack.sglang.head_votes import LayerQueries, best_of_own_heads
from spec_stack.sglang.protocols import Scheduler
from spec_stack.sglang.ranks import largest_of_all, own_rank

# Forwards of the look-ahead in one part of a scoring.
_LOOK_AHEAD_PER_PART = 4


@dataclass(frozen=True)
class Prompt:
    """A prompt as it came, with what is asked for. Equal ones are given to the target alike, while that is remembered.

    extra_key, cache_salt: the walls of SGLang's radix cache, which nothing about a prompt crosses. end_ids: tokens
    after which the look-ahead stops. follow_up: the rule for what the prompt goes on from.
    """

    token_ids: tuple[int, ...]
    extra_key: str | None
    cache_salt: str | None
    config: PrefillConfig
    follow_up: str
    protected: tuple[Span, ...] = ()
    end_ids: frozenset[int] = frozenset()

    @property
    def tenant(self) -> tuple[str | None, str | None]:
        return self.extra_key, self.cache_salt


@dataclass(frozen=True)
class Score:
    """importance: (num_prompt_tokens,) on the host. num_draft_tokens: how many of them the draft read for it."""

    importance: torch.Tensor
    num_draft_tokens: int


def needs_the_draft(config: PrefillConfig) -> bool:
    """Whether a scorer asks the draft at all, or votes by the tokens alone."""
    return config.scorer not in DRAFT_FREE


class DraftScorer:
    """Scores prompts with a scheduler's draft, one at a time. Raises whatever the engine raises."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler: Any = scheduler
        self._draft = scheduler.draft_worker.pooled_draft
        self._runner = scheduler.draft_worker.draft_worker.draft_runner

    def num_cached(self, prompt: Prompt) -> int:
        """Tokens at the prompt's beginning whose KV the target has, were it prefilled densely."""
        # SGLang prefills at least one token, so the last one counts as not cached.
        key = RadixKey(
            array("q", prompt.token_ids),
            prompt.extra_key,
            limit=max(len(prompt.token_ids) - 1, 0),
            cache_salt=prompt.cache_salt,
        )
        return len(self._scheduler.tree_cache.match_prefix(MatchPrefixParams(key=key)).device_indices)

    def pool_state(self) -> dict[str, int]:
        index = self._draft.index
        return {
            "num_tokens": index.num_slots,
            "num_held": index.num_held,
            "num_free": index.num_free,
            "num_pinned": index.num_pinned,
            "num_bytes": self._draft.num_bytes,
        }

    def forget(self) -> None:
        """Empty the draft's pool. Nothing may be scored meanwhile."""
        self._draft.index.clear()

    def score(self, prompt: Prompt) -> Generator[None, None, Score]:
        """Score a prompt part by part.

        Yields
        ------
        None
            After every part of the work. Each must run inside `working()`. Closing the generator gives back what it
            holds.

        Returns
        -------
        Score
            The same on all ranks of a tensor-parallel group.

        Raises
        ------
        PoolFullError
            Where the prompt is longer than the draft's pool.

        Notes
        -----
        Ranks may fail one by one, and agree after every part. So no part has a place to fail before a collective:
        those are in the draft's forwards, and in the last part. Of a scoring that ends early the pool keeps what all
        ranks have agreed on, since their pools must stay alike.
        """
        limit = int(self._scheduler.model_config.context_len)
        num_tokens = len(prompt.token_ids)
        look_ahead = max(0, min(prompt.config.look_ahead, limit - num_tokens))
        # The last token is asked again whatever the pool has: its query is what scores.
        lease = self._draft.index.lease(prompt.tenant, prompt.token_ids, num_tokens - 1)
        num_shared = num_agreed = lease.num_shared
        try:
            lease.extend(num_tokens - num_shared + look_ahead)
            slots = lease.slots
            chunk = self._chunk(prompt.config)
            # The last part of the text goes with the look-ahead; a short one needs no part of its own.
            for start in range(num_shared, num_tokens - chunk, chunk):
                self._draft.forward(prompt.token_ids[start : start + chunk], slots[: start + chunk])
                yield
                num_agreed = start + chunk
            layers: dict[int, LayerQueries] = {}
            token_id = self._next_token(prompt, num_agreed, slots, layers)
            for drafted in range(look_ahead):
                if drafted % _LOOK_AHEAD_PER_PART == 0:
                    # So many forwards of one token, run without graphs, may take as long as a chunk.
                    yield
                with self._draft.captured_queries(layers):
                    following = self._draft.forward([token_id], slots[: num_tokens + drafted + 1])
                if token_id in prompt.end_ids:
                    break
                token_id = int(following)
            yield
            num_agreed = num_tokens
            best = self._best_of_own_heads(slots[:num_tokens], layers, prompt.config)
            yield
            importance = largest_of_all(best).mean(dim=0)
            return Score(importance.cpu(), num_tokens - num_shared)
        finally:
            lease.keep(num_agreed)

    def _next_token(self, prompt: Prompt, start: int, slots: Ints, layers: dict[int, LayerQueries]) -> int:
        """The draft's most likely token after the prompt, of which it has read the tokens before `start`. Adds the last
        token's queries to layers."""
        num_tokens = len(prompt.token_ids)
        if start < num_tokens - 1:
            self._draft.forward(prompt.token_ids[start:-1], slots[: num_tokens - 1])
        with self._draft.captured_queries(layers):
            return int(self._draft.forward(prompt.token_ids[-1:], slots[:num_tokens]))

    def _best_of_own_heads(
        self, slots: Ints, layers: Mapping[int, LayerQueries], config: PrefillConfig
    ) -> torch.Tensor:
        """Pooled attention (n, num_tokens), the largest over those of this rank's heads that vote."""
        where = torch.from_numpy(slots).to(self._runner.device)
        return best_of_own_heads(self._draft, where, layers, config, own_rank())

    def _chunk(self, config: PrefillConfig) -> int:
        server = self._scheduler.chunked_prefill_size
        return min(config.prefill_chunk, server) if server and server > 0 else config.prefill_chunk

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around every part of a scoring; nothing of it outlives the part."""
        moe = speculative_moe_backend_context(), speculative_moe_a2a_backend_context()
        with torch.no_grad(), self._on_forward_stream(), moe[0], moe[1]:
            yield

    @contextmanager
    def _on_forward_stream(self) -> Iterator[None]:
        """Under overlap scheduling the last batch may still run: wait for it, and use the stream it runs on."""
        stream = getattr(self._scheduler, "forward_stream", None)
        if stream is None or self._runner.device == "cpu":
            yield
            return
        current = torch.get_device_module(self._runner.device).current_stream()
        stream.wait_stream(current)
        try:
            with self._scheduler.forward_stream_ctx:
                yield
        finally:
            # The pool's slots were written on that stream, whether or not the scoring came to its end.
            current.wait_stream(stream)
