"""How much sooner the first token comes, by prompt length and by how the draft goes through the prompt.

Dense prefill against sparse prefill through the same code, interleaved, medians: today's default, a draft that prefills
with a window, and a calibrated setting. Beside them the bare forwards that they are made of: the draft's pass (r), the
target's over the kept tokens alone (s), the target's over the whole prompt (1); 1/(r + s) bounds what there is to gain.
Peak memory is that of a process of its own, over what it held when the pair was loaded. Prints tables, ends in one JSON
line.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from experiments.common.environment import describe
from experiments.common.memory import peak_over, reset_peak
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.cli.demo import hide_fact
from spec_stack.decode.propose import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.prompt import encode_messages
from spec_stack.prefill.calibration import Calibration
from spec_stack.prefill.scoring import score_prompt

DENSE = "dense"


def settings_of(arguments: argparse.Namespace) -> dict[str, PrefillConfig]:
    """The settings that are compared, by name."""
    window = arguments.window
    settings = {"default, keep 0.2": PrefillConfig()}
    for keep_rate in (0.2, 0.1):
        settings[f"window {window}, keep {keep_rate}"] = PrefillConfig(draft_window=window, keep_rate=keep_rate)
    if arguments.calibration:
        settings["calibrated"] = Calibration.load(arguments.calibration).apply()
    return settings


def make_prompt(tokenizer: Any, num_tokens: int) -> list[int]:
    """Token ids of a document of about so many tokens with a fact in it, and a question."""
    return encode_messages(tokenizer, hide_fact(tokenizer, num_tokens, seed=7).messages)[0]


def first_token(generator: SpecStackGenerator, prompt: Sequence[int], is_sparse: bool) -> Any:
    options: dict[str, Any] = {"sparse_prefill": "on"} if is_sparse else {"sparse_prefill": "off", "gamma": 0}
    return next(iter(generator.stream(input_ids=list(prompt), max_tokens=16, **options)))


def interleave(variants: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds per variant and repeat, all variants in turn, after one round of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 1):
        for name, run in variants.items():
            began = perf_counter()
            run()
            if repeat:
                times[name].append(perf_counter() - began)
    return times


def bench(pair: ModelPair, prompt: list[int], settings: dict[str, PrefillConfig], repeats: int) -> dict[str, Any]:
    generators = {
        name: SpecStackGenerator(pair.target, pair.draft, pair.tokenizer, config=SpecStackConfig(config))
        for name, config in settings.items()
    }
    chunk = PrefillConfig.prefill_chunk
    whole = range(len(prompt))
    variants: dict[str, Callable[[], Any]] = {
        DENSE: partial(first_token, next(iter(generators.values())), prompt, False),
        "target, whole": lambda: pair.open_target(chunk).forward(prompt, whole, 1),
    }
    kept: dict[str, list[int]] = {}
    for name, config in settings.items():
        draft = pair.view_draft(pair.open_index(chunk))
        look_ahead = partial(propose, draft, sampler=Sampler(), end_ids=pair.end_ids)
        kept[name] = list(score_prompt(draft, prompt, look_ahead, config)[0].positions)
        variants[name] = partial(first_token, generators[name], prompt, True)
        variants[f"draft, {name}"] = partial(_draft_pass, pair, prompt, config)
        variants[f"kept, {name}"] = partial(_target_pass, pair, prompt, kept[name])
    times = interleave(variants, repeats)
    seconds = {name: median(values) for name, values in times.items()}
    rows = {}
    for name in settings:
        r, s = (seconds[f"{part}, {name}"] / seconds["target, whole"] for part in ("draft", "kept"))
        ratio = seconds[DENSE] / seconds[name]
        pairs = [dense / sparse for dense, sparse in zip(times[DENSE], times[name], strict=True)]
        rows[name] = {
            "ttft_s": seconds[name],
            "ttft_ratio": ratio,
            "ttft_ratio_range": [min(pairs), max(pairs)],
            "r": r,
            "s": s,
            "bound": 1 / (r + s),
            "share_of_bound": ratio * (r + s),
            "kept_tokens": len(kept[name]),
        }
    return {"prompt_tokens": len(prompt), "dense_s": seconds[DENSE], "settings": rows}


def _draft_pass(pair: ModelPair, prompt: list[int], config: PrefillConfig) -> None:
    draft = pair.view_draft(pair.open_index(config.prefill_chunk))
    if config.scorer != "bm25":
        draft.prefill(prompt, range(len(prompt)), config.draft_window, config.draft_sinks, config.scoring_layers)


def _target_pass(pair: ModelPair, prompt: list[int], kept: list[int]) -> None:
    pair.open_target(PrefillConfig.prefill_chunk).forward([prompt[position] for position in kept], kept, 1)


def peak_mb(arguments: argparse.Namespace, num_tokens: int, config: PrefillConfig | None) -> float:
    """Memory that the first token of a prompt takes at most, in a fresh process. config None is dense prefill."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return float(pool.apply(_peak_in_this_process, (arguments, num_tokens, config)))


def _peak_in_this_process(arguments: argparse.Namespace, num_tokens: int, config: PrefillConfig | None) -> float:
    generator = load_generator(arguments, SpecStackConfig(config or PrefillConfig()))
    prompt = make_prompt(generator.tokenizer, num_tokens)
    first_token(generator, prompt[:256], False)
    before = reset_peak(generator.target.device)
    first_token(generator, prompt, config is not None)
    return peak_over(generator.target.device, before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 4000, 8000, 15800], help="(%(default)s)")
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--calibration", type=Path, help="a calibration file, or the folder it lies in")
    parser.add_argument("--repeats", type=int, default=5)
    add_out_argument(parser)
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    arguments = parser.parse_args()
    settings = settings_of(arguments)
    pair = load_generator(arguments).pair
    lengths = []
    for num_tokens in arguments.tokens:
        row = bench(pair, make_prompt(pair.tokenizer, num_tokens), settings, arguments.repeats)
        print(f"{row['prompt_tokens']} prompt tokens, dense {row['dense_s'] * 1e3:.0f} ms, {arguments.repeats} repeats")
        for name, found in row["settings"].items():
            low, high = found["ttft_ratio_range"]
            print(
                f"  {name:24s}{found['ttft_s'] * 1e3:7.0f} ms  {found['ttft_ratio']:5.1f}x ({low:.1f}-{high:.1f})  "
                f"r {found['r']:.3f} s {found['s']:.3f} bound {found['bound']:5.1f}x  "
                f"{found['share_of_bound']:4.0%} of it  {found['kept_tokens']} kept"
            )
        if not arguments.no_memory:
            variants = {DENSE: None, **settings}
            row["peak_mb"] = {name: peak_mb(arguments, num_tokens, config) for name, config in variants.items()}
            print("  peak memory: " + ", ".join(f"{name} {value:.0f} MB" for name, value in row["peak_mb"].items()))
        lengths.append(row)
    named = {name: asdict(config) for name, config in settings.items()}
    report = {"experiment": "prefill_grid", **describe(), "settings": named, "lengths": lengths}
    print_report(report, arguments.out)


if __name__ == "__main__":
    run_script(main)
