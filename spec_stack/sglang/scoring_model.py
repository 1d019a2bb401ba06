"""The small model that scores a scheduler's prompts: SPEC_STACK's draft, or a separate one.

Pairs such as Qwen2.5's 0.5B and 72B have one tokenizer, and embeddings that are padded to different numbers of rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
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

from spec_stack.sglang.draft_scoring_runner import DraftScoringRunner, bytes_per_token
from spec_stack.sglang.ranks import least_free_bytes
from spec_stack.sglang.scoring import DraftScorer, Scorer
from spec_stack.sglang.scoring_backend import ScoringBackend, choose_backend
from spec_stack.sglang.server_args import NAME, ServerConfig
from spec_stack.sglang.support import pruning_refusal, require_scoring, untested_refusal
from spec_stack.sglang.transformers_scoring import TransformersScorer

logger = logging.getLogger(__name__)
_PLACE = "spec_stack_scoring_model"


class ScoringModel:
    """A scoring model with its KV pool, made before SGLang divides the memory that the weights leave.

    source: folder or hub id. runner: SGLang's ModelRunner of it, or its model and configuration alone. algorithm: the
    name of what decodes. backend: what runs the model, and why. refusal: why no prompt may be pruned, or None.
    num_pool_tokens: capacity of its KV.
    """

    def __init__(
        self,
        source: str,
        runner: Any,
        target_config: Any,
        server_args: Any,
        config: ServerConfig,
        algorithm: str = NAME,
        backend: str = "sglang, since SPEC_STACK's draft scores",
    ) -> None:
        self.source, self.runner, self.algorithm, self.backend = source, runner, algorithm, backend
        # Of another model the choice of its backend has seen to it.
        draft = runner.model_config if algorithm == NAME else None
        self.refusal = pruning_refusal(server_args, draft) or untested_refusal(server_args, target_config, config)
        self.prunes = self.refusal is None and config.prunes
        self._reserve(config)

    def _reserve(self, config: ServerConfig) -> None:
        self._pool = sized_pool(self.runner, config)
        self.num_pool_tokens = self._pool.index.num_slots
        if self.prunes:
            _allocate(self._pool.allocate, self.num_pool_tokens)

    def scorer(self, scheduler: Any, most_of_a_part: Callable[[int], int]) -> Scorer:
        """The scorer of a scheduler whose pools SGLang has made."""
        return DraftScorer(scheduler, self._pool, most_of_a_part)

    @staticmethod
    def of(scheduler: Any) -> ScoringModel | None:
        """The scheduler's scoring model; None where it has none, and nothing is pruned."""
        found = getattr(scheduler, _PLACE, None)
        return found if found is not None else getattr(scheduler.draft_worker, "scoring_model", None)


class TransformersModel(ScoringModel):
    """One that the Transformers backend runs, on every rank."""

    _room: torch.Tensor | None = None

    def _reserve(self, config: ServerConfig) -> None:
        num_bytes = self.runner.model_config.bytes_per_token
        self.num_pool_tokens = _pool_tokens(self.runner, num_bytes, config)
        if self.prunes:
            # SGLang's pools leave this room to the model's KV, which is allocated by request.
            room = partial(torch.empty, self.num_pool_tokens, num_bytes, dtype=torch.uint8, device=self.runner.device)
            self._room = _allocate(room, self.num_pool_tokens)

    def scorer(self, scheduler: Any, most_of_a_part: Callable[[int], int]) -> Scorer:
        self._room = None
        found, model = self.runner.model_config, self.runner.model
        return TransformersScorer(scheduler, found, model, self.num_pool_tokens, most_of_a_part)


def sized_pool(runner: Any, config: ServerConfig) -> DraftScoringRunner:
    """A draft with a pool, not yet allocated, of the configured size or what its device has room for. Collective."""
    return DraftScoringRunner(runner, _pool_tokens(runner, bytes_per_token(runner), config))


