"""Notes on pruning and drafting for a server's log and for the launch check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spec_stack.sglang.draft_rows import num_row_slots
from spec_stack.sglang.server_args import ServerConfig

# Bytes of one slot number, in backends that list slots token by token.
_SLOT_BYTES = {"flashinfer": 4, "triton": 8}
# SGLang's default, for Qwen2 and Qwen3 more.
_FLASHINFER_WORKSPACE = 384 << 20
_SMALL_DEVICE, _FEW_GAMMAS = 40e9, (0, 2, 4)


def prunes(config: ServerConfig, refusal: str | None) -> bool:
    """Return whether a server prunes prompts by default. refusal: why none may be, or None."""
    return refusal is None and config.prefill.sparse_prefill in ("auto", "on") and config.prefill.keep_rate != 1


def pruning_note(config: ServerConfig, refusal: str | None, unrecognised: str) -> str:
    """What is pruned, from which length, and what is kept whole.

    unrecognised: what the chat template does not separate from user text, "" for nothing.
    """
    switch = config.prefill.sparse_prefill
    if switch == "draft_only":
        slots = config.prefill.draft_slots
        return f"the target prefills densely; of prompts of over {slots} tokens the draft has {slots} slots"
    if refusal is not None:
        return f"no prompt is pruned here, since {refusal}"
    if not prunes(config, refusal):
        return f"no prompt is pruned, since {'sparse_prefill is off' if switch == 'off' else 'keep_rate is 1.0'}"
    from_length = config.prefill.min_prompt_tokens
    share = f"{100 * config.prefill.rate_for(from_length):.0f} %"
    longer = f"{100 * config.prefill.rate_for(4 * from_length):.0f} %"
    if longer != share:
        share += f" ({longer} at {4 * from_length})"
    kept_whole = unrecognised or (
        "System messages, tool definitions and the template's tokens are kept whole, as far as prompts are rendered by "
        "the tokenizer's chat template"
    )
    return (
        f"PROMPTS ARE PRUNED, which is lossy: of those with {from_length} or more tokens that are not cached, the "
        f"target prefills about {share}. {kept_whole}. "
        "--spec-stack-sparse-prefill off prefills all prompts densely"
    )


def follow_up_note(config: ServerConfig, pool: Mapping[str, int], num_target_tokens: int) -> str:
    """The follow-up rule, and the memory of the draft's pool on each rank beside the target's."""
    return (
        f"follow-ups: {config.follow_up}; the draft's own KV pool holds {pool['num_tokens']} tokens in "
        f"{pool['num_bytes'] / 1e9:.2f} GB, the target's {num_target_tokens} tokens"
    )


def threshold_note(config: ServerConfig) -> str:
    """Where the shortest pruned prompt comes from."""
    prefill = config.prefill
    if "min_prompt_tokens" in prefill.given:
        return f"{prefill.min_prompt_tokens} uncached tokens, as given or calibrated"
    return (
        f"{prefill.min_prompt_tokens} uncached tokens, or more: the launch times both models' prefill and raises it to "
        "where pruning pays (--spec-stack-min-prompt-tokens sets it)"
    )


def target_pool_note(bytes_per_token: Mapping[str, int | None], num_tokens: int | None, share: float | None) -> str:
    """Memory of SGLang's own pool on each rank. bytes_per_token: by model; None where not estimated."""
    if None in bytes_per_token.values():
        return "not estimated for these layers"
    each = " and ".join(f"{num_bytes} bytes of the {name}" for name, num_bytes in bytes_per_token.items())
    total = sum(num_bytes or 0 for num_bytes in bytes_per_token.values())
    if num_tokens:
        return f"{num_tokens} tokens of {each}, {num_tokens * total / 1e9:.2f} GB on each rank"
    given = "" if share is None else f" of {share} of the device"
    return f"each token takes {each}; as many tokens as fit into what the weights leave{given}"


def pool_note(config: ServerConfig, bytes_per_token: int) -> str:
    """Memory of the draft's own pool on each rank, as far as known before loading."""
    num_tokens = config.most_pool_tokens
    note = f"{num_tokens} tokens of {bytes_per_token} bytes, {num_tokens * bytes_per_token / 1e9:.2f} GB on each rank"
    if config.draft_pool_tokens is not None:
        return note
    return f"{note}, or a tenth of the memory that the weights leave, if that is less (--spec-stack-draft-pool-tokens)"


def slots_of(config: ServerConfig, num_requests: int, bytes_per_token: int) -> dict[str, int]:
    """Slots of a draft over its own, for each request, and their bytes on each rank."""
    num_per_request = num_row_slots(config.prefill, config.gammas[-1])
    # One row is SGLang's padding.
    return {
        "num_per_request": num_per_request,
        "num_bytes": (num_requests + 1) * num_per_request * bytes_per_token,
    }


