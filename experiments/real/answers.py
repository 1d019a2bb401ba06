"""Measure what a target answers when it prefills what a rule kept, against all of the prompt.

Prompts with known evidence in several shapes (evidence_prompts.py). Arms: dense; a calibration, or the default rule
where none is named, at keep rates 0.1 and 0.2, each at original and at contiguous positions over the same kept tokens;
BM25 at 0.2. The draft scores each prompt once. The target prefills the kept tokens with transformers, greedily; a
dense prefill resumes from the previous prompt's where both begin alike. The arms of a prompt decode side by side.

A row per prompt and arm: whether the answer holds all that a right one holds, in whatever case, whether all evidence is
kept, the loss of the dense answer's tokens over that cache in nats a token, and where the answer leaves the dense one.
A run goes on where it ended. Intervals: 95 %, by drawing documents again; differences are paired. Ends in one JSON
line.

    python -m experiments.real.answers --data DATA --target TARGET --draft DRAFT --rows ROWS.jsonl [--calibration FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from experiments.common.environment import describe, note_pair
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.real.captures import Encoded, Looks, add_arguments, encode, kept_positions, look, measure_with
from experiments.real.evidence import everything, having, interval
from experiments.real.evidence_prompts import SHAPES, EvidencePrompt, shaped_prompts
from experiments.real.rows import Row, Rows, add_row_arguments
from spec_stack import PrefillConfig
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.cache import cache_argument
from spec_stack.hf.loading import end_token_ids, load_tokenizer
from spec_stack.hf.precision import DTYPES
from spec_stack.hf.prepack import can_prepack, prepack
from spec_stack.hf.prompt import num_shared
from spec_stack.prefill.calibration import Calibration

DENSE = "dense"
RATES = (0.1, 0.2)


@dataclass(frozen=True)
class Arm:
    """What an arm keeps (None: everything), and at which positions."""

    rule: PrefillConfig | None = None
    is_contiguous: bool = False

    def keep(self, encoded: Encoded, looks: Looks) -> Sequence[int]:
        """The kept positions of a prompt."""
        if self.rule is None:
            return range(len(encoded.token_ids))
        return kept_positions(encoded, looks, self.rule)


def arms_of(calibration: Path | None) -> dict[str, Arm]:
    """The arms by name."""
    rule, name = PrefillConfig(), "default"
    if calibration is not None:
        rule, name = replace(Calibration.load(calibration).apply(), draft_window=None), "calibrated"
    found = {DENSE: Arm()}
    for rate in RATES:
        found[f"{name} {rate}"] = Arm(replace(rule, keep_rate=rate))
        found[f"{name} {rate} contiguous"] = Arm(replace(rule, keep_rate=rate), is_contiguous=True)
    return found | {"BM25 0.2": Arm(PrefillConfig(scorer="bm25", keep_rate=0.2))}


@dataclass
class Prefilled:
    """One arm's cache, the logits (vocabulary,) behind it, and the position of the next token."""

    cache: Any
    logits: torch.Tensor
    position: int

    @property
    def token_id(self) -> int:
        return int(self.logits.argmax())


