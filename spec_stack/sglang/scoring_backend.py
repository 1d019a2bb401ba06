"""What runs a scoring model: SGLang's runner, or the Transformers backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.model_config import ModelConfig

from spec_stack.engine.prompt_scorer import FoundScorer
from spec_stack.hf.loading import load_draft_tokenizer
from spec_stack.sglang.server_args import ServerConfig
from spec_stack.sglang.support import architecture_refusal
from spec_stack.tokenizers.vocabulary import compare

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
