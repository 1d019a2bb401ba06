"""Lines are ranked by their likeness to the question."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from experiments.real.evidence_prompts import EvidencePrompt
from experiments.real.line_embeddings import LineEmbeddings
from experiments.real.scoring import encode
from spec_stack import SpecStackGenerator


class Letters:
    """WordLlama's interface over counts of letters."""

    @classmethod
    def load(cls, cache_dir: Path, disable_download: bool) -> Letters:
        assert disable_download
        return cls()

    def embed(self, texts: Sequence[str], norm: bool) -> np.ndarray[Any, Any]:
        counts = np.array([[text.lower().count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts])
        return counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1) if norm else counts


def test_the_line_that_is_like_the_question_comes_first(
    monkeypatch: pytest.MonkeyPatch, embedded: SpecStackGenerator
) -> None:
    package = ModuleType("wordllama")
    package.WordLlama, package.__file__ = Letters, str(Path(__file__))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wordllama", package)
    wanted = "The green code for Alice is 43936."
    lines = [f"Note {number}: box {number} holds screws and nails." for number in range(60)]
    lines.insert(20, wanted)
    document = "\n".join(lines)
    start = document.index(wanted)
    tokenizer = embedded.tokenizer
    prompt = EvidencePrompt(
        "0", "fact", "0", document, "What is the green code for Alice?", ((start, start + len(wanted)),)
    )
    encoded = encode(tokenizer, prompt)
    (span,) = encoded.spans
    kept = LineEmbeddings(tokenizer)(prompt, encoded, {}).kept(0.1)
    assert kept.issuperset(range(*span))


def test_without_wordllama_the_rule_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wordllama", None)
    with pytest.raises(ValueError, match="pip install wordllama"):
        LineEmbeddings(None)
