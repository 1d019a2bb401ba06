"""Tokens per second of decoding, by length of the context: plain, speculation, sparse prefill, and both.

Speculation over a long context pays for a draft that attends to all of it; with sparse prefill both models decode over
the kept slots, and in the lossless mode the draft alone decodes over chosen ones. The draft proposes alone: look-ups,
which read no draft, would hide what its context costs. The ways run on the same documents (standard-library modules,
continued), interleaved, the one that goes first changing from prompt to prompt. A speed is tokens over seconds of the
steps behind the first; a step in which the draft catches up with a densely prefilled prompt is left out of it and told
beside it (draft_reads_s).

--random SHAPE measures seconds of steps instead, with random weights at a real pair's sizes and caches filled with
random keys, up to 128K tokens: no prompt is prefilled and nothing can be said of acceptance, so tokens/s are computed
for an acceptance rate that is given (--acceptance). Layers are cut to --layers of each model so that a CPU can hold
them; attention's share of a step is that of the whole model, the embedding and the head weigh more.

Prints tables, ends in one JSON line; --out has it as a file, --plot a picture.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.gpu.shapes import SHAPES
from spec_stack import PrefillConfig, SpecStackGenerator
from spec_stack.calibrate.documents import MODULES, module_source
from spec_stack.hf.cache import crop, new_cache

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"specprefill": False, "gamma": 0},
    "speculation": {"prune": "none"},
    "lossless": {"prune": "draft"},
    "sparse": {"specprefill": True, "gamma": 0},
    "both": {"specprefill": True},
}


def documents(tokenizer: Any, num_tokens: int, count: int) -> list[list[int]]:
    """Token ids of as many texts of that length, of modules joined where one is too short."""
    found = []
    for index in range(count):
        ids: list[int] = []
        for step in range(len(MODULES)):
            source = module_source(MODULES[(index + step) % len(MODULES)])
            ids += tokenizer(source[: 6 * num_tokens], add_special_tokens=not ids, verbose=False).input_ids
            if len(ids) >= num_tokens:
                break
        if len(ids) < num_tokens:
            raise ValueError(f"the modules have {len(ids)} tokens, fewer than the {num_tokens} asked for")
        found.append(ids[:num_tokens])
    return found


def decode(generator: SpecStackGenerator, ids: list[int], way: dict[str, Any], max_tokens: int) -> dict[str, float]:
    """One run: tokens/s of its later steps, what the draft took to catch up, acceptance."""
    result = generator.generate(input_ids=ids, max_tokens=max_tokens, ignore_eos=True, return_records=True, **way)
    later = [record for record in result.records or [] if not record.is_prefill]
    timed = [record for record in later if not record.draft_read_prompt]
    proposed = sum(record.gamma for record in later)
    return {
        "tokens_per_s": sum(record.num_tokens for record in timed) / sum(record.seconds for record in timed),
        "draft_reads_s": sum(record.draft_s for record in later if record.draft_read_prompt),
        "acceptance_rate": sum(record.num_accepted for record in later) / proposed if proposed else float("nan"),
        "gamma": proposed / len(later),
        "ttft_s": result.metrics.ttft_s,
    }


def measure(
    generator: SpecStackGenerator, lengths: Sequence[int], prompts: int, max_tokens: int, policy: dict[str, Any]
) -> dict[str, dict[str, dict[str, float]]]:
    """Medians by length and way."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for length in lengths:
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
        texts = documents(generator.tokenizer, length, prompts)
        # The first one warms up.
        for index, ids in enumerate(tqdm([texts[0], *texts], desc=f"{length} tokens", leave=False)):
            for name in list(WAYS)[:: -1 if index % 2 else 1]:
                own = policy | WAYS[name]
                found = decode(generator, ids, own, max_tokens if index else 16)
                if index:
                    rows[name].append(found)
        table[str(length)] = {
            name: {key: float(np.nanmedian([row[key] for row in own])) if own else 0.0 for key in own[0]}
            | {"lowest": min(row["tokens_per_s"] for row in own), "highest": max(row["tokens_per_s"] for row in own)}
            for name, own in rows.items()
        }
    return table


