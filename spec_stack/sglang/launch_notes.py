"""Tell, for a server's log and for who asks beforehand, what it will do to prompts and how far it drafts."""

from __future__ import annotations

from collections.abc import Sequence

from spec_stack.sglang.server_args import ServerConfig


def prunes(config: ServerConfig, refusal: str | None) -> bool:
    """Return whether any prompt of a server is pruned that no request asked for. refusal: why none may be, or None."""
    return refusal is None and config.prefill.prune == "both" and config.prefill.keep_rate != 1


def pruning_note(config: ServerConfig, refusal: str | None, unrecognised: str) -> str:
    """Return what is pruned, from which length, and what is kept whole.

    unrecognised: what the chat template does not let be told from what users write, "" for nothing.
    """
    prune = config.prefill.prune
    if prune == "draft":
        slots = config.prefill.draft_slots
        return f"the target prefills densely; of prompts of over {slots} tokens the draft has {slots} slots"
    if refusal is not None:
        return f"no prompt is pruned here, since {refusal}"
    if not prunes(config, refusal):
        return f"no prompt is pruned, since {'keep_rate is 1.0' if prune == 'both' else f'prune is {prune!r}'}"
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
        "--spec-stack-keep-rate 1 prefills all prompts densely"
    )


def follow_up_note(config: ServerConfig, num_bytes: int, num_target_tokens: int) -> str:
    """The rule, and what the draft's pool takes on each rank beside the target's pool."""
    return (
        f"follow-ups: {config.follow_up}; the draft's own KV pool holds {config.draft_pool_tokens} tokens in "
        f"{num_bytes / 1e9:.2f} GB, the target's {num_target_tokens} tokens"
    )


def slots_note(num_per_request: int, num_bytes: int, **counters: int) -> str:
    """What a draft's own slots take on each rank."""
    return f"the draft has {num_per_request} slots of its own for each request, {num_bytes / 1e9:.2f} GB in all"


def graph_sizes(config: ServerConfig, sizes: Sequence[int], gamma: int) -> list[int]:
    """The batch sizes that may meet this gamma, for which alone its graphs are captured."""
    return [size for size in sizes if gamma in config.gammas_at(size)]


def num_graphs(config: ServerConfig, sizes: Sequence[int]) -> int:
    """CUDA graphs in all: per gamma and size one to verify, one to extend the draft, and one to draft where gamma is
    over 1, since the draft's extension brings the first token."""
    return sum(len(graph_sizes(config, sizes, gamma)) * (3 if gamma > 1 else 2) for gamma in config.gammas)


def graphs_note(config: ServerConfig, sizes: Sequence[int] | None) -> str:
    """The captured batch sizes of every gamma; sizes is None where no graphs are captured."""
    if sizes is None:
        return "none"
    by_gamma = {gamma: graph_sizes(config, sizes, gamma) for gamma in config.gammas}
    each = "; ".join(
        f"gamma {gamma} for {len(found)} batch sizes up to {max(found, default=0)}" for gamma, found in by_gamma.items()
    )
    return f"{num_graphs(config, sizes)} in all: {each}"


def drafting_note(config: ServerConfig) -> str:
    predictor = "" if config.policy != "speckv" else f" by {config.predictor or 'a ridge that learns online'}"
    return f"policy {config.policy}{predictor}, gammas {list(config.gammas)}"


DRAFT_AT_SLOTS = "on this attention backend the draft stays at its cache slots, so fewer of its tokens are accepted"
