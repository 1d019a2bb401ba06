"""Train the embedded draft/target pair: prepare the data, train or continue either model, export Transformers folders.

    python -m experiments.pair.train prepare --corpus FOLDER --data DATA
    python -m experiments.pair.train train --data DATA --out RUN/target --shape target --minutes 60
    python -m experiments.pair.train train --data DATA --out RUN/draft --shape draft --teacher TARGET --minutes 40
    python -m experiments.pair.train export --run RUN/target --tokenizer DATA/tokenizer --to PAIR/target

Every step takes one batch of each part of the mixture (`--mix`), so that language modelling, distillation and retrieval
never fight over a step. A retrieval sequence has its loss on the answers alone; there the last layer's attention to the
evidence is supervised too (`--attention-weight`), because that attention scores prompts for sparse prefill.
A run is resumed from RUN/checkpoint.pt when there is one. Batches depend on the seed and the step, and on the phase of
the mixture, which follows the clock under --minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from experiments.common.script import run_script
from experiments.pair.batches import Batch, Part, Source, parse_mix
from experiments.pair.data import Corpus, prepare
from experiments.pair.data import __doc__ as about_data
from experiments.pair.model import (
    ASSISTANT,
    PairModel,
    Shape,
    export_folder,
    load_folder,
    pack,
    seed_previous_token_heads,
    unpack,
    widen_mlp,
)
from experiments.pair.optimiser import FullPrecisionMuon

SHAPES = {
    "target": Shape(),
    "draft": Shape(hidden=128, layers=2, intermediate=192),
    "target-gpu": Shape(hidden=384, layers=8, heads=6, kv_heads=2, intermediate=1152, vocab=8192),
    "draft-gpu": Shape(hidden=192, layers=2, heads=6, kv_heads=2, intermediate=192, vocab=8192),
    "target-tiny": Shape(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, vocab=320),
    "draft-tiny": Shape(hidden=16, layers=2, heads=2, kv_heads=1, intermediate=32, vocab=320),
}


def token_losses(
    model: PairModel, hidden: torch.Tensor, batch: Batch, teacher: PairModel | None, share: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per token: the loss (cross-entropy, mixed with the teacher's KL by share), and the KL (zeros without one)."""
    log_probs = model.logits(hidden).flatten(0, 1).log_softmax(-1)
    loss = F.nll_loss(log_probs, batch.labels.flatten(), reduction="none")
    if teacher is None:
        return loss, torch.zeros_like(loss)
    with torch.no_grad():
        teacher_log_probs = teacher.logits(teacher.hidden(batch.ids, batch.positions)).flatten(0, 1).log_softmax(-1)
        teacher_probs = teacher_log_probs.exp()
        offset = (teacher_probs * teacher_log_probs).sum(-1)
    divergence = offset - (teacher_probs * log_probs).sum(-1)
    return (1 - share) * loss + share * divergence, divergence.detach()


@dataclass(frozen=True)
class LossWeights:
    """What the loss is made of.

    distil: share of the teacher's KL. evidence: weight of the last layer's attention (mean of its heads) to the
    evidence, which is what scores a prompt. copied: of its best head's attention to the copied token. middle: a layer
    whose best head is to find the evidence (weight: found), so that the layers after it have something to copy from.
    first: how many times an answer's first token counts: it has to be found, those after it only to be gone on with.
    """

    distil: float = 0.7
    evidence: float = 0.0
    copied: float = 0.0
    middle: int | None = None
    found: float = 0.0
    first: float = 1.0


