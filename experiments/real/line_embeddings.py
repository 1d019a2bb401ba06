"""Rank a prompt's segments by how near they are to its question, as retrieval does: a rival without a draft.

WordLlama's package on PyPI holds its weights (16 MB, a vector a token, their mean a text); `pip install wordllama`, of
which `experiments.real.evidence --embeddings` has need. The question is given, where a draft must find it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from experiments.real.evidence_prompts import EvidencePrompt
from experiments.real.scoring import Encoded, Looks, Ranked
from spec_stack import PrefillConfig
from spec_stack.prefill.segments import make_segments


class LineEmbeddings:
    """A rule of `experiments.real.evidence`. Raises ValueError if WordLlama is not installed."""

    def __init__(self, tokenizer: Any) -> None:
        try:
            import wordllama
        except ImportError as error:
            raise ValueError("--embeddings needs WordLlama: pip install wordllama") from error
        self._tokenizer = tokenizer
        # Without a folder it looks for its tokenizer on a hub, though the package has it.
        self._model = wordllama.WordLlama.load(cache_dir=Path(wordllama.__file__).parent, disable_download=True)

    def __call__(self, prompt: EvidencePrompt, encoded: Encoded, looks: Looks) -> Ranked:
        config = PrefillConfig()
        segments = make_segments(len(encoded.token_ids), encoded.pieces, config)
        texts = [self._tokenizer.decode(list(encoded.token_ids[start:stop])) for start, stop in segments]
        question, *lines = self._model.embed([f"{prompt.question} {prompt.other}".strip(), *texts], norm=True)
        return Ranked(encoded, config, segments, torch.tensor([float(line @ question) for line in lines]))
