"""Should the draft decode over the full prompt, or over the part the target kept?

After sparse prefill the draft can go on with its full-prompt KV ("full"), or with only the selected slots of it
("kept": the same context as the target's, less memory, a shorter cache to attend to). Both run on the same
prompts, interleaved: continuations of standard-library modules and questions about a fact hidden in them. Counts
drafted tokens the pruned target agrees with (greedy) and times decoding. Prints a table, ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from statistics import median
from typing import Any, get_args

from tqdm import tqdm

from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.script import run_script
from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.cli.demo import hide_fact
from spec_stack.config import DraftContext


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--tokens", type=int, default=8000, help="document length (%(default)s)")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--keep-rate", type=float, default=PrefillConfig.keep_rate)
    parser.add_argument("--gamma", type=int, default=4)
    arguments = parser.parse_args()
    base = load_generator(arguments)
    contexts = get_args(DraftContext)
    prefill = replace(PrefillConfig(), keep_rate=arguments.keep_rate)
    generators = {
        context: SpecStackGenerator(
            base.target,
            base.draft,
            base.tokenizer,
            precision=base.precision,
            config=SpecStackConfig(replace(prefill, draft_context=context)),
        )
        for context in contexts
    }
    counts: dict[str, dict[str, list[float]]] = {
        f"{kind}, {context}": {"accepted": [], "proposed": [], "steps": [], "tokens_per_s": []}
        for kind in ("continue", "answer")
        for context in contexts
    }
    different = 0
    # The first prompt warms up; who goes first changes from prompt to prompt.
    for seed in tqdm(range(-1, arguments.prompts), leave=False):
        fact = hide_fact(base.tokenizer, arguments.tokens, max(seed, 0))
        order = list(generators.items())[:: -1 if seed % 2 else 1]
        requests: dict[str, dict[str, Any]] = {
            "continue": {"prompt": fact.document, "max_tokens": arguments.max_tokens, "ignore_eos": True},
            "answer": {"messages": fact.messages, "max_tokens": 32},
        }
        for kind, request in requests.items():
            texts = []
            for context, generator in order:
                result = generator.generate(specprefill=True, gamma=arguments.gamma, return_records=True, **request)
                texts.append(result.token_ids)
                if seed < 0:
                    continue
                steps = [record for record in result.records or [] if not record.is_prefill]
                row = counts[f"{kind}, {context}"]
                row["accepted"].append(sum(record.num_accepted for record in steps))
                row["proposed"].append(sum(record.gamma for record in steps))
                row["steps"].append(len(steps))
                row["tokens_per_s"].append(result.metrics.decode_tokens_per_s or 0.0)
            different += texts[0] != texts[1]
    rows = {}
    print(f"{arguments.prompts} prompts of {arguments.tokens} tokens, gamma {arguments.gamma}; steps after the first")
    print("request, draft context   acceptance  accepted a step  tokens/s (median)")
    for name, row in counts.items():
        accepted, proposed, steps = (sum(row[key]) for key in ("accepted", "proposed", "steps"))
        rows[name] = {
            "acceptance_rate": accepted / max(proposed, 1),
            "accepted_per_step": accepted / max(steps, 1),
            "tokens_per_s": median(row["tokens_per_s"]),
        }
        figures = rows[name]
        print(
            f"{name:24s} {figures['acceptance_rate']:9.1%}  {figures['accepted_per_step']:15.2f}  "
            f"{figures['tokens_per_s']:17.0f}"
        )
    print(f"requests whose tokens differed between the two: {different}")
    print(json.dumps({"experiment": "draft_context", **describe(), "rows": rows, "different": different}))


if __name__ == "__main__":
    run_script(main)
