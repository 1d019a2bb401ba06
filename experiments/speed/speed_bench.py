"""A report in the form of SPEED-Bench: per category and temperature, what is accepted and how fast, against plain.

Prompts are JSON lines with a category and turns (SPEED-Bench's own file, MT-bench's, Spec-Bench's) or TASK=FILE as
`experiments.common.prompt_files` reads them; with none, the project's own. First turns only. Every prompt runs under
each arm, interleaved, the one that goes first changing; prefill is dense unless --sparse. Tokens/s count the steps
behind the first. The acceptance length counts the target's own token: 1 is plain decoding. --requests writes, for each
request, the object `metrics.speculative_decoding` that aiperf reads. Prints a table, ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.peer_rows import add_up, speculative_decoding
from experiments.common.prompt_files import Prompt, choose_prompts
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from spec_stack import SpecStackGenerator

PLAIN = "plain"


def read_prompts(sources: Sequence[str], per_task: int) -> list[Prompt]:
    """Prompts of TASK=FILE sources, or of one file of rows with a category each."""
    if len(sources) != 1 or "=" in sources[0]:
        return choose_prompts(list(sources), per_task)
    text = Path(sources[0]).read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    try:
        prompts = [Prompt(str(row["category"]), str(row["turns"][0]), True) for row in rows]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{sources[0]}: every row needs a category and turns ({error!r})") from error
    tasks = dict.fromkeys(prompt.task for prompt in prompts)
    return [prompt for task in tasks for prompt in [each for each in prompts if each.task == task][:per_task]]


def run(
    generator: SpecStackGenerator,
    ids: list[int],
    policy: str,
    temperature: float,
    max_tokens: int,
    sparse: bool,
    seed: int,
) -> dict[str, Any]:
    """One request: its acceptance object and its speed."""
    options: dict[str, Any] = {"gamma": 0} if policy == PLAIN else {"policy": policy}
    result = generator.generate(
        input_ids=ids,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed if temperature else None,
        ignore_eos=True,
        specprefill=None if sparse else False,
        return_records=True,
        **options,
    )
    records = result.records or []
    timed = [record for record in records if not record.is_prefill and not record.draft_read_prompt]
    seconds = sum(record.seconds for record in timed)
    return {
        "speculative_decoding": speculative_decoding(records),
        "tokens_per_s": sum(record.num_tokens for record in timed) / seconds if seconds else None,
        "ttft_s": result.metrics.ttft_s,
    }


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per temperature and category (and "all"): acceptance, median tokens/s by arm, and the median ratio to plain."""
    report: dict[str, Any] = {}
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        own = [row for row in rows if row["temperature"] == temperature]
        by_category: dict[str, Any] = {}
        for category in [*dict.fromkeys(row["category"] for row in own), "all"]:
            chosen = [row for row in own if category in ("all", row["category"])]
            arms = {}
            for arm in chosen[0]["arms"]:
                found = [row["arms"][arm] for row in chosen]
                ratios = [
                    row["arms"][arm]["tokens_per_s"] / row["arms"][PLAIN]["tokens_per_s"]
                    for row in chosen
                    if row["arms"][arm]["tokens_per_s"] and row["arms"][PLAIN]["tokens_per_s"]
                ]
                arms[arm] = {
                    "speculative_decoding": add_up([each["speculative_decoding"] for each in found]),
                    "tokens_per_s": median(each["tokens_per_s"] or 0.0 for each in found),
                    "over_plain": median(ratios) if ratios else None,
                }
            by_category[category] = {"prompts": len(chosen), "arms": arms}
        report[str(temperature)] = by_category
    return report


def format_report(report: dict[str, Any]) -> str:
    """For a terminal."""

    def shown(value: float | None, form: str, unit: str = "") -> str:
        return "-" if value is None else f"{value:{form}}{unit}"

    heads = ("length", "accepted", "tokens/s", "over plain")
    lines = []
    for temperature, categories in report.items():
        lines.append(f"temperature {temperature}")
        lines.append(f"  {'category':16s}{'arm':14s}" + "".join(f"{head:>11s}" for head in heads) + "  histogram")
        for category, entry in categories.items():
            for arm, figures in entry["arms"].items():
                spec = figures["speculative_decoding"]
                cells = (
                    shown(spec["mean_acceptance_length"], ".2f"),
                    shown(spec["draft_acceptance_rate"], ".0%"),
                    shown(figures["tokens_per_s"], ".0f"),
                    shown(figures["over_plain"], ".2f", "x"),
                )
                histogram = " ".join(map(str, spec["acceptance_histogram"]))
                lines.append(
                    f"  {category:16s}{arm:14s}" + "".join(f"{cell:>11s}" for cell in cells) + f"  {histogram}"
                )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("sources", nargs="*", help="a .jsonl file of categories and turns, or TASK=FILE …")
    parser.add_argument("--per-task", type=int, default=6, help="prompts per category (%(default)s)")
    parser.add_argument("--policies", nargs="+", default=["throughput"], help="arms beside plain (%(default)s)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="(%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--sparse", action="store_true", help="prune prompts from min_prompt_tokens on")
    parser.add_argument("--requests", type=Path, help="write a line per request")
    add_out_argument(parser)
    arguments = parser.parse_args()
    generator = load_generator(arguments)
    prompts = read_prompts(arguments.sources, arguments.per_task)
    arms = [PLAIN, *arguments.policies]
    limit = min(generator.pair.max_positions) - arguments.max_tokens
    rows: list[dict[str, Any]] = []
    # The first request warms up.
    for index, prompt in enumerate(tqdm([prompts[0], *prompts], leave=False), start=-1):
        ids = prompt.encode(generator.tokenizer, limit)
        for temperature in arguments.temperatures:
            found = {
                arm: run(generator, ids, arm, temperature, arguments.max_tokens, arguments.sparse, max(index, 0))
                for arm in arms[:: -1 if index % 2 else 1]
            }
            if index >= 0:
                ordered = {arm: found[arm] for arm in arms}
                rows.append({"category": prompt.task, "temperature": temperature, "arms": ordered})
    report = summarise(rows)
    print(format_report(report))
    if arguments.requests is not None:
        lines = [
            json.dumps({"category": row["category"], "temperature": row["temperature"], "arm": arm, "metrics": each})
            for row in rows
            for arm, each in row["arms"].items()
        ]
        arguments.requests.write_text("\n".join(lines) + "\n", encoding="utf-8")
    line = {"experiment": "speed_bench", **describe(), "sparse": arguments.sparse, "report": report}
    print_report(line, arguments.out)


if __name__ == "__main__":
    run_script(main)