def masses(attention: torch.Tensor, links: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """Attention (heads, queries, tokens) to the spans of links (query row, start, end): (heads, links)."""
    rows, starts, ends = (torch.tensor(column, device=attention.device) for column in zip(*links, strict=True))
    at = torch.arange(attention.shape[-1], device=attention.device)
    inside = (at >= starts[:, None]) & (at < ends[:, None])
    return (attention[:, rows] * inside).sum(-1)


def part_loss(
    model: PairModel, batch: Batch, teacher: PairModel | None, parts: LossWeights
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of one batch, and what to log of it."""
    wanted = (batch.weights[0] > 0).nonzero()[:, 0]
    if len(batch.ids) > 1 or (not batch.links and len(wanted) > batch.ids.shape[1] // 4):
        hidden = model.hidden(batch.ids, batch.positions)
        loss, divergence = token_losses(model, hidden, batch, teacher, parts.distil)
        weights = batch.weights.flatten()
        total = (loss * weights).sum() / weights.sum()
        return total, {"loss": float(total.detach()), "kl": float((divergence * weights).sum() / weights.sum())}
    hidden, attention, between = model.hidden_at(
        batch.ids, batch.positions, wanted, batch.window, middle=parts.middle if parts.found else None
    )
    is_first = batch.ids[0, wanted] == ASSISTANT
    weights = batch.weights[0, wanted] * torch.where(is_first, parts.first, 1.0)
    losses = F.cross_entropy(model.logits(hidden)[0], batch.labels[0, wanted], reduction="none")
    loss = (losses * weights).sum() / weights.sum()
    logged = {"loss": float(loss.detach())}
    if bool(is_first.any()):
        logged["first"] = float(losses.detach()[is_first].mean())
    row = {int(query): at for at, query in enumerate(wanted.tolist())}
    links = [(row[query], start, end) for query, start, end in batch.links if query in row]
    terms = []
    if links and parts.evidence:
        terms.append(("mass", parts.evidence, links, masses(attention.mean(0, keepdim=True), links)[0]))
    if links and between is not None:
        terms.append(("found", parts.found, links, masses(between, links).amax(0)))
    copies = [(row[query], at, at + 1) for query, at in batch.copies if query in row]
    if copies and parts.copied:  # one head is enough, so the others are left to what they do
        terms.append(("copied", parts.copied, copies, masses(attention, copies).amax(0)))
    for name, weight, queries, mass in terms:
        logged[name] = float(mass.detach().mean())
        counts = torch.where(is_first[[each[0] for each in queries]], parts.first, 1.0)
        loss = loss - weight * (counts * (mass + 1e-5).log()).sum() / counts.sum()
    return loss, logged


@torch.no_grad()
def validate(model: PairModel, corpus: Corpus, device: torch.device, windows: int = 48, length: int = 512) -> float:
    """Nats per token on evenly spaced windows of the held-out text."""
    ids = corpus.valid.astype(np.int64)
    if len(ids) < length + 1:
        return float("nan")
    total = 0.0
    for start in np.linspace(0, len(ids) - length - 1, windows).astype(int):
        row = torch.from_numpy(ids[start : start + length + 1]).to(device)
        logits = model.logits(model.hidden(row[None, :-1], torch.arange(length, device=device)[None]))
        total += float(F.cross_entropy(logits[0], row[1:]))
    return total / windows


def halves_are_faster(device: torch.device, size: int = 512, num: int = 3) -> bool:
    """Whether matrices multiply faster in bf16 than in fp32: without instructions for it they take ten times longer."""
    if device.type != "cpu":
        return True

    def seconds(dtype: torch.dtype) -> float:
        matrix = torch.ones(size, size, dtype=dtype)
        torch.mm(matrix, matrix)
        started = time.perf_counter()
        for _ in range(num):
            torch.mm(matrix, matrix)
        return time.perf_counter() - started

    return seconds(torch.bfloat16) < seconds(torch.float32)


class Run:
    """One training run: model, optimisers, progress; saved to and resumed from a folder.

    Raises ValueError where the arguments, the data and the models do not fit together.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        if args.minutes <= 0 or args.steps < 0:
            raise ValueError(f"--minutes must be above 0 and --steps 0 or more, got {args.minutes} and {args.steps}")
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(f"this torch ({torch.__version__}) has no Muon optimiser; a newer one has")
        self.args, self.out = args, Path(args.out)
        self.phases = parse_mix(args.mix or ["lm:1:1024:4"])
        self.device = torch.device(args.device)
        self.halves = halves_are_faster(self.device)
        torch.manual_seed(args.seed)
        self.model = load_folder(Path(args.init)) if args.init else PairModel(SHAPES[args.shape])
        if args.widen_mlp:
            self.model = widen_mlp(self.model, args.widen_mlp)
        self.model = self.model.to(self.device)
        if args.seed_heads and not args.init:
            seed_previous_token_heads(self.model)
        longest = max(length for _, parts in self.phases for part in parts for length in part.lengths)
        if longest > self.model.shape.max_positions:
            raise ValueError(
                f"--mix asks for {longest} tokens, the model has {self.model.shape.max_positions} positions"
            )
        self.source = Source(
            Path(args.data),
            vocab=self.model.shape.vocab,
            span=self.model.shape.max_positions,
            seed=args.seed,
            gapped=args.gapped,
            context_weight=args.context_weight,
            device=self.device,
            windowed=args.windowed,
        )
        self.teacher = None
        if args.teacher:
            self.teacher = load_folder(Path(args.teacher)).to(self.device).eval().requires_grad_(False)
            if self.teacher.shape.vocab != self.model.shape.vocab:
                raise ValueError(f"the teacher in {args.teacher} has another vocabulary than the model to train")
        self.out.mkdir(parents=True, exist_ok=True)
        named = dict(self.model.named_parameters())
        matrices = [value for name, value in named.items() if value.ndim == 2 and "embed" not in name]
        others = [value for name, value in named.items() if value.ndim != 2 or "embed" in name]
        muon = torch.optim.Muon if self.halves else FullPrecisionMuon
        self.optimisers: list[tuple[torch.optim.Optimizer, float]] = [
            (muon(matrices, lr=args.lr, weight_decay=args.decay, momentum=0.95), args.lr),
            (torch.optim.AdamW(others, lr=args.other_lr, betas=(0.9, 0.95), weight_decay=0.0), args.other_lr),
        ]
        self.others = others
        self.loss_weights = LossWeights(
            args.distil,
            args.attention_weight,
            args.copy_weight,
            args.middle_layer,
            args.middle_weight,
            args.first_weight,
        )
        self.average = {name: value.detach().clone() for name, value in named.items()} if args.average else {}
        self.step, self.tokens, self.elapsed = 0, 0, 0.0
        self.told_to_stop = False
        if (self.out / "checkpoint.pt").exists():
            self._resume()
        if args.compile:
            self._compile()

    def _resume(self) -> None:
        state = load_checkpoint(self.out)
        if Shape(**state["shape"]) != self.model.shape:
            raise ValueError(f"{self.out} holds a run of another shape, {state['shape']}; choose another --out")
        self.model.load_state_dict(state["model"])
        for (optimiser, _), saved in zip(self.optimisers, state["optimisers"], strict=True):
            decay = optimiser.param_groups[0]["weight_decay"]
            optimiser.load_state_dict(saved)
            optimiser.param_groups[0]["weight_decay"] = decay
        self.step, self.tokens, self.elapsed = state["step"], state["tokens"], state["elapsed"]
        for name, value in self.average.items():
            value.copy_(state.get("average", {}).get(name, state["model"][name]))
        ignored = " (so --init and --seed-heads are not used)" if self.args.init or self.args.seed_heads else ""
        print(f"resumed at step {self.step}, {self.tokens} tokens{ignored}", flush=True)

    def _compile(self) -> None:
        if not any(shutil.which(compiler) for compiler in ("cc", "gcc", "clang")):
            print("no C compiler found: the blocks are not compiled", flush=True)
            return
        import torch._dynamo

        torch._dynamo.config.suppress_errors = True  # a block that does not compile runs as it is
        for module in [self.model, *([self.teacher] if self.teacher else [])]:
            for block in module.model.layers:
                block.compile()

    def save(self, valid_nats: float) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser, _ in self.optimisers],
            "shape": asdict(self.model.shape),
            "step": self.step,
            "tokens": self.tokens,
            "elapsed": self.elapsed,
            "valid_nats": valid_nats,
            "average": self.average,
        }
        torch.save(state, self.out / "checkpoint.tmp")
        (self.out / "checkpoint.tmp").replace(self.out / "checkpoint.pt")

    def progress(self) -> float:
        """Done share of the run: of --steps, or of --minutes or --max-tokens, whichever comes first."""
        if self.args.steps:
            return self.step / self.args.steps
        return max(self.elapsed / (self.args.minutes * 60), self.tokens / self.args.max_tokens)

    def _clock(self) -> float:
        """Seconds that a stopped or starved run does not count: of the processor, or by the wall with a device."""
        return time.process_time() / self.args.threads if self.device.type == "cpu" else time.monotonic()

    def stop(self, *_: object) -> None:
        """End after the step in hand, with a checkpoint: a handler for SIGTERM."""
        self.told_to_stop = True

    def _stops(self) -> bool:
        return self.told_to_stop or self.step >= self.args.stop_at or self.elapsed >= 60 * self.args.stop_minutes

    def set_rates(self, progress: float) -> float:
        warm = min(1.0, (self.step + 1) / self.args.warmup)
        left = (1 - progress) / max(1 - self.args.decay_from, 1e-9)
        scale = warm * min(1.0, max(0.01, left))
        for optimiser, peak in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = peak * scale
        return scale

    def autocast(self) -> torch.autocast:
        """Matrices in bf16 where that is the faster of the two."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.halves)

    def take_step(self, parts: list[Part]) -> dict[str, float]:
        seen: dict[str, list[float]] = {}
        for index, part in enumerate(parts):
            batch = self.source.batch(part, self.step, index)
            teacher = self.teacher if part.kind == "lm" else None
            with self.autocast():
                loss, values = part_loss(self.model, batch, teacher, self.loss_weights)
            if not torch.isfinite(loss):
                raise RuntimeError(f"the loss of {part} is not finite at step {self.step}; lower --lr")
            (loss * part.weight).backward()
            self.tokens += batch.ids.numel()
            for name, value in values.items():
                seen.setdefault(f"{part.kind}.{name}", []).append(value)
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        for optimiser, _ in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
        for name, parameter in self.model.named_parameters():
            if name in self.average:
                self.average[name].lerp_(parameter.detach(), 1 - min(self.args.average, self.step / (self.step + 10)))
        return {name: sum(values) / len(values) for name, values in seen.items()}

    def fit(self) -> None:
        means: dict[str, float] = {}
        last: list[Part] = []
        last_saved = last_logged = time.monotonic()
        while (progress := self.progress()) < 1 and not self._stops():
            started = self._clock()
            scale = self.set_rates(progress)
            parts = next((parts for until, parts in self.phases if progress < until), self.phases[-1][1])
            if parts != last:
                means.clear()
            last, before = parts, self.tokens
            for name, value in self.take_step(parts).items():
                means[name] = value + 0.95 * (means.get(name, value) - value)
            spent = self._clock() - started
            self.elapsed += spent
            if time.monotonic() - last_logged > self.args.log_s or self.step == 1:
                rate = (self.tokens - before) / max(spent, 1e-9)
                head = f"{time.strftime('%H:%M:%S')} {self.out.name} step {self.step} tokens {self.tokens}"
                tail = " ".join(f"{name} {value:.3f}" for name, value in sorted(means.items()))
                print(f"{head} done {progress:.3f} rate {scale:.3f} tok/s {rate:.0f} {tail}", flush=True)
                last_logged = time.monotonic()
            if time.monotonic() - last_saved > self.args.save_s:
                self.report()
                last_saved = time.monotonic()
        self.report()

    def report(self) -> None:
        """Validate, save a checkpoint, and add a line to progress.jsonl."""
        with self.autocast():
            loss = validate(self.model, self.source.corpus, self.device)
        self.save(loss)
        line = {"step": self.step, "tokens": self.tokens, "elapsed_s": round(self.elapsed), "valid_nats": loss}
        print(json.dumps({"run": self.out.name, **line}), flush=True)
        with (self.out / "progress.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")


def load_checkpoint(run: Path) -> dict[str, Any]:
    if not (run / "checkpoint.pt").exists():
        raise ValueError(f"no checkpoint.pt in {run}; train there first")
    state: dict[str, Any] = torch.load(run / "checkpoint.pt", map_location="cpu")
    return state


def finished(state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint whose weights are those to hand out: their moving average, where the run keeps one."""
    return state | {"model": state.get("average") or state["model"]}


