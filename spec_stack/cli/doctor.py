"""Report of `spec-stack doctor`: installed packages, device, and compatibility of a pair."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from spec_stack.config import PRECISIONS, DraftStep, LoadConfig, PrefillConfig
from spec_stack.hf import architectures, loading
from spec_stack.hf.fixed_step import describe_step, why_eager
from spec_stack.hf.precision import (
    QUANTIZED,
    Precision,
    estimate_bytes,
    num_weights,
    resolve_precisions,
    stored_precision,
    unquantized_dtype,
)
from spec_stack.prefill.calibration import describe_setting
from spec_stack.prefill.cost import Shape, counted_break_even, expected_gain
from spec_stack.prefill.shipped import choose_calibration, sketch_of_files
from spec_stack.tokenizers.vocabulary import Vocabulary, compare

_PACKAGES = ("spec-stack", "torch", "transformers", "tokenizers", "safetensors", "numpy")
_ROLES = ("target", "draft")
# Prompt lengths of the gain estimate.
_LENGTHS = (2048, 8192, 32768, 131072)
_OPTIONAL = ("scikit-learn", "bitsandbytes", "accelerate", "llguidance", "sglang")
# Largest draft in target weights; padding rows alone make it slightly larger than 1.
_ROUGHLY_AS_LARGE = 1.1


def diagnose(
    target: str | None,
    draft: str | None,
    precision: str = LoadConfig.precision,
    device: str | None = None,
    draft_precision: str = LoadConfig.draft_precision,
    draft_step: DraftStep = LoadConfig.draft_step,
) -> dict[str, Any]:
    """A report of plain values; report["problem"] is the reason against the pair, or None. Reads configs, tokenizers
    and weight shapes, never weights."""
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in (*_PACKAGES, *_OPTIONAL)},
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "problem": None,
    }
    try:
        load = LoadConfig(precision, draft_precision, draft_step)
        on = loading.resolve_device(device)
        report["device"] = str(on)
        sources = loading.resolve_pair(target, draft)
        configs = loading.load_config(sources[0]), loading.load_config(sources[1])
        for role, source, config in zip(_ROLES, sources, configs, strict=True):
            report[role] = _describe(source, config, on)
        calibration, gain = _describe_prefill(sources[1], *configs, on.type == "cuda")
        report |= {"calibration": calibration, "gain of sparse prefill": gain, "support": _support(*configs)}
        loading.check_pair(*configs)
        precisions = resolve_precisions(*configs, load, on)
        for role, config, resolved in zip(_ROLES, configs, precisions, strict=True):
            step = _describe_step(role, config, on, load.draft_step, resolved)
            report[role] |= {"precision": resolved.name, "step": step}
        report["decoding"] = _describe_decoding(*configs, precisions)
        tokenizers = loading.load_tokenizers(*sources)
        report["draft"]["tokenizer"] = "the target's" if tokenizers[0] is tokenizers[1] else "its own"
        sizes = [architectures.text_config(config).vocab_size for config in configs]
        report["vocabulary"] = _describe_vocabulary(compare(*tokenizers, *sizes))
    except ValueError as error:
        report["problem"] = str(error)
    return report


def report_text(report: Mapping[str, Any]) -> str:
    """The report for a terminal, its verdict first."""
    lines = [f"problem: {report['problem']}" if report["problem"] else "the pair fits together"]
    for key, value in report.items():
        match value:
            case Mapping():
                lines += [f"{key}:", *(f"  {name}: {_shown(it)}" for name, it in value.items())]
            case list():
                lines += [f"{key}:", *(f"  {line}" for line in value)]
            case _ if key != "problem":
                lines.append(f"{key}: {_shown(value)}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(it)}" for name, it in value.items())
    return "none" if value is None else str(value)


def _describe_step(role: str, config: Any, on: torch.device, draft_step: DraftStep, precision: Precision) -> str:
    is_quantized = precision.is_stored or precision.name in QUANTIZED
    reason = why_eager(config, on, draft_step, role == "draft", is_quantized)
    return describe_step(reason, draft_step == "compiled" and role == "draft", on.type == "cuda")


def _describe_decoding(target: Any, draft: Any, precisions: tuple[Precision, Precision]) -> str:
    """The bound on decoding speed by the weights read per step. Raises ValueError for a larger draft."""
    sizes = [estimate_bytes(config, each) for config, each in zip((target, draft), precisions, strict=True)]
    share = sizes[1] / sizes[0]
    if num_weights(draft) > _ROUGHLY_AS_LARGE * num_weights(target):
        raise ValueError(
            f"the draft is larger than its target ({num_weights(draft) / 1e6:.0f} against "
            f"{num_weights(target) / 1e6:.0f} million weights): every step and prompt would take longer than without "
            "it; are they the wrong way round?"
        )
    return (
        f"a drafted token costs about c = {share:.2f} of a step, by the bytes of the weights: decoding at most "
        f"{1 / share:.1f}x; --measure times answers"
    )


def _describe_prefill(draft: str, target_config: Any, draft_config: Any, on_gpu: bool) -> tuple[str, str]:
    """The calibration, and the estimated gain of sparse prefill."""
    target, drafting = (architectures.text_config(config) for config in (target_config, draft_config))
    calibration, problem = choose_calibration(draft, None, (target, drafting), lambda: sketch_of_files(draft))
    prefill = PrefillConfig() if calibration is None else calibration.apply()
    found = [f"left aside: {problem}"] if problem else []
    if calibration is not None:
        found.append(
            f"{calibration.origin}: {describe_setting(prefill)}; prompts of {prefill.min_prompt_tokens} tokens or more"
        )
    none = "none; `spec-stack calibrate` finds the settings for this draft"
    return "; ".join(found) or none, _describe_counted(target, drafting, prefill, on_gpu)


def _describe_counted(target: Any, draft: Any, prefill: PrefillConfig, on_gpu: bool) -> str:
    try:
        shapes = Shape.of(target), Shape.of(draft)
    except ValueError as error:
        return str(error)
    even = counted_break_even(*shapes, prefill, on_gpu)
    if not even:
        return "none is expected at any length: the draft costs as much as it saves"
    limit = min(getattr(each, "max_position_embeddings", None) or _LENGTHS[-1] for each in (target, draft))
    gains = [
        f"{expected_gain(*shapes, num_tokens, prefill):.1f}x at {num_tokens}"
        for num_tokens in _LENGTHS
        if even <= num_tokens <= limit
    ]
    at_most = f"; TTFT sooner by at most {', '.join(gains)} tokens" if gains else ""
    return f"expected from about {even} prompt tokens on, by counting operations{at_most}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _describe_vocabulary(vocabulary: Vocabulary) -> dict[str, Any]:
    num_common = len(vocabulary.common) if vocabulary.relation == "other" else vocabulary.num_tokens
    return {
        "tokenizer": vocabulary.relation,
        "common_tokens": f"{num_common} of {vocabulary.num_tokens} ({num_common / vocabulary.num_tokens:.0%})",
        "sparse_prefill": vocabulary.prefill_note,
        "drafting": vocabulary.decode_reason,
    }


def _support(target: Any, draft: Any) -> dict[str, str]:
    """Exact, approximate and unsupported features of the pair, with reasons."""
    of_target, of_draft = architectures.abilities(target), architectures.abilities(draft)
    context = "the kept tokens"
    if architectures.is_recurrent(draft):
        context = "the whole prompt; a recurrent state cannot forget single tokens"
    return {
        "the draft scores prompts": str(of_draft.score),
        "the target prefills sparsely": str(of_target.sparse_prefill),
        "the target decodes speculatively": str(of_target.decode),
        "the draft's context after a sparse prefill": context,
    }


def _describe(source: str, whole: Any, device: torch.device) -> dict[str, Any]:
    config = architectures.text_config(whole)
    weights = [path.stat().st_size for path in Path(source).glob("*.safetensors")] if Path(source).is_dir() else []
    return {
        "source": source,
        "model_type": config.model_type,
        "max_positions": getattr(config, "max_position_embeddings", None),
        "weights_mb": round(sum(weights) / 1e6, 1) if weights else None,
        "memory_mb": _memory_mb(whole, device),
    }


def _memory_mb(config: Any, device: torch.device) -> dict[str, float] | str:
    """Weight memory at each precision in MB; prepacking duplicates the last layer and small layers."""
    stored = stored_precision(config)
    if stored is not None:
        return f"as stored ({stored})"
    return {
        name: round(estimate_bytes(config, Precision(name, unquantized_dtype(name, device))) / 1e6, 1)
        for name in PRECISIONS
    }
