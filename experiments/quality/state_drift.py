"""How far does a sparse prefill push recurrent state away from where the whole prompt would have left it?

Recurrent layers (linear attention, Mamba) prefill only the kept tokens, as if they were neighbours. For a hybrid
model and real text this measures, per recurrent layer, the relative L2 distance |S_sparse - S_dense| / |S_dense| of
the states after the same last tokens, against keep_rate; selections are the draft's, and as controls random ones and
the most recent tokens, of the same size. The same distance again after further tokens that both prefill shows whether
it fades, and two unrelated prompts that end alike show how large it can get. Beside it: how often the next token
agrees, and KL(dense || sparse), over those further tokens.

No pretrained hybrid comes with the package, so a small Qwen3.5 is trained first (`--train`), or `--model random` takes
untrained weights. Prints a table, ends in one JSON line; --plot draws it.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import random
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3_5TextConfig

from experiments.common.environment import describe
from experiments.common.script import run_script
from spec_stack import PrefillConfig
from spec_stack.decode.propose import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.hf.attention import install
from spec_stack.hf.loading import ASSETS
from spec_stack.hf.model import CachedModel
from spec_stack.prefill.scoring import score_prompt
from spec_stack.prefill.selection import select
from spec_stack.types import Selection

KEEP_RATES = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)
# Of each kind of text: how its files' names begin, the most characters of all and of one document.
GROUPS = {
    "prose": ("prose_novels", 15_000_000, 110_000),
    "code": ("code_", 18_000_000, 24_000),
    "docs": ("docs_", 12_000_000, 20_000),
}


def make_hybrid(vocab_size: int) -> PreTrainedModel:
    """A small Qwen3.5: six gated delta-net layers, two gated-attention layers.

    The time steps start log-uniform in 0.001 to 0.1, as flash-linear-attention starts a gated delta net. transformers
    starts them all at 1.3, with which a layer forgets everything within a few tokens and has no state to speak of.
    """
    config = Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                time_step = torch.empty_like(parameter).uniform_(math.log(0.001), math.log(0.1)).exp()
                # The inverse of the softplus that the layer applies.
                parameter.copy_(time_step + torch.log(-torch.expm1(-time_step)))
    return model


def read_documents(corpus: Path, group: str, share: float) -> list[str]:
    """Return texts of one kind in a fixed random order, up to a share of its characters.

    Long ones are cut at a random place. Each line of a file is a record with "text"; lines end at "\\n" alone.
    """
    prefix, most_chars, most_in_document = GROUPS[group]
    rng = random.Random(f"pair-{group}")
    files = sorted(path for path in corpus.glob("*.jsonl*") if path.name.startswith(prefix))
    texts = [text for path in files for text in _records(path)]
    rng.shuffle(texts)
    kept: list[str] = []
    num_chars = 0
    for text in texts:
        if len(text) > most_in_document:
            start = rng.randrange(len(text) - most_in_document)
            start = 0 if group == "code" else text.find("\n", start) + 1
            text = text[start : start + most_in_document]
        num_chars += len(text)
        kept.append(text)
        if num_chars >= most_chars * share:
            break
    return kept


def _records(path: Path) -> list[str]:
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8", newline="\n") as lines:
        return [json.loads(line)["text"] for line in lines if line.strip()]


def read_tokens(corpus: Path, tokenizer: Any, share: float) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the documents: every eighth for measuring, the rest for training."""
    texts = [text for group in GROUPS for text in read_documents(corpus, group, share)]
    random.Random(0).shuffle(texts)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in tqdm(texts, desc="tokens", leave=False)]
    return [each for index, each in enumerate(ids) if index % 8], ids[::8]


