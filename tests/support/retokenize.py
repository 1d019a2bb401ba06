"""A copy of a model with another tokenizer, without training: a byte-level BPE with fewer merges and other ids.

Every token of the smaller vocabulary was one of the larger, so its embedding is copied.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from spec_stack.prefill.calibration import FILE_NAME

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def drop_merges(source: Path, to: Path, share: float, seed: int, tokenizer_from: Path | None = None) -> None:
    """Write to `to` the Llama folder `source` (one safetensors file) with that share of its tokenizer's merges dropped,
    chosen by the seed together with all that build on them; the ordinary tokens left get shuffled ids.

    tokenizer_from: the folder of its tokenizer, where it has none itself.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"the share of merges to drop must be in 0…1, got {share}")
    # A calibration is of one vocabulary.
    shutil.copytree(source, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns(FILE_NAME))
    for name in TOKENIZER_FILES:
        shutil.copyfile((tokenizer_from or source) / name, to / name)
    tokenizer = json.loads((to / "tokenizer.json").read_text(encoding="utf-8"))
    model, rng = tokenizer["model"], random.Random(seed)
    made = {left + right for left, right in model["merges"]}
    known = {token for token in model["vocab"] if token not in made}
    kept = []
    for left, right in model["merges"]:
        if rng.random() >= share and left in known and right in known:
            kept.append([left, right])
            known.add(left + right)
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ordinary = sorted((token for token in known if token not in special), key=lambda token: model["vocab"][token])
    rng.shuffle(ordinary)
    # Special tokens come first and keep their ids, which the configuration names.
    tokens = [*sorted(special, key=special.__getitem__), *ordinary]
    rows = torch.tensor([model["vocab"][token] for token in tokens])
    model["merges"], model["vocab"] = kept, {token: index for index, token in enumerate(tokens)}
    (to / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (to / "config.json").write_text(json.dumps(config | {"vocab_size": len(tokens)}), encoding="utf-8")
    weights = load_file(source / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name] = weights[name][rows].clone()
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
