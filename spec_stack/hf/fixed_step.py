"""Forwards of a few tokens in fixed shapes, over whole buckets of cache slots under a mask: CUDA captures one in a
graph, and torch compiles it once for all lengths. A rollback is a counter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from spec_stack.config import DraftStep
from spec_stack.devices import CapturedCall, to_device
from spec_stack.hf.architectures import has_windows, is_recurrent, is_supported, text_config
from spec_stack.hf.cache import cache_argument, new_cache, reserve
from spec_stack.hf.versions import cache_parameter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

WIDTHS = (1, 2, 4, 8, 16)
"""Tokens of a fixed forward; fewer are padded."""
# Model types whose forward is the same operators for every input.
_FIXED = ("llama", "mistral", "ministral", "qwen2", "qwen3")
# Forwards of a width in a bucket before its graph is captured, which costs about as much as three of them.
_EAGER_BEFORE_CAPTURE = 2
_LONGEST_REASON = 200
# Largest difference of a captured forward's logits to the eager ones, relative to the largest.
_TOLERANCE = 0.02


class FixedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of a whole bucket, written at given slots, without StaticLayer's counter."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self._slots = keys, values, slots
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys.index_copy_(2, self._slots, key_states)
        self.values.index_copy_(2, self._slots, value_states)
        return self.keys, self.values


Buffers = Sequence[torch.Tensor]


def fixed_forward(
    model: PreTrainedModel, name: str, inputs: torch.Tensor, keys: Buffers, values: Buffers
) -> torch.Tensor:
    """Logits (width, vocab) of inputs (3, width): token ids, positions, and increasing slots. name: what the forward
    calls its cache. keys, values: (1, num_kv_heads, bucket, head_dim) a layer, written in place."""
    token_ids, positions, slots = inputs.unbind()
    columns = torch.arange(keys[0].shape[2], device=inputs.device)
    mask = torch.zeros(len(slots), len(columns), dtype=keys[0].dtype, device=inputs.device)
    mask.masked_fill_(columns > slots[:, None], -torch.inf)
    cache = DynamicCache()
    cache.layers = [FixedLayer(*buffers, slots) for buffers in zip(keys, values, strict=True)]
    output = model(
        input_ids=token_ids[None],
        position_ids=positions[None],
        attention_mask=mask[None, None],
        use_cache=True,
        **{name: cache},
    )
    return output.logits[0]  # type: ignore[no-any-return]


class FixedStep:
    """The fixed-shape forward of a model, shared by its requests. why_eager: the reason against fixed shapes, also
    after a failure; empty where used."""

    def __init__(self, model: PreTrainedModel, draft_step: DraftStep, is_draft: bool = False) -> None:
        self.model = model
        self.is_captured = model.device.type == "cuda"
        self.is_compiled = draft_step == "compiled" and is_draft
        is_quantized = bool(getattr(model, "is_quantized", False))
        self.why_eager = why_eager(model.config, model.device, draft_step, is_draft, is_quantized)
        if len({parameter.device for parameter in model.parameters()}) > 1:
            self.why_eager = self.why_eager or "it is split over devices"
        self.forward = self.forward_one = partial(fixed_forward, model, cache_parameter(model.__class__))
        if self.is_compiled and not self.why_eager:
            self._compile()

    def __str__(self) -> str:
        return describe_step(self.why_eager, self.is_compiled, self.is_captured)

    def give_up(self, why: RuntimeError | str) -> None:
        """Use eager forwards from now on."""
        self.why_eager = " ".join(str(why).split())[:_LONGEST_REASON]
        logger.warning("forwards of %s are eager from now on: %s", type(self.model).__name__, self.why_eager)

    def _compile(self) -> None:
        """Compile the forward of one token by running it once."""
        self.forward_one = partial(torch.compile(fixed_forward, fullgraph=True), *self.forward.args)
        try:
            with torch.inference_mode():
                cache = new_cache(self.model.config)
                self.model(
                    input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.model.device),
                    use_cache=True,
                    **cache_argument(self.model, cache),
                )
                fixed = FixedCache(self, *reserve(cache, 1))
                self.forward_one(fixed.place([0], [1], 1), fixed.keys, fixed.values)
        except RuntimeError as error:
            self.give_up(error)


def describe_step(why_eager: str, is_compiled: bool, is_captured: bool) -> str:
    """How the short forwards of a model run, for metrics and the doctor."""
    if why_eager:
        return f"eager ({why_eager})"
    return ("compiled" if is_compiled else "static") + (", in CUDA graphs" if is_captured else "")


def why_eager(config: Any, device: torch.device, draft_step: DraftStep, is_draft: bool, is_quantized: bool) -> str:
    """The reason against fixed shapes for a model; empty if there is none."""
    if draft_step == "eager":
        return "as asked"
    if device.type not in ("cpu", "cuda"):
        return f"graphs are for CUDA, not for {device.type}"
    if device.type == "cpu" and draft_step == "auto":
        return 'on a CPU fixed shapes alone gain nothing; draft_step="compiled" compiles the draft'
    if device.type == "cpu" and draft_step == "compiled" and not is_draft:
        return "on a CPU a padded verification costs more"
    if is_recurrent(config):
        return "a recurrent state cannot be rolled back by a counter"
    if has_windows(config):
        return "sliding windows are masked by position"
    kind = text_config(config).model_type
    if kind not in _FIXED or not is_supported(config):
        return f"the forward of this {kind!r} model has not been checked for fixed shapes"
    return "its weights are quantized" if is_quantized else ""


class FixedCache:
    """A request's keys and values, (1, num_kv_heads, bucket, head_dim) a layer, and the captured forwards over them."""

    def __init__(self, step: FixedStep, keys: Buffers, values: Buffers) -> None:
        self.keys, self.values = keys, values
        self._step = step
        self._inputs: dict[int, torch.Tensor] = {}
        self._captured: dict[int, CapturedCall] = {}
        self._num_runs = dict.fromkeys(WIDTHS, 0)
        if step.is_compiled:
            for buffer in (*keys, *values):
                torch._dynamo.mark_dynamic(buffer, 2)

    @property
    def num_slots(self) -> int:
        return int(self.keys[0].shape[2])

    def place(self, token_ids: Sequence[int], positions: Sequence[int], first_slot: int) -> torch.Tensor:
        """The inputs (3, width) of these tokens and of the padding behind them, in one copy that nobody waits for."""
        width = padded(len(token_ids))
        rows = [[*row, *[row[-1]] * (width - len(row))] for row in (token_ids, positions)]
        rows.append(list(range(first_slot, first_slot + width)))
        if width not in self._inputs:
            # A graph reads the same tensor every time.
            self._inputs[width] = torch.zeros(3, width, dtype=torch.long, device=self.keys[0].device)
        return self._inputs[width].copy_(to_device(torch.tensor(rows), self.keys[0].device))

    def forward(self, token_ids: Sequence[int], positions: Sequence[int], first_slot: int) -> torch.Tensor | None:
        """Logits (num_tokens, vocab) of at most 16 tokens; None after a failure, which makes the step eager."""
        try:
            logits = self._run(self.place(token_ids, positions, first_slot))
        except RuntimeError as error:
            self._step.give_up(error)
            return None
        # A graph's next replay overwrites its output.
        return logits[: len(token_ids)].clone() if self._step.is_captured else logits[: len(token_ids)]

    def _run(self, inputs: torch.Tensor) -> torch.Tensor:
        width = inputs.shape[1]
        captured = self._captured.get(width)
        if captured is not None:
            return captured.replay()  # type: ignore[no-any-return]
        forward = self._step.forward_one if width == 1 else self._step.forward
        call = partial(forward, inputs, self.keys, self.values)
        self._num_runs[width] += 1
        if not self._step.is_captured or self._num_runs[width] <= _EAGER_BEFORE_CAPTURE:
            return call()
        return self._capture(call, width)

    def _capture(self, call: Callable[[], torch.Tensor], width: int) -> torch.Tensor:
        """Capture a forward. Raises RuntimeError where its first replay differs from the eager forward."""
        expected = call()
        captured = CapturedCall(call, next(iter(self._captured.values()), None))
        logits: torch.Tensor = captured.replay()
        error = (logits - expected).abs().max() / expected.abs().max()
        if not bool(error <= _TOLERANCE):
            raise RuntimeError(f"a replayed forward differs from the eager one by {float(error):.2g}")
        self._captured[width] = captured
        return logits


def padded(num_tokens: int) -> int:
    """The width of the fixed forward of this many tokens, at most 16."""
    return next(width for width in WIDTHS if width >= num_tokens)
