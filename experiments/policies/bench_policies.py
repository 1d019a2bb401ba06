"""Which gamma policy decodes fastest, live, against plain decoding, every fixed gamma and transformers' own?

Every policy generates greedily from the same prompts, all variants in turn within a repeat, so that a change of the
machine's speed meets all of them. Policies keep what they learn over the whole run, as in a server. The order of the
variants turns by one from prompt to prompt. All must give the tokens of plain decoding (fp32) or are counted.

Per task and overall: tokens/s of the whole call, the prompt's prefill included, and for our own variants the gain of
the decode steps alone over the best fixed gamma in hindsight, with a bootstrap interval over prompts. A prompt's time
is the median over repeats. Prints tables and paired gains, ends in one JSON line that keeps the seconds per prompt.

    bench_policies.py code=HumanEval.jsonl.gz math=gsm8k.jsonl chat=mt_bench.jsonl \\
        summary=spec_bench.jsonl:summarization
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from time import perf_counter
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
from spec_stack import SpecStackGenerator
from spec_stack.controller.registry import POLICY_NAMES, make_policy
from spec_stack.hf.precision import QUANTIZED

PLAIN = "plain"
ASSISTED = "transformers, assisted (dynamic)"


class Contest:
    """Runs the variants and keeps their seconds per variant, prompt and repeat, of the whole call and of decoding."""

    def __init__(self, num_tokens: int, temperature: float = 0.0) -> None:
        self.num_tokens, self.temperature = num_tokens, temperature
        self.seconds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.decode_seconds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.tokens: dict[str, dict[int, list[int]]] = defaultdict(dict)
        self.controller_s: dict[str, float] = defaultdict(float)
        self.num_steps: dict[str, int] = defaultdict(int)
        self.accepted: dict[str, int] = defaultdict(int)
        self.proposed: dict[str, int] = defaultdict(int)

    def ours(
        self, generator: SpecStackGenerator, policy: Any, ids: list[int], name: str, index: int, proposer: str = "model"
    ) -> list[int]:
        result = generator.generate(
            input_ids=ids,
            max_tokens=self.num_tokens,
            policy=policy,
            proposer=proposer,
            temperature=self.temperature,
            sparse_prefill="draft_only",
            ignore_eos=True,
        )
        metrics = result.metrics
        self.decode_seconds[name][index].append(metrics.total_s - metrics.ttft_s)
        self.controller_s[name] += metrics.controller_s
        self.num_steps[name] += metrics.num_steps
        self.accepted[name] += metrics.num_accepted
        self.proposed[name] += metrics.num_proposed
        return result.token_ids

    def theirs(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | None,
        ids: list[int],
        name: str,
        index: int,
        num_looked_up: int | None = None,
    ) -> list[int]:
        inputs = torch.tensor([ids], device=target.device)
        output = target.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=self.temperature > 0,
            temperature=self.temperature or None,
            max_new_tokens=self.num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            assistant_model=draft,
            prompt_lookup_num_tokens=num_looked_up,
        )
        return [int(token) for token in output[0, len(ids) :]]

    def run(
        self, variants: dict[str, Callable[[list[int], str, int], list[int]]], prompts: list[list[int]], repeats: int
    ) -> None:
        names = list(variants)
        for name in names:
            variants[name](prompts[0], name, 0)
        # The warm-up's times do not count.
        self.decode_seconds.clear()
        for repeat in range(repeats):
            for index, ids in enumerate(tqdm(prompts, desc=f"repeat {repeat + 1} of {repeats}", leave=False)):
                turn = (index + repeat) % len(names)
                for name in names[turn:] + names[:turn]:
                    started = perf_counter()
                    tokens = variants[name](ids, name, index)
                    self.seconds[name][index].append(perf_counter() - started)
                    self.tokens[name][index] = tokens


def per_prompt(seconds: dict[int, list[float]]) -> np.ndarray[Any, Any]:
    """Median seconds per prompt."""
    return np.array([np.median(seconds[index]) for index in sorted(seconds)])


def gain(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any], seed: int = 0) -> tuple[float, float, float]:
    """Speed of ours over theirs less 1, with a 95 % bootstrap interval over prompts; both hold seconds per prompt."""
    picks = np.random.default_rng(seed).integers(len(ours), size=(2000, len(ours)))
    ratios = theirs[picks].sum(axis=1) / ours[picks].sum(axis=1) - 1
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(theirs.sum() / ours.sum() - 1), float(low), float(high)


def report(contest: Contest, tasks: list[str], fixed: list[str]) -> dict[str, Any]:
    whole = {name: per_prompt(seconds) for name, seconds in contest.seconds.items()}
    decode = {name: per_prompt(seconds) for name, seconds in contest.decode_seconds.items()}
    result: dict[str, Any] = {}
    for task in [*dict.fromkeys(tasks), "all"]:
        where = np.array([task in (name, "all") for name in tasks])
        best = min(fixed, key=lambda name: decode[name][where].sum())
        print(f"\n{task}: {where.sum()} prompts; best fixed gamma in hindsight: {best}")
        print(f"  {'':34s}tokens/s   decoding against the best fixed gamma [95 %]")
        result[task] = {"best_fixed": best, "tokens_per_s": {}, "decode_gain_over_best_fixed": {}}
        for name, values in whole.items():
            speed = where.sum() * contest.num_tokens / values[where].sum()
            result[task]["tokens_per_s"][name] = speed
            shown = "–"
            if name in decode:
                middle, low, high = gain(decode[name][where], decode[best][where])
                result[task]["decode_gain_over_best_fixed"][name] = [middle, low, high]
                shown = f"{middle:+7.1%} [{low:+.1%}, {high:+.1%}]"
            print(f"  {name:34s}{speed:8.0f}   {shown}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+", help="TASK=FILE or TASK=FILE:CATEGORY")
    add_pair_arguments(parser)
    parser.add_argument("--per-task", type=int, default=10, help="prompts per task (%(default)s)")
    parser.add_argument(
        "--leave-out",
        type=int,
        default=0,
        metavar="N",
        help="those that --per-task N takes: for other prompts than a run's",
    )
    parser.add_argument("--max-prompt-tokens", type=int, default=1024, help="longer ones lose their middle")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per answer (%(default)s)")
    parser.add_argument("--gammas", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8, 10, 12, 16])
    parser.add_argument("--temperature", type=float, default=0.0, help="1 draws: other text in every run, so wide")
    parser.add_argument("--proposer", default="model", help="for the policies, model or both (%(default)s)")
    parser.add_argument("--confidence", type=float, nargs="*", default=[0.3, 0.5, 0.7], help="more thresholds")
    add_out_argument(parser)
    parser.add_argument("--policies", nargs="+", default=[name for name in POLICY_NAMES if name != "fixed"])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    try:
        prompts = choose_prompts(arguments.prompts, arguments.per_task)
        known = choose_prompts(arguments.prompts, arguments.leave_out) if arguments.leave_out else []
        prompts = [prompt for prompt in prompts if prompt not in known]
    except ValueError as error:
        parser.error(str(error))
    generator = load_generator(arguments)
    if generator.precision in QUANTIZED:
        parser.error("transformers is run in a dtype here; profile_steps.py records int8 and nf4")
    target, draft = (
        AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=model.dtype).to(model.device).eval()
        for model in (generator.target, generator.draft)
    )
    encoded = [prompt.encode(generator.tokenizer, arguments.max_prompt_tokens) for prompt in prompts]

    contest = Contest(arguments.tokens, arguments.temperature)
    fixed = [f"fixed-{gamma}" for gamma in arguments.gammas]
    variants: dict[str, Callable[[list[int], str, int], list[int]]] = {
        PLAIN: partial(contest.ours, generator, make_policy("fixed", gamma=0)),
        "transformers, plain": partial(contest.theirs, target, None),
        ASSISTED: partial(contest.theirs, target, draft),
    }
    for gamma in arguments.gammas:
        variants[f"fixed-{gamma}"] = partial(contest.ours, generator, make_policy("fixed", gamma=gamma))
    files = generator.pair.predictors
    for name in arguments.policies:
        # `speckv` gets the predictor that a user of the pair gets.
        options = {"predictor": files[name]} if name in files else {}
        variants[name] = partial(contest.ours, generator, make_policy(name, **options), proposer=arguments.proposer)
    for threshold in arguments.confidence:
        policy = make_policy("confidence", threshold=threshold)
        variants[f"confidence {threshold}"] = partial(contest.ours, generator, policy)
    contest.run(variants, encoded, arguments.repeats)

    tasks = [prompt.task for prompt in prompts]
    result = report(contest, tasks, fixed)
    print("\n                                  acceptance  tokens a step  policy us a step  other tokens in")
    details: dict[str, Any] = {}
    for name in variants:
        other = sum(contest.tokens[name][index] != contest.tokens[PLAIN][index] for index in range(len(encoded)))
        details[name] = {"prompts_with_other_tokens": other, "decode_seconds": contest.decode_seconds[name]}
        if contest.num_steps[name]:
            steps = contest.num_steps[name]
            details[name] |= {
                "acceptance_rate": contest.accepted[name] / max(contest.proposed[name], 1),
                "accepted_per_step": contest.accepted[name] / steps,
                "policy_us_per_step": contest.controller_s[name] / steps * 1e6,
            }
            print(
                f"  {name:34s}{details[name]['acceptance_rate']:8.1%}  {details[name]['accepted_per_step'] + 1:13.2f}  "
                f"{details[name]['policy_us_per_step']:16.1f}  {other:9d} of {len(encoded)}"
            )
        else:
            print(f"  {name:34s}{'–':>8s}  {'–':>13s}  {'–':>16s}  {other:9d} of {len(encoded)}")
    paired = paired_gains(contest, arguments.policies)
    line = {"experiment": "bench_policies", **describe(), "result": result, "paired": paired, "details": details}
    print_report(line, arguments.out)


def paired_gains(contest: Contest, policies: list[str]) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Print, over the same prompts, what every policy's decoding gains on every other variant of ours."""
    # Of transformers' own variants only whole calls are timed.
    decode = {name: per_prompt(seconds) for name, seconds in contest.decode_seconds.items() if seconds}
    result: dict[str, dict[str, tuple[float, float, float]]] = {}
    for name in policies:
        result[name] = {other: gain(decode[name], decode[other]) for other in decode if other != name}
        print(f"\n{name}, paired over")
        for other, (middle, low, high) in result[name].items():
            print(f"  {other:34s}{middle:+7.1%} [{low:+.1%}, {high:+.1%}]")
    return result


if __name__ == "__main__":
    run_script(main)
