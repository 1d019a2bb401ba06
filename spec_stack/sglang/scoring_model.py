"""The small model that scores a scheduler's prompts: SPEC_STACK's draft, or a separate one.

Pairs such as Qwen2.5's 0.5B and 72B have one tokenizer, and embeddings that are padded to different numbers of rows.
"""

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
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.moe.utils import draft_model_build_scope
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_loader import get_model

from spec_stack.engine.prompt_scorer import FoundScorer
from spec_stack.hf.loading import load_draft_tokenizer
from spec_stack.sglang.draft_pool import DraftScoringRunner, bytes_per_token
from spec_stack.sglang.ranks import least_free_bytes
from spec_stack.sglang.scoring import DraftScorer, Scorer, TransformersScorer
from spec_stack.sglang.server_args import MOST_POOL_TOKENS, NAME, ServerConfig
from spec_stack.sglang.support import architecture_refusal, pruning_refusal, require_scoring, untested_refusal
from spec_stack.tokenizers.vocabulary import compare

logger = logging.getLogger(__name__)
_PLACE = "spec_stack_scoring_model"
# SGLang's names of precisions and ours; any other is the checkpoint's own.
_PRECISIONS = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class ScoringBackend:
    """The choice, and why. config: SGLang's configuration of the model, or what the Transformers backend has found.
    must_fit: the model's embedding rows are to be fitted to the target's."""

    is_sglang: bool
    why: str
    config: Any
    must_fit: bool = False

    def __str__(self) -> str:
        return f"{'sglang' if self.is_sglang else 'transformers'}, since {self.why}"

    def vocabularies(self, num_ids: int) -> str:
        """Whose tokens the model scores, in words. num_ids: the target's embedding rows."""
        if not self.is_sglang:
            return str(self.config.vocabulary.prefill_note)
        if not self.must_fit:
            return f"{num_ids} embedding rows in both"
        rows = f"{num_ids} and {self.config.vocab_size} embedding rows"
        return f"one tokenizer, {rows}: the draft's are fitted to the target's"


def choose_backend(config: ServerConfig, args: Any, target: Any, tokenizer: Any, device: str) -> ScoringBackend:
    """What runs the configured scoring model. tokenizer: the target's, or None. Raises ValueError where nothing can."""
    source, asked = str(config.scoring_model), config.scoring_backend
    why = "--spec-stack-scoring-backend names it"
    if asked != "transformers":
        try:
            return _by_sglang(source, args, target, tokenizer)
        except ValueError as error:
            if asked == "sglang":
                raise ValueError(f"{error}; leave --spec-stack-scoring-backend sglang out") from error
            why = f"SGLang's runner does not score with this model: {error}"
    try:
        precision = _PRECISIONS.get(str(args.dtype), "auto")
        found = FoundScorer.open(source, tokenizer, target.vocab_size, device, precision)
    except ValueError as error:
        raise ValueError(f"the Transformers backend, since {why}, cannot score with {source}: {error}") from error
    return ScoringBackend(False, why, found)


def _by_sglang(source: str, args: Any, target: Any, tokenizer: Any) -> ScoringBackend:
    """Raises ValueError where SGLang's runner cannot score."""
    if source.lower().endswith(".gguf"):
        raise ValueError(f"{source} is a GGUF file")
    try:
        # Without the overrides for the target.
        config = ModelConfig(source, trust_remote_code=args.trust_remote_code, dtype=args.dtype)
    # Whatever reading another's files raises.
    except Exception as error:
        raise ValueError(f"SGLang cannot read the configuration of {source}: {error}") from error
    if refusal := architecture_refusal(config):
        raise ValueError(f"the scoring model {refusal}")
    must_fit = rows_differ(target.vocab_size, config.vocab_size, tokenizer, source, args.trust_remote_code)
    return ScoringBackend(True, "its runner runs the scoring model", config, must_fit)


def rows_differ(num_target: int, num_draft: int, tokenizer: Any, source: str, trust_remote_code: bool) -> bool:
    """Return whether a draft's embedding rows are to be fitted to the target's. tokenizer: the target's, or None.

    Raises ValueError for another tokenizer; not looked for where the target has none and the rows are as many.
    """
    options = {"trust_remote_code": trust_remote_code}
    own = None if tokenizer is None else load_draft_tokenizer(source, tokenizer, options)
    if compare(tokenizer, own, num_target, num_draft).relation == "other":
        raise ValueError(
            f"{source} has another tokenizer than the target ({num_draft} embedding rows, the target {num_target}); "
            "SGLang's runner needs the target's, and a --spec-stack-scoring-model may have another"
        )
    return num_target != num_draft


