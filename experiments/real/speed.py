"""How much sooner the first token comes, and the whole answer, with a real pair, by prompt length.

Dense prefill and plain decoding against sparse prefill and drafting, through the same code, every repeat one after the
other: the paper's rule, the default, and a calibration where one is named. Seconds are of the wall; ratios are medians
with their range. A row is printed after every measurement; a run goes on where it ended. Ends in one JSON line.

    python -m experiments.real.speed --target TARGET --draft DRAFT --tokens 2048 4096 8192 --rows ROWS.jsonl
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from experiments.common import script
from experiments.common.answers import timed
from experiments.real.scoring import calibrated
from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.bench.demo import hide_fact
from spec_stack.bench.rows import Row, Rows
from spec_stack.hf.loading import load_tokenizer
from spec_stack.hf.prompt import encode_messages

DENSE = "dense"
_PLAIN: Mapping[str, Any] = {"sparse_prefill": "off", "gamma": 0, "proposer": "model"}
_SPARSE: Mapping[str, Any] = {"sparse_prefill": "on"}


def settings_of(
    calibration: Path | None, rates: Sequence[float], windows: Sequence[int] = ()
) -> dict[str, PrefillConfig]:
    """Return the paper's rule, the default, and a calibration at these rates, with these windows too, by name."""
    default, paper = PrefillConfig(), PrefillConfig.full_look_ahead()
    found = {f"paper {paper.keep_rate}": paper, f"default {default.keep_rate}": default}
    if calibration:
        chosen = {f"calibrated {rate}": replace(calibrated(calibration), keep_rate=rate) for rate in rates}
        found |= chosen
        for window in windows:
            found |= {f"{name}, window {window}": replace(it, draft_window=window) for name, it in chosen.items()}
    return found


def measure(generator: SpecStackGenerator, prompt: list[int], options: Mapping[str, Any]) -> dict[str, Any]:
    """One answer's seconds and counts."""
    answer = timed(partial(generator.stream, input_ids=prompt, ignore_eos=True, **options), perf_counter)
    metrics = answer.metrics
    return {
        "ttft_s": answer.first_s,
        "total_s": answer.total_s,
        "keep_rate": metrics.keep_rate,
        "num_accepted": metrics.num_accepted,
        "num_proposed": metrics.num_proposed,
    }


def report_of(rows: Rows, settings: Iterable[str], lengths: Sequence[int], repeats: int) -> dict[str, Any]:
    """Print medians by length and setting; the same as plain values. Repeats that are not whole are left out."""
    report: dict[str, Any] = {}
    for num_tokens in lengths:
        keys = [f"{num_tokens}/{repeat}" for repeat in range(repeats)]
        dense = [rows.of_arm(DENSE)[key] for key in keys if (key, DENSE) in rows]
        if not dense:
            continue
        own: dict[str, Any] = {f"dense_{name}": _median(dense, name) for name in ("ttft_s", "total_s")}
        print(f"{num_tokens} tokens: dense {own['dense_ttft_s']:.1f} s")
        for name in settings:
            pairs = [pair for pair in rows.pairs(DENSE, name) if pair[0]["key"] in keys]
            if pairs:
                own[name] = compare(pairs)
                middle, least, most = own[name]["ttft_ratio"]
                print(
                    f"  {name:28s}n={len(pairs)} {own[name]['ttft_s']:6.1f} s  {middle:5.2f}x [{least:.2f}, {most:.2f}]"
                    f"  whole answer {own[name]['total_ratio'][0]:.2f}x"
                )
        report[str(num_tokens)] = own
    return report


def compare(pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """A setting's medians beside dense ones; of the ratios that were measured the median, the least and the most."""
    found: dict[str, Any] = {name: _median([row for _, row in pairs], name) for name in ("ttft_s", "keep_rate")}
    for name in (name for name in ("ttft", "total") if f"{name}_s" in pairs[0][0]):
        ratios = [dense[f"{name}_s"] / row[f"{name}_s"] for dense, row in pairs]
        found[f"{name}_ratio"] = [median(ratios), min(ratios), max(ratios)]
    return {"n": len(pairs), **found}


def _median(rows: Iterable[Row], name: str) -> float:
    return float(median(row[name] for row in rows))


def main() -> None:
    parser = script.make_parser(__doc__)
    script.add_pair_arguments(parser)
    script.add_row_arguments(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="(%(default)s)")
    parser.add_argument("--keep-rates", type=float, nargs="+", default=[0.1], help="of the calibration (%(default)s)")
    parser.add_argument("--calibration", type=Path, help="a calibration's file, or the folder it lies in")
    parser.add_argument("--windows", type=int, nargs="+", default=[], help="of a calibrated draft, beside none")
    parser.add_argument("--only", default="", help="settings to measure, by a part of their names")
    parser.add_argument("--max-tokens", type=int, default=32, help="length of the answers (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    every = settings_of(arguments.calibration, arguments.keep_rates, arguments.windows)
    settings = {name: config for name, config in every.items() if arguments.only in name}
    if not settings:
        parser.error(f"--only {arguments.only} is a part of none of {', '.join(every)}")
    rows = Rows(arguments.rows, arguments.minutes)
    loaded = script.load_generator(arguments)
    other = load_tokenizer(str(arguments.draft)) if loaded.pair.translation is not None else None
    generators = {
        name: SpecStackGenerator(
            loaded.target,
            loaded.draft,
            loaded.tokenizer,
            config=SpecStackConfig(config),
            draft_tokenizer=other,
            # What ships for the draft would complete the others.
            calibration=False,
        )
        for name, config in settings.items()
    }
    arms = {DENSE: (loaded, _PLAIN), **{name: (generator, _SPARSE) for name, generator in generators.items()}}
    tokenizer = loaded.tokenizer
    prompts = {
        num_tokens: encode_messages(tokenizer, hide_fact(tokenizer, num_tokens, seed=7).messages).token_ids
        for num_tokens in arguments.tokens
    }
    # A process's first forward over a long text allocates what later ones find.
    loaded.generate(input_ids=prompts[min(prompts)], max_tokens=2, sparse_prefill="off")
    for repeat in range(arguments.repeats):
        for num_tokens in arguments.tokens[: arguments.limit]:
            key = f"{num_tokens}/{repeat}"
            for name, (generator, options) in rows.left(key, arms).items():
                row = rows.add(
                    key, name, measure(generator, prompts[num_tokens], {"max_tokens": arguments.max_tokens, **options})
                )
                print(f"{key:10s}{name:26s}{row['total_s']:7.2f} s  first token {row['ttft_s']:.2f} s", flush=True)
    found = report_of(rows, settings, arguments.tokens, arguments.repeats)
    named = {name: asdict(config) for name, config in settings.items()}
    script.print_report("speed", {"settings": named, "lengths": found}, arguments.out)


if __name__ == "__main__":
    script.run(main)