class Filled:
    """A model of random weights whose cache holds random keys: seconds of a forward at any length of the context."""

    def __init__(self, config: Any, num_layers: int) -> None:
        cut = deepcopy(config)
        cut.num_hidden_layers = num_layers
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(cut, dtype=torch.float32).eval()
        self._config = cut

    def seconds(self, num_cached: int, num_tokens: int, repeats: int) -> float:
        """Median seconds of a forward of num_tokens over num_cached slots."""
        config = self._config
        cache = new_cache(config)
        shape = (1, config.num_key_value_heads, num_cached, config.head_dim)
        for layer in range(config.num_hidden_layers):
            cache.update(torch.randn(shape), torch.randn(shape), layer)
        ids = torch.zeros(1, num_tokens, dtype=torch.long)
        positions = torch.arange(num_cached, num_cached + num_tokens)[None]
        taken = []
        with torch.inference_mode():
            for _ in range(repeats + 1):
                started = perf_counter()
                self.model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
                taken.append(perf_counter() - started)
                crop(cache, num_cached)
        return median(taken[1:])


def measure_random(
    shape: str, layers: tuple[int, int], lengths: Sequence[int], keep_rate: float, gamma: int, acceptance: float
) -> dict[str, Any]:
    """Seconds of steps by length, and the tokens/s that they make at an acceptance rate."""
    if shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")
    target, draft = (
        Filled(config, n) for config, n in zip((SHAPES[shape].target, SHAPES[shape].draft), layers, strict=True)
    )
    per_step = sum(acceptance**index for index in range(gamma + 1))
    table: dict[str, Any] = {}
    for length in tqdm(lengths, leave=False):
        row: dict[str, Any] = {}
        slots = min(length, PrefillConfig.draft_slots)
        for name, cached in (("full", length), ("kept", round(keep_rate * length)), ("chosen", slots)):
            row[name] = {
                "target_1_s": target.seconds(cached, 1, 5),
                "target_block_s": target.seconds(cached, gamma + 1, 5),
                "draft_1_s": draft.seconds(cached, 1, 5),
            }

        def speculative(seconds: dict[str, float]) -> float:
            return per_step / (gamma * seconds["draft_1_s"] + seconds["target_block_s"])

        row["tokens_per_s"] = {
            "plain": 1 / row["full"]["target_1_s"],
            "speculation": speculative(row["full"]),
            "lossless": speculative({**row["full"], "draft_1_s": row["chosen"]["draft_1_s"]}),
            "sparse": 1 / row["kept"]["target_1_s"],
            "both": speculative(row["kept"]),
        }
        table[str(length)] = row
    return {
        "shape": shape,
        "layers": list(layers),
        "of_layers": [SHAPES[shape].target.num_hidden_layers, SHAPES[shape].draft.num_hidden_layers],
        "gamma": gamma,
        "acceptance": acceptance,
        "keep_rate": keep_rate,
        "table": table,
    }


