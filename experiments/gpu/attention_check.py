"""Checks that chunked sparse prefill is right on a device, by each attention there is: against fp32 without a cache.

The trap: transformers reads positions with gaps as borders between packed sequences where there is neither cache nor
mask. Tokens then see their own run alone, and nothing says so. The route that is known to fall into it is measured too:
it shows that this check can fail.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from experiments.gpu.timing import describe_error
from spec_stack.hf.attention import install
from spec_stack.hf.model import CachedModel

NUM_TOKENS, CHUNK, FOLLOW = 2048, 200, 6
# Of the reference logits' standard deviation (a device may multiply fp32 with fewer bits); in 16 bits, what a forward
# without a cache is off by sets the scale.
FP32_TOLERANCE, ROUNDINGS = 1e-2, 3.0
SCALE = "bf16, no cache, mask of ones"
_CONFIG = LlamaConfig(
    hidden_size=256,
    intermediate_size=384,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=512,
    max_position_embeddings=4096,
    eos_token_id=None,
)


def _make_models(device: torch.device) -> Callable[[str, torch.dtype], PreTrainedModel]:
    torch.manual_seed(0)
    first = AutoModelForCausalLM.from_config(_CONFIG, dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        for name, weight in first.named_parameters():
            if weight.dim() == 2:
                # Large enough for attention that is far from uniform, so that a wrong mask shows.
                weight.normal_(std=0.1 if "_proj" in name else 1.0)

    def make(implementation: str, dtype: torch.dtype) -> PreTrainedModel:
        # A configuration of its own: the attention of a model is a setting of its configuration.
        config = copy.deepcopy(_CONFIG)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=implementation)
        model.load_state_dict(first.state_dict())
        return model.to(device).eval()

    return make


def _by_cached_model(model: PreTrainedModel, ids: Sequence[int], positions: Sequence[int], chunk: int) -> torch.Tensor:
    cached = CachedModel(model, chunk)
    num_kept = len(ids) - FOLLOW
    last = cached.forward(ids[:num_kept], positions[:num_kept], 1)
    return torch.cat([last, cached.forward(ids[num_kept:], positions[num_kept:], FOLLOW)])


def _without_cache(model: PreTrainedModel, ids: Sequence[int], positions: Sequence[int], mask: bool) -> torch.Tensor:
    inputs = torch.tensor([ids], device=model.device)
    with torch.inference_mode():
        return model(
            input_ids=inputs,
            position_ids=torch.tensor([positions], device=model.device),
            attention_mask=torch.ones_like(inputs) if mask else None,
            use_cache=False,
        ).logits[0, -FOLLOW - 1 :]


def check_attention(device: torch.device) -> dict[str, Any]:
    """Errors over the reference's standard deviation, and a verdict per route; package_right for the package's own."""
    make = _make_models(device)
    draw = torch.Generator().manual_seed(1)
    kept = sorted(
        {*range(32), *(torch.randperm(NUM_TOKENS, generator=draw)[: NUM_TOKENS // 4].tolist()), NUM_TOKENS - 1}
    )
    positions = [*kept, *range(NUM_TOKENS, NUM_TOKENS + FOLLOW)]
    ids = torch.randint(2, _CONFIG.vocab_size, (len(positions),), generator=draw).tolist()
    plain = make("sdpa", torch.float32)
    expected = _without_cache(plain, ids, positions, mask=True)
    half = make("sdpa", torch.bfloat16)
    routes: dict[str, Callable[[], torch.Tensor]] = {
        SCALE: lambda: _without_cache(half, ids, positions, mask=True),
        "trap: fp32, neither cache nor mask": lambda: _without_cache(plain, ids, positions, mask=False),
    }
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = make("sdpa", dtype)
        install(model)
        for way, chunk in (("one forward", len(ids)), ("chunked", CHUNK)):
            routes[f"package {name}, {way}"] = partial(_by_cached_model, model, ids, positions, chunk)
    errors: dict[str, float | str] = {}
    for name, run in routes.items():
        try:
            errors[name] = float((run().float() - expected).abs().max() / expected.std())
        except RuntimeError as error:
            errors[name] = describe_error(error)
    rounding = errors[SCALE]
    verdicts = {name: _verdict(error, "fp32" in name, rounding) for name, error in errors.items()}
    print(f"chunked sparse prefill: {len(kept)} of {NUM_TOKENS} tokens in pieces of {CHUNK}, then {FOLLOW} more")
    for name, error in errors.items():
        print(f"  {name:44s} {error if isinstance(error, str) else f'{error:10.2e}'}  {verdicts[name]}")
    return {
        "errors": errors,
        "verdicts": verdicts,
        "package_right": all(verdict == "right" for name, verdict in verdicts.items() if name.startswith("package")),
    }


def _verdict(error: float | str, is_fp32: bool, rounding: float | str) -> str:
    if isinstance(error, str):
        return "failed"
    if is_fp32:
        return "right" if error <= FP32_TOLERANCE else "wrong"
    # Beyond the logits' own scale nothing is a matter of rounding.
    return "right" if not isinstance(rounding, str) and error <= min(ROUNDINGS * rounding, 1.0) else "wrong"
