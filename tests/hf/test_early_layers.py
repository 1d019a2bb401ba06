"""A draft that scored by its first layers goes on with the others over what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from spec_stack.hf.attention import install
from spec_stack.hf.model import CachedModel
from tests.support import reference_architectures
from tests.support.nightly import others_nightly
from tests.support.tiny_architectures import CONFIGS, has_states, make_model, random_prompt

NUM_PROMPT = 60
KEPT = sorted({*range(0, 20, 3), *range(30, 42), 50, 58, 59})
DENSE = [name for name, config in CONFIGS.items() if not has_states(config)]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-3}


def kept_keys(model: PreTrainedModel, prompt: list[int], kept: Sequence[int], end: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of the kept tokens and of one behind the prompt, by layer, by one whole forward: before layer
    `end` the prompt's tokens see all of it; else nobody sees a token that is not kept."""
    kept, num_tokens = [*kept, len(prompt)], len(prompt) + 1
    dropped = torch.tensor([position not in kept for position in range(num_tokens)])
    hidden_early = dropped[None] & (torch.arange(num_tokens) == len(prompt))[:, None]

    def hide(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        mask, hidden = kwargs["attention_mask"], hidden_early if module.self_attn.layer_idx < end else dropped
        return args, {**kwargs, "attention_mask": mask.masked_fill(hidden, torch.finfo(mask.dtype).min)}

    for layer in model.model.layers:
        layer.register_forward_pre_hook(hide, with_kwargs=True)
    cache = DynamicCache()
    with torch.no_grad():
        model(
            input_ids=torch.tensor([[*prompt, 7]]),
            position_ids=torch.arange(num_tokens)[None],
            attention_mask=reference_architectures.masks(model.config, range(num_tokens), torch.float32),
            past_key_values=cache,
        )
    index = torch.tensor(kept)
    return [(layer.keys[0, :, index], layer.values[0, :, index]) for layer in cache.layers]


def early(model: PreTrainedModel, prompt: list[int], num_layers: int, prefill_chunk: int = 4096) -> CachedModel:
    install(model)
    draft = CachedModel(model, prefill_chunk)
    draft.prefill(prompt, range(len(prompt)), num_layers=num_layers)
    return draft


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "num_layers", "prefill_chunk"),
    others_nightly(
        [(name, num_layers, 4096) for name in DENSE for num_layers in (1, 2)] + [("Gemma3", 2, 7)],
        usual=[("Llama", 1, 4096), ("Qwen2", 2, 4096), ("Qwen3", 2, 4096), ("Gemma3", 2, 7), ("GPT-OSS", 2, 4096)],
    ),
)
def test_early_keys_saw_the_whole_prompt_and_late_ones_the_kept_tokens(
    name: str, num_layers: int, prefill_chunk: int
) -> None:
    prompt = random_prompt(NUM_PROMPT)
    draft = early(make_model(name), prompt, num_layers, prefill_chunk)
    draft.keep_slots(KEPT)
    draft.forward([7], [NUM_PROMPT], 1)
    assert draft.positions == [*KEPT, NUM_PROMPT]
    expected = kept_keys(make_model(name, eager=True), prompt, KEPT, num_layers - 1)
    found = draft.contents()
    for layer, (keys, values) in enumerate(expected):
        torch.testing.assert_close(found[f"cache.{layer}.keys"][0], keys, **TOLERANCE)
        torch.testing.assert_close(found[f"cache.{layer}.values"][0], values, **TOLERANCE)


def test_what_is_rolled_back_before_the_late_layers_run_leaves_no_trace() -> None:
    prompt, more = random_prompt(NUM_PROMPT), random_prompt(9, seed=1)
    one, two = (early(make_model("Llama"), prompt, 2) for _ in range(2))
    one.prefill(more, range(NUM_PROMPT, NUM_PROMPT + 9), num_layers=2)
    one.rollback(9)
    for draft in (one, two):
        draft.keep_slots(KEPT)
    torch.testing.assert_close(one.forward([7], [NUM_PROMPT], 1), two.forward([7], [NUM_PROMPT], 1))


def test_the_model_itself_and_other_requests_of_it_run_all_layers() -> None:
    prompt = random_prompt(NUM_PROMPT)
    model = make_model("Llama")
    install(model)
    before = CachedModel(model, 4096).forward(prompt, range(NUM_PROMPT), 1)
    draft = early(model, prompt, 1)
    torch.testing.assert_close(CachedModel(model, 4096).forward(prompt, range(NUM_PROMPT), 1), before)
    draft.keep_slots(KEPT)
    draft.forward([7], [NUM_PROMPT], 1)
    torch.testing.assert_close(CachedModel(model, 4096).forward(prompt, range(NUM_PROMPT), 1), before)


def test_the_lag_counts_the_late_layers_as_their_share_and_only_until_they_ran() -> None:
    draft = early(make_model("Llama"), random_prompt(NUM_PROMPT), 2)
    draft.keep_slots(KEPT)
    # Of three layers the second one, which ended at its keys, and the third one.
    assert draft.draft_lag(NUM_PROMPT + 1) == 1 + round(2 / 3 * len(KEPT))
    draft.forward([7], [NUM_PROMPT], 1)
    assert draft.draft_lag(NUM_PROMPT + 1) == 0


@pytest.mark.parametrize("name", others_nightly(["Qwen3.5", "Falcon-H1", "Qwen3"], usual=["Qwen3.5", "Qwen3"]))
def test_a_draft_with_a_state_or_wrapped_forwards_reads_the_kept_tokens_again(name: str) -> None:
    prompt, model = random_prompt(NUM_PROMPT), make_model(name)
    if name == "Qwen3":
        # As a model that is split over devices.
        hooks = pytest.importorskip("accelerate.hooks")
        hooks.add_hook_to_module(model, hooks.ModelHook())
    draft = early(model, prompt, 2)
    draft.keep_slots(KEPT)
    assert draft.draft_lag(NUM_PROMPT) == len(KEPT)
    again = CachedModel(draft.model, 4096)
    expected = again.forward([*(prompt[at] for at in KEPT), 7], [*KEPT, NUM_PROMPT], 1)
    torch.testing.assert_close(draft.forward([7], [NUM_PROMPT], 1), expected, **TOLERANCE)


def test_late_layers_that_fail_leave_a_draft_that_reads_the_kept_tokens_again() -> None:
    prompt = random_prompt(NUM_PROMPT)
    draft = early(make_model("Llama"), prompt, 2)
    draft.keep_slots(KEPT)

    def fail(num_tokens: int, share: float) -> None:
        raise RuntimeError("out of memory")

    draft.on_piece = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        draft.forward([7], [NUM_PROMPT], 1)
    draft.on_piece = None
    again = CachedModel(draft.model, 4096)
    expected = again.forward([*(prompt[at] for at in KEPT), 7], [*KEPT, NUM_PROMPT], 1)
    torch.testing.assert_close(draft.forward([7], [NUM_PROMPT], 1), expected, **TOLERANCE)
