"""The table of supported architectures and the features of each.
`tests/hf/test_architectures.py` checks every entry."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from spec_stack.config import Positions
from spec_stack.hf.versions import state_refusal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Level = Literal["exact", "approximate", "refused"]


# By the text model's model_type, also of composite checkpoints: the kind of its recurrent layers, if any.
SUPPORTED = {
    "llama": "",
    "mistral": "",
    "ministral": "",
    "qwen2": "",
    "qwen3": "",
    "qwen3_moe": "",
    "qwen3_5_text": "linear-attention",
    "qwen3_5_moe_text": "linear-attention",
    "qwen3_next": "linear-attention",
    "gemma3_text": "",
    "gpt_oss": "",
    "nemotron_h": "Mamba-2",
    "falcon_h1": "Mamba-2",
    "bamba": "Mamba-2",
}
# Their own cache class cannot roll back.
_OWN_CACHE = ("rwkv", "xlstm", "reformer", "minimax", "xlnet")


@dataclass(frozen=True)
class Support:
    """A support level; `why` is empty for exact."""

    level: Level
    why: str = ""

    def __str__(self) -> str:
        return f"{self.level} ({self.why})" if self.why else self.level


@dataclass(frozen=True)
class Abilities:
    """Support for scoring, sparse prefill and speculative decoding."""

    score: Support
    sparse_prefill: Support
    decode: Support


def text_config(config: Any) -> Any:
    """The text model's config, which composite checkpoints nest."""
    return config.get_text_config(decoder=True)


def max_positions(config: Any) -> int:
    """A model's position limit; unlimited if its config has none (ALiBi)."""
    text = text_config(config)
    named = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return next((int(limit) for limit in named if limit is not None), sys.maxsize)


def end_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """End-of-sequence ids from the generation config, or else the model config. Raises ValueError for invalid ids."""
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    return as_ids(text_config(model.config).eos_token_id if ids is None else ids)


def as_ids(ids: Any) -> frozenset[int]:
    """The ids of an eos_token_id: none, one or a list."""
    listed = [] if ids is None else ids if isinstance(ids, list | tuple) else [ids]
    if not all(type(token_id) is int for token_id in listed):
        raise ValueError(f"eos_token_id must be a token id or a list of them, got {ids!r}; correct the model's files")
    return frozenset(listed)


def abilities(config: Any) -> Abilities:
    """The support levels of a model with this config; any config is accepted."""
    config = text_config(config)
    refusal = _refusal(config)
    if refusal:
        refused = Support("refused", refusal)
        return Abilities(refused, refused, refused)
    sparse = Support("exact")
    if recurrent := SUPPORTED[config.model_type]:
        sparse = Support("approximate", f"{recurrent} layers take the kept tokens for neighbours")
    return Abilities(_score(config), sparse, _block_by_block(config))


def is_recurrent(config: Any) -> bool:
    """Whether a supported model has layers with a recurrent state."""
    return bool(SUPPORTED.get(text_config(config).model_type))


def scoring_limit(config: Any) -> int | None:
    """The longest context that one layer attends in full, for a model with only sliding windows; None is unlimited."""
    config = text_config(config)
    num_full, num_sliding = _count_attention_layers(config)
    return int(config.sliding_window) if num_sliding and not num_full else None


def has_windows(config: Any) -> bool:
    """Whether some layers of a model attend to a sliding window."""
    return _count_attention_layers(text_config(config))[1] > 0


def is_supported(config: Any) -> bool:
    """Whether a model can be a draft, or a target at original positions."""
    return not _refusal(text_config(config), scores_only=True)


def check_architecture(role: str, config: Any, positions: Positions = "original", scores_only: bool = False) -> None:
    """Raise ValueError for a model with wrong positions or rollback, and for a draft that cannot score.

    scores_only: the draft never decodes, so its state is never rolled back.
    """
    config = text_config(config)
    hinders = _hinders_rollback(config)
    refusal = _refusal(config, scores_only) if positions == "original" else hinders
    if refusal:
        way = ' PrefillConfig(positions="contiguous") takes it.' if role == "target" and not hinders else ""
        raise ValueError(
            f"the {role} is a {config.model_type!r} model: {refusal}.{way} Supported: {', '.join(SUPPORTED)}"
        )
    if role == "draft" and not any(_count_attention_layers(config)):
        raise ValueError(
            f"the draft is a {config.model_type!r} model with 0 attention layers; scoring a prompt needs 1"
        )


def _refusal(config: Any, scores_only: bool = False) -> str:
    """The reason why a model cannot be used at all; empty if it can."""
    kind = config.model_type
    if kind not in SUPPORTED:
        return "it is not among those whose positions, masks and cache have been checked"
    # Any transformers continues a state of linear attention block by block, and an older one Mamba's token by token.
    has_state = SUPPORTED[kind] == "Mamba-2" if scores_only else SUPPORTED[kind] != ""
    if has_state and (refusal := state_refusal()):
        return refusal
    for parameters in _rope_parameters(config):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            return (
                f"it uses {parameters['rope_type']!r} RoPE, whose angles depend on the longest position seen so far: a "
                "proposal, or another request, would change them"
            )
    if getattr(config, "use_bidirectional_attention", None):
        return "its attention is bidirectional"
    return ""


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The RoPE parameters: one flat dict, or one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def rope_switch(config: Any) -> int | None:
    """The length beyond which a long RoPE rotates all tokens by other angles; None for another RoPE."""
    found = [each for each in _rope_parameters(text_config(config)) if each.get("rope_type") == "longrope"]
    return int(found[0]["original_max_position_embeddings"]) if found else None


def _hinders_rollback(config: Any) -> str:
    """The reason why a model cannot be a target even at contiguous positions; empty if it can."""
    if config.model_type in _OWN_CACHE:
        return "its cache is no transformers cache, and cannot be rolled back"
    if config.model_type in SUPPORTED:
        return state_refusal() if SUPPORTED[config.model_type] else ""
    is_stateful = any(hasattr(layer, "recurrent_states") for layer in DynamicCache(config=config).layers)
    return "its recurrent state is not among those whose rollback has been checked" if is_stateful else ""


def _count_attention_layers(config: Any) -> tuple[int, int]:
    """The numbers of full-attention and sliding-window layers."""
    layers = DynamicCache(config=config).layers
    slides = [layer.is_sliding for layer in layers if isinstance(layer, DynamicLayer)]
    return slides.count(False), slides.count(True)


def _score(config: Any) -> Support:
    if not any(_count_attention_layers(config)):
        return Support("refused", "0 attention layers; scoring needs 1")
    if scoring_limit(config) is not None:
        return Support("refused", "beyond the window, since no layer sees more; such prompts are prefilled densely")
    return _block_by_block(config)


def _block_by_block(config: Any) -> Support:
    """Whether a block forward equals token-by-token forwards, as decoding and scoring require."""
    if config.model_type == "nemotron_h" and config.time_step_min > 1e-6:
        return Support(
            "approximate",
            f"transformers keeps Mamba's time step over {config.time_step_min} in blocks, not in single tokens",
        )
    return Support("exact")