def train(model: PreTrainedModel, train_ids: list[list[int]], steps: int, length: int, batch: int, to: Path) -> None:
    """AdamW with warm-up and cosine decay over packed text. Leaves the model in the folder, and in training.json the
    number of its tokens and the mean loss of the last tenth, in nats."""
    stream = torch.tensor([token for document in train_ids for token in document])
    rng = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05)
    losses = []
    model.train()
    for step in (bar := tqdm(range(steps), desc="train", mininterval=10)):
        rate = min(1.0, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * rate
        starts = rng.integers(0, len(stream) - length, batch)
        ids = torch.stack([stream[start : start + length] for start in starts])
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        bar.set_postfix_str(f"loss {fmean(losses[-50:]):.3f}")
    model.eval()
    model.save_pretrained(to)
    training = {"tokens": steps * length * batch, "loss_nats": fmean(losses[-max(1, steps // 10) :])}
    (to / "training.json").write_text(json.dumps(training), encoding="utf-8")


def recurrent_states(model: CachedModel) -> dict[int, torch.Tensor]:
    """A copy of the recurrent state of every layer that has one."""
    layers = enumerate(model._cache.layers)
    return {index: layer.recurrent_states[0].clone() for index, layer in layers if hasattr(layer, "recurrent_states")}


def distance(states: dict[int, torch.Tensor], others: dict[int, torch.Tensor]) -> dict[int, float]:
    """|S - S_other| / |S_other| per layer."""
    return {index: float((states[index] - other).norm() / other.norm()) for index, other in others.items()}


class Run:
    """One prefill and the tokens after it: states after either, and the log-probabilities of the latter."""

    def __init__(self, hybrid: PreTrainedModel, selection: Selection, follow: list[int]) -> None:
        model = CachedModel(hybrid, 1024)
        first = model.forward(selection.token_ids, selection.positions, 1)
        self.states = recurrent_states(model)
        start = selection.num_prompt_tokens
        rest = model.forward(follow, range(start, start + len(follow)), len(follow))
        self.later_states = recurrent_states(model)
        self.log_probs = torch.cat([first, rest[:-1]]).log_softmax(dim=-1)


def selections(draft: PreTrainedModel, prompt: list[int], config: PrefillConfig, seed: int) -> dict[str, Selection]:
    """The draft's selection of the prompt, one of random chunks, and the latest chunks."""
    model = CachedModel(draft, config.prefill_chunk)
    look_ahead = partial(propose, model, sampler=Sampler(), end_ids=())
    scored, _ = score_prompt(model, prompt, look_ahead, config)
    generator = torch.Generator().manual_seed(seed)
    controls = {"random": torch.rand(len(prompt), generator=generator), "recent": torch.arange(float(len(prompt)))}
    return {"draft": scored} | {how: select(prompt, scores, config) for how, scores in controls.items()}


def measure(hybrid: PreTrainedModel, draft: PreTrainedModel, texts: list[list[int]], args: Any) -> dict[str, Any]:
    """Means over the texts, by selection and keep_rate."""
    cells: dict[tuple[str, float], dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    unrelated = []
    tail = (PrefillConfig.keep_last - 1) * PrefillConfig.chunk_size
    last_ids: list[int] | None = None
    for seed, text in enumerate(tqdm(texts, desc="prompts", leave=False)):
        prompt, follow = text[: args.tokens], text[args.tokens : args.tokens + args.follow]
        dense = Run(hybrid, Selection.everything(prompt), follow)
        if last_ids is not None:
            # Another text, with this one's last tokens.
            other = Run(hybrid, Selection.everything(last_ids[:-tail] + prompt[-tail:]), follow)
            unrelated.append(fmean(distance(other.states, dense.states).values()))
        last_ids = prompt
        for keep_rate in KEEP_RATES:
            config = replace(PrefillConfig(), keep_rate=keep_rate)
            for how, selection in selections(draft, prompt, config, seed).items():
                sparse = Run(hybrid, selection, follow)
                cell = cells[how, keep_rate]
                cell["kept"].append(selection.keep_rate)
                cell["layers"].append(distance(sparse.states, dense.states))
                cell["later"].append(fmean(distance(sparse.later_states, dense.later_states).values()))
                agrees = sparse.log_probs.argmax(-1) == dense.log_probs.argmax(-1)
                cell["agreement"].append(float(agrees.float().mean()))
                kl = (dense.log_probs.exp() * (dense.log_probs - sparse.log_probs)).sum(-1)
                cell["kl_nats"].append(float(kl.mean()))
    rows = [
        {
            "selection": how,
            "keep_rate": keep_rate,
            "kept": fmean(cell["kept"]),
            "drift": fmean(fmean(layers.values()) for layers in cell["layers"]),
            "drift_by_layer": {index: fmean(each[index] for each in cell["layers"]) for index in cell["layers"][0]},
            "drift_later": fmean(cell["later"]),
            "agreement": fmean(cell["agreement"]),
            "kl_nats": fmean(cell["kl_nats"]),
        }
        for (how, keep_rate), cell in cells.items()
    ]
    return {"rows": rows, "unrelated": fmean(unrelated)}


def plot(result: dict[str, Any], to: Path) -> None:
    """Drift by layer and in the mean, and what it does to the next token, against keep_rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    styles = {"draft": "-", "random": "--", "recent": ":"}
    rows = {how: [row for row in result["rows"] if row["selection"] == how] for how in styles}
    rates = [row["keep_rate"] for row in rows["draft"]]
    layers = list(rows["draft"][0]["drift_by_layer"])
    for order, layer in enumerate(layers):
        color = plt.get_cmap("viridis")(order / len(layers))
        drift = [row["drift_by_layer"][layer] for row in rows["draft"]]
        left.plot(rates, drift, color=color, linewidth=1, label=f"layer {layer}, draft's selection")
    for how, style in styles.items():
        left.plot(rates, [row["drift"] for row in rows[how]], "C0" + style, marker="o", label=f"mean, {how}")
        later = [row["drift_later"] for row in rows[how]]
        left.plot(rates, later, "C1" + style, marker="s", label=f"mean, {how}, {result['follow']} tokens later")
        right.plot(rates, [row["kl_nats"] for row in rows[how]], "C3" + style, marker="o", label=f"KL, {how}")
    left.axhline(result["unrelated"], color="black", linewidth=0.8, linestyle="-.", label="unrelated prompt, same end")
    left.set(
        xlabel="keep_rate", ylabel="relative L2 distance of the recurrent state", ylim=(0, 1.5 * left.get_ylim()[1])
    )
    left.legend(fontsize=6.5, handlelength=4, framealpha=1)
    right.set(xlabel="keep_rate", ylabel="KL(dense || sparse) of the next token, nats", ylim=(0, None))
    agreement = right.twinx()
    for how, style in styles.items():
        agreement.plot(rates, [row["agreement"] for row in rows[how]], "C2" + style, marker="s", label=f"agrees, {how}")
    agreement.set(ylabel="share of next tokens that agree", ylim=(0, 1.02))
    handles = [axes.get_legend_handles_labels() for axes in (right, agreement)]
    right.legend(
        handles[0][0] + handles[1][0], handles[0][1] + handles[1][1], fontsize=7, handlelength=4, loc="center right"
    )
    figure.suptitle(f"{result['model']}: {result['prompts']} prompts of {result['tokens']} tokens", fontsize=10)
    figure.tight_layout()
    figure.savefig(to, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help='folder of text as .jsonl or .jsonl.xz, each line with "text"')
    parser.add_argument("--model", default="random", help='folder of the hybrid, or "random" (%(default)s)')
    parser.add_argument("--train", type=int, metavar="STEPS", help="train the hybrid first, into --model")
    parser.add_argument("--length", type=int, default=1024, help="tokens per training row (%(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="rows per training step (%(default)s)")
    parser.add_argument("--share", type=float, default=0.1, help="share of the corpus to read (%(default)s)")
    parser.add_argument("--tokens", type=int, default=2048, help="prompt length (%(default)s)")
    parser.add_argument("--follow", type=int, default=64, help="tokens after it (%(default)s)")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="write the figure here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target")
    train_ids, held_out = read_tokens(args.corpus, tokenizer, args.share)
    texts = [ids for ids in held_out if len(ids) >= args.tokens + args.follow][: args.prompts]
    if len(texts) < 2:
        raise ValueError(
            f"the corpus has {len(texts)} held-out texts of {args.tokens + args.follow} tokens; lower --tokens"
        )
    if args.train:
        if args.model == "random":
            raise ValueError("--train needs a folder to keep the model in: --model FOLDER")
        train(make_hybrid(len(tokenizer)), train_ids, args.train, args.length, args.batch, Path(args.model))
    random_weights = args.model == "random"
    hybrid = make_hybrid(len(tokenizer)) if random_weights else AutoModelForCausalLM.from_pretrained(args.model)
    hybrid.eval()
    draft = AutoModelForCausalLM.from_pretrained(ASSETS / "draft").eval()
    for model in (hybrid, draft):
        install(model)
    trained_on = Path(args.model) / "training.json"
    training = json.loads(trained_on.read_text(encoding="utf-8")) if trained_on.exists() else None
    name = "tiny Qwen3.5, " + ("random weights" if random_weights else "briefly trained")
    result = {"model": name, "prompts": len(texts), "tokens": args.tokens, "follow": args.follow}
    result |= measure(hybrid, draft, texts, args)
    print(f"{name}; {len(texts)} prompts of {args.tokens} tokens, states after the same last tokens")
    print(f"selection  keep_rate   kept   drift  {args.follow} tokens later  agreement  KL (nats)")
    for row in result["rows"]:
        print(
            f"{row['selection']:9s} {row['keep_rate']:10.2f} {row['kept']:6.3f} {row['drift']:7.4f} "
            f"{row['drift_later']:16.4f} {row['agreement']:10.1%} {row['kl_nats']:10.4f}"
        )
    print(f"an unrelated prompt with the same last tokens: {result['unrelated']:.4f}")
    if args.plot:
        plot(result, args.plot)
    print(json.dumps({"experiment": "state_drift", **describe(), "training": training, **result}))


if __name__ == "__main__":
    run_script(main)
