"""Pairs with one tokenizer whose embeddings are padded to different numbers of rows, such as Qwen2.5's 0.5B and 72B."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

logger = logging.getLogger(__name__)
_OTHER_TOKENIZER = (
    "the small model has another tokenizer than the target; on a server the two must have one tokenizer: name a model "
    "of the target's family"
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def rows_differ(target_size: int, size: int, target_tokenizer: Any, source: str, trust_remote_code: bool) -> bool:
    """Return whether a small model's embedding rows are to be fitted to the target's.

    target_size, size: rows. source: the small model's folder or hub id. Raises ValueError where the two have different
    tokenizers; not looked for where the server runs without one and the rows are as many.
    """
    is_asked = target_size != size or target_tokenizer is not None
    if is_asked and not _have_one_vocabulary(target_tokenizer, source, trust_remote_code):
        raise ValueError(f"{source} ({size} embedding rows, the target {target_size}): {_OTHER_TOKENIZER}")
    return target_size != size


def _have_one_vocabulary(target_tokenizer: Any, draft: str, trust_remote_code: bool) -> bool:
    """Return whether every token has the same id in the draft's tokenizer; False where the server runs without one.

    SGLang does not load the draft's tokenizer. A draft without one has its target's.
    """
    if target_tokenizer is None:
        return False
    if Path(draft).is_dir() and not any((Path(draft) / name).is_file() for name in _TOKENIZER_FILES):
        logger.info("%s has no tokenizer of its own, so its target's is taken for it", draft)
        return True
    draft_tokenizer = get_tokenizer(draft, trust_remote_code=trust_remote_code)
    return bool(target_tokenizer.get_vocab() == draft_tokenizer.get_vocab())


def fit_draft(model: torch.nn.Module, target_size: int, draft_size: int) -> None:
    """Make a draft of draft_size rows fit a target of target_size. Mutates the draft's modules.

    A wider draft's logits are cut. A narrower draft maps ids beyond its rows, which no tokenizer makes, to its last id.
    """
    if draft_size > target_size:
        for module in model.modules():
            if isinstance(module, LogitsProcessor):
                module.vocab_size = target_size
    else:
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
                module.register_forward_pre_hook(_Clamp(draft_size - 1))


class _Clamp:
    def __init__(self, largest: int) -> None:
        self._largest = largest

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0].clamp(max=self._largest), *args[1:])
