"""Seconds from a request to its last token, by prompt length and answer length, beside transformers' generate.

Arms: *theirs* (transformers, dense and plain), *theirs look-up* (10 tokens, its best setting over recorded texts) and
*theirs assisted* (its dynamic rule, the same draft); *dense* (ours, the default policy), *pruned* (the calibration at
--keep-rate, the default policy), *pruned plain* (the same without proposals). All run the same weights in one process;
the order of the arms turns by one from prompt to prompt, so that a change of the machine's speed meets all of them.
Answers have exactly so many tokens (the end of the text is ignored), of questions whose answers are long. A dense arm
writes the longest answer once and is timed at every length; a pruned one is asked for every length apart, as its policy
reads it. Ours keep over a run what they learn. A row is written after every answer, and a run goes on where it ended.
Prints the mean seconds and the speed over *theirs* with the interval of a bootstrap over prompts, and names the best of
the three.

    python -m experiments.real.end_to_end --target T --draft D --precision bf16 --draft-precision bf16 --rows ROWS.jsonl
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter, process_time
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from experiments.common import script
from experiments.common.bootstrap import ratio_interval
from spec_stack import SpecStackGenerator
from spec_stack.bench.rows import Row, Rows
from spec_stack.calibrate.documents import MODULES, module_source

THEIRS = "theirs"
DENSE: dict[str, dict[str, Any]] = {
    THEIRS: {},
    "theirs look-up": {"prompt_lookup_num_tokens": 10},
    "theirs assisted": {"assisted": True},
    "dense": {"sparse_prefill": "off"},
}
PRUNED: dict[str, dict[str, Any]] = {
    "pruned": {"sparse_prefill": "on"},
    "pruned plain": {"sparse_prefill": "on", "gamma": 0, "proposer": "model"},
}
QUESTIONS = (
    "Explain in detail, function by function, what this code does.",
    "Write a tutorial for this module, with examples of its use.",
    "Review this code: which mistakes, risks and missing checks do you see? Give reasons.",
    "Write the reference documentation of the public names of this module.",
)


class Marks(BaseStreamer):  # type: ignore[misc]
    """When how many new tokens were there."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = perf_counter(), process_time()
        self._num_tokens, self._has_prompt = 0, False
        self._found: list[tuple[int, float, float]] = []

    def add(self, num_new: int) -> None:
        self._num_tokens += num_new
        self._found.append((self._num_tokens, perf_counter() - self._wall_s, process_time() - self._cpu_s))

    def put(self, value: torch.Tensor) -> None:
        """Transformers' streamers get the prompt first."""
        if self._has_prompt:
            self.add(value.numel())
        self._has_prompt = True

    def end(self) -> None:
        """Nothing is left to write."""

    def at(self, num_tokens: int) -> tuple[float, float]:
        """Wall and CPU seconds until so many tokens were there."""
        return next((wall_s, cpu_s) for count, wall_s, cpu_s in self._found if count >= num_tokens)


def theirs(generator: SpecStackGenerator, prompt: list[int], num_tokens: int, options: dict[str, Any]) -> Marks:
    """Transformers' greedy answer."""
    given = {name: value for name, value in options.items() if name != "assisted"}
    if "assisted" in options:
        given["assistant_model"] = generator.draft
    marks = Marks()
    inputs = torch.tensor([prompt], device=generator.target.device)
    generator.target.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        repetition_penalty=1.0,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        streamer=marks,
        **given,
    )
    return marks


def ours(generator: SpecStackGenerator, prompt: Any, num_tokens: int, options: dict[str, Any]) -> tuple[Marks, Row]:
    """Our greedy answer, and what was kept and proposed."""
    marks = Marks()
    metrics = None
    for output in generator.stream(messages=prompt, max_tokens=num_tokens, ignore_eos=True, **options):
        marks.add(len(output.token_ids))
        metrics = output.metrics
    if metrics is None:
        raise RuntimeError("the stream ended without a last step")
    names = ("num_prompt_tokens", "num_kept_tokens", "num_steps", "num_proposed", "num_accepted", "num_ngram_accepted")
    return marks, {name: getattr(metrics, name) for name in names}


def prompts_of(tokenizer: Any, length: int, number: int) -> list[list[dict[str, str]]]:
    """Chats of about so many tokens: a standard-library module, cut, and a question."""
    found = []
    for at in range(number):
        source = "\n".join(module_source(MODULES[(at + step) % len(MODULES)]) for step in range(len(MODULES)))
        ids = tokenizer(source[: 8 * length], add_special_tokens=False, verbose=False).input_ids[: length - 48]
        text = f"```python\n{tokenizer.decode(ids)}\n```\n\n{QUESTIONS[at % len(QUESTIONS)]}"
        found.append([{"role": "user", "content": text}])
    return found


