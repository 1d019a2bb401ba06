"""The trainable twin of the pair's Llama: same parameter names as transformers' LlamaForCausalLM (tied embeddings).

Why not train the transformers class itself: a retrieval sequence has thousands of tokens and a loss on a few hundred,
so the last layer is computed only where there is a loss, and its attention there is handed out, so that it can be
supervised (the attention is what scores a prompt for sparse prefill).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

EPS = 1e-5
PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, END = range(7)
_ABOUT = ("shape", "step", "tokens", "elapsed", "valid_nats")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Shape:
    """Everything that fixes the architecture."""

    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 832
    vocab: int = 4096
    theta: float = 500_000.0
    max_positions: int = 16_384

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @classmethod
    def from_folder(cls, folder: Path) -> Shape:
        """Read a transformers config.json. Raises ValueError for a model that this module cannot be."""
        config = json.loads((folder / "config.json").read_text())
        if config.get("model_type") != "llama" or not config.get("tie_word_embeddings"):
            raise ValueError(f"{folder} is not a Llama with tied embeddings; this trainer makes only those")
        rope = config.get("rope_parameters") or config
        other = {
            "rope_type": (rope.get("rope_type", "default"), "default"),
            "rope_scaling": (config.get("rope_scaling"), None),
            "rms_norm_eps": (config.get("rms_norm_eps", EPS), EPS),
            "attention_bias": (config.get("attention_bias", False), False),
            "mlp_bias": (config.get("mlp_bias", False), False),
        }
        for name, (value, known) in other.items():
            if value != known:
                raise ValueError(f"{folder} has {name} {value!r}; this trainer knows only {known!r}")
        shape = cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            theta=float(rope["rope_theta"]),
            max_positions=config["max_position_embeddings"],
        )
        if config.get("head_dim", shape.head_dim) != shape.head_dim:
            raise ValueError(f"{folder} has heads of {config['head_dim']}; this trainer knows only hidden / heads")
        return shape


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.weight


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _keys_values(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        groups = self.heads // self.kv_heads
        keys = _rotate(self._split(self.k_proj(x)), cos, sin).repeat_interleave(groups, 1)
        return keys, self._split(self.v_proj(x)).repeat_interleave(groups, 1)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        keys, values = self._keys_values(x, cos, sin)
        queries = _rotate(self._split(self.q_proj(x)), cos, sin)
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def windowed(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, window: int, sinks: int) -> torch.Tensor:
        """Like forward, but each token sees itself, the window - 1 before it and the first `sinks`. Batch of one.

        Blocks of `window` queries meet their own and the previous block and the sinks: linear in the tokens.
        """
        keys, values = self._keys_values(x, cos, sin)
        queries = _rotate(self._split(self.q_proj(x)), cos, sin)
        length = x.shape[1]
        blocks = -(-length // window)
        pad = blocks * window - length

        def with_previous(part: torch.Tensor) -> torch.Tensor:  # (heads, tokens, dim) -> (blocks, heads, keys, dim)
            padded = F.pad(part, (0, 0, window, pad)).unflatten(1, (blocks + 1, window))
            near = torch.cat((padded[:, :-1], padded[:, 1:]), dim=2)
            first = part[:, None, :sinks].expand(-1, blocks, -1, -1)
            return torch.cat((first, near), dim=2).transpose(0, 1)

        blocked = F.pad(queries[0], (0, 0, 0, pad)).unflatten(1, (blocks, window)).transpose(0, 1)
        query_at = torch.arange(blocks * window, device=x.device).view(blocks, window, 1)
        near_at = (
            torch.arange(-window, window, device=x.device) + window * torch.arange(blocks, device=x.device)[:, None]
        )
        near_at = near_at[:, None]
        near = (near_at >= 0) & (near_at <= query_at) & (near_at > query_at - window)
        sink_at = torch.arange(min(sinks, length), device=x.device)[None, None]
        far = sink_at <= query_at - window  # those that the window does not hold already
        mask = torch.cat((far, near), dim=2)[:, None]
        out = F.scaled_dot_product_attention(blocked, with_previous(keys[0]), with_previous(values[0]), attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(0, 1)[:length].flatten(1)[None])

    def at(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, queries_at: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output at the given indices only, and the attention there (heads, queries, tokens). Batch of one."""
        keys, values = self._keys_values(x, cos, sin)
        chosen = _rotate(self._split(self.q_proj(x[:, queries_at])), cos[:, :, queries_at], sin[:, :, queries_at])
        scores = (chosen @ keys.transpose(-1, -2)).float() * self.head_dim**-0.5
        later = torch.arange(x.shape[1], device=x.device)[None, :] > queries_at[:, None]
        attention = scores.masked_fill(later, -torch.inf).softmax(-1)
        out = attention.to(values.dtype) @ values
        return self.o_proj(out.transpose(1, 2).flatten(2)), attention[0]


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape), MLP(shape)
        self.input_layernorm, self.post_attention_layernorm = Norm(shape.hidden), Norm(shape.hidden)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))

    def windowed(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, window: int, sinks: int) -> torch.Tensor:
        x = x + self.self_attn.windowed(self.input_layernorm(x), cos, sin, window, sinks)
        return x + self.mlp(self.post_attention_layernorm(x))

    def at(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, queries_at: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, attention = self.self_attn.at(self.input_layernorm(x), cos, sin, queries_at)
        x = x[:, queries_at] + out
        return x + self.mlp(self.post_attention_layernorm(x)), attention


class _Core(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)


class PairModel(nn.Module):
    """A Llama with tied embeddings: hidden states out, logits through `logits`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = _Core(shape)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02 if "embed" in name else 0.5 * parameter.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)

    def _rope(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = torch.arange(0, self.shape.head_dim, 2, device=positions.device).float() / self.shape.head_dim
        angles = positions[:, None, :, None].float() * (1.0 / self.shape.theta**half)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Final hidden states (batch, tokens, hidden)."""
        cos, sin = self._rope(positions)
        x = self.model.embed_tokens(ids)
        for block in self.model.layers:
            x = block(x, cos, sin)
        return self.model.norm(x)

    def hidden_at(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        queries_at: torch.Tensor,
        window: int = 0,
        sinks: int = 64,
        middle: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """For one sequence: final hidden states at some indices (1, n, hidden), and the attention of the last layer and
        of the layer `middle` there (heads, n, tokens).

        With a window, all other tokens attend to the window and the sinks only, in every layer.
        """
        cos, sin = self._rope(positions)
        x = self.model.embed_tokens(ids)
        blocks = list(self.model.layers)
        between = None
        for layer, block in enumerate(blocks[:-1]):
            asked = None
            if window or layer == middle:
                asked, attention = block.at(x, cos, sin, queries_at)
                between = attention if layer == middle else between
            if window:
                x = block.windowed(x, cos, sin, window, sinks).index_copy(1, queries_at, asked.float())
            else:
                x = block(x, cos, sin)
        x, attention = blocks[-1].at(x, cos, sin, queries_at)
        return self.model.norm(x), attention, between

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight).float()


def load_folder(folder: Path) -> PairModel:
    """A model from a Transformers folder (one or several safetensors files), in fp32."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"no safetensors file in {folder}; give a folder that save_pretrained wrote")
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        weights |= load_file(file)
    weights.pop("lm_head.weight", None)
    model = PairModel(Shape.from_folder(folder))
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    return model


def export_folder(
    shape: Shape, weights: Mapping[str, torch.Tensor], tokenizer_folder: Path, out: Path, shard: str = "16MB"
) -> None:
    """Write a Transformers folder in bf16: config, generation config, weights, tokenizer and chat template."""
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

    config: Any = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rms_norm_eps=EPS,
        rope_theta=shape.theta,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=[EOS, END],
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = {name: value.to(torch.bfloat16) for name, value in weights.items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS, eos_token_id=[EOS, END], pad_token_id=PAD, do_sample=False
    )
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out, max_shard_size=shard)
    written = json.loads((out / "config.json").read_text())
    # For readers older than transformers 5.
    written |= {"rope_theta": shape.theta, "torch_dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(written, indent=2))
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_folder / name, out / name)


@torch.no_grad()
def widen_mlp(model: PairModel, intermediate: int) -> PairModel:
    """The same function with wider MLPs: the new units read like new ones and write nothing yet.

    Raises ValueError for fewer units than there are.
    """
    old = model.shape.intermediate
    if intermediate < old:
        raise ValueError(f"an MLP of {old} units cannot be widened to {intermediate}; give at least {old}")
    wide = PairModel(replace(model.shape, intermediate=intermediate))
    state = model.state_dict()
    for name, parameter in wide.named_parameters():
        if name.endswith("down_proj.weight"):
            parameter[:, :old] = state[name]
        elif "mlp" in name:
            parameter[:old] = state[name]
        else:
            parameter.copy_(state[name])
    return wide


@torch.no_grad()
def seed_previous_token_heads(model: PairModel) -> None:
    """Make the first layer's first key group attend to the previous token and the one before it, by construction.

    A two-layer model needs such heads to copy from the context, and does not find them within a few million tokens.
    A direction that all embeddings share (adding it changes every logit alike) is the only thing these heads read.
    """
    attention, norm = model.model.layers[0].self_attn, model.model.layers[0].input_layernorm
    head_dim, embedding = model.shape.head_dim, model.model.embed_tokens.weight
    shared = embedding.mean(0)
    shared = shared / shared.norm()
    wanted = 0.75 * embedding.norm(dim=1).mean()
    embedding += (wanted - embedding @ shared)[:, None] * shared
    read = shared / norm.weight
    constant = (norm(embedding) @ read).mean()
    attention.q_proj.weight[: 2 * head_dim] = 0
    attention.k_proj.weight[:head_dim] = 0
    half = head_dim // 2
    for index in range(min(6, half)):
        angle = torch.tensor(model.shape.theta ** (-2 * index / head_dim))
        row = (8.0 if index == 0 else 6.0) / constant * read
        attention.q_proj.weight[index] = row
        attention.q_proj.weight[head_dim + index] = angle.cos() * row
        attention.q_proj.weight[head_dim + index + half] = -angle.sin() * row
        attention.k_proj.weight[index] = angle.cos() * row
        attention.k_proj.weight[index + half] = angle.sin() * row


def pack(states: Mapping[str, Mapping[str, Any]], out: Path, shard_bytes: int = 15 * 2**20) -> list[Path]:
    """Checkpoints as a few flat bf16 files, NAME-00.safetensors …, and pack.json; `unpack` reads them back.

    For machines that hand back only a handful of small files.
    """
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    for old in (file for name in states for file in out.glob(f"{name}-*.safetensors")):
        old.unlink()
    files = []
    for name, state in states.items():
        shards: list[dict[str, torch.Tensor]] = [{}]
        size = 0
        for key, value in state["model"].items():
            tensor = value.detach().to("cpu", torch.bfloat16).contiguous()
            if size + tensor.nbytes > shard_bytes and shards[-1]:
                shards.append({})
                size = 0
            shards[-1][key] = tensor
            size += tensor.nbytes
        for index, shard in enumerate(shards):
            files.append(out / f"{name}-{index:02d}.safetensors")
            save_file(shard, files[-1])
    about = {name: {key: value for key, value in state.items() if key in _ABOUT} for name, state in states.items()}
    (out / "pack.json").write_text(json.dumps(about, indent=1))
    return [*files, out / "pack.json"]


def unpack(packed: Path) -> dict[str, tuple[Shape, dict[str, torch.Tensor]]]:
    """The models of a folder that `pack` wrote: name to shape and weights."""
    from safetensors.torch import load_file

    models = {}
    for name, about in json.loads((packed / "pack.json").read_text()).items():
        weights: dict[str, torch.Tensor] = {}
        for file in sorted(packed.glob(f"{name}-*.safetensors")):
            weights |= load_file(file)
        models[name] = (Shape(**about["shape"]), weights)
    return models
