"""Notes on pruning, drafting and their memory, for a server's log and for the launch check. Bytes are of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spec_stack.sglang.server_args import MOST_POOL_TOKENS, NAME, NEVER, ServerConfig


def pruning_note(config: ServerConfig, refusal: str | None, unrecognised: str) -> str:
    """What is pruned, from which length, and what is kept whole.

    refusal: why no prompt may be pruned, or None. unrecognised: what the chat template leaves unprotected.
    """
    prefill = config.prefill
    if prefill.sparse_prefill == "draft_only":
        slots = prefill.draft_kv_budget
        return f"the target prefills densely; of prompts of over {slots} tokens the draft has {slots} slots"
    if refusal is not None:
        return f"no prompt is pruned here, since {refusal}"
    if not config.prunes:
        why = "sparse_prefill is off" if prefill.sparse_prefill == "off" else "keep_rate is 1.0"
        return f"no prompt is pruned, since {why}"
    from_length = prefill.min_prompt_tokens
    if from_length == NEVER:
        return (
            "prompts are pruned on request alone: by the sizes of both models pruning pays at no length; "
            "--spec-stack-min-prompt-tokens sets one"
        )
    share, longer = (f"{100 * prefill.rate_for(length):.0f} %" for length in (from_length, 4 * from_length))
    if longer != share:
        share += f" ({longer} at {4 * from_length})"
    kept_whole = unrecognised or (
        "System messages, tool definitions and the template's tokens are kept whole, as far as prompts are rendered by "
        "the tokenizer's chat template"
    )
    return (
        f"PROMPTS ARE PRUNED, which is lossy: of those with {from_length} or more tokens that are not cached, the "
        f"target prefills about {share}. {kept_whole}. --spec-stack-min-prompt-tokens sets the length, "
        "--spec-stack-sparse-prefill off prefills all prompts densely"
    )


def slots_note(num_per_request: int, num_bytes: int) -> str:
    return f"the draft has {num_per_request} slots of its own for each request, {num_bytes / 1e9:.2f} GB in all"


def pool_note(config: ServerConfig, bytes_per_token: int) -> str:
    """Memory of the draft's own pool, as far as known before loading."""
    num_tokens = config.draft_pool_tokens or MOST_POOL_TOKENS
    note = f"{num_tokens} tokens of {bytes_per_token} bytes, {num_tokens * bytes_per_token / 1e9:.2f} GB on each rank"
    if config.draft_pool_tokens is not None:
        return note
    return f"{note}, or a tenth of the memory that the weights leave, if that is less (--spec-stack-draft-pool-tokens)"


def graphs_note(config: ServerConfig, sizes: Sequence[int] | None) -> str:
    """The captured batch sizes of every gamma; sizes is None where no graphs are captured."""
    if sizes is None:
        return "none"
    # SGLang captures its launch gamma, the largest, before any policy is asked.
    graphs = {gamma: config.sizes_for(gamma, sizes) for gamma in config.gammas[:-1]} | {config.gammas[-1]: sizes}
    # To verify, to extend the draft, and over gamma 1 to draft on after that.
    num_graphs = sum(len(found) * (3 if gamma > 1 else 2) for gamma, found in graphs.items())
    each = "; ".join(
        f"gamma {gamma} for {len(found)} batch sizes up to {max(found, default=0)}" for gamma, found in graphs.items()
    )
    return f"{num_graphs} in all: {each}"


def penalty_advice(sampling: Mapping[str, Any]) -> str | None:
    """The advice where a checkpoint's generation_config.json disables drafting; None for nothing."""
    penalty = sampling.get("repetition_penalty", 1)
    if penalty == 1:
        return None
    return (
        f"the target's generation_config.json has repetition_penalty {penalty}, which every chat request inherits, and "
        "a request with a penalty drafts nothing; --sampling-defaults openai leaves the file aside, or requests set "
        "repetition_penalty 1"
    )


def drafting_note(config: ServerConfig, algorithm: str) -> str:
    """algorithm: the name of what decodes; "" for none."""
    if algorithm == NAME:
        return f"policy {config.policy}, gammas {list(config.gammas)}"
    return f"{algorithm or 'none'}, by SGLang itself"