def _pool_tokens(runner: Any, num_bytes: int, config: ServerConfig) -> int:
    """The size of a draft's pool with num_bytes per token. Collective."""
    num_free = least_free_bytes(runner.device, runner.gpu_id)
    num_tokens = config.pool_tokens(num_bytes, num_free)
    logger.info(
        "%s: the draft's own KV pool: %d tokens (--spec-stack-draft-pool-tokens), %.2f GB of the %.2f GB that are free",
        *(NAME, num_tokens, num_tokens * num_bytes / 1e9, num_free / 1e9),
    )
    return num_tokens


def _allocate(allocate: Callable[[], Any], num_tokens: int) -> Any:
    try:
        return allocate()
    # On a GPU it is torch.OutOfMemoryError.
    except RuntimeError as error:
        raise ValueError(
            f"the draft's own KV pool of {num_tokens} tokens does not fit into the free memory; set "
            f"--spec-stack-draft-pool-tokens to fewer: {error}"
        ) from error


def load_beside(scheduler: Any, check: Callable[[], None]) -> None:
    """Load the configured scoring model into a scheduler with SGLang's own algorithm, or none. Mutates it.

    Called before SGLang sizes its pools. check raises where the plugin is not in place. Raises ValueError, naming the
    fix, where scoring cannot work beside this launch.
    """
    config, args = ServerConfig.from_environment(), resolving_view(scheduler.server_args)
    algorithm = "" if scheduler.spec_algorithm.is_none() else str(scheduler.spec_algorithm.name)
    if algorithm == NAME:
        return
    if config.scoring_model is None:
        logger.warning("settings of spec_stack are left aside: nothing names --spec-stack-scoring-model or %s", NAME)
        return
    check()
    target = scheduler.tp_worker.model_runner
    device = target.device if target.device == "cpu" else f"{target.device}:{target.gpu_id}"
    backend = choose_backend(config, args, target.model_config, scheduler.tp_worker.tokenizer, device)
    require_scoring(args, target.model_config, backend.config)
    kind = ScoringModel if backend.is_sglang else TransformersModel
    model = _load(backend, target, args) if backend.is_sglang else backend.config.load()
    # What `DraftScoringRunner` needs of SGLang's ModelRunner.
    of_runner = {"model_config": backend.config, "dtype": backend.config.dtype, "gpu_id": target.gpu_id}
    runner = SimpleNamespace(model=model, device=target.device, **of_runner)
    found = kind(config.scoring_model, runner, target.model_config, args, config, algorithm, str(backend))
    setattr(scheduler, _PLACE, found)
    logger.info("%s: %s scores prompts, and %s decodes", NAME, config.scoring_model, algorithm or "plain decoding")
    logger.info("%s: scoring backend: %s", NAME, backend)


def _load(backend: ScoringBackend, target: Any, args: Any) -> torch.nn.Module:
    """SGLang's model of a scoring model, fitted to the target's vocabulary."""
    load_format = "dummy" if args.load_format == "dummy" else "auto"
    with draft_model_build_scope():
        model: torch.nn.Module = get_model(
            model_config=backend.config,
            load_config=LoadConfig(load_format=load_format, download_dir=args.download_dir),
            device_config=DeviceConfig(target.device, target.gpu_id),
        )
    if backend.must_fit:
        fit_draft(model, target.model_config.vocab_size, backend.config.vocab_size)
    return model


def fit_draft(model: torch.nn.Module, target_size: int, draft_size: int) -> None:
    """Make a draft of draft_size rows fit a target of target_size. Mutates the draft's modules.

    A wider draft's logits are cut. A narrower draft maps ids beyond its rows, which no tokenizer makes, to its last id.
    """
    for module in model.modules():
        if draft_size > target_size and isinstance(module, LogitsProcessor):
            module.vocab_size = target_size
        is_embedding = isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
        if draft_size < target_size and is_embedding:
            module.register_forward_pre_hook(_clamp_to(draft_size - 1))


def _clamp_to(largest: int) -> Callable[[torch.nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    return lambda module, args: (args[0].clamp(max=largest), *args[1:])