def measured(
    generator: SpecStackGenerator, arm: str, messages: list[dict[str, str]], answers: Sequence[int], keep_rate: float
) -> Iterator[tuple[int, Row]]:
    """An arm's rows by answer length."""
    if arm in PRUNED:
        for num_tokens in answers:
            marks, row = ours(generator, messages, num_tokens, {"keep_rate": keep_rate, **PRUNED[arm]})
            yield num_tokens, {**_seconds(marks, num_tokens), **row}
        return
    most, row = max(answers), Row()
    if not arm.startswith(THEIRS):
        marks, row = ours(generator, messages, most, DENSE[arm])
    else:
        template: Callable[..., Any] = generator.tokenizer.apply_chat_template
        prompt = template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        marks = theirs(generator, prompt, most, DENSE[arm])
    for num_tokens in answers:
        yield num_tokens, {**_seconds(marks, num_tokens), **row}


def _seconds(marks: Marks, num_tokens: int) -> Row:
    first, last = marks.at(1), marks.at(num_tokens)
    return {"first_s": first[0], "wall_s": last[0], "first_cpu_s": first[1], "cpu_s": last[1]}


def summary(rows: Rows, arms: Sequence[str], lengths: Sequence[int], answers: Sequence[int], unit: str) -> Row:
    """Print the table; the same as plain values. Prompts that some arm has not answered yet are left out."""
    report: Row = {}
    by_arm = {arm: rows.of_arm(arm) for arm in arms}
    for length in lengths:
        for num_tokens in answers:
            cell = f"{length}/{num_tokens}"
            keys = [key for key in by_arm[THEIRS] if key.startswith(f"{cell}/")]
            keys = [key for key in keys if all(key in found for found in by_arm.values())]
            if not keys:
                continue
            plain = [by_arm[THEIRS][key][unit] for key in keys]
            means = {arm: sum(found[key][unit] for key in keys) / len(keys) for arm, found in by_arm.items()}
            best = min((arm for arm in arms if arm.startswith(THEIRS)), key=means.__getitem__)
            print(f"\n{length} tokens, answer of {num_tokens}: n={len(keys)}, best of transformers: {best}")
            report[cell] = {"n": len(keys), "best_of_theirs": best}
            for arm, found in by_arm.items():
                speed, low, high = ratio_interval(plain, [found[key][unit] for key in keys])
                print(
                    f"  {arm:18s}{means[arm]:8.1f} s  {speed:5.2f}x [{low:.2f}, {high:.2f}]"
                    f"  over the best {means[best] / means[arm]:.2f}x"
                )
                report[cell][arm] = {"seconds": means[arm], "over_theirs": [speed, low, high]}
    return report


def main() -> None:
    parser = script.make_parser(__doc__)
    script.add_pair_arguments(parser)
    script.add_row_arguments(parser, limited=False)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[2048, 4096, 8192], help="prompt tokens (%(default)s)"
    )
    parser.add_argument("--answers", type=int, nargs="+", default=[16, 64, 256], help="answer tokens (%(default)s)")
    parser.add_argument("--prompts", type=int, default=4, help="per length (%(default)s)")
    parser.add_argument("--keep-rate", type=float, default=0.1, help="(%(default)s)")
    parser.add_argument("--arms", nargs="+", default=[*DENSE, *PRUNED], help="theirs is always one of them")
    parser.add_argument("--unit", choices=("wall_s", "cpu_s"), default="wall_s", help="of the table (%(default)s)")
    arguments = parser.parse_args()
    rows = Rows(arguments.rows, arguments.minutes)
    arms = [arm for arm in (*DENSE, *PRUNED) if arm in (THEIRS, *arguments.arms)]
    generator = script.load_generator(arguments, calibration=None)
    # A process's first forward over a long text allocates what later ones find.
    generator.generate("The quick brown fox. " * 200, max_tokens=2, sparse_prefill="off")
    for length in arguments.lengths:
        for number, messages in enumerate(prompts_of(generator.tokenizer, length, arguments.prompts)):
            for arm in arms[number % len(arms) :] + arms[: number % len(arms)]:
                keys = {num_tokens: f"{length}/{num_tokens}/{number}" for num_tokens in arguments.answers}
                left = [num_tokens for num_tokens, key in keys.items() if (key, arm) not in rows]
                if not left or not rows.has_time:
                    continue
                for num_tokens, row in measured(generator, arm, messages, left, arguments.keep_rate):
                    rows.add(keys[num_tokens], arm, row)
                    print(f"{keys[num_tokens]:14s}{arm:18s}{row['wall_s']:8.2f} s", flush=True)
    table = summary(rows, arms, arguments.lengths, arguments.answers, arguments.unit)
    script.print_report("end_to_end", {"unit": arguments.unit, "cells": table}, arguments.out)


if __name__ == "__main__":
    script.run(main)
