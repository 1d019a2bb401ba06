"""Measure what a target answers when it prefills what a rule kept, against all of the prompt.

Prompts with known evidence in several shapes (evidence_prompts.py). Arms: dense; a calibration, or the default rule
where none is named, at keep rates 0.1 and 0.2, each at original and at contiguous positions over the same kept tokens;
BM25 at 0.2. The draft scores each prompt once. The target prefills the kept tokens with transformers, greedily; a
dense prefill resumes from the previous prompt's where both begin alike. The other arms of a document's prompts decode
side by side. No rule changes a dense answer: a file of rows may begin with another run's dense ones.

A row per prompt and arm: whether the answer holds all that a right one holds, in whatever case, whether all evidence is
kept, the loss of the dense answer's tokens over that cache in nats a token, and where the answer leaves the dense one.
A run goes on where it ended. Intervals: 95 %, by drawing documents again; differences are paired. Ends in one JSON
line.

    python -m experiments.real.answers --data DATA --target TARGET --draft DRAFT --rows ROWS.jsonl [--calibration FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import inf
from pathlib import Path
from time import process_time
from typing import Any

from experiments.common import script
from experiments.common.bootstrap import mean_interval, rank_correlation
from experiments.common.environment import commit, note_pair
from experiments.real.evidence import everything, having
from experiments.real.evidence_prompts import SHAPES, EvidencePrompt, shaped_prompts
from experiments.real.scoring import (
    Encoded,
    Looks,
    Ranked,
    Scorer,
    add_prompt_arguments,
    add_scorer_arguments,
    calibrated,
    encode,
    kept_positions,
    measure_with,
)
from experiments.real.target import DensePrefix, Prefilled, Target
from spec_stack import PrefillConfig
from spec_stack.bench.rows import Row, Rows
from spec_stack.hf.loading import load_tokenizer
from spec_stack.prefill.registry import needs_attention

DENSE = "dense"
RATES = (0.1, 0.2)


@dataclass(frozen=True)
class Arm:
    """What an arm keeps, and where it stands.

    rule: None keeps everything. is_random: lines in random order, at the rule's rate. shift: of all positions.
    """

    rule: PrefillConfig | None = None
    is_contiguous: bool = False
    is_random: bool = False
    shift: int = 0


@dataclass(frozen=True)
class Answer:
    """An arm's answer over the kept positions, and the loss of the dense one's tokens there, in nats a token."""

    arm: str
    kept: Sequence[int]
    token_ids: Sequence[int]
    text: str
    loss: float


@dataclass(frozen=True)
class Asked:
    """A prompt, its dense answer, and the arms that answer it."""

    encoded: Encoded
    dense: Answer
    arms: Mapping[str, Arm]


def arms_of(calibration: Path | None, with_contiguous: bool = True) -> dict[str, Arm]:
    """The arms by name, the dense one first."""
    name, rule = ("default", PrefillConfig()) if calibration is None else ("calibrated", calibrated(calibration))
    found = {DENSE: Arm()}
    for rate in RATES:
        found[f"{name} {rate}"] = Arm(replace(rule, keep_rate=rate))
        if with_contiguous:
            found[f"{name} {rate} contiguous"] = Arm(replace(rule, keep_rate=rate), is_contiguous=True)
    return found | {"BM25 0.2": Arm(PrefillConfig(scorer="bm25", keep_rate=0.2))}


@dataclass
class Bench:
    """A draft that scores prompts once, and a target that prefills what each arm keeps of them."""

    scorer: Scorer
    target: Target
    dense: DensePrefix

    @classmethod
    def load(cls, arguments: argparse.Namespace) -> Bench:
        """The pair that `add_scorer_arguments` asks for."""
        scorer, target = Scorer.load(arguments), Target(arguments.target, arguments.precision)
        return cls(scorer, target, DensePrefix(target))

    def answer_densely(self, encoded: Encoded, max_tokens: int) -> Answer:
        """The target's answer over all of a prompt."""
        made = self.dense.prefill(encoded.token_ids)
        (token_ids,) = self.target.decode([made], max_tokens)
        (loss,) = self.target.losses([made], token_ids)
        return Answer(DENSE, range(len(encoded.token_ids)), token_ids, self._text(token_ids), loss)

    def known(self, encoded: Encoded, row: Row) -> Answer | None:
        """The dense answer of a row; None where it is no answer of this prompt's tokens."""
        num_tokens = len(encoded.token_ids)
        if row["num_kept"] != num_tokens or "token_ids" not in row:
            return None
        return Answer(DENSE, range(num_tokens), row["token_ids"], row["text"], row["loss"])

    def answer(self, prompts: Sequence[Asked], max_tokens: int) -> list[list[Answer]]:
        """What the arms of some prompts answer, all side by side."""
        kept, caches = [], []
        for prompt in prompts:
            rules = [arm.rule for arm in prompt.arms.values() if arm.rule and needs_attention(arm.rule.scorer)]
            looks = self.scorer.look(prompt.encoded, {rule.scoring_queries for rule in rules})
            for arm in prompt.arms.values():
                kept.append(self._kept(prompt.encoded, looks, arm))
                caches.append(self._prefilled(prompt.encoded.token_ids, arm, kept[-1]))
        decoded = self.target.decode(caches, max_tokens) if caches else []
        answers = iter(zip(kept, caches, decoded, strict=True))
        return [[self._told(prompt, name, *next(answers)) for name in prompt.arms] for prompt in prompts]

    def _told(
        self, prompt: Asked, name: str, kept: Sequence[int], cache: Prefilled, token_ids: Sequence[int]
    ) -> Answer:
        (loss,) = self.target.losses([cache], prompt.dense.token_ids)
        return Answer(name, kept, token_ids, self._text(token_ids), loss)

    def _text(self, token_ids: Sequence[int]) -> str:
        text: str = self.scorer.pair.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def _kept(self, encoded: Encoded, looks: Looks, arm: Arm) -> Sequence[int]:
        num_tokens = len(encoded.token_ids)
        if arm.rule is None:
            return range(num_tokens)
        if arm.is_random:
            return sorted(Ranked.by_chance(encoded, num_tokens).kept(arm.rule.rate_for(num_tokens)))
        return kept_positions(encoded, looks, arm.rule)

    def _prefilled(self, token_ids: Sequence[int], arm: Arm, kept: Sequence[int]) -> Prefilled:
        if arm.is_contiguous:
            return self.target.prefill([token_ids[at] for at in kept], range(len(kept)))
        return self.target.prefill(token_ids, kept, arm.shift)


