"""HumanEval: does a target answer as its makers say, and does speculation leave its answers as they are?

Every task is asked once per arm, greedily, as EvalPlus asks chat models: the problem in a code block, and the answer
begun with one. *batched* is transformers' own generate over several tasks at once, with no part of this package but
the layout of the weights: the cheapest way to see that weights and template are right. *plain* decodes without a
draft, *spec* with one; prompts are prefilled densely in both. An answer passes where the task's own tests do, run in a
process of their own with limits of time and memory. Where spec parts from plain (from batched, where plain was not
run), or plain from batched, the row says at which token and how far apart the two logits were. A row is printed after
every answer; the last line is one of JSON, with pass@1 and its 95 % interval (Wilson).
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from time import process_time
from typing import Any

import torch
from scipy.stats import binomtest
from transformers import AutoModelForCausalLM

from experiments.common.environment import describe, note_pair
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.real.rows import Rows, add_row_arguments, first_divergence
from spec_stack import SpecStackGenerator
from spec_stack.hf.loading import load_tokenizer
from spec_stack.hf.precision import DTYPES
from spec_stack.hf.prepack import can_prepack, prepack
from spec_stack.hf.prompt import PromptSource, encode_prompt

BATCHED = "batched"
ARMS = (BATCHED, "plain", "spec")
_ASK = "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
_BEGIN = (
    "Below is a Python script with a self-contained function that solves the problem and passes corresponding tests:\n"
    "```python\n"
)
_STOP = ["\n```"]
_TEST_SECONDS = 10
_TEST_BYTES = 2 << 30


def read_tasks(path: Path) -> list[dict[str, Any]]:
    """The tasks of HumanEval's own file, packed or not."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    return [json.loads(line) for line in text.split("\n") if line.strip()]


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


def ask(generator: SpecStackGenerator, prompt_ids: list[int], arm: str, max_tokens: int) -> dict[str, Any]:
    """One answer, and what it took."""
    began = process_time()
    result = generator.generate(
        input_ids=prompt_ids,
        max_tokens=max_tokens,
        stop=_STOP,
        sparse_prefill="draft_only",
        gamma=0 if arm == "plain" else None,
        proposer="model" if arm == "plain" else None,
    )
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


def load_target(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The target as transformers runs it, its weights laid out as the package does, and its tokenizer."""
    torch.set_num_threads(arguments.threads)
    note_pair(arguments.target, arguments.draft)
    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=DTYPES[arguments.precision])
    if can_prepack(model.device, model.dtype):
        prepack(model)
    return model, load_tokenizer(arguments.target)


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
    model, tokenizer = load_target(arguments)
    while tasks and rows.has_time:
        batch, tasks = tasks[: arguments.batch], tasks[arguments.batch :]
        prompts = [encode(tokenizer, task) for task in batch]
        for task, row in zip(batch, ask_batch(model, tokenizer, prompts, arguments.max_tokens), strict=True):
            keep(rows, task, BATCHED, row)


def run_single(arguments: argparse.Namespace, tasks: list[dict[str, Any]], rows: Rows) -> None:
    """Answer what is left of the tasks through the package, every arm of a task after the other."""
    generator = load_generator(arguments)
    for task in tasks:
        prompt_ids = encode(generator.tokenizer, task)
        for arm in arguments.arms:
            if (task["task_id"], arm) in rows or not rows.has_time:
                continue
            row = ask(generator, prompt_ids, arm, arguments.max_tokens)
            others = [rows.of_arm(name).get(task["task_id"]) for name in ARMS[: ARMS.index(arm)]]
            if wanted := next(filter(None, reversed(others)), None):
                row["compared_with"] = wanted["arm"]
                row["divergence"] = first_divergence(generator, prompt_ids, wanted["token_ids"], row["token_ids"])
            keep(rows, task, arm, row)


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
    for arm in ("plain", "spec"):
        compared = [row for row in rows.of_arm(arm).values() if "compared_with" in row]
        if compared:
            parted = {row["key"]: [row["compared_with"], *row["divergence"]] for row in compared if row["divergence"]}
            report[arm] |= {"compared": len(compared), "divergences": parted}
    spec = rows.of_arm("spec").values()
    if spec:
        report["spec"]["pooled_acceptance"] = _sum(spec, "num_accepted") / max(1.0, _sum(spec, "num_proposed"))
        report["spec"]["pooled_tokens_per_step"] = sum(len(row["token_ids"]) for row in spec) / _sum(spec, "num_steps")
    both = rows.pairs("plain", "spec")
    if both:
        cpu_ratio = _sum((plain for plain, _ in both), "cpu_s") / _sum((row for _, row in both), "cpu_s")
        report["spec_over_plain"] = {"n": len(both), "cpu_ratio": cpu_ratio}
    return report


def _sum(rows: Iterable[dict[str, Any]], name: str) -> float:
    return float(sum(row[name] for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", type=Path, help="HumanEval.jsonl or .jsonl.gz")
    add_pair_arguments(parser)
    add_row_arguments(parser)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["plain"])
    parser.add_argument("--every", type=int, default=1, help="take every so manieth task (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=512)
    add_out_argument(parser)
    parser.add_argument("--batch", type=int, default=12, help="tasks of the batched arm at once (%(default)s)")
    arguments = parser.parse_args()
    if BATCHED in arguments.arms and len(arguments.arms) > 1:
        raise ValueError("run the batched arm alone: it loads the target without the package")
    tasks = read_tasks(arguments.tasks)[:: arguments.every][: arguments.limit]
    rows = Rows(arguments.rows, arguments.minutes)
    left = [task for task in tasks if any((task["task_id"], arm) not in rows for arm in arguments.arms)]
    if left:
        (run_batches if arguments.arms == [BATCHED] else run_single)(arguments, left, rows)
    num_left = sum((task["task_id"], arm) not in rows for task in tasks for arm in arguments.arms)
    print_report({"experiment": "humaneval", **describe(), "num_left": num_left, **summary(rows)}, arguments.out)


if __name__ == "__main__":
    run_script(main)
