"""What is installed, which device there is, and whether a pair fits together: facts for `spec-stack doctor`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from spec_stack.backends import architectures, loading
from spec_stack.backends.prepack import can_prepack
from spec_stack.backends.vocabulary import Vocabulary, compare
from spec_stack.config import DecodeConfig, PrefillConfig

_PACKAGES = ("spec-stack", "torch", "transformers", "tokenizers", "safetensors", "numpy")
_OPTIONAL = ("scikit-learn", "bitsandbytes", "flashinfer-python", "sglang")


def diagnose(target: str | None, draft: str | None, precision: str, device: str | None) -> dict[str, Any]:
    """A report of plain values. report["problem"] holds the reason where the pair cannot be used, else None.

    Reads configurations and tokenizers, never weights.
    """
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in (*_PACKAGES, *_OPTIONAL)},
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "problem": None,
    }
    try:
        on = loading.resolve_device(device)
        report["device"] = str(on)
        report["precision"] = loading.resolve_precision(precision, on)
        report["precision_reason"] = "asked for" if precision != "auto" else f"the default on {on.type}"
        report["prepack_linears"] = can_prepack(on, loading.PRECISIONS[report["precision"]])
        report["policy"] = DecodeConfig.policy
        report["specprefill"] = (
            f"prompts of {PrefillConfig.min_prompt_tokens} tokens or more, unless a call says otherwise"
        )
        sources = loading.resolve_pair(target, draft)
        report["pair"] = "embedded" if target is None else "given"
        configs = {}
        for role, source in zip(("target", "draft"), sources, strict=True):
            configs[role] = loading.load_config(source)
            architectures.check_architecture(role, configs[role])
            report[role] = _describe(source, configs[role])
        loading.check_pair(configs["target"], configs["draft"])
        target_tokenizer, draft_tokenizer = (loading.load_tokenizer(source) for source in sources)
        sizes = configs["target"].vocab_size, configs["draft"].vocab_size
        report["vocabulary"] = _describe_vocabulary(compare(target_tokenizer, draft_tokenizer, *sizes))
    except ValueError as error:
        report["problem"] = str(error)
    return report


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


def _describe(source: str, config: Any) -> dict[str, Any]:
    weights = [path.stat().st_size for path in Path(source).glob("*.safetensors")] if Path(source).is_dir() else []
    return {
        "source": source,
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "heads": f"{config.num_attention_heads} over {getattr(config, 'num_key_value_heads', None)} key/value",
        "vocab_size": config.vocab_size,
        "max_positions": loading.max_positions(config),
        "weights_mb": round(sum(weights) / 1e6, 1) if weights else None,
    }
