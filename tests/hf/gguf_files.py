"""GGUF files made on the spot: a Qwen2 in blocks of 8 bits, and what its weights are, unpacked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_BLOCK = 32


def make_qwen2(vocab_size: int, seed: int = 0, max_positions: int = 512) -> PreTrainedModel:
    """A tiny Qwen2 with random weights."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return Qwen2ForCausalLM(config).eval()


def _names(num_layers: int) -> dict[str, str]:
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for layer in range(num_layers):
        names |= {f"blk.{layer}.{ours}": f"model.layers.{layer}.{theirs}" for ours, theirs in _LAYER.items()}
    return names


def write_gguf(model: PreTrainedModel, path: Path, tokenizer_file: Path) -> PreTrainedModel:
    """Write the model's matrices in Q8_0 and the rest in fp32; return it with the weights that the file then holds."""
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, tokenizer_file)
    weights = dict(model.state_dict())
    for ours, theirs in _names(config.num_hidden_layers).items():
        for part in ("weight", "bias"):
            name = f"{theirs}.{part}"
            if name not in weights:
                continue
            values = weights[name].numpy()
            if values.ndim == 1:
                writer.add_tensor(f"{ours}.{part}", values)
                continue
            blocks = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{ours}.{part}", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            weights[name] = torch.from_numpy(_unpack(blocks, values.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unpacked = Qwen2ForCausalLM(config).eval()
    unpacked.load_state_dict(weights)
    return unpacked


def _unpack(blocks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Q8_0: a scale in fp16, then 32 signed bytes."""
    rows = np.ascontiguousarray(blocks).reshape(-1, 2 + _BLOCK)
    scales = rows[:, :2].copy().view(np.float16).astype(np.float32)
    return (scales * rows[:, 2:].copy().view(np.int8).astype(np.float32)).reshape(shape)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer_file: Path) -> None:
    """The vocabulary and merges of a tokenizer.json that pairs bytes."""
    stored = json.loads(tokenizer_file.read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in stored["added_tokens"]}
    vocabulary = stored["model"]["vocab"] | special
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    merges = stored["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def set_first_type(path: Path, type_id: int) -> None:
    """Have the file say that its first tensor is of another type."""
    data = bytearray(path.read_bytes())
    name = b"token_embd.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    data[at : at + 4] = type_id.to_bytes(4, "little")
    path.write_bytes(bytes(data))
