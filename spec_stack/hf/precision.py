"""Precisions: transformers options, supported devices and memory. int8 (LLM.int8) and nf4 (4 bits, double quantization)
are bitsandbytes' and apply to linear layers; the rest uses the device's float dtype."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spec_stack.config import OTHER_PRECISION, PRECISIONS, LoadConfig, how_to_install
from spec_stack.hf.architectures import text_config
from spec_stack.hf.prepack import has_bf16_instructions
from spec_stack.settings.warning import warn_caller

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
QUANTIZED = tuple(name for name in PRECISIONS if name not in DTYPES)
TIE_TOLERANCE = {"fp32": 1e-3, "fp16": 0.05, "bf16": 0.25, "int8": 0.5, "nf4": 0.25}
"""Gap between the target's two best logits up to which greedy output may differ with and without speculation: a block
and a single token round differently. Twice the largest difference on the embedded pair, or more; nf4 is as bf16
because bitsandbytes' CPU kernel multiplies in it."""
_QUANTIZED_ON = ("cpu", "cuda")
_PACKAGES = ("bitsandbytes", "accelerate")
# Number of weights above which a CPU keeps stored bf16; below it bf16 gains nothing and fp32 is more accurate.
_LEAST_BF16_WEIGHTS = 50_000_000


@dataclass(frozen=True)
class Precision:
    """name: the user's name. dtype: of unquantized weights. is_stored: the checkpoint is already quantized."""

    name: str
    dtype: torch.dtype
    is_stored: bool = False

    def load_options(self, device: torch.device) -> dict[str, Any]:
        """Options for `from_pretrained`."""
        if self.is_stored:
            return {"device_map": {"": str(device)}}
        if self.name in DTYPES:
            return {"dtype": self.dtype}
        from transformers import BitsAndBytesConfig

        nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": self.dtype}
        kind = {"load_in_8bit": True} if self.name == "int8" else {"load_in_4bit": True, **nf4}
        quantization = BitsAndBytesConfig(**kind)
        return {"dtype": self.dtype, "quantization_config": quantization, "device_map": {"": str(device)}}


def stored_precision(config: Any) -> str | None:
    """A quantized checkpoint's precision ("other" without a name here); None if unquantized."""
    stored = getattr(config, "quantization_config", None) or getattr(text_config(config), "quantization_config", None)
    if stored is None:
        return None
    values = stored if isinstance(stored, dict) else stored.to_dict()
    if values.get("load_in_8bit"):
        return "int8"
    return "nf4" if values.get("load_in_4bit") and values.get("bnb_4bit_quant_type") == "nf4" else OTHER_PRECISION


def resolve_precisions(
    target_config: Any, draft_config: Any, load: LoadConfig, device: torch.device
) -> tuple[Precision, Precision]:
    """Precisions of target and draft; `LoadConfig` defines "auto". Raises ValueError for an unsupported one."""
    target = _resolve("target", load.precision, None, target_config, device)
    default = target.name if target.name in DTYPES else None
    draft = _resolve("draft", load.draft_precision, default, draft_config, device)
    if device.type == "cpu" and "fp16" in (target.name, draft.name):
        warn_caller("fp16 prefill is very slow on a CPU; use bf16 or fp32 there")
    return target, draft


def unquantized_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of unquantized weights: the precision's own; the device's default for int8 and nf4."""
    return DTYPES.get(name, torch.float32 if device.type == "cpu" else torch.bfloat16)


def _default_precision(config: Any, device: torch.device) -> str:
    """The default precision of an unquantized checkpoint; see LoadConfig."""
    if device.type != "cpu":
        return "bf16"
    stored = getattr(text_config(config), "dtype", None) or getattr(config, "dtype", None)
    if stored != torch.bfloat16 or not has_bf16_instructions():
        return "fp32"
    return "bf16" if num_weights(config) >= _LEAST_BF16_WEIGHTS else "fp32"


def _resolve(role: str, requested: str, default: str | None, config: Any, device: torch.device) -> Precision:
    """One model's precision. default: the meaning of "auto"; None depends on model and device."""
    stored = stored_precision(config)
    if stored is not None:
        if requested not in ("auto", stored):
            raise ValueError(
                f"the {role}'s checkpoint is quantized already ({stored}); load it with precision 'auto', or give "
                f"an unquantized one to have {requested}"
            )
        if stored in QUANTIZED:
            _check_bitsandbytes(role, stored, device)
        dtype = getattr(config, "dtype", None)
        floats = dtype if isinstance(dtype, torch.dtype) else unquantized_dtype(stored, device)
        return Precision(stored, floats, is_stored=True)
    name = (default or _default_precision(config, device)) if requested == "auto" else requested
    if name in QUANTIZED:
        _check_bitsandbytes(role, name, device)
        _check_quantizable(role, name, config)
    return Precision(name, unquantized_dtype(name, device))