def pair_speeds(table: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Tokens/s by length and way, of what `measure` returns."""
    return {length: {name: own["tokens_per_s"] for name, own in row.items()} for length, row in table.items()}


def format_speeds(speeds: dict[str, dict[str, float]], more: Callable[[str], str] = lambda length: "") -> str:
    """Tokens/s by length and way, with what each is over plain."""
    names = list(next(iter(speeds.values())))
    lines = [f"{'tokens':>8s}" + "".join(f"{name:>20s}" for name in names)]
    for length, row in speeds.items():
        cells = "".join(f"{row[name]:>12.1f} ({row[name] / row['plain']:4.2f}x)" for name in names)
        lines.append(f"{length:>8s}{cells}{more(length)}")
    return "\n".join(lines)


def plot(panels: dict[str, dict[str, dict[str, float]]], to: Path) -> None:
    """Tokens/s over the length of the context, a curve per way; one panel per measurement."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {
        "plain": "#9aa5a3",
        "speculation": "#c62828",
        "lossless": "#ef6c00",
        "sparse": "#1565c0",
        "both": "#00796b",
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(5.6 * len(panels), 3.8), layout="constrained", squeeze=False)
    for axis, (title, speeds) in zip(axes[0], panels.items(), strict=True):
        lengths = [int(length) for length in speeds]
        for name in speeds[str(lengths[0])]:
            values = [speeds[str(length)][name] for length in lengths]
            axis.plot(lengths, values, "o-", color=colours[name], label=name, lw=2)
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{length / 1000:.0f}K" if length >= 1000 else str(length) for length in lengths])
        axis.set_ylim(0)
        axis.set_xlabel("tokens of the prompt")
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("tokens/s while decoding")
    axes[0][0].legend(frameon=False)
    figure.savefig(to, dpi=130, facecolor="white", metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 2000, 4000, 8000, 16000], help="(%(default)s)")
    parser.add_argument("--prompts", type=int, default=4, help="per length (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96, help="(%(default)s)")
    parser.add_argument("--keep-rate", type=float, default=PrefillConfig.keep_rate)
    parser.add_argument("--gamma", type=int, help="of speculation (default: the policy throughput)")
    parser.add_argument("--random", choices=SHAPES, help="random weights at these sizes, beside the pair")
    parser.add_argument("--layers", type=int, nargs=2, default=(2, 1), help="kept of target and draft (%(default)s)")
    parser.add_argument(
        "--random-lengths", type=int, nargs="+", default=[1000, 4000, 16000, 32000, 64000, 128000], help="(%(default)s)"
    )
    parser.add_argument("--acceptance", type=float, default=0.7, help="that is supposed with --random (%(default)s)")
    parser.add_argument("--no-pair", action="store_true", help="the random weights only")
    add_out_argument(parser)
    parser.add_argument("--plot", type=Path)
    parser.add_argument(
        "--redraw", type=Path, metavar="FILE", help="measure nothing: draw the pair's curves of an earlier result"
    )
    arguments = parser.parse_args()
    if arguments.redraw is not None:
        if arguments.plot is None:
            raise ValueError("--redraw draws to --plot; say where that is to be")
        plot({"": pair_speeds(json.loads(arguments.redraw.read_text(encoding="utf-8"))["pair_table"])}, arguments.plot)
        return
    if not 0 <= arguments.acceptance < 1:
        raise ValueError("--acceptance must be from 0 to under 1")
    torch.set_num_threads(arguments.threads)
    result: dict[str, Any] = {}
    panels: dict[str, dict[str, dict[str, float]]] = {}
    if not arguments.no_pair:
        generator = load_generator(arguments)
        limit = min(generator.pair.max_positions) - arguments.max_tokens
        lengths = [min(length, limit) for length in arguments.lengths]
        policy = {"keep_rate": arguments.keep_rate, "proposer": "model"} | (
            {} if arguments.gamma is None else {"gamma": arguments.gamma}
        )
        table = measure(generator, lengths, arguments.prompts, arguments.max_tokens, policy)
        result["pair_table"] = table
        speeds = pair_speeds(table)
        print(f"tokens/s, the pair, keep rate {arguments.keep_rate}")
        print(
            format_speeds(
                speeds, lambda length: f"   draft reads {table[length]['speculation']['draft_reads_s']:.2f} s"
            )
        )
        panels["measured: the pair"] = speeds
    if arguments.random is not None:
        found = measure_random(
            arguments.random,
            tuple(arguments.layers),
            arguments.random_lengths,
            arguments.keep_rate,
            arguments.gamma or 4,
            arguments.acceptance,
        )
        result["random"] = found
        speeds = {length: row["tokens_per_s"] for length, row in found["table"].items()}
        layers = " and ".join(f"{kept} of {of}" for kept, of in zip(found["layers"], found["of_layers"], strict=True))
        title = (
            f"{arguments.random} sizes, {layers} layers, random weights,\nacceptance {arguments.acceptance} supposed"
        )
        print("tokens/s from measured seconds, " + title.replace("\n", " "))
        print(format_speeds(speeds))
        panels[title] = speeds
    if not panels:
        raise ValueError("nothing to measure: --no-pair without --random")
    if arguments.plot is not None:
        plot(panels, arguments.plot)
    line = {"experiment": "decode_collapse", **describe(), "keep_rate": arguments.keep_rate, **result}
    print_report(line, arguments.out)


if __name__ == "__main__":
    run_script(main)
