"""The small model that scores a scheduler's prompts, SPEC_STACK's draft or a separate one, and its scorings.

A scoring is chunked prefill, look-ahead and importance (SpecPrefill, section 3.2). It runs in parts between the
scheduler's batches, in the small model's own KV, without SGLang's slots or rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.moe.utils import draft_model_build_scope
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_loader import get_model
from sglang.srt.utils.common import reserve_rope_cache_for_long_sequences

from spec_stack.config import PrefillConfig
from spec_stack.prefill.attention import Parts
from spec_stack.prefill.queries import WINDOW
from spec_stack.prefill.scoring import PartSize, ScoringQueries, capture_in_parts
from spec_stack.prefill.turn import num_behind
from spec_stack.sglang.decide import Decision, KnownTexts, Prompt, UnscoredPrompt, decide_scored
from spec_stack.sglang.draft_pool import DraftScoringRunner, PooledLayers, Queries
from spec_stack.sglang.draft_prefixes import Lease
from spec_stack.sglang.launch import Launch
from spec_stack.sglang.ranks import TensorParallel, least_free_bytes
from spec_stack.sglang.server_args import MOST_POOL_TOKENS, NAME, ServerConfig
from spec_stack.types import Proposal

logger = logging.getLogger(__name__)
_PLACE = "spec_stack_scorer"
# Steps of a look-ahead in one part: without graphs they may take as long as a chunk of a prompt.
_STEPS_PER_PART = 4


class LeasedDraft:
    """SGLang's model of the draft over the slots of one text, as the scoring driver runs it."""

    is_stateful = False

    def __init__(self, runner: DraftScoringRunner, lease: Lease, end_ids: frozenset[int]) -> None:
        self._runner, self._lease, self._end_ids = runner, lease, end_ids
        self.next_position = lease.num_shared
        self.captured: Queries = {}
        self._first: int | None = None

    @property
    def num_cached(self) -> int:
        return self.next_position

    def rollback(self, num_tokens: int) -> None:
        self.next_position -= num_tokens

    def prefill(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        window: int | None = None,
        num_sinks: int = 0,
        num_layers: int | None = None,
    ) -> None:
        """Append tokens. The runner has its own layers, and no window."""
        self._append(token_ids, positions)

    def forward(self, token_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Append tokens; logits (1, vocab) of the last one."""
        logits = self._append(token_ids, positions)
        if logits is None:
            raise RuntimeError("the draft's first layers have no next token, and a look-ahead was asked for")
        return logits

    def _append(self, token_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor | None:
        self.next_position = stop = positions[-1] + 1
        captured, first = (None, 0) if self._first is None else (self.captured, self._first)
        num_captured = stop - max(positions[0], first)
        return self._runner.run(token_ids, self._lease.slots[:stop], captured, num_captured)

    def checkpoint(self) -> None:
        """Every slot can be rolled back to."""

    @contextmanager
    def capture(self, first: int = 0) -> Iterator[Queries]:
        self._first, self.captured = first, {}
        yield self.captured
        self._first = None

    def look_ahead(self, token_ids: Sequence[int], most: int) -> Parts[Proposal]:
        """Draft greedily behind the prompt."""
        drafted: list[int] = []
        unseen = token_ids[self.next_position :]
        while len(drafted) < most and not self._end_ids.intersection(drafted[-1:]):
            logits = self.forward(unseen, range(self.next_position, self.next_position + len(unseen)))
            if len(drafted) % _STEPS_PER_PART == 0:
                yield
            unseen = [int(logits.argmax())]
            drafted += unseen
        return Proposal(drafted)


class DraftScorer:
    """Scores by SGLang's model of the draft, in the draft's own KV pool.

    A launch that prunes has the KV reserved here, before SGLang divides the memory that the weights leave; ValueError
    where it does not fit. index: which slots hold which text. max_positions: the draft's; a longer prompt is not
    scored.
    """

    def __init__(self, launch: Launch, draft: DraftScoringRunner, max_positions: int | None = None) -> None:
        self.launch, self._draft, self.index = launch, draft, draft.index
        self._context_len = launch.target.context_len
        self.max_positions = self._context_len if max_positions is None else max_positions
        if not launch.prunes:
            return
        try:
            draft.allocate()
        # On a GPU it is torch.OutOfMemoryError.
        except RuntimeError as error:
            raise ValueError(
                f"the draft's own KV pool of {self.index.num_slots} tokens does not fit into the free memory; "
                f"set --spec-stack-draft-pool-tokens to fewer: {error}"
            ) from error

    @staticmethod
    def of(scheduler: Any) -> DraftScorer | None:
        """The scheduler's; None where it has none, and nothing is pruned."""
        return getattr(scheduler, _PLACE, None) or getattr(scheduler.draft_worker, "scorer", None)

    def pool_state(self) -> dict[str, int]:
        return {**self.index.state(), "num_bytes": self._draft.num_bytes}

    def num_to_prefill(self, prompt: Prompt) -> int:
        """Tokens that the draft's pool lacks; the last one always runs."""
        return len(prompt.token_ids) - self.index.num_shared(prompt.tenant, prompt.token_ids[:-1])

    def has_room(self, prompt: Prompt) -> bool:
        """Whether the pool has room for a scoring of the prompt, whatever its queries are."""
        config, num_tokens = prompt.config, len(prompt.token_ids)
        num_wanted = max(0, num_tokens - WINDOW)
        return self.index.has_room(prompt.tenant, prompt.token_ids, num_wanted, num_behind(config, config.look_ahead))

    def check_refusal(self, config: PrefillConfig) -> str | None:
        """Why a prompt cannot be checked, or None."""
        if config.max_dropped_attention is None or self._draft.has_all_layers:
            return None
        return (
            "the server has only the draft's first layers, and max_dropped_attention needs all; launch it with "
            "--spec-stack-max-dropped-attention"
        )

    def working(self, scheduler: Any) -> AbstractContextManager[None]:
        return on_forward_stream(scheduler, self._draft.device)

    def decide(self, needs: UnscoredPrompt, known: KnownTexts, most_of_a_part: PartSize) -> Parts[Decision]:
        """Score a prompt part by part, and decide, alike on all ranks of a tensor-parallel group.

        Yields after every part; each must run inside `working()`. Closing the generator frees its slots. Raises
        PoolFullError where the prompt is longer than the draft's pool.

        Ranks may fail one by one, and agree after every part. So no part may fail before a collective: those are in the
        draft's forwards, and at the beginning of the last two parts. The pool keeps what all ranks have agreed on.
        """
        prompt, text = needs.prompt, known.text_of(needs.prompt)
        config, num_tokens = prompt.config, len(text)
        queries = ScoringQueries.of(text, config, needs.first_query)
        # The scoring queries run again whatever the pool has.
        lease = self.index.lease(prompt.tenant, prompt.token_ids, queries.start)
        num_new, draft = num_tokens - lease.num_shared, LeasedDraft(self._draft, lease, prompt.end_ids)
        config = replace(config, look_ahead=max(0, min(config.look_ahead, self._context_len - num_tokens)))
        num_queries = config.look_ahead if queries.found is None else sum(map(len, queries.repeated))
        is_checked, answer = config.max_dropped_attention is not None, None
        try:
            lease.extend(num_new + max(num_queries, config.check_tokens * is_checked))
            importance = yield from self._importance(draft, lease, queries, config, most_of_a_part)
            if is_checked:
                yield
                answering = ScoringQueries(text)
                answer = yield from self._importance(draft, lease, answering, config.answering, most_of_a_part)
            return decide_scored(needs, importance, num_new, known, answer)
        finally:
            lease.insert(lease.num_agreed)

    def _importance(
        self,
        draft: LeasedDraft,
        lease: Lease,
        queries: ScoringQueries,
        config: PrefillConfig,
        most_of_a_part: PartSize,
    ) -> Parts[torch.Tensor]:
        """Importance (num_prompt_tokens,) by these queries, on the host."""
        num_tokens = len(queries.text)
        for _ in capture_in_parts(draft, queries, draft.look_ahead, config, most_of_a_part=most_of_a_part):
            yield
            lease.num_agreed = min(draft.next_position, num_tokens)
        captured = draft.captured
        if unknown := {layer for layer, _ in config.scoring_heads or ()} - set(captured):
            raise ValueError(f"scoring_heads names layers {sorted(unknown)}, and the draft has {sorted(captured)}")
        layers = PooledLayers(self._draft, captured, lease.slots[:num_tokens])
        return (yield from queries.attention(layers, ranks=TensorParallel()).importance_in_parts(config))


@contextmanager
def on_forward_stream(scheduler: Any, device: torch.device) -> Iterator[None]:
    """Under overlap scheduling the last batch may still run: wait for it, and use its stream."""
    # A version that has renamed it fails in the self-test, at launch: nothing else would order reads and writes.
    stream = None if device.type == "cpu" else scheduler.forward_stream
    if stream is None:
        yield
        return
    current = torch.get_device_module(device).current_stream()
    stream.wait_stream(current)
    try:
        with scheduler.forward_stream_ctx:
            yield
    finally:
        # The pool's slots were written on that stream, even where the scoring failed.
        current.wait_stream(stream)


def draft_scorer(launch: Launch, runner: Any, max_positions: int | None = None) -> DraftScorer:
    """A scorer by a draft, its pool of the configured size or what the device has room for. Collective.

    runner: SGLang's ModelRunner of the draft. max_positions: the draft's.
    """
    num_layers = launch.config.num_draft_layers
    num_bytes, num_free = launch.bytes_per_token(num_layers), least_free_bytes(runner.device, runner.gpu_id)
    num_tokens = launch.config.draft_pool_tokens or max(1, min(MOST_POOL_TOKENS, num_free // 10 // num_bytes))
    logger.info(
        "%s: the draft's own KV pool: %d tokens (--spec-stack-draft-pool-tokens), %.2f GB of the %.2f GB that are free",
        *(NAME, num_tokens, num_tokens * num_bytes / 1e9, num_free / 1e9),
    )
    return DraftScorer(launch, DraftScoringRunner(runner, num_tokens, num_layers), max_positions)


def load_scoring_model(scheduler: Any) -> None:
    """Load the configured scoring model into a scheduler with SGLang's own algorithm, or none. Mutates it.

    Called before SGLang sizes its pools. Raises ValueError, naming the fix, where scoring cannot work with this
    launch.
    """
    config, args = ServerConfig.from_environment(), resolving_view(scheduler.server_args)
    algorithm = "" if scheduler.spec_algorithm.is_none() else str(scheduler.spec_algorithm.name)
    if algorithm == NAME:
        return
    if config.scoring_model is None:
        logger.warning("settings of spec_stack are left aside: nothing names --spec-stack-scoring-model or %s", NAME)
        return
    worker = scheduler.tp_worker
    runner = worker.model_runner
    launch = Launch.scoring(algorithm, args, runner.model_config, worker.tokenizer, config)
    setattr(scheduler, _PLACE, _scorer(launch, runner))


def _scorer(launch: Launch, target: Any) -> DraftScorer:
    """Load the scoring model. target: SGLang's ModelRunner. Collective."""
    found = launch.small
    load_format = "dummy" if launch.args.load_format == "dummy" else "auto"
    with draft_model_build_scope():
        own: torch.nn.Module = get_model(
            model_config=found,
            load_config=LoadConfig(load_format=load_format, download_dir=launch.args.download_dir),
            device_config=DeviceConfig(target.device, target.gpu_id),
        )
    if launch.must_fit:
        fit_draft(own, launch.target.vocab_size, found.vocab_size)
    # Up to MOST_REPEATED tokens run again behind a prompt. SGLang's ModelRunner reserves angles for as many.
    reserve_rope_cache_for_long_sequences(own, found)
    # What `DraftScoringRunner` needs of a ModelRunner.
    runner = SimpleNamespace(model=own, dtype=found.dtype, device=target.device, gpu_id=target.gpu_id)
    return draft_scorer(launch, runner)


def fit_draft(model: torch.nn.Module, target_size: int, draft_size: int) -> None:
    """Make a draft of draft_size rows fit a target of target_size. Mutates the draft's modules.

    A wider draft's logits are cut. A narrower draft maps ids beyond its rows, which no tokenizer makes, to its last id.
    """
    for module in model.modules():
        if draft_size > target_size and isinstance(module, LogitsProcessor):
            module.vocab_size = target_size
        is_embedding = isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
        if draft_size < target_size and is_embedding:
            module.register_forward_pre_hook(lambda _, args: (args[0].clamp(max=draft_size - 1), *args[1:]))
