"""Train an EAGLE3 head for the embedded target: minutes on one core, 0.9 MB.

python -m experiments.serving.eagle3_head --corpus FOLDER --out FOLDER [--minutes 5]

Distillation from the target's own distribution over the corpus, with training-time test over three drafted tokens
(EAGLE-3, arXiv:2503.01840): from the second on, the head reads its own output in place of the target's layers. The head
has two attention heads and shares the target's embeddings and output layer. FOLDER of the corpus has *.jsonl.xz files
with a "text" per line.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

TARGET = Path(__file__).resolve().parents[2] / "spec_stack" / "assets" / "target"
AUX_LAYERS = (0, 2, 4)
_NUM_HEADS, _NUM_KV_HEADS, _INNER = 2, 1, 128
_CONTEXT, _BATCH, _DRAFTED = 256, 4, 3


class Head(nn.Module):
    """One layer over pairs of a token and the target's features of the token before it, in SGLang's names."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, self.head_dim, self.theta = config.hidden_size, config.head_dim, config.rope_parameters["rope_theta"]
        self.q, self.k, self.v = (
            nn.Linear(2 * hidden, out * self.head_dim, bias=False) for out in (_NUM_HEADS, _NUM_KV_HEADS, _NUM_KV_HEADS)
        )
        self.o = nn.Linear(_NUM_HEADS * self.head_dim, hidden, bias=False)
        self.fc = nn.Linear(len(AUX_LAYERS) * hidden, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, _INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(_INNER, hidden, bias=False)
        with torch.no_grad():
            # It begins with the latest of the target's layers.
            self.fc.weight.mul_(0.1)[:, -hidden:] += torch.eye(hidden)
        eps = config.rms_norm_eps
        self.hidden_norm, self.input_norm, self.post_norm, self.norm = (nn.RMSNorm(hidden, eps) for _ in range(4))

    def forward(self, embeds: torch.Tensor, aux: torch.Tensor) -> list[torch.Tensor]:
        """What predicts the token after each embedded one, (n, length, hidden), for every drafted token.

        embeds: (n, length, hidden), of the tokens behind those whose features aux (n, length, 3 * hidden) are.
        """
        length = embeds.shape[1]
        features, embeds = self.fc(aux), self.input_norm(embeds)
        angles = torch.arange(length)[:, None] / self.theta ** (torch.arange(0, self.head_dim, 2) / self.head_dim)
        cos, sin = (torch.cat([each, each], dim=-1) for each in (angles.cos(), angles.sin()))
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        outputs = []
        for step in range(_DRAFTED):
            mixed = torch.cat([embeds, self.hidden_norm(features)], dim=-1)
            query = _rotate(self._split(self.q(mixed)), cos, sin)
            keys.append(_rotate(self._split(self.k(mixed)), cos, sin))
            values.append(self._split(self.v(mixed)))
            residual = features + self.o(self._attend(query, keys, values, step))
            normed = self.post_norm(residual)
            hidden = residual + self.down(F.silu(self.gate(normed)) * self.up(normed))
            outputs.append(self.norm(hidden))
            features = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)
        return outputs

    def _split(self, states: torch.Tensor) -> torch.Tensor:
        return states.view(*states.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def _attend(
        self, query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], step: int
    ) -> torch.Tensor:
        """Over the target's features up to `step` tokens before, and the head's own outputs between."""
        length = query.shape[2]
        seen = torch.ones(length, length, dtype=torch.bool).tril(-step)
        scores = (query @ keys[0].transpose(-1, -2)).masked_fill(~seen, -torch.inf)
        own = [(query * _later(keys[at], step - at)).sum(-1, keepdim=True) for at in range(1, step + 1)]
        weights = torch.cat([scores, *own], dim=-1).div(self.head_dim**0.5).softmax(-1)
        mixed = weights[..., :length] @ values[0]
        for at in range(1, step + 1):
            mixed = mixed + weights[..., length + at - 1, None] * _later(values[at], step - at)
        return mixed.transpose(1, 2).flatten(2)

    def save(self, folder: Path, config: dict[str, Any]) -> None:
        """In the layout of the published heads."""
        names = {
            **{"fc": self.fc, "norm": self.norm, "midlayer.hidden_norm": self.hidden_norm},
            **{"midlayer.input_layernorm": self.input_norm, "midlayer.post_attention_layernorm": self.post_norm},
            **{f"midlayer.self_attn.{name}_proj": getattr(self, name) for name in "qkvo"},
            **{f"midlayer.mlp.{name}_proj": getattr(self, name) for name in ("gate", "up", "down")},
        }
        weights = {f"{name}.weight": module.weight.detach().bfloat16().contiguous() for name, module in names.items()}
        own = {
            **{"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "tie_word_embeddings": False},
            **{"num_attention_heads": _NUM_HEADS, "num_key_value_heads": _NUM_KV_HEADS, "intermediate_size": _INNER},
            # Without one SGLang shares the target's output layer.
            "draft_vocab_size": None,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS), "use_aux_hidden_state": True},
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**config, **own}, indent=1) + "\n")
        save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _later(states: torch.Tensor, by: int) -> torch.Tensor:
    """Shifted: each position has what stands `by` positions before it."""
    return F.pad(states, (0, 0, by, 0))[:, :, : states.shape[2]] if by else states


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


