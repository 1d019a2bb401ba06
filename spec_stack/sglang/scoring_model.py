"""The small model that scores a scheduler's prompts, with its KV: SPEC_STACK's draft, or a separate one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
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

from spec_stack.sglang.draft_pool import DraftScoringRunner, bytes_per_token
from spec_stack.sglang.launch import Launch
from spec_stack.sglang.ranks import least_free_bytes
from spec_stack.sglang.scoring import DraftScorer, Scorer, TransformersScorer
from spec_stack.sglang.server_args import MOST_POOL_TOKENS, NAME, ServerConfig

logger = logging.getLogger(__name__)
_PLACE = "spec_stack_scoring_model"


@dataclass(frozen=True)
class ScoringModel:
    """A launch's scoring model, whose KV is reserved before SGLang divides the memory that the weights leave.

    Raises ValueError where the KV of a server that prunes does not fit.
    """

    launch: Launch
    scorer: Scorer

    def __post_init__(self) -> None:
        if not self.launch.prunes:
            return
        try:
            self.scorer.allocate()
        # On a GPU it is torch.OutOfMemoryError.
        except RuntimeError as error:
            raise ValueError(
                f"the draft's own KV pool of {self.scorer.num_pool_tokens} tokens does not fit into the free memory; "
                f"set --spec-stack-draft-pool-tokens to fewer: {error}"
            ) from error

    @staticmethod
    def of(scheduler: Any) -> ScoringModel | None:
        """The scheduler's scoring model; None where it has none, and nothing is pruned."""
        found = getattr(scheduler, _PLACE, None)
        return found if found is not None else getattr(scheduler.draft_worker, "scoring_model", None)


def draft_scorer(runner: Any, config: ServerConfig, context_len: int) -> DraftScorer:
    """A scorer by a draft, its pool of the configured size or what the device has room for. Collective.

    runner: SGLang's ModelRunner. context_len: the target's.
    """
    num_tokens = _pool_tokens(runner, bytes_per_token(runner), config)
    return DraftScorer(DraftScoringRunner(runner, num_tokens), context_len)


def _pool_tokens(runner: Any, num_bytes: int, config: ServerConfig) -> int:
    """The size of a draft's pool with num_bytes per token. Collective."""
    num_free = least_free_bytes(runner.device, runner.gpu_id)
    num_tokens = config.draft_pool_tokens or max(1, min(MOST_POOL_TOKENS, num_free // 10 // num_bytes))
    logger.info(
        "%s: the draft's own KV pool: %d tokens (--spec-stack-draft-pool-tokens), %.2f GB of the %.2f GB that are free",
        *(NAME, num_tokens, num_tokens * num_bytes / 1e9, num_free / 1e9),
    )
    return num_tokens


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
    worker = scheduler.tp_worker
    runner = worker.model_runner
    device = runner.device if runner.device == "cpu" else f"{runner.device}:{runner.gpu_id}"
    launch = Launch.scoring(algorithm, args, runner.model_config, worker.tokenizer, config, device)
    setattr(scheduler, _PLACE, ScoringModel(launch, _scorer(launch, runner)))
    logger.info("%s: %s scores prompts, and %s decodes", NAME, config.scoring_model, algorithm or "plain decoding")
    logger.info("%s: scoring backend: %s", NAME, launch.backend)


def _scorer(launch: Launch, target: Any) -> Scorer:
    """Load the scoring model. target: SGLang's ModelRunner. Collective."""
    found, config, context_len = launch.small, launch.config, launch.target.context_len
    if not launch.is_sglang:
        model = found.load()
        num_tokens = _pool_tokens(target, found.bytes_per_token, config)
        return TransformersScorer(found, model, target.device, num_tokens, context_len)
    load_format = "dummy" if launch.args.load_format == "dummy" else "auto"
    with draft_model_build_scope():
        own: torch.nn.Module = get_model(
            model_config=found,
            load_config=LoadConfig(load_format=load_format, download_dir=launch.args.download_dir),
            device_config=DeviceConfig(target.device, target.gpu_id),
        )
    if launch.must_fit:
        fit_draft(own, launch.target.vocab_size, found.vocab_size)
    # What `DraftScoringRunner` needs of a ModelRunner.
    runner = SimpleNamespace(model=own, dtype=found.dtype, device=target.device, gpu_id=target.gpu_id)
    return draft_scorer(runner, config, context_len)


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