def slots_note(num_per_request: int, num_bytes: int, **counters: int) -> str:
    """Memory of a draft's own slots on each rank."""
    return f"the draft has {num_per_request} slots of its own for each request, {num_bytes / 1e9:.2f} GB in all"


def graph_sizes(config: ServerConfig, sizes: Sequence[int], gamma: int) -> list[int]:
    """The batch sizes that may use this gamma, for which alone its graphs are captured."""
    return [size for size in sizes if gamma in config.gammas_at(size)]


def captured(config: ServerConfig, sizes: Sequence[int]) -> dict[int, Sequence[int]]:
    """Captured batch sizes by gamma. SGLang captures its launch gamma, the largest, before any policy is asked."""
    last = config.gammas[-1]
    return {gamma: sizes if gamma == last else graph_sizes(config, sizes, gamma) for gamma in config.gammas}


def num_graphs(config: ServerConfig, sizes: Sequence[int]) -> int:
    """CUDA graphs in all: per gamma and size one to verify, one to extend the draft, and one to draft where gamma is
    over 1, since the draft's extension brings the first token.
    """
    return sum(len(found) * (3 if gamma > 1 else 2) for gamma, found in captured(config, sizes).items())


def graphs_note(config: ServerConfig, sizes: Sequence[int] | None) -> str:
    """The captured batch sizes of every gamma; sizes is None where no graphs are captured."""
    if sizes is None:
        return "none"
    each = "; ".join(
        f"gamma {gamma} for {len(found)} batch sizes up to {max(found, default=0)}"
        for gamma, found in captured(config, sizes).items()
    )
    return (
        f"{num_graphs(config, sizes)} in all: {each}. Gamma {config.gammas[-1]}, the first one, is captured for all "
        "batch sizes, since SGLang captures it before it asks for which"
    )


def states_bytes(config: ServerConfig, sizes: Sequence[int], context_len: int, page_size: int, backend: str) -> int:
    """Estimated bytes of the attention backends of all gammas for their graphs; SGLang reserves memory for one gamma.

    Every gamma has a backend for the target, one for the draft's extension and one for each token drafted after the
    first. FA3 keeps four tables of page numbers (batch, pages of a context) in each. Triton and FlashInfer keep slot
    numbers by token, and FlashInfer a workspace for each target's. 0 for other backends.
    """
    return sum(
        _state_bytes(gamma, max(found, default=0), context_len, page_size, backend)
        for gamma, found in captured(config, sizes).items()
    )


def _state_bytes(gamma: int, size: int, context_len: int, page_size: int, backend: str) -> int:
    if not size:
        return 0
    if backend == "fa3":
        return 4 * (max(gamma - 1, 0) + 2) * size * -(-context_len // page_size) * 4
    if backend not in _SLOT_BYTES:
        return 0
    # The target's and the extension's by token, with the target's mask; the draft's by step.
    by_token = size * (gamma + 1) * context_len * (2 * _SLOT_BYTES[backend] + 1)
    workspace = _FLASHINFER_WORKSPACE if backend == "flashinfer" else 0
    return by_token + gamma * size * context_len * _SLOT_BYTES[backend] + workspace


def states_note(config: ServerConfig, num_bytes: int) -> str:
    """The bytes of `states_bytes` in words."""
    if not num_bytes:
        return "not estimated for this attention backend"
    return f"about {num_bytes / 1e9:.2f} GB for {len(config.gammas)} gammas, beside the graphs themselves"


def gammas_advice(config: ServerConfig, device_bytes: float) -> str | None:
    """The advice where the states of the gammas take much of a device's memory; None for nothing."""
    if not 0 < device_bytes < _SMALL_DEVICE or len(config.gammas) <= len(_FEW_GAMMAS):
        return None
    return (
        f"on a device of {device_bytes / 1e9:.0f} GB the graphs of {len(config.gammas)} gammas may not fit; "
        f"--spec-stack-gammas {' '.join(map(str, _FEW_GAMMAS))} takes fewer"
    )


def penalty_advice(sampling: Mapping[str, Any]) -> str | None:
    """The advice where a checkpoint's sampling defaults disable drafting; None for nothing.

    sampling: SGLang's defaults from the checkpoint's generation_config.json.
    """
    penalty = sampling.get("repetition_penalty", 1)
    if penalty == 1:
        return None
    return (
        f"the target's generation_config.json has repetition_penalty {penalty}, which every chat request inherits, and "
        "a request with a penalty drafts nothing; --sampling-defaults openai leaves the file aside, or requests set "
        "repetition_penalty 1"
    )


def drafting_note(config: ServerConfig) -> str:
    return f"policy {config.policy}, gammas {list(config.gammas)}"


def others_note(algorithm: str) -> str:
    return f"{algorithm or 'none'}, by SGLang itself"


DRAFT_AT_SLOTS = "on this attention backend the draft stays at its cache slots, so fewer of its tokens are accepted"
