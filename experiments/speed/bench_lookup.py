"""Look-ups beside the draft model: what does each bring alone, what do both, and what do Transformers' own?

Greedy tokens per second of the whole call, prefill included, for every task: plain decoding, Transformers' plain
`generate`, its assisted generation with the same draft, its prompt look-up (`prompt_lookup_num_tokens=10`, no draft
model), and ours with the draft alone, look-ups alone, and both. The tasks are copying (prompts/copying.jsonl: edit a
passage, answer by quotation, structured rewrite) and whatever is named as TASK=FILE. The arms run in turn within a
prompt, the order turning by one from prompt to prompt; policies and look-up estimates keep what they learn over the
run, as in a server. A prompt's time is the median over repeats; intervals are bootstrapped over prompts, and gains are
paired. Per-prompt seconds are in the JSON line that the output ends in.

    bench_lookup.py --per-task 12 code=HumanEval.jsonl.gz math=gsm8k.jsonl chat=mt_bench.jsonl \\
        summary=spec_bench.jsonl:summarization
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM

from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.prompt_files import choose_prompts, read_prompts
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.policies.bench_policies import Contest, gain, per_prompt
from spec_stack import SpecStackGenerator
from spec_stack.controller.registry import make_policy

COPYING = Path(__file__).parents[1] / "prompts" / "copying.jsonl"
OURS = {"model only": "model", "look-up only": "lookup", "both": "both"}
PLAIN = "plain"
THEIR_LOOKUP = "transformers, prompt look-up 10"


def arms(contest: Contest, generator: SpecStackGenerator) -> dict[str, Callable[[list[int], str, int], list[int]]]:
    """Every arm, Transformers' on copies of their own with transformers' own attention."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=model.dtype).to(model.device).eval()
        for model in (generator.target, generator.draft)
    )
    found: dict[str, Callable[[list[int], str, int], list[int]]] = {
        PLAIN: partial(contest.ours, generator, make_policy("fixed", gamma=0)),
        "transformers, plain": partial(contest.theirs, target, None),
        "transformers, assisted": partial(contest.theirs, target, draft),
        THEIR_LOOKUP: partial(contest.theirs, target, None, num_looked_up=10),
    }
    for name, proposer in OURS.items():
        found[name] = partial(contest.ours, generator, make_policy("throughput"), proposer=proposer)
    return found


def report(contest: Contest, tasks: list[str]) -> dict[str, Any]:
    """Print tokens/s by task and what both gain over model and look-up alone; the same as plain values."""
    seconds = {name: per_prompt(values) for name, values in contest.seconds.items()}
    result: dict[str, Any] = {}
    for task in [*dict.fromkeys(tasks), "all"]:
        where = np.array([task in (name, "all") for name in tasks])
        print(f"\n{task}: {where.sum()} prompts x {contest.num_tokens} tokens")
        print(f"  {'':34s}tokens/s  over plain [95 %]              both over it [95 %]")
        row: dict[str, Any] = {}
        for name, values in seconds.items():
            speed = float(where.sum() * contest.num_tokens / values[where].sum())
            over_plain = gain(values[where], seconds[PLAIN][where])
            of_both = gain(seconds["both"][where], values[where])
            row[name] = {"tokens_per_s": speed, "over_plain": over_plain, "both_over_it": of_both}
            shown = [
                f"{1 + middle:.2f}x [{1 + low:.2f}, {1 + high:.2f}]" for middle, low, high in (over_plain, of_both)
            ]
            print(f"  {name:34s}{speed:8.0f}  {shown[0]:28s}  {shown[1]}")
        alone = {name: row[name]["tokens_per_s"] for name in ("model only", "look-up only", THEIR_LOOKUP)}
        better = max(alone, key=alone.__getitem__)
        row["better_alone"] = better
        print(f"  both over the better alone ({better}): {1 + row[better]['both_over_it'][0]:.2f}x")
        result[task] = row
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", help="TASK=FILE or TASK=FILE:CATEGORY beside the copying tasks")
    add_pair_arguments(parser)
    parser.add_argument("--per-task", type=int, default=12, help="prompts per named task (%(default)s)")
    parser.add_argument("--copying", type=int, default=8, help="prompts per copying task, 0 for none (%(default)s)")
    parser.add_argument("--max-prompt-tokens", type=int, default=1024, help="longer ones lose their middle")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per answer (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    add_out_argument(parser)
    arguments = parser.parse_args()
    prompts = []
    if arguments.copying:
        copying = read_prompts(COPYING)
        for task in dict.fromkeys(prompt.task for prompt in copying):
            prompts += [prompt for prompt in copying if prompt.task == task][: arguments.copying]
    if arguments.prompts:
        try:
            prompts += choose_prompts(arguments.prompts, arguments.per_task)
        except ValueError as error:
            parser.error(str(error))
    if not prompts:
        parser.error("no prompts: name TASK=FILE, or leave --copying on")
    generator = load_generator(arguments)
    encoded = [prompt.encode(generator.tokenizer, arguments.max_prompt_tokens) for prompt in prompts]
    contest = Contest(arguments.tokens)
    contest.run(arms(contest, generator), encoded, arguments.repeats)
    tasks = [prompt.task for prompt in prompts]
    result = report(contest, tasks)
    details = {
        name: {
            "prompts_with_other_tokens": sum(
                contest.tokens[name][index] != contest.tokens[PLAIN][index] for index in range(len(encoded))
            ),
            "tokens_per_step": contest.accepted[name] / contest.num_steps[name] + 1
            if contest.num_steps[name]
            else None,
            "seconds": {index: values for index, values in contest.seconds[name].items()},
        }
        for name in contest.seconds
    }
    for name, detail in details.items():
        print(f"  {name:34s}other tokens in {detail['prompts_with_other_tokens']} of {len(encoded)}")
    line = {
        "experiment": "bench_lookup", **describe(), "num_tokens": arguments.tokens, "repeats": arguments.repeats,
        "tasks": tasks, "result": result, "details": details,
    }  # fmt: skip
    print_report(line, arguments.out)


if __name__ == "__main__":
    run_script(main)
