"""A draft that scores for another engine: part by part it finds what it finds at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spec_stack.config import PrefillConfig
from spec_stack.engine.prompt_scorer import FoundScorer, PromptScorer
from spec_stack.hf.model import CachedModel
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.scoring import run_draft
from spec_stack.tokenizers.vocabulary import compare
from spec_stack.types import Proposal
from tests.support.tiny_architectures import VOCAB, make_model, random_prompt

CONFIG = PrefillConfig()


def _scorer(model: Any) -> PromptScorer:
    return PromptScorer(model, (None, None), compare(None, None, VOCAB, VOCAB))


def _score(scorer: PromptScorer, prompt: list[int], most: int = 100) -> tuple[torch.Tensor, int]:
    """The importance, and the number of parts."""
    work, num_parts = scorer.score(prompt, CONFIG, lambda: most), 0
    while True:
        num_parts += 1
        try:
            next(work)
        except StopIteration as end:
            return end.value, num_parts


@pytest.mark.parametrize("name", ["Llama", "Qwen3.5", "Gemma3"])
def test_parts_give_the_importance_of_one_pass(name: str) -> None:
    model, prompt = make_model(name), random_prompt(700)
    found, num_parts = _score(_scorer(model), prompt)
    # Five of the 540 tokens before the window; then the other 40, with the queries.
    assert num_parts == 6
    attention, _ = run_draft(CachedModel(model, 8192), ScoringInputs(prompt), lambda *_: Proposal(), CONFIG)
    torch.testing.assert_close(found, attention.importance(CONFIG), rtol=1e-3, atol=1e-5)


def test_a_longer_prompt_reads_only_what_is_new() -> None:
    model, prompt = make_model("Llama"), random_prompt(900)
    scorer = _scorer(model)
    _score(scorer, prompt[:700])
    found, num_parts = _score(scorer, prompt)
    assert num_parts < 4
    fresh, _ = _score(_scorer(model), prompt)
    torch.testing.assert_close(found, fresh, rtol=1e-3, atol=1e-5)


def test_a_prompt_over_the_drafts_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="4096 positions"):
        _score(_scorer(make_model("Llama")), random_prompt(4000), 2048)


def test_a_source_says_what_its_kv_takes_before_it_is_loaded(tmp_path: Path) -> None:
    make_model("Qwen3.5").save_pretrained(tmp_path)
    source = FoundScorer.open(str(tmp_path), None, VOCAB, "cpu", "fp32")
    # Two of four layers have keys: 2 heads of 16.
    assert source.bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert (source.context_len, source.is_recurrent) == (4096, True)
    found, _ = _score(source.load(), random_prompt(300))
    assert found.shape == (300,)