class Target:
    """A target as transformers runs it, for tokens at positions of their own."""

    def __init__(self, folder: Path, precision: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[precision]).eval()
        if can_prepack(self.model.device, self.model.dtype):
            prepack(self.model)
        self.end_ids = frozenset(end_token_ids(self.model))

    @torch.inference_mode()
    def prefill(
        self, token_ids: Sequence[int], positions: Sequence[int], shift: int = 0, cache: Any = None
    ) -> Prefilled:
        """Go over some tokens of a prompt, at positions `shift` further on. cache: with the first of these tokens."""
        cache = DynamicCache(config=self.model.config) if cache is None else cache
        own = positions[cache.get_seq_length() :]
        made = self.model(
            torch.tensor([[token_ids[position] for position in own]]),
            # Without a mask transformers takes gaps between positions for several texts in one row.
            attention_mask=torch.ones(1, len(positions), dtype=torch.long),
            position_ids=torch.tensor([[position + shift for position in own]]),
            logits_to_keep=1,
            **cache_argument(self.model, cache),
        )
        return Prefilled(cache, made.logits[0, -1], positions[-1] + shift + 1)

    @torch.inference_mode()
    def decode(self, arms: Sequence[Prefilled], max_tokens: int) -> list[list[int]]:
        """Answer greedily, all arms side by side, until each has ended."""
        widths = [arm.cache.get_seq_length() for arm in arms]
        cache, mask = _side_by_side([arm.cache for arm in arms]), _mask(widths)
        answers = [[arm.token_id] for arm in arms]
        while len(answers[0]) < max_tokens and not all(self.end_ids & {*answer} for answer in answers):
            mask = torch.cat([mask, mask.new_ones(len(arms), 1)], dim=1)
            positions = [[arm.position + len(answers[0]) - 1] for arm in arms]
            made = self.model(
                torch.tensor([answer[-1:] for answer in answers]),
                attention_mask=mask,
                position_ids=torch.tensor(positions),
                **cache_argument(self.model, cache),
            )
            for answer, token_id in zip(answers, made.logits[:, -1].argmax(-1).tolist(), strict=True):
                answer.append(token_id)
        return [self._to_the_end(answer) for answer in answers]

    @torch.inference_mode()
    def losses(self, arms: Sequence[Prefilled], answer: Sequence[int]) -> list[float]:
        """The mean loss of an answer's tokens behind each arm's cache, in nats a token."""
        widths, known = [arm.cache.get_seq_length() for arm in arms], answer[:-1]
        logits = torch.stack([arm.logits for arm in arms])[:, None]
        if known:
            mask = _mask(widths)
            made = self.model(
                torch.tensor([known] * len(arms)),
                attention_mask=torch.cat([mask, mask.new_ones(len(arms), len(known))], dim=1),
                position_ids=torch.tensor([[arm.position + at for at in range(len(known))] for arm in arms]),
                **cache_argument(self.model, _side_by_side([arm.cache for arm in arms])),
            )
            logits = torch.cat([logits, made.logits], dim=1)
        wanted = torch.tensor([answer] * len(arms))[..., None]
        told: list[float] = (-logits.float().log_softmax(-1).gather(-1, wanted)).mean(dim=(1, 2)).tolist()
        return told

    def _to_the_end(self, answer: list[int]) -> list[int]:
        return answer[: next((at for at, token_id in enumerate(answer) if token_id in self.end_ids), len(answer))]


def _mask(widths: Sequence[int]) -> torch.Tensor:
    longest = max(widths)
    return torch.tensor([[0] * (longest - width) + [1] * width for width in widths])


def _side_by_side(caches: Sequence[Any]) -> Any:
    """One cache of several, the shorter ones with empty slots before them."""
    joined = DynamicCache()
    longest = max(cache.get_seq_length() for cache in caches)
    for layer in range(len(caches[0].layers)):
        parts = []
        for cache in caches:
            own = cache.layers[layer]
            empty = longest - own.keys.shape[-2]
            parts.append([torch.nn.functional.pad(each, (0, 0, empty, 0)) for each in (own.keys, own.values)])
        joined.update(*(torch.cat(each) for each in zip(*parts, strict=True)), layer)
    return joined


def is_right(text: str, answers: Sequence[str]) -> bool:
    """Tell whether a text holds all of the answers; commas between the digits of a number do not matter."""
    plain = "".join(
        char
        for at, char in enumerate(text)
        if not (char == "," and text[at - 1 : at].isdigit() and text[at + 1 : at + 2].isdigit())
    ).lower()
    return all(answer.lower() in plain for answer in answers)


@dataclass
class DensePrefix:
    """The dense cache of the previous prompt, which the next one resumes where both begin alike."""

    target: Target
    token_ids: Sequence[int] = ()
    cache: Any = None

    def prefill(self, token_ids: Sequence[int]) -> Prefilled:
        """Go over what the previous prompt does not share. The result's cache ends with the next call."""
        if self.cache is not None:
            self.cache.crop(min(num_shared(self.token_ids, token_ids), len(token_ids) - 1))
        made = self.target.prefill(token_ids, range(len(token_ids)), cache=self.cache)
        self.token_ids, self.cache = token_ids, made.cache
        return made


