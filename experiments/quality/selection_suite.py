"""How much of the evidence does each way of choosing keep, and does the target still answer?

Needles of the kinds that calibration hides, in words that neither it nor any tuning saw (`held_out_needles`), in
held-out texts: single facts, paraphrases, one of 24 facts, several values, chains, logs, JSON records, code. A prompt's
recall is the share of its evidence's lines of which every token is kept. For every setting: today's default, each part
of the calibrated setting taken away, and controls that know nothing (random chunks, the most recent ones). Intervals
are 95 % bootstrap intervals over prompts. Answers are counted right where they contain what was hidden, beside those
of dense prefill. Prints tables, ends in one JSON line.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.quality.held_out_needles import HELD_OUT
from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.calibrate.documents import module_source
from spec_stack.calibrate.needles import WORDINGS, Haystack, make_haystacks
from spec_stack.calibrate.prompts import Prompt, encode_haystack
from spec_stack.decode.propose import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.engine.pair import ModelPair
from spec_stack.prefill.attention import CapturedAttention
from spec_stack.prefill.calibration import Calibration
from spec_stack.prefill.registry import needs_attention
from spec_stack.prefill.rule import Evidence
from spec_stack.prefill.scoring import look_at, num_layers_needed
from spec_stack.prefill.selection import select
from spec_stack.prefill.units import Chunks

# Modules that neither the demo nor calibration takes.
MODULES = ("smtplib", "optparse", "mailbox", "difflib", "locale", "uuid", "configparser", "statistics")
CONTROLS = ("random", "most recent")


def settings_of(calibrated: PrefillConfig, keep_rates: Sequence[float]) -> dict[str, PrefillConfig]:
    """The settings to compare, by name: the paper's rule, the calibrated setting, and that with one part taken away."""
    settings: dict[str, PrefillConfig] = {}
    for rate in keep_rates:
        whole = replace(calibrated, keep_rate=rate)
        parts = {
            "paper": PrefillConfig.full_look_ahead(rate),
            "default": PrefillConfig(keep_rate=rate),
            "calibrated parts": whole,
            "- window": replace(whole, draft_window=None),
            "- heads": replace(whole, scoring_heads=None),
            "- neighbours": replace(whole, neighbour_share=0.0),
            "- anchors": replace(whole, scorer="attention"),
            "- attention": replace(whole, scorer="anchors"),
        }
        settings |= {f"{name} @ {rate}": config for name, config in parts.items()}
    return settings | {"calibrated": calibrated}


def read_texts(folder: Path | None) -> list[str]:
    if folder is None:
        return [module_source(module) for module in MODULES]
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".md", ".py", ".rst"))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    if not texts:
        raise ValueError(f"{folder} holds no .txt, .md, .rst or .py file")
    return texts


def keep(
    pair: ModelPair, prompt: Prompt, config: PrefillConfig, looks: dict[PrefillConfig, CapturedAttention]
) -> set[int]:
    """Positions that a setting keeps. looks: what the draft attended to, by what of a setting its pass depends on; it
    is added to."""
    pieces = pair.pieces(prompt.token_ids)
    if not needs_attention(config.scorer):
        return set(select(Evidence(prompt.token_ids, pieces=pieces), config).positions)
    draft = pair.open_draft(config.prefill_chunk, prompt.tokenization)
    look_ahead = partial(propose, draft, sampler=Sampler(), end_ids=pair.end_ids)
    of_the_pass = ("draft_window", "draft_sinks", "look_ahead", "scoring_queries", "scoring_layers")
    key = PrefillConfig(**{name: getattr(config, name) for name in of_the_pass})
    if key not in looks:
        num_layers = num_layers_needed(key, draft.num_layers)
        looks[key] = look_at(draft, prompt.token_ids, look_ahead, key, prompt.tokenization, num_layers)[0]
    return set(select(Evidence(prompt.token_ids, looks[key], pieces=pieces), config).positions)


def keep_blindly(control: str, prompt: Prompt, keep_rate: float, seed: int) -> set[int]:
    """Positions that a control keeps, with the same ends as every setting."""
    config = PrefillConfig()
    chunks = Chunks(len(prompt.token_ids), config.chunk_size)
    scores = torch.arange(len(chunks)).float()
    if control == "random":
        scores = torch.rand(len(chunks), generator=torch.Generator().manual_seed(seed))
    return chunks.chosen(scores, config, keep_rate)


def recall(prompt: Prompt, kept: set[int]) -> float:
    return float(np.mean([kept >= set(range(start, stop)) for start, stop in prompt.spans]))


