"""Targets and pairs of other architectures, each tiny and random: pruned as plain Transformers would."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    GPT2Config,
    GraniteConfig,
    Olmo2Config,
    Phi3Config,
    StableLmConfig,
)

from spec_stack.config import PrefillConfig
from spec_stack.prefill.segments import line_borders
from spec_stack.tokenizers.vocabulary import Pieces
from tests.support import reference as oracle
from tests.support import reference_question
from tests.support.nightly import others_nightly

from .conftest import ASSETS, BY_CHUNKS, Reference, kept_positions, special_spans

_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {
    **_IDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_PAIRS: dict[str, Any] = {
    "Phi3": Phi3Config(**_SIZES, sliding_window=None),
    "OLMo2": Olmo2Config(**_SIZES),
    "GLM4": Glm4Config(**_SIZES, head_dim=16, attention_bias=True),
    "Granite": GraniteConfig(**_SIZES, embedding_multiplier=2.0, attention_multiplier=0.2, logits_scaling=2.0),
}
_WINDOWS = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
_TARGETS: dict[str, Any] = {
    # Windows in every other layer, far shorter than the kept tokens.
    "sliding windows": Gemma3TextConfig(
        **{**_SIZES, "num_hidden_layers": 4, "tie_word_embeddings": True}, head_dim=16, **_WINDOWS
    ),
    "learned positions": GPT2Config(**_IDS, n_positions=2048, n_embd=64, n_layer=2, n_head=4),
    "another one": StableLmConfig(**_SIZES),
}


def _saved(config: Any, folder: Path, reference: Reference) -> tuple[Path, Any]:
    """A random model far from uniform attention, so that mistakes in positions show, with the embedded tokenizer."""
    torch.manual_seed(3)
    config.vocab_size = reference.generator.target.config.vocab_size
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.3)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ASSETS / "target" / file, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    return folder, model


def _greedy(model: Any, token_ids: list[int]) -> list[int]:
    ids, options = torch.tensor([token_ids]), {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return [int(token_id) for token_id in output[0, len(token_ids) :]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", others_nightly(_TARGETS, usual=["sliding windows"]))
def test_a_target_of_another_architecture_is_pruned(
    launch: Any, reference: Reference, tmp_path: Path, kind: str
) -> None:
    """A plain draft scores; plain decoding, and the turn after reuses what was kept."""
    folder, model = _saved(_TARGETS[kind], tmp_path / "model", reference)
    server = launch(
        *("--max-total-tokens", "6000", "--chunked-prefill-size", "128", "--context-length", "2048"),
        own_algorithm=(),
        target=folder,
    )
    # It shares no beginning with any other test's.
    prompt = [*random.Random(1920).choices(range(100, 1000), k=4), *reference.prompt(700, 1920)]
    dense = server.generate(prompt, 12, sparse_prefill="off")
    assert dense["output_ids"] == _greedy(model, prompt), "SGLang's own model is not Transformers'"
    options = {"explain": True, "keep_rate": 0.3, "follow_up": "recall"}
    reply = server.generate(prompt, 12, sparse_prefill="on", **options)
    assert reply["output_ids"] == _greedy(model, [prompt[at] for at in kept_positions(reply)])
    history = [*prompt, *reply["output_ids"], *reference.user_turn(30, seed=1921)]
    second = server.generate(history, 12, **options)
    assert second["output_ids"] == _greedy(model, [history[at] for at in kept_positions(second)])
    assert not server.state()["num_failures"]
    server.stop()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", _PAIRS)
def test_a_pair_of_this_architecture_is_pruned_as_plain_transformers_would(
    launch: Any, reference: Reference, tmp_path: Path, name: str
) -> None:
    """What is kept by attention matrices, and every token by plain forwards; the same again in the turn after."""
    folder, model = _saved(_PAIRS[name], tmp_path / "model", reference)
    flags = ("--max-total-tokens", "4000", "--spec-stack-keep-rate", "0.3")
    server = launch(*flags, environment=BY_CHUNKS, target=folder, draft=folder)
    prompt = reference.text_ids(420, seed=5)
    pieces = Pieces(reference.tokenizer).of(prompt)
    question = reference_question.question_of(pieces, line_borders(pieces), special_spans(prompt))
    asking = question.repeated, question.in_place, question.asks, question.is_question, question.is_marked
    scores = oracle.question_importance(model, prompt, *asking, mean=True)
    sizes = PrefillConfig.chunk_size, PrefillConfig.keep_first, PrefillConfig.keep_last
    chunks = [(start, min(start + sizes[0], len(prompt))) for start in range(0, len(prompt), sizes[0])]
    means = [float(scores[start:stop].mean()) for start, stop in chunks]
    raised = reference_question.raised(means, pieces, chunks, [-1] * len(chunks), question.words())
    kept = oracle.selected_positions([raised[at // sizes[0]] for at in range(len(prompt))], 0.3, *sizes)
    reply = server.generate(prompt, 12, sparse_prefill="on", explain=True, gamma=4)
    assert kept_positions(reply) == kept
    assert reply["output_ids"] == _greedy(model, [prompt[at] for at in kept])
    # It is its own draft, but for the prompt's first token, which SGLang's drafts never see.
    assert reply["meta_info"]["spec_stack"]["num_accepted"] > 0
    longer = [*prompt, *reply["output_ids"], *reference.text_ids(40, seed=6)]
    second = server.generate(longer, 12, sparse_prefill="on", explain=True, follow_up="recall")
    given = kept_positions(second)
    assert set(given) >= {*kept, *range(len(prompt), len(longer))}
    assert second["output_ids"] == _greedy(model, [longer[at] for at in given])
    server.stop()
