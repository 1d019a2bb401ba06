"""Tokens per second of decoding, by length of the context: plain, drafts over all of it or a part, sparse prefill.

Speculation over a long context pays for a draft that attends to all of it. Beside a dense target the arms are: plain;
the full draft; a window of as many slots as are chosen; slots chosen once, by words or by the draft's attention; and
"chosen", the library's own, by words and chosen anew as the answer grows. Their target prefills a prompt once. "sparse"
and "both" prune the target as well. The draft proposes alone: look-ups, which read no draft, would hide what its
context costs. Each arm runs with a fixed gamma and with the default policy, which every arm has to itself. Prompts are
standard-library modules, to be continued ("go on") or ending with the head of a function that stands in them ("asked").

Arms are interleaved, the one that goes first changing from prompt to prompt. tokens_per_s is of the steps behind the
first token without those in which a draft reads the prompt, which are told apart (reads_s); with_reading is of all.
Time to first token is measured by itself, plain and "chosen" in turn; since targets of the other runs have prefilled
before, the default policy there takes a draft's first reading to be cheaper than it is. --cpu-seconds counts the
process's own seconds, for a busy machine. Every run is a row of --rows as soon as it is there; a run goes on after
those it finds.

--random SHAPE measures seconds of steps instead, with random weights at a real pair's sizes and caches filled with
random keys, up to 128K tokens: no prompt is prefilled and nothing can be said of acceptance, so tokens/s are computed
for tokens a step of a full and of a chosen draft that are measured elsewhere (--tokens-per-step). Layers are cut to
--layers of each model so that a CPU can hold them; attention's share of a step is that of the whole model, the
embedding and the head weigh more.

Prints tables, ends in one JSON line; --out has it as a file, --plot a picture.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from experiments.common.environment import describe, note_pair
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.gpu.shapes import SHAPES
from experiments.real.rows import Row, Rows
from experiments.speed.draft_arms import Arm, DenseCaches, dense_arms
from spec_stack import PrefillConfig, SpecStackGenerator
from spec_stack.calibrate.documents import MODULES, module_source
from spec_stack.clock import Clock
from spec_stack.controller.registry import make_policy
from spec_stack.devices import synchronize
from spec_stack.engine.conversation import SingleTurn
from spec_stack.engine.options import Call
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.attention import install
from spec_stack.hf.cache import cache_argument, crop, new_cache
from spec_stack.hf.model import CachedModel

SPARSE = {"sparse": Arm({"sparse_prefill": "on"}), "both": Arm({"sparse_prefill": "on"})}
ARMS = ("plain", *dense_arms(1, 1), *SPARSE)
LOSSLESS = ("plain", "full", "window", "words", "attention", "chosen")
PLAIN = ("plain", "sparse")
KINDS = ("go on", "asked")
# Tokens of a function's head that a prompt ends with.
HEAD = 16


def documents(pair: ModelPair, num_tokens: int, count: int, kind: str) -> list[list[int]]:
    """Token ids of as many texts of that length, of modules joined where one is too short."""
    found = []
    for index in range(count):
        ids: list[int] = []
        for step in range(len(MODULES)):
            source = module_source(MODULES[(index + step) % len(MODULES)])
            ids += pair.tokenizer(source[: 6 * num_tokens], add_special_tokens=not ids, verbose=False).input_ids
            if len(ids) >= num_tokens:
                break
        if len(ids) < num_tokens:
            raise ValueError(f"the modules have {len(ids)} tokens, fewer than the {num_tokens} asked for")
        found.append(ids[:num_tokens] if kind == "go on" else _asked(pair, ids[:num_tokens]))
    return found


def _asked(pair: ModelPair, ids: list[int]) -> list[int]:
    """The text with the head of a function from the middle of it at its end."""
    pieces = pair.pieces(ids) or []
    middle = range(len(ids) // 5, len(ids) * 3 // 5)
    heads = [at for at in middle if pieces[at].strip() == "def"] or [middle[0]]
    at = heads[len(heads) // 2]
    return [*ids[: len(ids) - HEAD], *ids[at : at + HEAD]]


class Bench:
    """Runs arms over prompts. Each arm's default policy is its own, and learns from prompt to prompt."""

    def __init__(self, generator: SpecStackGenerator, arguments: argparse.Namespace) -> None:
        self._generator, self._arguments = generator, arguments
        self._now = process_time if arguments.cpu_seconds else perf_counter
        self._policies: dict[str, Any] = {}

    def prefilled(self, key: str, ids: list[int]) -> CachedModel:
        """The target with all of a prompt but its last token; kept under the prompt's key where there is a folder for
        it."""
        target, folder = self._generator.pair.open_target(PrefillConfig.prefill_chunk), self._arguments.prefilled
        file = None if folder is None else folder / f"{key.replace(' ', '_')}.safetensors"
        if file is not None and file.exists():
            return target.filled(load_file(file))
        target.prefill(ids[:-1], range(len(ids) - 1))
        if file is not None:
            folder.mkdir(parents=True, exist_ok=True)
            save_file({name: tensor.contiguous() for name, tensor in target.contents().items()}, file)
        return target

    def decode(self, ids: list[int], name: str, policy: str, prefilled: CachedModel, max_tokens: int) -> dict[str, Any]:
        """One run of an arm: speeds, what reading took the draft, acceptance, tokens."""
        engine, own = self._generator.engine, self._arguments
        dense = {"plain": Arm()} | dense_arms(len(ids), engine.config.prefill.draft_slots)
        arm = (dense | SPARSE)[name]
        options: dict[str, Any] = {"proposer": "model", "keep_rate": own.keep_rate} | arm.options
        if name in dense and name != "attention":
            del options["keep_rate"]
        if name in PLAIN or policy == "fixed":
            options["gamma"] = 0 if name in PLAIN else own.gamma
        else:
            options["policy"] = self._policies.setdefault(name, make_policy("throughput"))
        call = Call(input_ids=ids, max_tokens=max_tokens, ignore_eos=True, **options)
        request = engine.plan(call)
        request = replace(request, clock=Clock(self._now))
        pair = engine.pair
        caches = DenseCaches(pair, request, prefilled, arm) if name in dense else SingleTurn(pair, request)
        outputs = list(engine.answer(request, caches))
        later = [output.record for output in outputs if not output.record.is_prefill]
        timed = [record for record in later if not record.draft_read_prompt]
        proposed = sum(record.gamma for record in later)
        scored_s = sum(output.record.draft_s for output in outputs if output.record.is_prefill)
        drafted = [record.draft_s / record.gamma for record in timed if record.gamma and record.num_unread <= 2]
        return {
            "tokens_per_s": sum(record.num_tokens for record in timed) / sum(record.seconds for record in timed),
            "with_reading": sum(record.num_tokens for record in later)
            / (scored_s + sum(record.seconds for record in later)),
            "reads_s": scored_s + sum(record.draft_s for record in later if record.draft_read_prompt),
            "acceptance_rate": sum(record.num_accepted for record in later) / proposed if proposed else None,
            "gamma": proposed / len(later),
            "tokens_per_step": sum(record.num_tokens for record in later) / len(later),
            "draft_token_s": median(drafted) if drafted else None,
            "token_ids": [token for output in outputs for token in output.token_ids],
        }

    def ttft(self, ids: list[int], name: str) -> dict[str, float]:
        """Seconds to the first token of a prompt that nobody has prefilled."""
        options = {
            "plain": {"gamma": 0, "sparse_prefill": "off"},
            "chosen": {"sparse_prefill": "draft_only", "proposer": "model"},
        }[name]
        started = self._now()
        self._generator.generate(input_ids=ids, max_tokens=1, **options)  # type: ignore[arg-type]
        return {"ttft_s": self._now() - started}


