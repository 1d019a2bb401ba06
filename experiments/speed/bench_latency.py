"""How much sooner the first token comes, and how much faster the rest, on one machine in one run.

Prefill: the time to first token of dense and of sparse prefill through the same code, beside the bare forwards
they are made of: the draft's over the whole prompt (r), the target's over the kept tokens alone (s), the target's
over the whole prompt (1). 1/(r + s) bounds what sparse prefill can gain; the share of it that is reached
tells what scoring, selection and Python cost.

Decode: greedy tokens per second of plain `target.generate`, of transformers' assisted generation with the same pair
(its default dynamic length, and every fixed length) and of spec_stack, with a check that all give the same
tokens. The transformers baselines run on copies of their own, with transformers' own attention.

All variants are interleaved; figures are medians. Prints two tables, ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.prompt_files import read_prompts
from experiments.common.script import run_script
from spec_stack import PrefillConfig, Selection, SpecStackGenerator
from spec_stack.cli.demo import hide_fact
from spec_stack.hf.model import CachedModel
from spec_stack.hf.prompt import encode_messages


def settle() -> None:
    """Wait for work that was only launched, so that it counts where it belongs."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(run: Callable[[], Any]) -> float:
    settle()
    started = perf_counter()
    run()
    settle()
    return perf_counter() - started


def interleave(variants: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds per variant and repeat, all variants in turn, after one round of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 1):
        for name, run in variants.items():
            seconds = timed(run)
            if repeat:
                times[name].append(seconds)
    return times


def spread(values: Sequence[float]) -> str:
    return f"{median(values) * 1e3:8.0f} ms  ({min(values) * 1e3:.0f}-{max(values) * 1e3:.0f})"


def bench_prefill(generator: SpecStackGenerator, num_tokens: int, keep_rate: float, repeats: int) -> dict[str, Any]:
    fact = hide_fact(generator.tokenizer, num_tokens, seed=0)
    prompt, _ = encode_messages(generator.tokenizer, fact.messages)
    kept: list[int] = []
    handle = generator.target.register_forward_pre_hook(
        lambda module, args, kwargs: kept.extend(kwargs["position_ids"][0].tolist()), with_kwargs=True
    )
    options: dict[str, Any] = {"input_ids": prompt, "keep_rate": keep_rate, "max_tokens": 32}
    next(generator.stream(sparse_prefill="on", **options))
    handle.remove()
    positions = [position for position in kept if position < len(prompt)]
    selection = Selection([prompt[position] for position in positions], positions, len(prompt))
    chunk = PrefillConfig.prefill_chunk

    def bare(model: PreTrainedModel, part: Selection) -> Callable[[], Any]:
        return lambda: CachedModel(model, chunk).forward(part.token_ids, part.positions, 1)

    whole = Selection.everything(prompt)
    times = interleave(
        {
            "target, whole prompt": bare(generator.target, whole),
            "draft, whole prompt": bare(generator.draft, whole),
            "target, kept tokens": bare(generator.target, selection),
            "TTFT dense": lambda: next(generator.stream(sparse_prefill="draft_only", gamma=0, **options)),
            "TTFT sparse": lambda: next(generator.stream(sparse_prefill="on", **options)),
        },
        repeats,
    )
    seconds = {name: median(values) for name, values in times.items()}
    r = seconds["draft, whole prompt"] / seconds["target, whole prompt"]
    s = seconds["target, kept tokens"] / seconds["target, whole prompt"]
    ratio = seconds["TTFT dense"] / seconds["TTFT sparse"]
    report = {
        "prompt_tokens": len(prompt),
        "kept_tokens": len(positions),
        "r": r,
        "s": s,
        "bound": 1 / (r + s),
        "ttft_ratio": ratio,
        "share_of_bound": ratio * (r + s),
        "seconds": seconds,
        "all_seconds": times,
    }
    print(f"prefill: {len(prompt)} prompt tokens, {len(positions)} kept, {repeats} repeats")
    for name, values in times.items():
        print(f"  {name:22s}{spread(values)}")
    print(f"  r = {r:.3f}, s = {s:.3f}, bound 1/(r + s) = {1 / (r + s):.2f}x")
    print(f"  TTFT dense / sparse = {ratio:.2f}x, {ratio * (r + s):.0%} of the bound\n")
    return report


