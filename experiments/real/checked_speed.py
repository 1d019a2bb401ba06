"""How soon the first token comes under fixed keep rates and under the draft's check, with a real pair.

Prompts of checked.py, one kind after the other; of each the whole prompt, fixed rates and the check's ladder through
`generate`, in turn, the order reversed from prompt to prompt. Seconds are of the wall: nothing else may run. Ratios are
medians with their range, mixed and by group of kinds; "refused" is the share of prompts that the check leaves whole. A
row is printed after every measurement; a run goes on where it ended. Ends in one JSON line.

    python -m experiments.real.checked_speed --data DATA --texts TEXTS --target TARGET --draft DRAFT
        --rows ROWS.jsonl [--calibration FILE] [--num-tokens 2048] [--most-dropped 0.25]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

from experiments.common import script
from experiments.common.answers import timed
from experiments.real.checked import CheckedPrompt, prompts
from experiments.real.checked_report import GROUPS
from experiments.real.scoring import calibrated, measure_with
from experiments.real.speed import DENSE, compare
from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.bench.rows import Row, Rows
from spec_stack.hf.prompt import encode_messages


def measure(generator: SpecStackGenerator, prompt: CheckedPrompt, options: Mapping[str, Any]) -> Row:
    """Seconds to a prompt's first token, what is kept, and what was tried."""
    start = partial(generator.stream, messages=list(prompt.messages), max_tokens=1, **options)
    answer = timed(start, perf_counter)
    metrics = answer.metrics
    tried = [[each.keep_rate, round(each.dropped_attention, 3)] for each in metrics.tried_rates]
    return {"kind": prompt.kind, "ttft_s": answer.first_s, "keep_rate": metrics.keep_rate, "tried": tried}


def report_of(rows: Rows, arms: Sequence[str], num_tokens: int) -> dict[str, Any]:
    """Print the ratios of dense first tokens, mixed and by group; the same as plain values."""
    report: dict[str, Any] = {"num_tokens": num_tokens}
    for group, kinds in {"all": [], **GROUPS}.items():
        for arm in arms:
            pairs = [pair for pair in rows.pairs(DENSE, arm) if not kinds or pair[0]["kind"] in kinds]
            if not pairs:
                continue
            own = compare(pairs)
            own["refused"] = sum(row["keep_rate"] == 1 for _, row in pairs) / len(pairs)
            own["ratio_of_sums"] = sum(dense["ttft_s"] for dense, _ in pairs) / sum(row["ttft_s"] for _, row in pairs)
            report.setdefault(group, {})[arm] = own
            middle, least, most = own["ttft_ratio"]
            print(
                f"{group:14s}{arm:12s} n={len(pairs):<3d} {middle:.2f}x [{least:.2f}, {most:.2f}], of all together "
                f"{own['ratio_of_sums']:.2f}x, refused {own['refused']:.2f}"
            )
    return report


def main() -> None:
    parser = script.make_parser(__doc__)
    script.add_pair_arguments(parser)
    script.add_row_arguments(parser)
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--texts", type=Path, required=True, help="folder of fetch_texts.py")
    parser.add_argument("--calibration", type=Path, help="a calibration's file or folder (default: none)")
    parser.add_argument("--num-tokens", type=int, default=2048, help="length of the prompts, about (%(default)s)")
    parser.add_argument("--from-tokens", type=int, default=0, help="shorter prompts are left out (none)")
    parser.add_argument("--most-tokens", type=int, default=1 << 20, help="longer prompts are left out (none)")
    parser.add_argument("--keep-rates", type=float, nargs="+", default=[0.1, 0.2, 0.4], help="fixed (%(default)s)")
    parser.add_argument("--most-dropped", type=float, default=0.25, help="max_dropped_attention (%(default)s)")
    arguments = parser.parse_args()
    rows = Rows(arguments.rows, arguments.minutes)
    prefill = calibrated(arguments.calibration) if arguments.calibration else PrefillConfig()
    generator = script.load_generator(arguments, SpecStackConfig(prefill))
    tokenizer, least, most = generator.tokenizer, arguments.from_tokens, arguments.most_tokens
    measured = prompts(arguments.data, arguments.texts, arguments.num_tokens, measure_with(tokenizer))
    fitting = (
        prompt for prompt in measured if least <= len(encode_messages(tokenizer, prompt.messages).token_ids) <= most
    )
    arms: dict[str, dict[str, Any]] = {DENSE: {"sparse_prefill": "off"}}
    arms |= {f"always {rate}": {"sparse_prefill": "on", "keep_rate": rate} for rate in arguments.keep_rates}
    first = {"sparse_prefill": "on", "keep_rate": min(arguments.keep_rates)}
    arms["check"] = {**first, "max_dropped_attention": arguments.most_dropped}
    is_warm = False
    for at, prompt in enumerate(islice(fitting, arguments.limit)):
        left = rows.left(prompt.name, arms)
        for arm, options in left.items() if at % 2 else reversed(left.items()):
            if not is_warm:
                # A process's first forward over a long text allocates what later ones find.
                measure(generator, prompt, arms[DENSE])
                is_warm = True
            row = rows.add(prompt.name, arm, measure(generator, prompt, options))
            print(f"{prompt.name:40s}{arm:12s}{row['ttft_s']:7.2f} s  {row['tried']}", flush=True)
    report = report_of(rows, [arm for arm in arms if arm != DENSE], arguments.num_tokens)
    script.print_report("checked_speed", {"most_dropped": arguments.most_dropped, **report}, arguments.out)


if __name__ == "__main__":
    script.run(main)
