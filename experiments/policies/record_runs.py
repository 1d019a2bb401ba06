"""Record greedy runs at several fixed gammas (or under policies), for replay and for training the controller.

Asks: what do the draft's signals look like token by token, and what does a step cost here? Every prompt is generated
once per gamma, past the end-of-sequence token so that all runs of a prompt have one length; runs of one prompt
share a request id, which is what `evaluate_policies.py` merges them by. Writes .jsonl or .parquet, prints tokens per
second of the decode steps, ends in one JSON line.

    record_runs.py code=HumanEval.jsonl.gz math=gsm8k.jsonl --gammas 0 1 2 4 6 8 --out records.parquet
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.prompt_files import choose_prompts
from experiments.common.script import run_script
from spec_stack import GenerationResult, SpecStackGenerator, StepRecord
from spec_stack.controller.base import Policy
from spec_stack.controller.registry import make_policy
from spec_stack.offline.records import SUFFIXES, check_record_path, write_records


def run_prompt(
    generator: SpecStackGenerator, ids: list[int], policy: Policy, num_tokens: int, task: str, request_id: str
) -> GenerationResult:
    """One greedy run over a densely prefilled prompt, past the end-of-sequence token, with its records."""
    return generator.generate(
        input_ids=ids,
        max_tokens=num_tokens,
        policy=policy,
        sparse_prefill="draft_only",
        ignore_eos=True,
        task=task,
        request_id=request_id,
        return_records=True,
    )


def check_tokens(num_tokens: int) -> None:
    """Raise ValueError where a run would end with its first step, the prompt's."""
    if num_tokens < 2:
        raise ValueError(f"--tokens must be 2 or more, got {num_tokens}; the first step is the prompt's")


def summarise(records: list[StepRecord]) -> dict[str, float]:
    """Tell what decode steps did and took, without the steps in which a model prefilled the prompt."""
    steps = [record for record in records if not record.is_prefill and not record.draft_read_prompt]
    num_tokens, num_drafted = sum(r.num_tokens for r in steps), sum(r.gamma for r in steps)
    draft_s, verify_s = sum(r.draft_s for r in steps), sum(r.verify_s for r in steps)
    return {
        "steps": len(steps),
        "tokens_per_step": num_tokens / len(steps),
        "tokens_per_s": num_tokens / (draft_s + verify_s + sum(r.controller_s for r in steps)),
        "draft_ms_per_token": draft_s / num_drafted * 1e3 if num_drafted else 0.0,
        "verify_ms_per_step": verify_s / len(steps) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+", help="TASK=FILE or TASK=FILE:CATEGORY")
    add_pair_arguments(parser)
    parser.add_argument("--per-task", type=int, default=10, help="prompts per task (%(default)s)")
    parser.add_argument(
        "--max-prompt-tokens", type=int, default=512, help="longer ones lose their middle (%(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=96, help="tokens per run (%(default)s)")
    parser.add_argument("--gammas", type=int, nargs="*", default=[0, 1, 2, 4, 6, 8])
    parser.add_argument("--policies", nargs="*", default=[], help="policies to record beside the fixed gammas")
    parser.add_argument("--out", type=Path, required=True, help=".jsonl or .parquet")
    arguments = parser.parse_args()
    try:
        check_record_path(arguments.out, suffixes=SUFFIXES)
        check_tokens(arguments.tokens)
        prompts = choose_prompts(arguments.prompts, arguments.per_task)
        policies = [make_policy("fixed", gamma=gamma) for gamma in arguments.gammas]
        policies += [make_policy(name) for name in arguments.policies]
    except ValueError as error:
        parser.error(str(error))
    generator = load_generator(arguments)
    if not policies or len({policy.name for policy in policies}) < len(policies):
        parser.error("give at least one gamma or policy, and each once")
    records: list[StepRecord] = []
    for number, prompt in enumerate(tqdm(prompts)):
        ids = prompt.encode(generator.tokenizer, arguments.max_prompt_tokens)
        for policy in policies:
            name = f"{prompt.task}-{number}"
            result = run_prompt(generator, ids, policy, arguments.tokens, prompt.task, name)
            records += result.records or []
    write_records(records, arguments.out)

    rows: dict[str, dict[str, Any]] = {}
    print("policy        steps  tokens/step  tokens/s  draft ms/token  verify ms/step")
    for policy in policies:
        rows[policy.name] = summarise([record for record in records if record.policy == policy.name])
        print("{:12s} {:6d} {:12.3f} {:9.1f} {:15.3f} {:15.3f}".format(policy.name, *rows[policy.name].values()))
    print(json.dumps({"experiment": "record_runs", **describe(), "records": len(records), "policies": rows}))


if __name__ == "__main__":
    run_script(main)