def _batches(corpus: Path, tokenizer: Any, seed: int) -> Iterator[torch.Tensor]:
    """Batches (_BATCH, _CONTEXT) of windows of texts, all files alike often."""
    rng = random.Random(seed)
    files = [path for path in sorted(corpus.glob("*.jsonl.xz")) if "valid" not in path.name]
    texts = [texts for path in files if (texts := _texts(path))]
    while True:
        rows: list[list[int]] = []
        while len(rows) < _BATCH:
            text = rng.choice(rng.choice(texts))
            start = rng.randrange(max(1, len(text) - 8 * _CONTEXT))
            ids = tokenizer(text[start : start + 8 * _CONTEXT]).input_ids
            if len(ids) >= _CONTEXT:
                rows.append(ids[:_CONTEXT])
        yield torch.tensor(rows)


def _texts(path: Path) -> list[str]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [entry["text"] for entry in map(json.loads, lines) if "text" in entry]


def _targets(target: Any, ids: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's features (n, length, 3 * hidden), and its distributions at places (n, len(places), vocab)."""
    with torch.no_grad():
        output = target.model(ids, output_hidden_states=True, use_cache=False)
        right = target.lm_head(output.last_hidden_state[:, places]).softmax(-1)
    return torch.cat([output.hidden_states[layer + 1] for layer in AUX_LAYERS], dim=-1), right


def train(corpus: Path, out: Path, minutes: float, seed: int = 0) -> None:
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    embed = target.get_input_embeddings().weight.detach()
    head = Head(target.config)
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    begun = 0.0
    for step, ids in enumerate(_batches(corpus, tokenizer, seed), 1):
        begun = begun or time.process_time()
        share = (time.process_time() - begun) / (60 * minutes)
        if share >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, step / 50) * (1 - share)
        # A quarter of the positions: the output layer over all of them takes most of a step. The first ones have no
        # output of the head before them.
        places = torch.randperm(_CONTEXT - 1 - _DRAFTED)[: _CONTEXT // 4] + _DRAFTED
        aux, right = _targets(target, ids, places + 1)
        loss, agreed = torch.zeros(()), []
        for at, hidden in enumerate(head(embed[ids[:, 1:]], aux[:, :-1])):
            logits = hidden[:, places] @ embed.T
            loss = loss - 0.8**at * (right * logits.log_softmax(-1)).sum(-1).mean()
            agreed.append((logits.argmax(-1) == right.argmax(-1)).float().mean().item())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(step, f"{share:.2f}", f"{loss.item():.3f}", *(f"{each:.3f}" for each in agreed), flush=True)
    head.save(out, json.loads((TARGET / "config.json").read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5, help="of the processor's time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train(arguments.corpus, arguments.out, arguments.minutes)


if __name__ == "__main__":
    main()
