"""How much sooner the first token comes, and the whole answer, with a real pair, by prompt length.

Dense prefill and plain decoding against sparse prefill and drafting, through the same code, every repeat one after the
other: the paper's rule, the default, and a calibration where one is named. Beside them the bare forwards that bound the
gain: the draft's over the prompt as far as the setting needs it (r), the target's over the kept tokens (s), the
target's over the whole (1). Seconds are of the wall and of all cores; ratios are of the wall, medians with their range.
A row is printed after every measurement; a run goes on where it ended. Peak memory is over what the loaded pair holds.
Ends in one JSON line.

    python -m experiments.real.speed --target TARGET --draft DRAFT --tokens 2048 4096 8192 --rows ROWS.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

from experiments.common.environment import describe
from experiments.common.memory import peak_over, reset_peak
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.real.rows import Row, Rows, add_row_arguments
from experiments.real.settings import settings_of
from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.cli.demo import hide_fact
from spec_stack.devices import synchronize
from spec_stack.hf.loading import load_tokenizer
from spec_stack.hf.prompt import encode_messages
from spec_stack.prefill.registry import needs_attention

DENSE, WHOLE = "dense", "target, whole"
_PLAIN: Mapping[str, Any] = {"sparse_prefill": "off", "gamma": 0, "proposer": "model"}
_SPARSE: Mapping[str, Any] = {"sparse_prefill": "on"}


@dataclass
class Bench:
    """A pair under several settings."""

    generators: dict[str, SpecStackGenerator]
    max_tokens: int

    def parts(self, prompt: list[int]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """Everything that is measured over a prompt, in turn."""
        first = next(iter(self.generators.values()))
        yield DENSE, partial(self._answer, first, prompt, _PLAIN)
        yield WHOLE, partial(self._target, first, prompt, range(len(prompt)))
        for name, generator in self.generators.items():
            answer, draft, kept = arms(name)
            yield answer, partial(self._answer, generator, prompt, _SPARSE)
            yield draft, partial(self._draft, generator, prompt)
            # As many tokens as are kept, at positions as far apart.
            num_kept = round(generator.config.prefill.keep_rate * len(prompt))
            spread = [at * len(prompt) // num_kept for at in range(num_kept)]
            yield kept, partial(self._target, generator, prompt, spread)

    def _answer(self, generator: SpecStackGenerator, prompt: list[int], options: Mapping[str, Any]) -> dict[str, Any]:
        before = reset_peak(generator.target.device)
        result = generator.generate(input_ids=prompt, max_tokens=self.max_tokens, ignore_eos=True, **options)
        metrics = result.metrics
        return {
            "ttft_s": metrics.ttft_s,
            "total_s": metrics.total_s,
            "keep_rate": metrics.keep_rate,
            "num_accepted": metrics.num_accepted,
            "num_proposed": metrics.num_proposed,
            "peak_mb": peak_over(generator.target.device, before) / 2**20,
        }

    def _draft(self, generator: SpecStackGenerator, prompt: list[int]) -> dict[str, Any]:
        config = generator.config.prefill
        draft = generator.pair.view_draft(generator.pair.open_index(config.prefill_chunk))
        if needs_attention(config.scorer):
            window = config.window_for(len(prompt))
            draft.prefill(prompt, range(len(prompt)), window, config.draft_sinks, config.num_asked_layers)
        synchronize(generator.draft.device)
        return {}

    def _target(self, generator: SpecStackGenerator, prompt: list[int], positions: Any) -> dict[str, Any]:
        target = generator.pair.open_target(PrefillConfig.prefill_chunk)
        target.forward([prompt[position] for position in positions], positions, 1)
        synchronize(generator.target.device)
        return {}


def measure(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a run tells, with its seconds on the wall and of all cores."""
    wall, cpu = perf_counter(), process_time()
    told = run()
    return {"wall_s": perf_counter() - wall, "cpu_s": process_time() - cpu, **told}


def report_of(rows: Rows, settings: Iterable[str], lengths: Sequence[int], repeats: int) -> dict[str, Any]:
    """Print medians by length and setting; the same as plain values. Repeats that are not whole are left out."""
    report: dict[str, Any] = {}
    for num_tokens in lengths:
        keys = [f"{num_tokens}/{repeat}" for repeat in range(repeats)]
        keys = [key for key in keys if (key, DENSE) in rows and (key, WHOLE) in rows]
        if not keys:
            continue
        dense = [rows.of_arm(DENSE)[key] for key in keys]
        own: dict[str, Any] = {f"dense_{name}": _median(dense, name) for name in ("ttft_s", "total_s", "peak_mb")}
        print(f"{num_tokens} tokens: dense {own['dense_ttft_s']:.1f} s, peak {own['dense_peak_mb']:.0f} MB")
        for name in settings:
            both = [key for key in keys if all((key, arm) in rows for arm in arms(name))]
            if both:
                parts = ([rows.of_arm(arm)[key] for key in both] for arm in (DENSE, WHOLE, *arms(name)))
                own[name] = compare(*parts)
                print(f"  {name:28s}" + told(own[name]))
        report[str(num_tokens)] = own
    return report