def interval(values: Sequence[float]) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    means = rng.choice(np.array(values), (2000, len(values))).mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def answers(generators: dict[str, SpecStackGenerator], haystack: Haystack, prompt: Prompt) -> dict[str, bool]:
    """Return by name whether a generator's answer has what was hidden; "dense" is any of them without pruning."""
    options: dict[str, Any] = {"input_ids": prompt.token_ids, "max_tokens": 32}
    dense = next(iter(generators.values())).generate(specprefill=False, **options).text
    right = {"dense": haystack.answer in dense}
    for name, generator in generators.items():
        right[name] = haystack.answer in generator.generate(specprefill=True, **options).text
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 4000, 8000], help="(%(default)s)")
    parser.add_argument("--prompts", type=int, default=64, help="per length, of all kinds in turn (%(default)s)")
    parser.add_argument("--keep-rates", type=float, nargs="+", default=[0.05, 0.1, 0.2], help="(%(default)s)")
    parser.add_argument("--calibration", type=Path, required=True, help="a calibration file, or its folder")
    parser.add_argument("--texts", type=Path, help="a folder of texts to hide in (default: standard library modules)")
    parser.add_argument("--half", choices=["test", "tuning"], default="test", help="whose wordings (%(default)s)")
    parser.add_argument("--answers", action="store_true", help="also have the target answer, by the main settings")
    parser.add_argument(
        "--answers-up-to", type=int, default=8000, help="longest prompts that are answered too (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=20)
    add_out_argument(parser)
    arguments = parser.parse_args()
    pair = load_generator(arguments).pair
    calibrated = Calibration.load(arguments.calibration).apply()
    settings = settings_of(calibrated, arguments.keep_rates)
    asked = {"default @ 0.2": PrefillConfig(), "calibrated": calibrated}
    generators = {
        name: SpecStackGenerator(pair.target, pair.draft, pair.tokenizer, config=SpecStackConfig(config))
        for name, config in (asked.items() if arguments.answers else ())
    }
    texts = read_texts(arguments.texts)
    wordings = HELD_OUT if arguments.half == "test" else WORDINGS
    sample = "\n".join(text[:4000] for text in texts)
    per_token = len(sample) / len(pair.tokenizer(sample, add_special_tokens=False).input_ids)
    rows: list[dict[str, Any]] = []
    for num_tokens in arguments.tokens:
        made = make_haystacks(texts, round(num_tokens * per_token), arguments.prompts, arguments.seed, wordings)
        for index, haystack in enumerate(tqdm(made, desc=f"{num_tokens} tokens", leave=False)):
            prompt = encode_haystack(pair.tokenizer, haystack)
            if len(prompt.token_ids) + 64 > min(pair.max_positions):
                continue
            prompt = replace(prompt, tokenization=pair.tokenize_for_draft(prompt.token_ids)[0])
            looks: dict[PrefillConfig, CapturedAttention] = {}
            found = {name: recall(prompt, keep(pair, prompt, config, looks)) for name, config in settings.items()}
            for control in CONTROLS:
                for rate in arguments.keep_rates:
                    found[f"{control} @ {rate}"] = recall(prompt, keep_blindly(control, prompt, rate, index))
            asks = generators and num_tokens <= arguments.answers_up_to
            right = answers(generators, haystack, prompt) if asks else {}
            rows.append({"tokens": num_tokens, "kind": haystack.kind, "recall": found, "right": right})
    print(f"recall, {arguments.half} wordings, {len(rows)} prompts")
    summary = {name: _summarise(rows, name) for name in rows[0]["recall"]}
    for name, entry in summary.items():
        low, high = entry["interval"]
        kinds = "  ".join(f"{kind} {value:.2f}" for kind, value in entry["by_kind"].items())
        lengths = "  ".join(f"{length}: {value:.2f}" for length, value in entry["by_length"].items())
        print(f"  {name:26s}{entry['recall']:.2f} ({low:.2f}-{high:.2f})  {lengths}  |  {kinds}")
    report: dict[str, Any] = {}
    if any(row["right"] for row in rows):
        report = _compare_answers([row for row in rows if row["right"]])
        for name, entry in report.items():
            low, high = entry["interval"]
            print(
                f"answers right, {name:16s}{entry['right']} of {entry['num_prompts']} ({low:.2f}-{high:.2f}); where "
                f"dense prefill's is: {entry['where_dense_is']} of {entry['num_dense']}"
            )
    print_report(
        {
            "experiment": "selection_suite",
            **describe(),
            "half": arguments.half,
            "calibrated": asdict(calibrated),
            "num_prompts": len(rows),
            "recall": summary,
            "answers": report,
        },
        arguments.out,
    )


def _summarise(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    def mean_by(key: str) -> dict[Any, float]:
        groups = dict.fromkeys(row[key] for row in rows)
        return {group: float(np.mean([row["recall"][name] for row in rows if row[key] == group])) for group in groups}

    values = [row["recall"][name] for row in rows]
    return {
        "recall": float(np.mean(values)),
        "interval": interval(values),
        "by_kind": mean_by("kind"),
        "by_length": mean_by("tokens"),
    }


def _compare_answers(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many are right, and of those that dense prefill has right, how many a setting has too."""
    names = list(rows[0]["right"])
    of_dense = [row["right"] for row in rows if row["right"]["dense"]]
    return {
        name: {
            "right": sum(row["right"][name] for row in rows),
            "num_prompts": len(rows),
            "interval": interval([float(row["right"][name]) for row in rows]),
            "where_dense_is": sum(each[name] for each in of_dense),
            "num_dense": len(of_dense),
        }
        for name in names
    }


if __name__ == "__main__":
    run_script(main)
