"""The mixture of a training run (`--mix`) and its batches, which depend on the seed, the step and the part alone."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from experiments.pair.data import Corpus, gapped_positions
from experiments.pair.model import EOS
from experiments.pair.questions import QuestionMaker
from experiments.pair.tasks import Sequence, TaskMaker, drop_chunks

KINDS = ("lm", "task", "sparse", "repeat", "wide", "wide-sparse")
TRAIN_HAYSTACKS = ("code", "prose", "docs", "stories", "instruct", "speeches")  # the rest are for evaluation
# Every answer of these has its evidence in the links, so that pruning cannot take it away.
PRUNABLE = ("facts", "facts", "facts", "relations", "relations", "table", "split", "copy", "cloze", "definitions")
KEEP_RATES = (0.1, 0.4)
MIN_LENGTH = 64


@dataclass(frozen=True)
class Part:
    """One part of the mixture: "kind:weight:lengths:batch", such as "task:1:4096/8192:1".

    lengths are tokens per sequence, one drawn per batch. A sparse sequence is made at that length and then pruned, so
    its batch is 1. Raises ValueError for values out of range.
    """

    kind: str
    weight: float
    lengths: tuple[int, ...]
    batch: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a part of --mix begins with one of {KINDS}, got {self.kind!r}")
        if self.batch < 1 or self.weight <= 0 or min(self.lengths, default=0) < MIN_LENGTH:
            raise ValueError(f"a part of --mix needs a positive weight and batch and {MIN_LENGTH} tokens, got {self}")
        if self.kind in ("sparse", "wide-sparse") and self.batch > 1:
            raise ValueError(
                f"{self.kind} sequences differ in length, so their batch is 1; raise the weight instead of {self}"
            )

    @classmethod
    def parse(cls, text: str) -> Part:
        try:
            kind, weight, lengths, batch = text.split(":")
            numbers = float(weight), tuple(int(length) for length in lengths.split("/")), int(batch)
        except ValueError as error:
            raise ValueError(
                f"a part of --mix is kind:weight:lengths:batch, as task:1:4096/8192:1, got {text!r}"
            ) from error
        return cls(kind, *numbers)


def parse_mix(texts: list[str]) -> list[tuple[float, list[Part]]]:
    """--mix "0.5=lm:1:512:8" --mix "lm:1:2048:2,task:1:8192:1": the parts until each fraction of the run."""
    phases: list[tuple[float, list[Part]]] = []
    for text in texts:
        until, _, parts = text.rpartition("=")
        try:
            fraction = float(until or 1.0)
        except ValueError as error:
            raise ValueError(f"--mix begins with a fraction and '=' or has no '=', got {text!r}") from error
        if phases and fraction <= phases[-1][0]:
            raise ValueError(f"the fractions of --mix must rise, got {fraction} after {phases[-1][0]}")
        phases.append((fraction, [Part.parse(part) for part in parts.split(",")]))
    return phases


@dataclass
class Batch:
    """ids, labels, weights and positions are (batch, tokens); the label of a token is the one after it.

    links: for a batch of one sequence, (query index, evidence start, evidence end) of its answer tokens.
    copies: likewise (query index, index of the token that is copied). window: 0, or the window that a draft is to read
    this sequence with.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor
    links: list[tuple[int, int, int]]
    copies: list[tuple[int, int]] = field(default_factory=list)
    window: int = 0