def measure(generator: SpecStackGenerator, arguments: argparse.Namespace, rows: Rows) -> None:
    """Make the rows that are missing, as long as there is time."""
    bench = Bench(generator, arguments)
    limit = min(generator.pair.max_positions) - arguments.max_tokens
    for length in (min(length, limit) for length in arguments.lengths):
        for kind in arguments.kinds:
            texts = documents(generator.pair, length, arguments.first + arguments.prompts, kind)[arguments.first :]
            keys = [f"{length} {kind} {arguments.first + index}" for index in range(len(texts))]
            runs = [(name, policy) for policy in arguments.policies for name in arguments.arms]
            for index, (key, ids) in enumerate(zip(keys, texts, strict=True)):
                left = [run for run in runs[:: -1 if index % 2 else 1] if (key, " ".join(run)) not in rows]
                ttft = [
                    name for name in ("plain", "chosen") * arguments.ttft_repeats if (key, f"{name} ttft") not in rows
                ]
                if not rows.has_time or not (left or ttft):
                    continue
                if ttft and kind == arguments.kinds[0]:
                    found = [(name, bench.ttft(ids, name)["ttft_s"]) for name in ttft]
                    for name in dict.fromkeys(ttft):
                        seconds = [each for other, each in found if other == name]
                        rows.add(key, f"{name} ttft", {"ttft_s": min(seconds), "all_s": seconds})
                prefilled = bench.prefilled(key, ids)
                for name, policy in tqdm(left, desc=key, leave=False):
                    if index == 0 and arguments.warm_up:
                        # Warms up, and the default policy gets to know its costs.
                        bench.decode(ids, name, policy, prefilled, min(arguments.warm_up, arguments.max_tokens))
                    if rows.has_time:
                        rows.add(
                            key, f"{name} {policy}", bench.decode(ids, name, policy, prefilled, arguments.max_tokens)
                        )


