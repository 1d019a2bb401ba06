"""Is speculation ever slower than plain decoding? The cases in which it could be, live, against plain in turn.

Cases: a draft of random weights with short prompts and with 1,800-token ones; the good draft with 8-token answers to
1,800-token prompts; the target as its own draft; sampling at temperature 1; and a policy that is fresh for every
request. Both arms of a prompt run in turn, the order swapping from prompt to prompt, and a prompt's time is the median
over repeats. The figure is plain seconds over ours, all prompts together, of the whole call, with a 95 % bootstrap
interval over prompts; sampled answers are of equal length, since the end-of-sequence token is passed over.

Each case has a policy (and look-up estimates) of its own, which keeps what it learns, except in "fresh policy", where
every call has new ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from time import process_time
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.prompt_files import choose_prompts
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.policies.bench_policies import gain
from spec_stack import SpecStackGenerator
from spec_stack.calibrate.documents import module_source
from spec_stack.controller.registry import make_policy

LONG = 1800


@dataclass(frozen=True)
class Case:
    """One way in which drafting may not pay.

    make: the generator; prompts: token ids; num_tokens: of every answer; is_fresh: a new policy for every call.
    """

    name: str
    make: Callable[[], SpecStackGenerator]
    prompts: list[list[int]]
    num_tokens: int
    temperature: float = 0.0
    is_fresh: bool = False


def random_twin(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """A model of the same shape that knows nothing."""
    torch.manual_seed(seed)
    twin = AutoModelForCausalLM.from_config(model.config).to(device=model.device, dtype=model.dtype)
    twin.name_or_path = model.name_or_path
    return twin.eval()


def copy_of(model: PreTrainedModel) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=model.dtype).to(model.device).eval()


def make_cases(generator: SpecStackGenerator, short: list[list[int]], long: list[list[int]]) -> list[Case]:
    def with_draft(make: Callable[[], PreTrainedModel]) -> Callable[[], SpecStackGenerator]:
        return lambda: SpecStackGenerator(copy_of(generator.target), make(), generator.tokenizer)

    useless = with_draft(lambda: random_twin(generator.draft))
    good = with_draft(lambda: copy_of(generator.draft))
    equal = with_draft(lambda: copy_of(generator.target))
    return [
        Case("random draft, short prompts", useless, short, 64),
        Case("random draft, long prompts", useless, long, 24),
        Case("good draft, 8-token answers to long prompts", good, long, 8),
        Case("draft = target", equal, short, 64),
        Case("temperature 1", good, short, 64, temperature=1.0),
        Case("fresh policy", good, short, 64, is_fresh=True),
        Case("fresh policy, random draft", useless, short, 64, is_fresh=True),
    ]


def measure(case: Case, policy: str, proposer: str, repeats: int) -> dict[str, Any]:
    """Process seconds per prompt of both arms, and how far plain is from ours. CPU time: a stall of another's making
    is no fault of ours."""
    generator = case.make()
    plain, ours = make_policy("fixed", gamma=0), make_policy(policy)

    def run(ids: list[int], is_plain: bool) -> float:
        nonlocal ours
        if case.is_fresh and not is_plain:
            ours = make_policy(policy)
        started = process_time()
        generator.generate(
            input_ids=ids, max_tokens=case.num_tokens, temperature=case.temperature, sparse_prefill="draft_only",
            ignore_eos=True,
            policy=plain if is_plain else ours, proposer="model" if is_plain else proposer,
        )  # fmt: skip
        return process_time() - started

    run(case.prompts[0], True)
    seconds: dict[bool, list[list[float]]] = {True: [], False: []}
    for index, ids in enumerate(tqdm(case.prompts, desc=case.name, leave=False)):
        rounds: dict[bool, list[float]] = {True: [], False: []}
        for repeat in range(repeats):
            for is_plain in (True, False) if (index + repeat) % 2 else (False, True):
                rounds[is_plain].append(run(ids, is_plain))
        for is_plain, values in rounds.items():
            seconds[is_plain].append(values)
    medians = {is_plain: np.array([np.median(values) for values in rows]) for is_plain, rows in seconds.items()}
    middle, low, high = gain(medians[False], medians[True])
    return {
        "over_plain": [1 + middle, 1 + low, 1 + high],
        "num_prompts": len(case.prompts),
        "num_tokens": case.num_tokens,
        "plain_s": seconds[True],
        "ours_s": seconds[False],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", help="TASK=FILE or TASK=FILE:CATEGORY of the short prompts")
    add_pair_arguments(parser)
    parser.add_argument("--num-prompts", type=int, default=20, help="per case (%(default)s)")
    parser.add_argument("--long", type=int, default=LONG, help="tokens of the long prompts (%(default)s)")
    parser.add_argument("--policy", default="throughput")
    parser.add_argument("--proposers", nargs="+", default=["model", "both"], help="%(default)s")
    parser.add_argument("--cases", nargs="+", type=int, help="numbers from 0 on (default: all)")
    parser.add_argument("--repeats", type=int, default=3)
    add_out_argument(parser)
    arguments = parser.parse_args()
    generator = load_generator(arguments)
    per_task = -(-arguments.num_prompts // max(len(arguments.prompts), 4))
    short = [
        prompt.encode(generator.tokenizer, 256)
        for prompt in choose_prompts(arguments.prompts, per_task)[: arguments.num_prompts]
    ]
    text = generator.tokenizer(module_source("argparse") + module_source("tarfile"), verbose=False).input_ids
    stride = (len(text) - arguments.long) // max(arguments.num_prompts - 1, 1)
    long = [text[at * stride : at * stride + arguments.long] for at in range(arguments.num_prompts)]
    cases = make_cases(generator, short, long)
    chosen = cases if arguments.cases is None else [cases[number] for number in arguments.cases]
    result: dict[str, Any] = {}
    for case in chosen:
        for proposer in arguments.proposers:
            row = measure(case, arguments.policy, proposer, arguments.repeats)
            result[f"{case.name} ({proposer})"] = row
            middle, low, high = row["over_plain"]
            print(
                f"{case.name:46s}{proposer:8s}{middle:6.3f}x plain [{low:.3f}, {high:.3f}]  {len(case.prompts)} prompts"
            )
    line = {"experiment": "bench_floor", **describe(), "policy": arguments.policy, "result": result}
    print_report(line, arguments.out)


if __name__ == "__main__":
    run_script(main)
