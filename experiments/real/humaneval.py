"""HumanEval: does a target answer as its makers say, and does speculation leave its answers as they are?

Every task is asked once per arm, greedily, as EvalPlus asks chat models: the problem in a code block, and the answer
begun with one. *batched* is transformers' own generate over several tasks at once, with no part of this package but
the layout of the weights: the cheapest way to see that weights and template are right. *spec* decodes with a draft;
prompts are prefilled densely in both. An answer passes where the task's own tests do, run in a process of their own
with limits of time and memory. Where spec parts from batched, the row says at which token and how far apart the two
logits were. A row is printed after every answer; the last line is one of JSON, with pass@1 and its 95 % interval
(Wilson).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from time import process_time
from typing import Any

import torch
from scipy.stats import binomtest

from experiments.common import script
from experiments.common.answers import first_divergence
from experiments.common.environment import note_pair
from experiments.common.prompt_files import lines_of
from experiments.real.target import Target
from spec_stack import SpecStackGenerator
from spec_stack.bench.rows import Rows
from spec_stack.hf.loading import load_tokenizer
from spec_stack.hf.prompt import PromptSource, encode_prompt

BATCHED, SPEC = ARMS = ("batched", "spec")
_ASK = "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
_BEGIN = (
    "Below is a Python script with a self-contained function that solves the problem and passes corresponding tests:\n"
    "```python\n"
)
_STOP = ["\n```"]
_TEST_SECONDS = 10
_TEST_BYTES = 2 << 30


def program(task: dict[str, Any], answer: str) -> str:
    """The answer between what stands before the function in the problem (imports, helpers) and the task's tests."""
    before = task["prompt"].partition(f"def {task['entry_point']}")[0]
    return f"{before}\n{answer}\n{task['test']}\ncheck({task['entry_point']})\n"


def passes(code: str) -> bool:
    """Tell whether a program ends well, in a folder and a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = subprocess.run(
                [sys.executable, "-I", "-c", code],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_TEST_SECONDS,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (_TEST_BYTES, _TEST_BYTES)),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return ended.returncode == 0


def ask(generator: SpecStackGenerator, prompt_ids: list[int], max_tokens: int) -> dict[str, Any]:
    """One answer, and what it took."""
    began = process_time()
    result = generator.generate(input_ids=prompt_ids, max_tokens=max_tokens, stop=_STOP, sparse_prefill="draft_only")
    metrics = result.metrics
    return {
        "token_ids": result.token_ids,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "cpu_s": round(process_time() - began, 2),
        "num_accepted": metrics.num_accepted,
        "num_proposed": metrics.num_proposed,
        "num_steps": metrics.num_steps,
    }


def ask_batch(model: Any, tokenizer: Any, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
    """The answers to several prompts at once, each with its share of what they took."""
    began = process_time()
    width, pad = max(map(len, prompts)), tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(each)) + each for each in prompts])
    mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts])
    made = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=max_tokens,
        stop_strings=_STOP,
        tokenizer=tokenizer,
        repetition_penalty=1.0,
    )
    seconds = round((process_time() - began) / len(prompts), 2)
    answers = [[token for token in row[width:].tolist() if token != pad] for row in made]
    texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    return [
        {"token_ids": answer, "text": text.split(_STOP[0])[0], "cpu_s": seconds}
        for answer, text in zip(answers, texts, strict=True)
    ]


def encode(tokenizer: Any, task: dict[str, Any]) -> list[int]:
    """The prompt of a task: the question, and how its answer begins."""
    messages = [
        {"role": "user", "content": f"{_ASK}\n```\n{task['prompt'].strip()}\n```"},
        {"role": "assistant", "content": _BEGIN},
    ]
    source = PromptSource(messages=messages, continue_final_message=True)
    return encode_prompt(tokenizer, len(tokenizer), source).token_ids


def run_batches(arguments: argparse.Namespace, tasks: list[dict[str, Any]], rows: Rows) -> None:
    """Answer what is left of the tasks by batches."""
    torch.set_num_threads(arguments.threads)
    note_pair(arguments.target, arguments.draft)
    model, tokenizer = Target(arguments.target, arguments.precision).model, load_tokenizer(arguments.target)
    while tasks and rows.has_time:
        batch, tasks = tasks[: arguments.batch], tasks[arguments.batch :]
        prompts = [encode(tokenizer, task) for task in batch]
        for task, row in zip(batch, ask_batch(model, tokenizer, prompts, arguments.max_tokens), strict=True):
            keep(rows, task, BATCHED, row)


def run_single(arguments: argparse.Namespace, tasks: list[dict[str, Any]], rows: Rows) -> None:
    """Answer what is left of the tasks through the package, one by one."""
    generator = script.load_generator(arguments)
    for task in tasks:
        if not rows.has_time:
            break
        prompt_ids = encode(generator.tokenizer, task)
        row = ask(generator, prompt_ids, arguments.max_tokens)
        if wanted := rows.of_arm(BATCHED).get(task["task_id"]):
            row["compared_with"] = BATCHED
            row["divergence"] = first_divergence(generator, prompt_ids, wanted["token_ids"], row["token_ids"])
        keep(rows, task, SPEC, row)


def keep(rows: Rows, task: dict[str, Any], arm: str, row: dict[str, Any]) -> None:
    """Run a task's tests on an answer, keep the row and print it."""
    row["passed"] = passes(program(task, row["text"]))
    rows.add(task["task_id"], arm, row)
    told = f"{row['cpu_s']:7.1f} s {len(row['token_ids']):4d} tokens  {row.get('divergence') or ''}"
    print(f"{task['task_id']:15s}{arm:8s}{'passed' if row['passed'] else 'failed'} {told}", flush=True)


def summary(rows: Rows) -> dict[str, Any]:
    """Pass rates by arm, and how the arms compare."""
    report: dict[str, Any] = {}
    for arm in ARMS:
        done = rows.of_arm(arm).values()
        if done:
            passed = sum(row["passed"] for row in done)
            low, high = binomtest(passed, len(done)).proportion_ci(method="wilson")
            report[arm] = {"n": len(done), "pass_at_1": passed / len(done), "interval": [low, high]}
    spec = rows.of_arm(SPEC).values()
    compared = [row for row in spec if "compared_with" in row]
    if compared:
        parted = {row["key"]: [row["compared_with"], *row["divergence"]] for row in compared if row["divergence"]}
        report[SPEC] |= {"compared": len(compared), "divergences": parted}
    return report


def main() -> None:
    parser = script.make_parser(__doc__)
    parser.add_argument("tasks", type=Path, help="HumanEval.jsonl or .jsonl.gz")
    script.add_pair_arguments(parser)
    script.add_row_arguments(parser)
    parser.add_argument("--arm", choices=ARMS, default=SPEC, help="(%(default)s)")
    parser.add_argument("--every", type=int, default=1, help="take every so manieth task (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=12, help="tasks of the batched arm at once (%(default)s)")
    arguments = parser.parse_args()
    tasks = [json.loads(line) for line in lines_of(arguments.tasks)][:: arguments.every][: arguments.limit]
    rows = Rows(arguments.rows, arguments.minutes)
    left = [task for task in tasks if (task["task_id"], arguments.arm) not in rows]
    if left:
        (run_batches if arguments.arm == BATCHED else run_single)(arguments, left, rows)
    num_left = rows.num_left([task["task_id"] for task in tasks], [arguments.arm])
    script.print_report("humaneval", {"num_left": num_left, **summary(rows)}, arguments.out)


if __name__ == "__main__":
    script.run(main)