def summed_up(rows: Rows, arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians over prompts by policy, length and kind, and arm; ratios are of the prompts that plain has too."""
    table: dict[str, Any] = {}
    for policy in arguments.policies:
        plain = rows.of_arm(f"plain {policy}")
        for name in arguments.arms:
            for cell, own in _by_cell(rows.of_arm(f"{name} {policy}")).items():
                pairs = [(row, plain[row["key"]]) for row in own if row["key"] in plain]
                medians = {
                    key: float(np.median([row[key] for row in own if row[key] is not None] or [float("nan")]))
                    for key in own[0]
                    if key not in ("key", "arm", "token_ids")
                }
                ratios = {
                    f"over_plain{suffix}": [row[key] / other["tokens_per_s"] for row, other in pairs]
                    for suffix, key in (("", "tokens_per_s"), ("_with_reading", "with_reading"))
                }
                table.setdefault(policy, {}).setdefault(cell, {})[name] = medians | {
                    "n": len(own),
                    **{key: float(np.median(values)) for key, values in ratios.items() if values},
                    "lowest_over_plain": min(ratios["over_plain"], default=float("nan")),
                    "same_tokens": sum(row["token_ids"] == other["token_ids"] for row, other in pairs),
                }
    return table


def _by_cell(own: dict[str, Row]) -> dict[str, list[Row]]:
    """Shorter prompts first, in whatever order they were measured."""
    cells: dict[str, list[Row]] = {}
    for key, row in sorted(own.items(), key=lambda item: int(item[0].partition(" ")[0])):
        cells.setdefault(key.rpartition(" ")[0], []).append(row)
    return cells


def first_tokens(rows: Rows) -> dict[str, Any]:
    """Time to first token of the lossless mode over plain, by length: median over prompts."""
    ratios: dict[str, list[float]] = {}
    for chosen, plain in rows.pairs("chosen ttft", "plain ttft"):
        ratios.setdefault(chosen["key"].partition(" ")[0], []).append(chosen["ttft_s"] / plain["ttft_s"])
    shorter_first = sorted(ratios.items(), key=lambda item: int(item[0]))
    return {length: {"over_plain": median(own), "n": len(own)} for length, own in shorter_first}


class Filled:
    """A model of random weights whose cache holds random keys: seconds of a forward at any length of the context."""

    def __init__(self, config: Any, num_layers: int) -> None:
        cut = deepcopy(config)
        cut.num_hidden_layers = num_layers
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(cut, dtype=torch.bfloat16).eval()
        # Verification is timed with the library's attention, which does not copy the cache for a few queries.
        install(self.model)
        self._config = cut

    def seconds(self, num_cached: int, num_tokens: int, repeats: int) -> float:
        """Median seconds of a forward of num_tokens over num_cached slots."""
        config = self._config
        cache = new_cache(config)
        shape = (1, config.num_key_value_heads, num_cached, config.head_dim)
        for layer in range(config.num_hidden_layers):
            cache.update(*torch.randn(2, *shape).to(self.model.dtype), layer)
        ids = torch.zeros(1, num_tokens, dtype=torch.long)
        positions = torch.arange(num_cached, num_cached + num_tokens)[None]
        taken = []
        with torch.inference_mode():
            for _ in range(repeats + 1):
                synchronize(self.model.device)
                started = perf_counter()
                self.model(input_ids=ids, position_ids=positions, use_cache=True, **cache_argument(self.model, cache))
                synchronize(self.model.device)
                taken.append(perf_counter() - started)
                crop(cache, num_cached)
        return median(taken[1:])


def measure_random(
    shape: str,
    layers: Sequence[int],
    lengths: Sequence[int],
    keep_rate: float,
    gamma: int,
    tokens_per_step: Sequence[float],
) -> dict[str, Any]:
    """Seconds of steps by length, and the tokens/s that they make at the tokens a step of two drafts, full and
    chosen."""
    if shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")
    target, draft = (
        Filled(config, n) for config, n in zip((SHAPES[shape].target, SHAPES[shape].draft), layers, strict=True)
    )
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
        full, kept, chosen = row["full"], row["kept"], row["chosen"]
        drafts_s = {name: gamma * row[name]["draft_1_s"] for name in row}
        row["tokens_per_s"] = {
            "plain": 1 / full["target_1_s"],
            "full": tokens_per_step[0] / (drafts_s["full"] + full["target_block_s"]),
            "chosen": tokens_per_step[1] / (drafts_s["chosen"] + full["target_block_s"]),
            "sparse": 1 / kept["target_1_s"],
            "both": tokens_per_step[1] / (drafts_s["kept"] + kept["target_block_s"]),
        }
        row["chosen_draft_step_over_first"] = chosen["draft_1_s"] / (
            next(iter(table.values()))["chosen"]["draft_1_s"] if table else chosen["draft_1_s"]
        )
        table[str(length)] = row
    return {
        "shape": shape,
        "layers": list(layers),
        "of_layers": [SHAPES[shape].target.num_hidden_layers, SHAPES[shape].draft.num_hidden_layers],
        "gamma": gamma,
        "tokens_per_step": list(tokens_per_step),
        "keep_rate": keep_rate,
        "table": table,
    }


def format_table(table: dict[str, dict[str, Any]], name: str) -> str:
    """A policy's cells: a line for each arm."""
    lines = [f"{name:20s}{'':12s}tokens/s  over plain  (lowest)  reading too  accepted  gamma  draft ms  reads s  same"]
    for cell, row in table.items():
        for arm, own in row.items():
            lines.append(
                f"{cell:20s}{arm:12s}{own['tokens_per_s']:8.1f}{own.get('over_plain', float('nan')):11.2f}x"
                f"{own['lowest_over_plain']:9.2f}x{own.get('over_plain_with_reading', float('nan')):12.2f}x"
                f"{100 * own['acceptance_rate']:9.0f}%{own['gamma']:7.2f}{1e3 * own['draft_token_s']:10.2f}"
                f"{own['reads_s']:9.2f}{own['same_tokens']:4d}/{own['n']}"
            )
    return "\n".join(lines)


def format_speeds(speeds: dict[str, dict[str, float]]) -> str:
    """Tokens/s by length and way, with what each is over plain."""
    names = list(next(iter(speeds.values())))
    lines = [f"{'tokens':>8s}" + "".join(f"{name:>20s}" for name in names)]
    for length, row in speeds.items():
        cells = "".join(f"{row[name]:>12.1f} ({row[name] / row['plain']:4.2f}x)" for name in names)
        lines.append(f"{length:>8s}{cells}")
    return "\n".join(lines)


def pair_speeds(table: dict[str, Any], policy: str, kind: str = KINDS[0]) -> dict[str, dict[str, float]]:
    """Tokens/s by length and arm, of what `summed_up` returns, of the arms that every length has."""
    cells = {cell.partition(" ")[0]: row for cell, row in table[policy].items() if cell.partition(" ")[2] == kind}
    common = [name for name in ARMS if all(name in row for row in cells.values())]
    return {length: {name: row[name]["tokens_per_s"] for name in common} for length, row in cells.items()}


def plot(panels: dict[str, dict[str, dict[str, float]]], to: Path) -> None:
    """Tokens/s over the length of the context, a curve per way; one panel per measurement."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = {
        "plain": ("#9aa5a3", "plain"),
        "full": ("#c62828", "draft over all of it"),
        "window": ("#8e24aa", "draft over a window"),
        "chosen": ("#ef6c00", "draft over chosen slots"),
        "sparse": ("#1565c0", "sparse prefill (lossy)"),
        "both": ("#00796b", "sparse prefill and draft (lossy)"),
    }
    size = (5.6 * len(panels) + 2, 3.8)
    figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axis, (title, speeds) in zip(axes[0], panels.items(), strict=True):
        lengths = [int(length) for length in speeds]
        for name in (name for name in curves if name in speeds[str(lengths[0])]):
            values = [speeds[str(length)][name] for length in lengths]
            axis.plot(lengths, values, "o-", color=curves[name][0], label=curves[name][1], lw=2)
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{length / 1000:.0f}K" if length >= 1000 else str(length) for length in lengths])
        axis.set_ylim(0)
        axis.set_xlabel("tokens of the prompt")
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("tokens/s while decoding")
    figure.legend(*axes[0][0].get_legend_handles_labels(), frameon=False, loc="outside right center")
    figure.savefig(to, dpi=130, facecolor="white", metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 2000, 4000, 8000, 16000], help="(%(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="(%(default)s)")
    parser.add_argument("--prompts", type=int, default=4, help="per length and kind (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them (%(default)s)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="(%(default)s)")
    parser.add_argument("--policies", nargs="+", choices=["fixed", "default"], default=["fixed", "default"])
    parser.add_argument("--max-tokens", type=int, default=96, help="(%(default)s)")
    parser.add_argument(
        "--warm-up", type=int, default=32, help="tokens of a run before the first of each cell and arm (%(default)s)"
    )
    parser.add_argument("--keep-rate", type=float, default=PrefillConfig.keep_rate, help="of sparse prefill")
    parser.add_argument("--gamma", type=int, default=4, help="where it is fixed (%(default)s)")
    parser.add_argument("--ttft-repeats", type=int, default=2, help="per prompt of the first kind (%(default)s)")
    parser.add_argument("--cpu-seconds", action="store_true", help="count the process's own seconds")
    parser.add_argument("--rows", type=Path, help="file of rows; a run goes on after those it holds")
    parser.add_argument("--prefilled", type=Path, help="folder that keeps targets' prefilled caches for a later run")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no run after so many; 0 sums up --rows")
    parser.add_argument("--random", choices=SHAPES, help="random weights at these sizes, beside the pair")
    parser.add_argument("--layers", type=int, nargs=2, default=(2, 1), help="kept of target and draft (%(default)s)")
    parser.add_argument(
        "--random-lengths", type=int, nargs="+", default=[1000, 4000, 16000, 32000, 64000, 128000], help="(%(default)s)"
    )
    parser.add_argument(
        "--tokens-per-step",
        type=float,
        nargs=2,
        metavar=("FULL", "CHOSEN"),
        help="of a step of each draft, which --random reckons with",
    )
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
        table = json.loads(arguments.redraw.read_text(encoding="utf-8"))["pair_table"]
        plot({"": pair_speeds(table, next(reversed(table)))}, arguments.plot)
        return
    if "plain" not in arguments.arms:
        raise ValueError("--arms needs plain, which the others are measured against")
    if arguments.random is not None and arguments.tokens_per_step is None:
        raise ValueError("--random needs --tokens-per-step, as a pretrained pair's run measured them")
    torch.set_num_threads(arguments.threads)
    result: dict[str, Any] = {}
    panels: dict[str, dict[str, dict[str, float]]] = {}
    if not arguments.no_pair:
        with tempfile.TemporaryDirectory() as folder:
            rows = Rows(arguments.rows or Path(folder) / "rows.jsonl", arguments.minutes)
            # With --minutes 0 what there is is summed up, and no model is loaded for it.
            if rows.has_time:
                measure(load_generator(arguments), arguments, rows)
            else:
                note_pair(arguments.target, arguments.draft)
        table, ttft = summed_up(rows, arguments), first_tokens(rows)
        result |= {"pair_table": table, "ttft": ttft, "max_tokens": arguments.max_tokens}
        for policy, cells in table.items():
            print(format_table(cells, policy if policy == "default" else f"gamma {arguments.gamma}"))
            panels[f"the pair, {policy}"] = pair_speeds(table, policy)
        print("first token over plain: " + "  ".join(f"{n}: {own['over_plain']:.3f}" for n, own in ttft.items()))
    if arguments.random is not None:
        found = measure_random(
            arguments.random,
            arguments.layers,
            arguments.random_lengths,
            arguments.keep_rate,
            arguments.gamma,
            arguments.tokens_per_step,
        )
        result["random"] = found
        speeds = {length: row["tokens_per_s"] for length, row in found["table"].items()}
        layers = " and ".join(f"{kept} of {of}" for kept, of in zip(found["layers"], found["of_layers"], strict=True))
        title = f"{arguments.random} sizes, {layers} layers, random weights"
        print("tokens/s from measured seconds, " + title)
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