def arms(setting: str) -> tuple[str, str, str]:
    """The arms of a setting: its answers, and the bare forwards that bound them."""
    return setting, f"draft, {setting}", f"kept, {setting}"


def compare(dense: list[Row], whole: list[Row], sparse: list[Row], draft: list[Row], kept: list[Row]) -> dict[str, Any]:
    """Return a setting's medians; of ratios the median, the least and the most."""
    r, s = (_median(part, "wall_s") / _median(whole, "wall_s") for part in (draft, kept))
    found: dict[str, Any] = {name: _median(sparse, name) for name in ("ttft_s", "keep_rate", "peak_mb")}
    for name in ("ttft", "total"):
        ratios = [one[f"{name}_s"] / other[f"{name}_s"] for one, other in zip(dense, sparse, strict=True)]
        found[f"{name}_ratio"] = [median(ratios), min(ratios), max(ratios)]
    return {"n": len(sparse), **found, "r": r, "s": s, "share_of_bound": found["ttft_ratio"][0] * (r + s)}


def told(found: Mapping[str, Any]) -> str:
    """Return a setting's line of the table."""
    middle, least, most = found["ttft_ratio"]
    return (
        f"n={found['n']} {found['ttft_s']:6.1f} s  {middle:5.2f}x [{least:.2f}, {most:.2f}]  "
        f"r {found['r']:.2f} s {found['s']:.2f} {found['share_of_bound']:4.0%} of the bound  "
        f"whole answer {found['total_ratio'][0]:.2f}x  peak {found['peak_mb']:.0f} MB"
    )


def _median(rows: Iterable[Row], name: str) -> float:
    return float(median(row[name] for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    add_row_arguments(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="(%(default)s)")
    parser.add_argument("--keep-rates", type=float, nargs="+", default=[0.1], help="of the calibration (%(default)s)")
    parser.add_argument("--calibration", type=Path, help="a calibration's file, or the folder it lies in")
    parser.add_argument("--windows", type=int, nargs="+", default=[], help="of a calibrated draft, beside none")
    parser.add_argument("--only", default="", help="settings to measure, by a part of their names")
    parser.add_argument("--max-tokens", type=int, default=32, help="length of the answers (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    add_out_argument(parser)
    arguments = parser.parse_args()
    every = settings_of(arguments.calibration, arguments.keep_rates, arguments.windows)
    settings = {name: config for name, config in every.items() if arguments.only in name}
    if not settings:
        parser.error(f"--only {arguments.only} is a part of none of {', '.join(every)}")
    rows = Rows(arguments.rows, arguments.minutes)
    loaded = load_generator(arguments)
    other = load_tokenizer(str(arguments.draft)) if loaded.pair.translation is not None else None
    generators = {
        name: SpecStackGenerator(
            loaded.target,
            loaded.draft,
            loaded.tokenizer,
            config=SpecStackConfig(config),
            draft_tokenizer=other,
            precision=loaded.precision,
        )
        for name, config in settings.items()
    }
    bench = Bench(generators, arguments.max_tokens)
    prompts = {
        num_tokens: encode_messages(loaded.tokenizer, hide_fact(loaded.tokenizer, num_tokens, seed=7).messages)[0]
        for num_tokens in arguments.tokens
    }
    # A process's first forward over a long text allocates what later ones find.
    loaded.generate(input_ids=prompts[min(prompts)], max_tokens=2, sparse_prefill="off")
    for repeat in range(arguments.repeats):
        for num_tokens in arguments.tokens[: arguments.limit]:
            for name, run in bench.parts(prompts[num_tokens]):
                key = f"{num_tokens}/{repeat}"
                if (key, name) in rows or not rows.has_time:
                    continue
                row = rows.add(key, name, measure(run))
                told = f"  first token {row['ttft_s']:.2f} s" if "ttft_s" in row else ""
                print(f"{key:10s}{name:26s}{row['wall_s']:7.2f} s{told}", flush=True)
    found = report_of(rows, settings, arguments.tokens, arguments.repeats)
    named = {name: asdict(config) for name, config in settings.items()}
    print_report({"experiment": "speed", **describe(), "settings": named, "lengths": found}, arguments.out)


if __name__ == "__main__":
    run_script(main)