def is_right(text: str, answers: Sequence[str]) -> bool:
    """Tell whether a text holds all of the answers; commas between the digits of a number do not matter."""
    plain = "".join(
        char
        for at, char in enumerate(text)
        if not (char == "," and text[at - 1 : at].isdigit() and text[at + 1 : at + 2].isdigit())
    ).lower()
    return all(answer.lower() in plain for answer in answers)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two answers part; None where they are the same."""
    if list(one) == list(other):
        return None
    both = min(len(one), len(other))
    return next((at for at in range(both) if one[at] != other[at]), both)


def run(arguments: argparse.Namespace, prompts: Sequence[EvidencePrompt], arms: Mapping[str, Arm], rows: Rows) -> None:
    """Answer what is left of the prompts, those of a document at a time."""
    bench, measured_at = Bench.load(arguments), commit()
    for _, group in groupby(prompts, lambda prompt: prompt.source):
        left = [(prompt, own) for prompt in group if (own := rows.left(prompt.name, arms))]
        began, asked = process_time(), []
        for prompt, own in left:
            encoded, dense = encode(bench.scorer.pair.tokenizer, prompt), None
            if row := rows.of_arm(DENSE).get(prompt.name):
                dense = bench.known(encoded, row)
            if dense is None:
                dense = bench.answer_densely(encoded, arguments.max_tokens)
                rows.add(prompt.name, DENSE, row_of(prompt, encoded, dense, dense, measured_at))
            asked.append(Asked(encoded, dense, {name: arm for name, arm in own.items() if name != DENSE}))
        for (prompt, _), its, answers in zip(left, asked, bench.answer(asked, arguments.max_tokens), strict=True):
            for answer in answers:
                rows.add(prompt.name, answer.arm, row_of(prompt, its.encoded, answer, its.dense, measured_at))
            told = "  ".join(f"{name} {'+' if rows.of_arm(name)[prompt.name]['is_right'] else '-'}" for name in arms)
            print(f"{prompt.name:30s}{told}", flush=True)
        if left:
            print(f"{len(left)} prompts, {process_time() - began:.0f} CPU s", flush=True)


def row_of(prompt: EvidencePrompt, encoded: Encoded, answer: Answer, dense: Answer, measured_at: str) -> Row:
    """What is kept of an answer, with the commit that it is of."""
    wanted = {at for start, stop in encoded.spans for at in range(start, stop)}
    return {
        "kind": prompt.kind,
        "shape": prompt.shape,
        "source": prompt.source,
        "num_kept": len(answer.kept),
        "is_evidence_kept": wanted <= {*answer.kept},
        "is_right": is_right(answer.text, prompt.answers),
        "loss": round(answer.loss, 4),
        "first_difference": first_difference(dense.token_ids, answer.token_ids),
        "num_dense_tokens": len(dense.token_ids),
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "commit": measured_at,
    }


def compare(rows: Rows, name: str, base: str, keep: Callable[[Row], bool]) -> dict[str, Any]:
    """Right answers and loss of an arm, and both less those of another, paired; with the evidence kept whole."""
    pairs = [(other, row) for other, row in rows.pairs(base, name) if keep(row)]
    if not pairs:
        return {}
    sources = [row["source"] for _, row in pairs]

    def mean(tell: Callable[[Row, Row], float]) -> list[float]:
        return [round(each, 3) for each in mean_interval([tell(*pair) for pair in pairs], sources)]

    whole = [row["is_right"] for _, row in pairs if row["is_evidence_kept"]]
    return {
        "n": len(pairs),
        "right": mean(lambda other, row: row["is_right"]),
        "right_over": mean(lambda other, row: float(row["is_right"]) - float(other["is_right"])),
        "loss_over": mean(lambda other, row: row["loss"] - other["loss"]),
        "same_text": round(sum(row["text"] == other["text"] for other, row in pairs) / len(pairs), 3),
        "with_evidence": [sum(whole), len(whole)],
    }


def fidelity(rows: Rows, names: Sequence[str], keep: Callable[[Row], bool]) -> dict[str, Any]:
    """How the loss of the dense answer's tokens goes with right answers that pruning loses: over all prompts, where the
    dense answer is right, and there by bands of the loss (lost, of)."""
    pairs = [pair for name in names for pair in rows.pairs(DENSE, name) if keep(pair[1])]
    right = [pair for pair in pairs if pair[0]["is_right"]]
    report: dict[str, Any] = {}
    for title, own in (("all", pairs), ("dense_right", right)):
        losses = [row["loss"] - dense["loss"] for dense, row in own]
        lost = [float(dense["is_right"]) - float(row["is_right"]) for dense, row in own]
        report[title] = {"n": len(own), "rank_correlation": rank_correlation(losses, lost)}
    for low, high in pairwise((-inf, 0.05, 0.2, 0.5, inf)):
        band = [row["is_right"] for dense, row in right if low <= row["loss"] - dense["loss"] < high]
        report[f"loss {low} to {high}"] = [band.count(False), len(band)]
    return report


def summary(rows: Rows, names: Sequence[str]) -> dict[str, Any]:
    """Every arm over dense, and contiguous positions over original ones, of all prompts and by shape."""
    shapes = dict.fromkeys(row["shape"] for row in rows.of_arm(names[0]).values())
    parts: dict[str, Callable[[Row], bool]] = {"all": everything}
    parts |= {shape: having("shape", shape) for shape in shapes}
    report: dict[str, Any] = {}
    for part, keep in parts.items():
        over_dense = {name: compare(rows, name, DENSE, keep) for name in names}
        contiguous = {
            name: compare(rows, name, name.removesuffix(" contiguous"), keep)
            for name in names
            if name.endswith(" contiguous")
        }
        report[part] = {"over_dense": over_dense, "contiguous_over_original": contiguous}
        report[part]["fidelity"] = fidelity(rows, names[1:], keep)
        for title, found in (("over dense", over_dense), ("over original", contiguous)):
            for name, told in found.items():
                print(f"{part:16s}{title:14s}{name:26s}{told}")
    return report


def main() -> None:
    parser = script.make_parser(__doc__)
    add_scorer_arguments(parser)
    add_prompt_arguments(parser)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["bare", "briefly", "ahead"], help="shapes")
    parser.add_argument("--no-contiguous", dest="contiguous", action="store_false", help="original positions alone")
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="these alone (all)")
    script.add_row_arguments(parser, limited=False)
    arguments = parser.parse_args()
    note_pair(str(arguments.target), str(arguments.draft))
    arms, rows = arms_of(arguments.calibration, arguments.contiguous), Rows(arguments.rows, arguments.minutes)
    names, asked = list(arms), list(arms) if arguments.arms is None else [DENSE, *arguments.arms]
    if unknown := {*asked} - {*names}:
        raise ValueError(f"no arms are called {sorted(unknown)}; those of this command are {names}")
    measure = measure_with(load_tokenizer(str(arguments.target)))
    every = shaped_prompts(arguments.data, arguments.num_tokens, arguments.documents, measure, arguments.seed)
    prompts = [prompt for prompt in every if prompt.shape in arguments.shapes][: arguments.limit]
    keys = [prompt.name for prompt in prompts]
    if rows.num_left(keys, asked):
        run(arguments, prompts, {name: arms[name] for name in asked}, rows)
    left = rows.num_left(keys, names)
    commits = {name: sorted({row.get("commit", "") for row in rows.of_arm(name).values()}) for name in names}
    report = {"num_tokens": arguments.num_tokens, "num_left": left, "commits": commits}
    script.print_report("answers", {**report, "shapes": summary(rows, names)}, arguments.out)


if __name__ == "__main__":
    script.run(main)
