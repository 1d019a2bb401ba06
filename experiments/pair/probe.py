"""How well does one model answer, by task and by wording half? A learning curve's point in a minute.

    python -m experiments.pair.probe --data DATA --model RUN/target --halves test --length 1024

An answer is right when every one of its tokens is the model's first choice, given those before it: what greedy decoding
would give. --model is a run (its averaged weights are taken) or a Transformers folder. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from experiments.common.script import run_script
from experiments.pair.answers import haystacks
from experiments.pair.data import VALID
from experiments.pair.documents import Made
from experiments.pair.model import PairModel, Shape, load_folder
from experiments.pair.questions import QuestionMaker
from experiments.pair.train import finished, load_checkpoint


def held_out(data: Path) -> list[tuple[str, np.ndarray]]:
    """The held-out documents of a prepared folder: (domain, ids)."""
    ids = np.fromfile(data / f"{VALID}.bin", dtype=np.uint16)
    records = json.loads((data / f"{VALID}.json").read_text(encoding="utf-8"))
    return [(record["domain"], ids[record["start"] : record["start"] + record["num_tokens"]]) for record in records]


def load(folder: Path) -> tuple[PairModel, dict[str, float]]:
    """A model from a run's checkpoint or from a Transformers folder, and how far the run is."""
    if not (folder / "checkpoint.pt").exists():
        return load_folder(folder), {}
    state = finished(load_checkpoint(folder))
    model = PairModel(Shape(**state["shape"]))
    model.load_state_dict(state["model"])
    return model, {name: state[name] for name in ("step", "tokens", "elapsed", "valid_nats")}


@torch.no_grad()
def right_answers(model: PairModel, made: Made, window: int = 0) -> list[bool]:
    """Of each question, whether every token of its answer is the model's first choice."""
    ids = torch.tensor([made.sequence.ids])
    wanted = torch.tensor([at - 1 for start, end in made.answers for at in range(start, end)])
    hidden, *_ = model.hidden_at(ids, torch.arange(ids.shape[1])[None], wanted, window)
    best = dict(zip(wanted.tolist(), model.logits(hidden)[0].argmax(-1).tolist(), strict=True))
    return [all(best[at - 1] == made.sequence.ids[at] for at in range(start, end)) for start, end in made.answers]


def probe(
    model: PairModel,
    maker: QuestionMaker,
    kinds: list[str],
    length: int,
    num: int,
    questions: int | None,
    seed: int = 0,
) -> dict[str, tuple[float, int]]:
    """Share of right answers and number of questions, by kind."""
    result = {}
    for kind in kinds:
        right: list[bool] = []
        for index in range(num):
            right += right_answers(model, maker.made(random.Random(f"{seed}-{kind}-{index}"), length, kind, questions))
        result[kind] = (round(sum(right) / len(right), 3), len(right))
    return result


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--data", type=Path, required=True, help="folder that `train prepare` wrote")
    top.add_argument("--model", type=Path, required=True)
    top.add_argument("--halves", nargs="+", choices=("train", "test"), default=["test"])
    top.add_argument("--kinds", nargs="+", default=None)
    top.add_argument("--length", type=int, default=1024)
    top.add_argument("--num", type=int, default=6, help="sequences per kind")
    top.add_argument("--questions", type=int, default=None, help="questions per sequence; default: as in training")
    return top


def main() -> None:
    args = parser().parse_args()
    torch.set_num_threads(1)
    model, progress = load(args.model)
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer" / "tokenizer.json"))
    line: dict[str, Any] = dict(progress)
    for half in args.halves:
        maker = QuestionMaker(tokenizer, haystacks(held_out(args.data), half), half)
        found = probe(model, maker, args.kinds or list(maker.kinds), args.length, args.num, args.questions)
        line[half] = found
        line[f"{half} mean"] = round(sum(share for share, _ in found.values()) / len(found), 3)
    print(json.dumps({"length": args.length, **line}))


if __name__ == "__main__":
    run_script(main)