def prefill(target: Target, dense: DensePrefix, encoded: Encoded, arm: Arm, positions: Sequence[int]) -> Prefilled:
    """An arm's prefill."""
    if arm.rule is None:
        return dense.prefill(encoded.token_ids)
    if arm.is_contiguous:
        return target.prefill([encoded.token_ids[at] for at in positions], range(len(positions)))
    return target.prefill(encoded.token_ids, positions)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two answers part; None where they are the same."""
    if list(one) == list(other):
        return None
    both = min(len(one), len(other))
    return next((at for at in range(both) if one[at] != other[at]), both)


def run(arguments: argparse.Namespace, prompts: Sequence[EvidencePrompt], rows: Rows) -> None:
    """Answer what is left of the prompts."""
    arms, precision = arms_of(arguments.calibration), arguments.precision
    pair = ModelPair.load(
        arguments.target, arguments.draft, precision=precision, draft_precision=precision, target_weights=False
    )
    index = pair.open_index(PrefillConfig.prefill_chunk)
    target = Target(arguments.target, precision)
    dense = DensePrefix(target)
    for prompt in prompts:
        if not rows.left(prompt.name, arms):
            continue
        began, encoded = process_time(), encode(pair.tokenizer, prompt)
        looks = look(pair, index, encoded)
        kept = {name: arm.keep(encoded, looks) for name, arm in arms.items()}
        prefilled = [prefill(target, dense, encoded, arm, kept[name]) for name, arm in arms.items()]
        answers = target.decode(prefilled, arguments.max_tokens)
        losses = target.losses(prefilled, answers[0])
        wanted = {at for start, stop in encoded.spans for at in range(start, stop)}
        for (name, positions), answer, loss in zip(kept.items(), answers, losses, strict=True):
            text = pair.tokenizer.decode(answer, skip_special_tokens=True)
            told = {"kind": prompt.kind, "shape": prompt.shape, "source": prompt.source, "num_kept": len(positions)}
            measured = {
                "is_evidence_kept": wanted <= {*positions},
                "is_right": is_right(text, prompt.answers),
                "loss": round(loss, 4),
                "first_difference": first_difference(answers[0], answer),
                "num_dense_tokens": len(answers[0]),
                "text": text,
            }
            rows.add(prompt.name, name, {**told, **measured})
        told_arms = "  ".join(f"{name} {'+' if rows.of_arm(name)[prompt.name]['is_right'] else '-'}" for name in arms)
        print(f"{prompt.name:30s}{told_arms}  {process_time() - began:.0f} CPU s", flush=True)


def compare(rows: Rows, name: str, base: str, keep: Callable[[Row], bool]) -> dict[str, Any]:
    """Right answers and loss of an arm, and both less those of another, paired; with the evidence kept whole."""
    pairs = [(other, row) for other, row in rows.pairs(base, name) if keep(row)]
    if not pairs:
        return {}
    sources = [row["source"] for _, row in pairs]

    def mean(tell: Callable[[Row, Row], float]) -> list[float]:
        return [round(each, 3) for each in interval([tell(*pair) for pair in pairs], sources)]

    whole = [row["is_right"] for _, row in pairs if row["is_evidence_kept"]]
    return {
        "n": len(pairs),
        "right": mean(lambda other, row: row["is_right"]),
        "right_over": mean(lambda other, row: float(row["is_right"]) - float(other["is_right"])),
        "loss_over": mean(lambda other, row: row["loss"] - other["loss"]),
        "same_text": round(sum(row["text"] == other["text"] for other, row in pairs) / len(pairs), 3),
        "with_evidence": [sum(whole), len(whole)],
    }


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
        for title, found in (("over dense", over_dense), ("over original", contiguous)):
            for name, told in found.items():
                print(f"{part:16s}{title:14s}{name:26s}{told}")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--draft", type=Path, required=True, help="folder of the draft")
    parser.add_argument("--calibration", type=Path, help="a calibration's file or folder, in place of the default rule")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["bare", "briefly", "ahead"], help="shapes")
    parser.add_argument("--documents", type=int, default=24, help="so many documents (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1, help="torch threads (%(default)s)")
    add_row_arguments(parser, limited=False)
    add_out_argument(parser)
    arguments = parser.parse_args()
    note_pair(str(arguments.target), str(arguments.draft))
    names, rows = list(arms_of(arguments.calibration)), Rows(arguments.rows, arguments.minutes)
    measure = measure_with(load_tokenizer(str(arguments.target)))
    every = shaped_prompts(arguments.data, arguments.num_tokens, arguments.documents, measure, arguments.seed)
    prompts = [prompt for prompt in every if prompt.shape in arguments.shapes][: arguments.limit]
    if any((prompt.name, name) not in rows for prompt in prompts for name in names):
        torch.set_num_threads(arguments.threads)
        run(arguments, prompts, rows)
    left = sum((prompt.name, name) not in rows for prompt in prompts for name in names)
    report = {"experiment": "answers", **describe(), "num_tokens": arguments.num_tokens, "num_left": left}
    print_report({**report, "shapes": summary(rows, names)}, arguments.out)


if __name__ == "__main__":
    run_script(main)
