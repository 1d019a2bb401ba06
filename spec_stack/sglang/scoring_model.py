"""The small model that scores a scheduler's prompts: SPEC_STACK's draft, or a separate one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.moe.utils import draft_model_build_scope
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_loader import get_model

from spec_stack.sglang.launch_notes import prunes
from spec_stack.sglang.padded_vocabulary import fit_draft, rows_differ
from spec_stack.sglang.pooled_draft import PooledDraft
from spec_stack.sglang.protocols import Scheduler
from spec_stack.sglang.ranks import least_free_bytes
from spec_stack.sglang.server_args import ServerConfig
from spec_stack.sglang.support import NAME, pruning_of, scoring_refusal

logger = logging.getLogger(__name__)
_PLACE = "spec_stack_scoring_model"


@dataclass(frozen=True)
class Weights:
    """The part of SGLang's ModelRunner that `PooledDraft` needs: SGLang's model, loaded, without pools."""

    model: torch.nn.Module
    model_config: Any
    device: str
    gpu_id: int

    @property
    def dtype(self) -> torch.dtype:
        return self.model_config.dtype  # type: ignore[no-any-return]


class ScoringModel:
    """A scoring model with its KV pool.

    source: folder or hub id. runner: SGLang's ModelRunner of it, or its `Weights`. target_config: SGLang's.
    server_args: SGLang's, resolved. config: this server's. algorithm: the name of what decodes. pruning: how its scores
    may prune prompts; refusal: why they may prune none by default, or None.
    """

    def __init__(
        self,
        source: str,
        runner: Any,
        target_config: Any,
        server_args: Any,
        config: ServerConfig,
        algorithm: str = NAME,
    ) -> None:
        self.source = source
        self.runner = runner
        self.pruning = pruning_of(
            config.positions, server_args, target_config, runner.model_config, algorithm=algorithm
        )
        self.refusal = self.pruning.refusal(self.pruning.default)
        # Weights are loaded, and SGLang has not sized its pools yet: it divides what memory is left.
        self.pool = sized_pool(runner, config)
        if prunes(config, self.refusal):
            _allocate(self.pool)

    @staticmethod
    def of(scheduler: Scheduler) -> ScoringModel | None:
        """The scheduler's scoring model; None where it has none, and nothing is pruned."""
        found = getattr(scheduler, _PLACE, None)
        return found if found is not None else getattr(scheduler.draft_worker, "scoring_model", None)


def sized_pool(runner: Any, config: ServerConfig) -> PooledDraft:
    """A draft with a pool of the configured size, or what its device has room for; memory is not allocated yet.

    runner: SGLang's ModelRunner of it, or its `Weights`. All ranks must call it together; their pools are alike.
    """
    layers = [module for module in runner.model.modules() if isinstance(module, RadixAttention)]
    numbers = sum(layer.tp_k_head_num * (layer.qk_head_dim + layer.v_head_dim) for layer in layers)
    num_free = least_free_bytes(runner.device, runner.gpu_id)
    num_tokens = config.pool_tokens(numbers * runner.dtype.itemsize, num_free)
    logger.info(
        "%s: the draft's own KV pool: %d tokens (--spec-stack-draft-pool-tokens), %.2f GB of the %.2f GB that are free",
        *(NAME, num_tokens, num_tokens * numbers * runner.dtype.itemsize / 1e9, num_free / 1e9),
    )
    return PooledDraft(runner, num_tokens)


def _allocate(pool: PooledDraft) -> None:
    try:
        pool.allocate()
    # On a GPU it is torch.OutOfMemoryError.
    except RuntimeError as error:
        raise ValueError(
            f"the draft's own KV pool of {pool.index.num_slots} tokens does not fit into the free memory; set "
            f"--spec-stack-draft-pool-tokens to fewer: {error}"
        ) from error


def load_beside(scheduler: Any, check: Callable[[], None]) -> None:
    """Load the configured scoring model into a scheduler with SGLang's own algorithm, or none. Mutates it.

    Called after the other models are loaded and before SGLang sizes its pools. check raises where the plugin is not in
    place. Raises ValueError, naming the fix, where scoring cannot work beside this launch.
    """
    config, args = ServerConfig.from_environment(), resolving_view(scheduler.server_args)
    algorithm = _name_of(scheduler.spec_algorithm)
    if algorithm == NAME:
        return
    if config.scoring_model is None:
        logger.warning("settings of spec_stack are left aside: nothing names --spec-stack-scoring-model or %s", NAME)
        return
    check()
    target = scheduler.tp_worker.model_runner
    model_config = read_config(config.scoring_model, args)
    refusal = scoring_refusal(args, algorithm, target.model_config, model_config, config.positions)
    if refusal is not None:
        raise ValueError(f"--spec-stack-scoring-model does not work here: {refusal}")
    sizes = target.model_config.vocab_size, model_config.vocab_size
    must_fit = rows_differ(*sizes, scheduler.tp_worker.tokenizer, config.scoring_model, args.trust_remote_code)
    load_format = "dummy" if args.load_format == "dummy" else "auto"
    with draft_model_build_scope():
        model = get_model(
            model_config=model_config,
            load_config=LoadConfig(load_format=load_format, download_dir=args.download_dir),
            device_config=DeviceConfig(target.device, target.gpu_id),
        )
    if must_fit:
        fit_draft(model, *sizes)
    weights = Weights(model, model_config, target.device, target.gpu_id)
    found = ScoringModel(config.scoring_model, weights, target.model_config, args, config, algorithm)
    setattr(scheduler, _PLACE, found)
    logger.info("%s: %s scores prompts, and %s decodes", NAME, config.scoring_model, algorithm or "plain decoding")


def read_config(source: str, server_args: Any) -> Any:
    """SGLang's configuration of a scoring model, without the overrides for the target."""
    return ModelConfig(source, trust_remote_code=server_args.trust_remote_code, dtype=server_args.dtype)


def _name_of(algorithm: Any) -> str:
    """The launch name of SGLang's or a plugin's algorithm; "" for none."""
    return "" if algorithm.is_none() else str(algorithm.name)