def export(run: Path, tokenizer: Path, to: Path) -> None:
    """Write the latest checkpoint of a run as a Transformers folder."""
    state = finished(load_checkpoint(run))
    export_folder(Shape(**state["shape"]), state["model"], tokenizer, to)
    print(json.dumps({"exported": str(to), "step": state["step"], "tokens": state["tokens"]}))


def average(folders: Sequence[Path], tokenizer: Path, to: Path) -> None:
    """Write the mean of the weights of models of one run as a Transformers folder: what each of them learned is kept
    better than by any of them (model soups, https://arxiv.org/abs/2203.05482).

    Raises ValueError where their shapes differ.
    """
    models = [load_folder(folder) for folder in folders]
    if any(model.shape != models[0].shape for model in models):
        raise ValueError(f"models of one shape have a mean; {', '.join(map(str, folders))} differ")
    states = [model.state_dict() for model in models]
    mean = {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}
    export_folder(models[0].shape, mean, tokenizer, to)
    print(json.dumps({"exported": str(to), "mean of": len(models)}))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)
    make = commands.add_parser("prepare", help="tokenizer and token files from a corpus folder", description=about_data)
    make.add_argument("--corpus", type=Path, required=True, help="folder with *.jsonl or *.jsonl.xz files")
    make.add_argument("--data", type=Path, required=True, help="folder to write")
    make.add_argument("--tokenizer-from", type=Path, help="take this folder's tokenizer instead of training one")
    make.add_argument("--vocab", type=int, default=4096)
    make.add_argument("--share", type=float, default=1.0, help="share of the usual amount of text (1: about 48 MB)")
    make.add_argument("--from-share", type=float, default=0.0, help="leave out so much text before that")
    make.add_argument("--exclude", nargs="*", default=[], help='values of "src" to leave out')
    fit = commands.add_parser("train", help="train a model, or continue one")
    fit.add_argument("--data", required=True, help="folder that `prepare` wrote")
    fit.add_argument("--out", required=True, help="folder of the run; a checkpoint in it is resumed")
    fit.add_argument("--shape", choices=sorted(SHAPES), default="target", help="architecture of a new model")
    fit.add_argument("--init", help="Transformers folder to start from (its shape is taken)")
    fit.add_argument("--seed-heads", action="store_true", help="give a new model previous-token heads")
    fit.add_argument("--teacher", help="Transformers folder to distil from on language-modelling parts")
    fit.add_argument("--distil", type=float, default=0.7, help="share of the KL in the distilled loss")
    fit.add_argument("--mix", action="append", default=None, help="[until=]kind:weight:lengths:batch,…; repeatable")
    fit.add_argument("--minutes", type=float, default=30.0)
    fit.add_argument("--steps", type=int, default=0, help="run by steps instead of minutes")
    fit.add_argument(
        "--max-tokens", type=float, default=float("inf"), help="end (and decay) by tokens, where they come first"
    )
    fit.add_argument(
        "--stop-at", type=int, default=sys.maxsize, help="stop at this step, to go on later with other arguments"
    )
    fit.add_argument(
        "--stop-minutes", type=float, default=float("inf"), help="stop after so many minutes of steps, likewise"
    )
    fit.add_argument("--lr", type=float, default=0.015, help="peak rate of the matrices (Muon)")
    fit.add_argument("--other-lr", type=float, default=3e-3, help="peak rate of embeddings and norms (AdamW)")
    fit.add_argument("--decay", type=float, default=0.1, help="weight decay of the matrices")
    fit.add_argument("--decay-from", type=float, default=0.5, help="when the rate decays: a fraction; 1 is never")
    fit.add_argument("--warmup", type=int, default=50, help="steps")
    fit.add_argument("--attention-weight", type=float, default=0.0, help="weight of the attention to the evidence")
    fit.add_argument(
        "--copy-weight", type=float, default=0.0, help="weight of one head's attention to the copied token"
    )
    fit.add_argument("--middle-layer", type=int, help="a layer (from 0) whose attention is to find the evidence")
    fit.add_argument("--middle-weight", type=float, default=0.0, help="weight of that")
    fit.add_argument("--first-weight", type=float, default=1.0, help="how many times an answer's first token counts")
    fit.add_argument("--windowed", type=float, default=0.0, help="share of wide sequences that are read with a window")
    fit.add_argument("--average", type=float, default=0.0, help="keep (and export) a moving average with this decay")
    fit.add_argument("--widen-mlp", type=int, default=0, help="give the MLPs of --init so many units")
    fit.add_argument("--context-weight", type=float, default=0.0, help="loss weight of a task's context tokens")
    fit.add_argument("--gapped", type=float, default=0.2, help="share of sequences with gaps in their positions")
    fit.add_argument("--seed", type=int, default=20261120)
    fit.add_argument("--threads", type=int, default=1)
    fit.add_argument("--device", default="cpu")
    fit.add_argument("--compile", action="store_true", help="compile the blocks (needs a C++ compiler on CPU)")
    fit.add_argument("--log-s", type=float, default=20.0)
    fit.add_argument("--save-s", type=float, default=300.0)
    out = commands.add_parser("export", help="latest checkpoint to a Transformers folder")
    out.add_argument("--run", type=Path, required=True)
    out.add_argument("--tokenizer", type=Path, required=True)
    out.add_argument("--to", type=Path, required=True)
    mean = commands.add_parser("average", help="the mean of models of one run, as a Transformers folder")
    mean.add_argument("--of", type=Path, nargs="+", required=True, help="Transformers folders of one shape")
    mean.add_argument("--tokenizer", type=Path, required=True)
    mean.add_argument("--to", type=Path, required=True)
    flat = commands.add_parser(
        "pack", help="latest checkpoints to a few flat files, for machines that return few files"
    )
    flat.add_argument("--run", type=Path, action="append", required=True, help="repeatable; its name is kept")
    flat.add_argument("--to", type=Path, required=True)
    back = commands.add_parser("unpack", help="flat files to Transformers folders")
    back.add_argument("--packed", type=Path, required=True)
    back.add_argument("--tokenizer", type=Path, required=True)
    back.add_argument("--to", type=Path, required=True, help="gets one folder per packed model")
    return top


def main() -> None:
    args = parser().parse_args()
    if args.command == "prepare":
        text = (args.exclude, args.share, args.from_share)
        print(json.dumps(prepare(args.corpus, args.data, args.tokenizer_from, args.vocab, *text)))
    elif args.command == "export":
        export(args.run, args.tokenizer, args.to)
    elif args.command == "average":
        average(args.of, args.tokenizer, args.to)
    elif args.command == "pack":
        if len({run.name for run in args.run}) < len(args.run):
            raise ValueError("two --run folders have the same name, by which they are packed; rename one")
        files = pack({run.name: finished(load_checkpoint(run)) for run in args.run}, args.to)
        print(json.dumps({file.name: file.stat().st_size for file in files}))
    elif args.command == "unpack":
        for name, (shape, weights) in unpack(args.packed).items():
            export_folder(shape, weights, args.tokenizer, args.to / name)
    else:
        torch.set_num_threads(args.threads)
        run = Run(args)
        signal.signal(signal.SIGTERM, run.stop)
        run.fit()
        if run.told_to_stop:  # so that a recipe does not go on to its next phase
            raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    run_script(main)