@dataclass(frozen=True)
class ScoringModel:
    """A scoring model with its KV, which is reserved before SGLang divides the memory that the weights leave.

    source: folder or hub id. model_config: SGLang's configuration of it, or what the Transformers backend has found.
    refusal: why no prompt may be pruned, or None. algorithm: the name of what decodes. backend: what runs it, and why.
    """

    source: str
    model_config: Any
    scorer: Scorer
    refusal: str | None
    algorithm: str = NAME
    backend: str = "sglang, since SPEC_STACK's draft scores"

    @classmethod
    def of_draft(cls, source: str, runner: Any, target: Any, args: Any, config: ServerConfig) -> ScoringModel:
        """SPEC_STACK's draft. runner: SGLang's ModelRunner of it. target: SGLang's configuration. Collective."""
        refusal = pruning_refusal(args, runner.model_config) or untested_refusal(args, target, config)
        model = cls(source, runner.model_config, DraftScorer(sized_pool(runner, config), target.context_len), refusal)
        model.reserve(config)
        return model

    @staticmethod
    def of(scheduler: Any) -> ScoringModel | None:
        """The scheduler's scoring model; None where it has none, and nothing is pruned."""
        found = getattr(scheduler, _PLACE, None)
        return found if found is not None else getattr(scheduler.draft_worker, "scoring_model", None)

    def reserve(self, config: ServerConfig) -> None:
        """Reserve the KV of a server that prunes. Raises ValueError where it does not fit."""
        if self.refusal is not None or not config.prunes:
            return
        try:
            self.scorer.allocate()
        # On a GPU it is torch.OutOfMemoryError.
        except RuntimeError as error:
            raise ValueError(
                f"the draft's own KV pool of {self.scorer.num_pool_tokens} tokens does not fit into the free memory; "
                f"set --spec-stack-draft-pool-tokens to fewer: {error}"
            ) from error


def sized_pool(runner: Any, config: ServerConfig) -> DraftScoringRunner:
    """A draft with a pool, not yet allocated, of the configured size or what its device has room for. Collective."""
    num_tokens = _pool_tokens(runner.device, runner.gpu_id, bytes_per_token(runner), config)
    return DraftScoringRunner(runner, num_tokens)


def _pool_tokens(device: str, gpu_id: int, num_bytes: int, config: ServerConfig) -> int:
    """The size of a draft's pool with num_bytes per token. Collective."""
    num_free = least_free_bytes(device, gpu_id)
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
    runner = scheduler.tp_worker.model_runner
    target = runner.model_config
    device = runner.device if runner.device == "cpu" else f"{runner.device}:{runner.gpu_id}"
    backend = choose_backend(config, args, target, scheduler.tp_worker.tokenizer, device)
    require_scoring(args, target, backend.config)
    refusal = pruning_refusal(args, None) or untested_refusal(args, target, config)
    scorer = _scorer(backend, runner, args, config)
    model = ScoringModel(config.scoring_model, backend.config, scorer, refusal, algorithm, str(backend))
    model.reserve(config)
    setattr(scheduler, _PLACE, model)
    logger.info("%s: %s scores prompts, and %s decodes", NAME, config.scoring_model, algorithm or "plain decoding")
    logger.info("%s: scoring backend: %s", NAME, backend)


def _scorer(backend: ScoringBackend, target: Any, args: Any, config: ServerConfig) -> Scorer:
    """Loads the scoring model. target: SGLang's ModelRunner. Collective."""
    found, context_len = backend.config, target.model_config.context_len
    if backend.is_sglang:
        # What `DraftScoringRunner` needs of a ModelRunner.
        of_target = {"device": target.device, "gpu_id": target.gpu_id}
        runner = SimpleNamespace(model=_load(backend, target, args), dtype=found.dtype, **of_target)
        return DraftScorer(sized_pool(runner, config), context_len)
    model = found.load()
    num_tokens = _pool_tokens(target.device, target.gpu_id, found.bytes_per_token, config)
    return TransformersScorer(found, model, target.device, num_tokens, context_len)


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
