"""Architectures whose prompts are pruned, each as a tiny random pair of its own, against plain Transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4Config, GraniteConfig, Olmo2Config, Phi3Config

from spec_stack.config import PrefillConfig
from spec_stack.prefill.segments import line_borders
from spec_stack.tokenizers.vocabulary import Pieces
from tests.support import reference as oracle
from tests.support import reference_question

from .conftest import ASSETS, BY_CHUNKS, Reference, special_spans

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_CONFIGS: dict[str, Any] = {
    "Phi3": Phi3Config(**_SIZES, sliding_window=None),
    "OLMo2": Olmo2Config(**_SIZES),
    "GLM4": Glm4Config(**_SIZES, head_dim=16, attention_bias=True),
    "Granite": GraniteConfig(**_SIZES, embedding_multiplier=2.0, attention_multiplier=0.2, logits_scaling=2.0),
}


def _saved(name: str, folder: Path, vocab_size: int) -> Path:
    """A random model far from uniform attention, so that mistakes in positions show, with the embedded tokenizer."""
    torch.manual_seed(3)
    config = _CONFIGS[name]
    config.vocab_size = vocab_size
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.3)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ASSETS / "target" / file, folder)
    return folder


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", _CONFIGS)
def test_a_pair_of_this_architecture_is_pruned_as_plain_transformers_would(
    launch: Any, reference: Reference, tmp_path: Path, name: str
) -> None:
    """What is kept by attention matrices, and every token by plain forwards; the same again in the turn after."""
    folder = _saved(name, tmp_path / "model", reference.generator.target.config.vocab_size)
    server = launch(
        "--max-total-tokens",
        "4000",
        "--spec-stack-keep-rate",
        "0.3",
        environment=BY_CHUNKS,
        target=folder,
        draft=folder,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    prompt = reference.text_ids(420, seed=5)
    pieces = Pieces(reference.tokenizer).of(prompt)
    question = reference_question.question_of(pieces, line_borders(pieces), special_spans(prompt))
    scores = oracle.question_importance(
        model,
        prompt,
        question.repeated,
        question.in_place,
        question.asks,
        question.is_question,
        question.is_marked,
        mean=True,
    )
    sizes = PrefillConfig.chunk_size, PrefillConfig.keep_first, PrefillConfig.keep_last
    chunks = [(start, min(start + sizes[0], len(prompt))) for start in range(0, len(prompt), sizes[0])]
    worth = [float(scores[start:stop].mean()) for start, stop in chunks]
    raised = reference_question.raised(worth, pieces, chunks, [-1] * len(chunks), question.words())
    kept = oracle.selected_positions([raised[at // sizes[0]] for at in range(len(prompt))], 0.3, *sizes)
    reply = server.generate(prompt, 12, sparse_prefill="on", explain=True, gamma=4)
    assert _positions(reply) == kept
    assert reply["output_ids"] == _greedy_over(model, prompt, kept)
    # It is its own draft, but for the prompt's first token, which SGLang's drafts never see.
    assert reply["meta_info"]["spec_stack"]["num_accepted"] > 0
    longer = [*prompt, *reply["output_ids"], *reference.text_ids(40, seed=6)]
    second = server.generate(longer, 12, sparse_prefill="on", explain=True, follow_up="recall")
    given = _positions(second)
    assert set(given) >= {*kept, *range(len(prompt), len(longer))}
    assert second["output_ids"] == _greedy_over(model, longer, given)
    server.stop()


def _greedy_over(model: Any, prompt: list[int], kept: list[int]) -> list[int]:
    return oracle.sparse_greedy(model, [prompt[at] for at in kept], range(len(kept)), len(kept), 12)


def _positions(reply: dict[str, Any]) -> list[int]:
    spans = reply["meta_info"]["spec_stack"]["kept_spans"]
    return [position for start, stop in spans for position in range(start, stop)]
