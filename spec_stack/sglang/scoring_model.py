"""The small model that scores a scheduler's prompts: SPEC_STACK's draft, or a separate one.

Pairs such as Qwen2.5's 0.5B and 72B have one tokenizer, and embeddings that are padded to different numbers of rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.moe.utils import draft_model_build_scope
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_loader import get_model
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from spec_stack.sglang.draft_scoring_runner import DraftScoringRunner, bytes_per_token
from spec_stack.sglang.ranks import least_free_bytes
from spec_stack.sglang.required_api import Scheduler
from spec_stack.sglang.server_args import NAME, ServerConfig
from spec_stack.sglang.support import pruning_of, scoring_refusal

logger = logging.getLogger(__name__)
_PLACE = "spec_stack_scoring_model"
_OTHER_TOKENIZER = (
    "the small model has another tokenizer than the target; on a server the two must have one tokenizer: name a model "
    "of the target's family"
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class ScoringModel:
    """A scoring model with its KV pool, made before SGLang divides the memory that the weights leave.

    source: folder or hub id. runner: SGLang's ModelRunner of it, or its model and configuration alone. algorithm: the
    name of what decodes. pruning: how its scores may prune prompts; refusal: why they prune none by default, or None.
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
        self.source, self.runner, self.algorithm = source, runner, algorithm
        self.pruning = pruning_of(
            config.positions, server_args, target_config, runner.model_config, algorithm=algorithm
        )
        self.refusal = self.pruning.refusal(self.pruning.default)
        self.prunes = self.refusal is None and config.prunes
        self.pool = sized_pool(runner, config)
        if self.prunes:
            _allocate(self.pool)

    @staticmethod
    def of(scheduler: Scheduler) -> ScoringModel | None:
        """The scheduler's scoring model; None where it has none, and nothing is pruned."""
        found = getattr(scheduler, _PLACE, None)
        return found if found is not None else getattr(scheduler.draft_worker, "scoring_model", None)


def sized_pool(runner: Any, config: ServerConfig) -> DraftScoringRunner:
    """A draft with a pool, not yet allocated, of the configured size or what its device has room for. Collective."""
    num_bytes = bytes_per_token(runner)
    num_free = least_free_bytes(runner.device, runner.gpu_id)
    num_tokens = config.pool_tokens(num_bytes, num_free)
    logger.info(
        "%s: the draft's own KV pool: %d tokens (--spec-stack-draft-pool-tokens), %.2f GB of the %.2f GB that are free",
        *(NAME, num_tokens, num_tokens * num_bytes / 1e9, num_free / 1e9),
    )
    return DraftScoringRunner(runner, num_tokens)


def _allocate(pool: DraftScoringRunner) -> None:
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
    # What `DraftScoringRunner` needs of SGLang's ModelRunner.
    of_runner = {"model_config": model_config, "dtype": model_config.dtype, "gpu_id": target.gpu_id}
    runner = SimpleNamespace(model=model, device=target.device, **of_runner)
    found = ScoringModel(config.scoring_model, runner, target.model_config, args, config, algorithm)
    setattr(scheduler, _PLACE, found)
    logger.info("%s: %s scores prompts, and %s decodes", NAME, config.scoring_model, algorithm or "plain decoding")


def read_config(source: str, server_args: Any) -> Any:
    """SGLang's configuration of a scoring model, without the overrides for the target."""
    return ModelConfig(source, trust_remote_code=server_args.trust_remote_code, dtype=server_args.dtype)


def rows_differ(target_size: int, size: int, target_tokenizer: Any, source: str, trust_remote_code: bool) -> bool:
    """Return whether a small model's embedding rows are to be fitted to the target's.

    Raises ValueError for another tokenizer; not looked for where the server has none and the rows are as many.
    """
    is_asked = target_size != size or target_tokenizer is not None
    if is_asked and not _have_one_vocabulary(target_tokenizer, source, trust_remote_code):
        raise ValueError(f"{source} ({size} embedding rows, the target {target_size}): {_OTHER_TOKENIZER}")
    return target_size != size


def _have_one_vocabulary(target_tokenizer: Any, draft: str, trust_remote_code: bool) -> bool:
    """Return whether every token has the same id in the draft's tokenizer, which SGLang does not load."""
    if target_tokenizer is None:
        return False
    if Path(draft).is_dir() and not any((Path(draft) / name).is_file() for name in _TOKENIZER_FILES):
        logger.info("%s has no tokenizer of its own, so its target's is taken for it", draft)
        return True
    draft_tokenizer = get_tokenizer(draft, trust_remote_code=trust_remote_code)
    return bool(target_tokenizer.get_vocab() == draft_tokenizer.get_vocab())


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
