"""Measure what a target answers when it prefills what a rule kept, against all of the prompt, over captured prompts.

Prompts with known evidence (evidence_prompts.py). Arms: dense, the paper's rule, BM25, the default, and a calibration
where one is named, each at a keep rate. The target goes over the kept tokens at their own positions by transformers
alone, greedily, in the precision given; the arms of a prompt decode side by side. An answer is right where it holds all
that a right one holds, in whatever case. A row is printed after every prompt; a run goes on where it ended. Intervals:
95 %, by drawing documents again; differences from dense are paired. Ends in one JSON line.

    python -m experiments.real.answers --data DATA --target TARGET --captures FOLDER --rows ROWS.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from experiments.common.environment import describe, note_pair
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.real.captures import Encoded, add_arguments, encode, file_of, kept_positions, prompts_of, read
from experiments.real.evidence import interval
from experiments.real.evidence_prompts import EvidencePrompt
from experiments.real.rows import Rows
from experiments.real.settings import settings_of
from spec_stack import PrefillConfig
from spec_stack.hf.cache import cache_argument
from spec_stack.hf.loading import end_token_ids, load_tokenizer
from spec_stack.hf.precision import DTYPES
from spec_stack.hf.prepack import can_prepack, prepack

DENSE = "dense"


def arms_of(calibration: Path | None) -> dict[str, PrefillConfig | None]:
    """Return what each arm keeps; None: everything."""
    found = settings_of(calibration, (0.1, 0.2))
    return {DENSE: None, "BM25 0.2": replace(found["default 0.2"], scorer="bm25"), **found}


@dataclass
class Prefilled:
    """One arm's cache, its next token, and the position of that."""

    cache: Any
    token_id: int
    position: int


class Target:
    """A target as transformers runs it, for tokens at positions of their own."""

    def __init__(self, folder: Path, precision: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[precision]).eval()
        if can_prepack(self.model.device, self.model.dtype):
            prepack(self.model)
        self.end_ids = frozenset(end_token_ids(self.model))

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int], positions: Sequence[int], shift: int = 0) -> Prefilled:
        """Go over some tokens of a prompt, at positions `shift` further on."""
        cache = DynamicCache(config=self.model.config)
        made = self.model(
            torch.tensor([[token_ids[position] for position in positions]]),
            # Without a mask transformers takes gaps between positions for several texts in one row.
            attention_mask=torch.ones(1, len(positions), dtype=torch.long),
            position_ids=torch.tensor([[position + shift for position in positions]]),
            logits_to_keep=1,
            **cache_argument(self.model, cache),
        )
        return Prefilled(cache, int(made.logits[0, -1].argmax()), positions[-1] + shift + 1)

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


def answer(target: Target, tokenizer: Any, encoded: Encoded, kept: Mapping[str, Sequence[int]], most: int) -> list[str]:
    """The texts of the arms' answers."""
    prefilled = [target.prefill(encoded.token_ids, positions) for positions in kept.values()]
    return [tokenizer.decode(each, skip_special_tokens=True) for each in target.decode(prefilled, most)]


def run(arguments: argparse.Namespace, prompts: Sequence[EvidencePrompt], rows: Rows) -> None:
    """Answer what is left of the prompts."""
    arms, tokenizer = arms_of(arguments.calibration), load_tokenizer(str(arguments.target))
    target = Target(arguments.target, arguments.precision)
    for prompt in prompts:
        left = rows.left(prompt.name, arms)
        if not left:
            continue
        began, encoded = process_time(), encode(tokenizer, prompt)
        looks, every = read(file_of(arguments.captures, prompt)), range(len(encoded.token_ids))
        kept = {name: every if rule is None else kept_positions(encoded, looks, rule) for name, rule in left.items()}
        wanted = {at for start, stop in encoded.spans for at in range(start, stop)}
        texts = answer(target, tokenizer, encoded, kept, arguments.max_tokens)
        for (name, positions), text in zip(kept.items(), texts, strict=True):
            rows.add(
                prompt.name,
                name,
                {
                    "kind": prompt.kind,
                    "source": prompt.source,
                    "num_kept": len(positions),
                    "is_evidence_kept": wanted <= {*positions},
                    "is_right": is_right(text, prompt.answers),
                    "text": text,
                },
            )
        told = "  ".join(f"{name} {'+' if rows.of_arm(name)[prompt.name]['is_right'] else '-'}" for name in kept)
        print(f"{prompt.name:30s}{told}  {process_time() - began:.0f} CPU s", flush=True)


def summary(rows: Rows, names: Sequence[str]) -> dict[str, Any]:
    """Right answers by arm, each over dense, paired; with the evidence kept whole and not."""
    report: dict[str, Any] = {}
    for name in names:
        pairs = rows.pairs(DENSE, name)
        if not pairs:
            continue
        sources = [row["source"] for _, row in pairs]
        own = interval([float(row["is_right"]) for _, row in pairs], sources)
        over = interval([float(row["is_right"]) - float(dense["is_right"]) for dense, row in pairs], sources)
        whole = [row["is_right"] for _, row in pairs if row["is_evidence_kept"]]
        report[name] = {
            "n": len(pairs),
            "right": [round(each, 3) for each in own],
            "over_dense": [round(each, 3) for each in over],
            "with_evidence": [sum(whole), len(whole)],
        }
        print(
            f"{name:16s} n={len(pairs):3d}  right {own[0]:.2f} [{own[1]:.2f}, {own[2]:.2f}]  over dense "
            f"{over[0]:+.3f} [{over[1]:+.3f}, {over[2]:+.3f}]  of {len(whole)} with all evidence {sum(whole)}"
        )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--captures", type=Path, required=True, help="folder that captures.py wrote")
    parser.add_argument("--calibration", type=Path, help="a calibration's file or folder, for two more arms")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--rows", type=Path, required=True, help="file of rows; a run goes on after those it holds")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no prompt after so many")
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1, help="torch threads (%(default)s)")
    add_out_argument(parser)
    arguments = parser.parse_args()
    note_pair(str(arguments.target), None)
    names, rows = list(arms_of(arguments.calibration)), Rows(arguments.rows, arguments.minutes)
    every = prompts_of(arguments, load_tokenizer(str(arguments.target)))
    captured = [prompt for prompt in every if prompt.answers and file_of(arguments.captures, prompt).exists()]
    prompts = captured[: arguments.limit]
    if not prompts:
        raise ValueError(f"{arguments.captures} holds none of these prompts; run experiments.real.captures first")
    if any((prompt.name, name) not in rows for prompt in prompts for name in names):
        torch.set_num_threads(arguments.threads)
        run(arguments, prompts, rows)
    left = sum((prompt.name, name) not in rows for prompt in prompts for name in names)
    report = {"experiment": "answers", **describe(), "num_tokens": arguments.num_tokens, "num_left": left}
    print_report({**report, "arms": summary(rows, names)}, arguments.out)


if __name__ == "__main__":
    run_script(main)