def bench_decode(
    generator: SpecStackGenerator, prompts_file: Path, num_tokens: int, gammas: Sequence[int], repeats: int
) -> dict[str, Any]:
    def copy_of(model: PreTrainedModel) -> PreTrainedModel:
        twin = AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=model.dtype)
        return twin.to(model.device).eval()

    # One assistant per setting: the dynamic one goes on adapting its threshold from call to call, as in use.
    target = copy_of(generator.target)
    assistants: dict[int | None, PreTrainedModel] = {None: copy_of(generator.draft)}
    for gamma in gammas:
        assistants[gamma] = copy_of(generator.draft)
        assistants[gamma].generation_config.num_assistant_tokens = gamma
        assistants[gamma].generation_config.num_assistant_tokens_schedule = "constant"
        assistants[gamma].generation_config.assistant_confidence_threshold = 0.0
    tokens: dict[str, list[int]] = {}
    overheads: dict[int, list[float]] = {gamma: [] for gamma in gammas}
    proposed: dict[int, list[tuple[int, int, int]]] = {gamma: [] for gamma in gammas}

    def hugging_face(name: str, ids: list[int], assistant: PreTrainedModel | None) -> None:
        inputs = torch.tensor([ids], device=target.device)
        output = target.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            assistant_model=assistant,
        )
        tokens[name] = output[0, len(ids) :].tolist()

    def ours(name: str, ids: list[int], gamma: int) -> None:
        result = generator.generate(
            input_ids=ids, max_tokens=num_tokens, gamma=gamma, sparse_prefill="draft_only", ignore_eos=True
        )
        tokens[name] = result.token_ids
        metrics = result.metrics
        if gamma in overheads:
            overheads[gamma].append((metrics.total_s - metrics.forward_s) / metrics.num_steps)
            proposed[gamma].append((metrics.num_accepted, metrics.num_proposed, metrics.num_steps))

    per_variant: dict[str, list[list[float]]] = {}
    differing: dict[str, int] = {}
    prompts = [prompt.encode(generator.tokenizer) for prompt in read_prompts(prompts_file)]
    for ids in prompts:
        plain_name = "transformers, plain"
        variants: dict[str, Callable[[], Any]] = {plain_name: partial(hugging_face, plain_name, ids, None)}
        for setting, assistant in assistants.items():
            name = f"transformers, assisted ({'dynamic' if setting is None else f'gamma {setting}'})"
            variants[name] = partial(hugging_face, name, ids, assistant)
        variants["spec_stack, plain"] = partial(ours, "spec_stack, plain", ids, 0)
        for gamma in gammas:
            name = f"spec_stack (gamma {gamma})"
            variants[name] = partial(ours, name, ids, gamma)
        for name, seconds in interleave(variants, repeats).items():
            per_variant.setdefault(name, []).append(seconds)
            differing[name] = differing.get(name, 0) + (tokens[name] != tokens["transformers, plain"])

    total = len(prompts) * num_tokens
    # One figure per repeat: all prompts' tokens over all prompts' seconds, so that the spread is of whole passes.
    speeds = {
        name: [total / sum(seconds[repeat] for seconds in runs) for repeat in range(repeats)]
        for name, runs in per_variant.items()
    }
    plain = median(speeds["transformers, plain"])
    print(f"decode: {len(prompts)} prompts x {num_tokens} greedy tokens, {repeats} repeats")
    print(f"  {'':38s}tokens/s (spread)        vs plain  other tokens in")
    for name, values in speeds.items():
        shown = f"{median(values):7.0f} ({min(values):.0f}-{max(values):.0f})"
        print(f"  {name:38s}{shown:24s} {median(values) / plain:7.2f}x  {differing[name]} of {len(prompts)}")
    overhead_ms = {gamma: median(values) * 1e3 for gamma, values in overheads.items()}
    # On CUDA a forward's seconds end with its launch, so what is outside of it cannot be told.
    on_cuda = generator.target.device.type == "cuda"
    acceptance = {}
    for gamma, counts in proposed.items():
        accepted, offered, steps = (sum(column) for column in zip(*counts, strict=True))
        acceptance[gamma] = {"acceptance_rate": accepted / offered, "accepted_per_step": accepted / steps}
        print(
            f"  gamma {gamma}: acceptance {accepted / offered:.1%}, {accepted / steps:.2f} accepted a step, "
            + ("" if on_cuda else f"{overhead_ms[gamma]:.2f} ms a step outside the forwards")
        )
    return {
        "num_prompts": len(prompts),
        "num_tokens": num_tokens,
        "tokens_per_s": {name: median(values) for name, values in speeds.items()},
        "all_tokens_per_s": speeds,
        "prompts_with_other_tokens": differing,
        "overhead_ms_per_step": None if on_cuda else overhead_ms,
        "acceptance": acceptance,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--tokens", type=int, default=8200, help="document length of the prefill part (%(default)s)")
    parser.add_argument("--keep-rate", type=float, default=0.2)
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parents[1] / "prompts" / "decode.jsonl")
    parser.add_argument("--decode-tokens", type=int, default=256)
    parser.add_argument("--gammas", type=int, nargs="+", default=[2, 4, 6, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--part", choices=["both", "prefill", "decode"], default="both")
    arguments = parser.parse_args()
    generator = load_generator(arguments)
    report: dict[str, Any] = {"experiment": "bench_latency", **describe()}
    if arguments.part != "decode":
        report["prefill"] = bench_prefill(generator, arguments.tokens, arguments.keep_rate, arguments.repeats)
    if arguments.part != "prefill":
        report["decode"] = bench_decode(
            generator, arguments.prompts, arguments.decode_tokens, arguments.gammas, arguments.repeats
        )
    print(json.dumps(report))


if __name__ == "__main__":
    run_script(main)