class Source:
    """Draws the batches of a run from a folder that `train_pair.py prepare` wrote.

    span: the largest position; gapped: the share of sequences with gaps in their positions. Raises ValueError where
    the folder's tokens do not fit into a vocabulary of vocab.
    """

    def __init__(
        self,
        data: Path,
        *,
        vocab: int,
        span: int,
        seed: int,
        gapped: float,
        context_weight: float,
        device: torch.device,
        windowed: float = 0.0,
        window: int = 128,
    ) -> None:
        self.corpus = Corpus(data)
        made_for = json.loads((data / "info.json").read_text(encoding="utf-8"))["vocab"]
        if made_for != vocab:
            raise ValueError(
                f"{data} has a vocabulary of {made_for}, the model one of {vocab}; prepare with --vocab {vocab}, "
                "and with more text where it yields fewer"
            )
        tokenizer = Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
        passages = self.corpus.ids.get("qa")
        self.tasks = TaskMaker(tokenizer, self.corpus.haystacks(), passages, context_weight=context_weight)
        self.seed, self.gapped, self.span, self.device = seed, gapped, span, device
        self.windowed, self.window = windowed, window
        haystacks = self.corpus.haystacks()
        chosen = {name: ids for name, ids in haystacks.items() if name in TRAIN_HAYSTACKS} or haystacks
        self.questions = QuestionMaker(tokenizer, chosen, "train")

    def batch(self, part: Part, step: int, index: int) -> Batch:
        rng = random.Random(f"{self.seed}-{step}-{index}")
        numbers = np.random.default_rng(rng.getrandbits(63))
        length = rng.choice(part.lengths)
        if part.kind.startswith("wide"):
            rows = [self.wide(rng, numbers, length, pruned=part.kind == "wide-sparse") for _ in range(part.batch)]
            return rows[0] if len(rows) == 1 else padded(rows)
        ids, weights, positions = [], [], []
        links: list[tuple[int, int, int]] = []
        for _ in range(part.batch):
            places = gapped_positions(numbers, length, self.span, self.gapped)
            if part.kind == "lm":
                row, row_weights = self.corpus.window(numbers, length)
            else:
                if part.kind == "repeat":
                    made = self.tasks.repeats(rng, length)
                else:
                    made = self.tasks.sequence(rng, length, linked=part.kind == "sparse")
                if part.kind == "sparse":
                    made, kept = drop_chunks(rng, made, rng.uniform(*KEEP_RATES))
                    places = np.array(kept[:-1])
                row, row_weights, links = np.array(made.ids), np.array(made.weights, dtype=np.float32), made.links
            ids.append(row)
            weights.append(row_weights)
            positions.append(places)
        stacked = torch.from_numpy(np.stack(ids)).to(self.device)
        return Batch(
            stacked[:, :-1],
            stacked[:, 1:],
            torch.from_numpy(np.stack(weights))[:, 1:].to(self.device),
            torch.from_numpy(np.stack(positions)).to(self.device),
            links if part.batch == 1 else [],
        )

    def wide(self, rng: random.Random, numbers: np.random.Generator, length: int, *, pruned: bool) -> Batch:
        """One sequence of questions in many wordings, of at most length tokens."""
        made = self.questions.made(rng, length, rng.choice(PRUNABLE) if pruned else None).sequence
        positions = gapped_positions(numbers, length, self.span, self.gapped)
        if pruned:
            made, kept = drop_chunks(rng, made, rng.uniform(*KEEP_RATES))
            positions = np.array(kept)
        window = self.window if rng.random() < self.windowed else 0
        return self._one(made, positions, length, window)

    def _one(self, made: Sequence, positions: np.ndarray, length: int, window: int) -> Batch:
        num = min(len(made.ids) - 1, length)
        ids = torch.tensor(made.ids[: num + 1], device=self.device)[None]
        weights = torch.tensor(made.weights[: num + 1], dtype=torch.float32, device=self.device)[None]
        places = torch.from_numpy(positions[:num]).to(self.device)[None]
        links = [link for link in made.links if link[0] < num]
        copies = [copy for copy in made.copies if copy[0] < num]
        return Batch(ids[:, :-1], ids[:, 1:], weights[:, 1:], places, links, copies, window)


def padded(rows: list[Batch]) -> Batch:
    """Several sequences of one row each as one batch, the shorter ones with text of no weight behind them.

    Their links, copies and windows are dropped: only a sequence by itself has its attention supervised.
    """
    length = max(row.ids.shape[1] for row in rows)

    def stacked(parts: list[torch.Tensor], fill: float) -> torch.Tensor:
        return torch.cat([F.pad(part, (0, length - part.shape[1]), value=fill) for part in parts])

    last = [row.positions[:, -1:] + torch.arange(1, length + 1, device=row.positions.device) for row in rows]
    places = [torch.cat((row.positions, after), dim=1)[:, :length] for row, after in zip(rows, last, strict=True)]
    return Batch(
        stacked([row.ids for row in rows], EOS),
        stacked([row.labels for row in rows], EOS),
        stacked([row.weights for row in rows], 0.0),
        torch.cat(places),
        [],
    )