def missing_packages(names: Sequence[str]) -> list[str]:
    return [name for name in names if find_spec(name) is None]


def _check_bitsandbytes(role: str, name: str, device: torch.device) -> None:
    if device.type not in _QUANTIZED_ON:
        raise ValueError(
            f"{name} for the {role} works on {' and '.join(_QUANTIZED_ON)}, not on {device.type!r}; use bf16 there"
        )
    if missing := missing_packages(_PACKAGES):
        raise ValueError(
            f"{name} for the {role} needs {' and '.join(missing)}, not installed here: {how_to_install('quantized')}"
        )
    # An optional kernel: without it bitsandbytes uses its own.
    _drop_messages("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward from kernels-community")


def _check_quantizable(role: str, name: str, config: Any) -> None:
    """Reject a model most of whose weights bitsandbytes does not quantize (e.g. fused experts)."""
    linear, embedded, total = _count_weights(config)
    share = linear / max(total - embedded, 1)
    if share < 0.5:
        raise ValueError(
            f"the {role} cannot be had in {name}: bitsandbytes quantizes linear layers, and in this "
            f"{config.model_type!r} model they hold {share:.0%} of the layers' weights; use bf16, or a checkpoint that "
            "is quantized already"
        )


def estimate_bytes(config: Any, precision: Precision) -> int:
    """Weight bytes at a precision, from the config; without prepacked copies and quantization constants."""
    linear, _, total = _count_weights(config)
    per_linear = {"int8": 1.0, "nf4": 0.5}.get(precision.name, precision.dtype.itemsize)
    return round(linear * per_linear + (total - linear) * precision.dtype.itemsize)


def num_weights(config: Any) -> int:
    """Number of weights from the config; tied weights count once."""
    return _count_weights(config)[2]


def skeleton(config: Any) -> PreTrainedModel:
    """A model of this config on the meta device, without weights."""
    from transformers import AutoModelForCausalLM

    plain = copy.deepcopy(text_config(config))
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(plain)


def _count_weights(config: Any) -> tuple[int, int, int]:
    """Weights in quantizable linear layers, in embeddings and the last layer, and in total; tied weights count once."""
    model = skeleton(config)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    embedded = {weight for end in ends if end is not None for weight in end.parameters()}
    linear = {module.weight for module in model.modules() if type(module) is nn.Linear} - embedded
    counts = [sum(weight.numel() for weight in group) for group in (linear, embedded, model.parameters())]
    return counts[0], counts[1], counts[2]


def precision_of(model: PreTrainedModel) -> str:
    """A loaded model's precision name; "other" without a name here."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    return stored_precision(model.config) or names.get(model.dtype, OTHER_PRECISION)


def warm_up_quantized(model: PreTrainedModel) -> None:
    """Run a quantized model once: bitsandbytes' first forward repacks weights and is not thread-safe."""
    if stored_precision(model.config) is None:
        return
    # Repeated in every call on a CPU.
    _drop_messages("bitsandbytes.autograd._functions", "MatMul8bitLt: inputs will be cast")
    with torch.inference_mode():
        model(torch.zeros(1, 1, dtype=torch.long, device=model.device))


def _drop_messages(logger: str, beginning: str) -> None:
    """Drop a library's messages that begin so."""
    logging.getLogger(logger).addFilter(lambda record: not str(record.msg).startswith(beginning))
