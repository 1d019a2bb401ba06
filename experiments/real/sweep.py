"""Every number of the selection rule at half, one and double, on the half of the judging prompts that may choose it.

A row of the table is a number, a column a family of prompts: the share with all evidence kept at 0.1 and 0.2, less that
of the rule as it is. What moves no family may go. With the KV caches of experiments.real.selection (--cache) a prompt
takes no pass of the draft. Prints the table of as many prompts as --minutes allow, ends in one JSON line.

    python -m experiments.real.sweep --texts TEXTS --target TARGET --draft DRAFT [--calibration FILE] [--cache FOLDER]
        [--half tune] [--minutes 10]
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import time
from types import ModuleType
from typing import Any
from unittest import mock

from experiments.common.environment import describe, note_pair
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.real.judging.prompt import JudgingPrompt, encode
from experiments.real.scoring import Encoded, Looks, Ranked, Scorer, add_pair_arguments, measure_with
from experiments.real.selection import RATES, CachedScorer, add_prompt_arguments, prompts_for, rules
from spec_stack import PrefillConfig
from spec_stack.hf.loading import load_tokenizer
from spec_stack.prefill import importance, queries, question


@dataclass(frozen=True)
class Number:
    """A module's number. looks: whether the scoring queries depend on it. off: the value that turns its rule off."""

    module: ModuleType
    name: str
    looks: bool = False
    off: float | None = None

    def values(self) -> list[float]:
        own = getattr(self.module, self.name)
        found = [max(1, own // 2), 2 * own] if isinstance(own, int) else [own / 2, 2 * own]
        return found if self.off is None or self.off in found else [*found, self.off]

    @contextmanager
    def set_to(self, value: float) -> Iterator[None]:
        with mock.patch.object(self.module, self.name, value):
            yield


NUMBERS = (
    Number(queries, "WINDOW", looks=True),
    Number(queries, "_LEAD", looks=True),
    Number(queries, "_FEWEST", looks=True, off=1),
    Number(importance, "_NOT_ASKING", off=0.0),
    Number(question, "_RARE_WORDS", off=0.0),
)


class Sweep:
    """Counts of prompts with all evidence kept, by rule, number and value, and family."""

    def __init__(self, tokenizer: Any, scorer: CachedScorer, wanted: dict[str, PrefillConfig]) -> None:
        self._tokenizer, self._scorer, self._rules = tokenizer, scorer, wanted
        self.kept: dict[tuple[str, str], dict[str, list[tuple[bool, ...]]]] = defaultdict(lambda: defaultdict(list))

    def judge(self, prompt: JudgingPrompt) -> None:
        encoded = encode(self._tokenizer, prompt)
        looks = self._scorer.look(encoded)
        self._add(prompt, "as it is", encoded, looks, self._rules)
        for number in NUMBERS:
            for value in number.values():
                with number.set_to(value):
                    own = self._scorer.look(encoded) if number.looks else looks
                    self._add(prompt, f"{number.name} {value:g}", encoded, own, self._rules)
        for size in (PrefillConfig.chunk_size // 2, 2 * PrefillConfig.chunk_size):
            changed = {name: replace(rule, chunk_size=size) for name, rule in self._rules.items()}
            self._add(prompt, f"both ends {size}", encoded, looks, changed)

    def _add(
        self, prompt: JudgingPrompt, label: str, encoded: Encoded, looks: Looks, wanted: dict[str, PrefillConfig]
    ) -> None:
        for name, rule in wanted.items():
            ranked = Ranked.by_rule(encoded, looks, rule)
            gold = {at for start, stop in encoded.spans for at in range(start, stop)}
            found = tuple(gold <= ranked.kept(rate) for rate in RATES)
            for family in ("all", prompt.family):
                self.kept[name, label][family].append(found)

    def table(self) -> dict[str, Any]:
        """Print the differences to the rule as it is; the same as values."""
        report: dict[str, Any] = {}
        for (name, label), families in self.kept.items():
            base = self.kept[name, "as it is"]
            cells = {}
            for family, found in families.items():
                less = 0.0 if label == "as it is" else 1.0
                cells[family] = [
                    round(
                        sum(own[at] - less * was[at] for own, was in zip(found, base[family], strict=True))
                        / len(found),
                        3,
                    )
                    for at in range(len(RATES))
                ]
            report.setdefault(name, {})[label] = cells
            shown = "  ".join(f"{family} {one:+.2f} {two:+.2f}" for family, (one, two) in cells.items())
            print(f"{name:12s}{label:26s}{shown}")
        return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    add_prompt_arguments(parser)
    parser.add_argument("--limit", type=int, help="most prompts (default: all)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many (default: at the end)")
    add_out_argument(parser)
    arguments = parser.parse_args()
    note_pair(str(arguments.target), str(arguments.draft))
    wanted = {name: rule for name, rule in rules(arguments.calibration).items() if name != "paper"}
    tokenizer = load_tokenizer(str(arguments.target))
    sweep, began, num_prompts = (
        Sweep(tokenizer, CachedScorer(Scorer.load(arguments), arguments.cache), wanted),
        time(),
        0,
    )
    for prompt in prompts_for(arguments, measure_with(tokenizer))[: arguments.limit]:
        if time() - began > 60 * arguments.minutes:
            break
        sweep.judge(prompt)
        num_prompts += 1
    print_report({"experiment": "sweep", **describe(), "num_prompts": num_prompts, **sweep.table()}, arguments.out)


if __name__ == "__main__":
    run_script(main)
