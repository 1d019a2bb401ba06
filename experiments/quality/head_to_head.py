"""Rules of selection side by side: one draft, one keep rate, one set of tasks.

The rules are those of `selection_rules`; the tasks the kinds of `spec_stack.calibrate.needles` and, after RULER,
variable chains, common words and frequent words, each in wordings to tune on and others to test on. Per rule and keep
rate: the share of the evidence's spans of which every token is kept; what the target answers, beside dense prefill;
the mean KL divergence of its next-token distributions from those of dense prefill, along dense prefill's own answer;
and what the rule costs in processor seconds, without the draft's pass, which all that need one share. Intervals are
95 % bootstrap intervals over prompts. Prints a table; --out has JSON, --plot a picture."""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.quality.held_out_needles import HELD_OUT
from experiments.quality.ruler_like import KINDS, Half, make
from experiments.quality.selection_rules import Rule, Seen, look_at, rules
from experiments.quality.selection_suite import interval, read_texts, recall
from spec_stack import PrefillConfig
from spec_stack.calibrate.needles import WORDINGS, Haystack, make_haystacks
from spec_stack.calibrate.prompts import Prompt, encode_haystack
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.loading import ASSETS
from spec_stack.prefill.calibration import find_calibration
from spec_stack.prefill.units import Chunks

# Tokens of the dense answer that sparse distributions are compared along, and most tokens of an answer.
_ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Task:
    """A prompt with its evidence and what a right answer contains (all of them, for full marks)."""

    kind: str
    haystack: Haystack
    prompt: Prompt
    answers: tuple[str, ...]
    num_tokens: int


@dataclass(frozen=True)
class Answer:
    """The target's answer over some of a prompt: share of what was asked for, and KL to dense along dense's answer."""

    score: float
    kl: float


def read_calibrated(draft: str | None, named: Path | None) -> PrefillConfig | None:
    """The setting of a pair's calibration: the one named, or the one that lies beside the draft, if any."""
    calibration = find_calibration(ASSETS / "draft" if draft is None else draft, named)
    return None if calibration is None else calibration.apply()


def make_tasks(pair: ModelPair, texts: Sequence[str], num_tokens: int, count: int, half: Half, seed: int) -> list[Task]:
    """Needles of all kinds in turn, then as many of RULER's three, of about so many tokens each."""
    sample = "\n".join(text[:4000] for text in texts)
    per_token = len(sample) / len(pair.tokenizer(sample, add_special_tokens=False).input_ids)
    wordings = WORDINGS if half == "tuning" else HELD_OUT
    num_ruler = max(len(KINDS), count // 4)
    found = [
        (each, (each.answer,)) for each in make_haystacks(texts, round(num_tokens * per_token), count, seed, wordings)
    ]
    rng = random.Random(seed + num_tokens)
    for index in range(num_ruler):
        kind = KINDS[index % len(KINDS)]
        # Characters per token differ from kind to kind, so the first one measures.
        probe = make(kind, 4000, half, random.Random(0)).haystack.document
        characters = 4000 / len(pair.tokenizer(probe, add_special_tokens=False).input_ids) * num_tokens
        asked = make(kind, round(characters), half, rng)
        found.append((asked.haystack, asked.answers))
    tasks = []
    for haystack, answers in found:
        prompt = encode_haystack(pair.tokenizer, haystack)
        if len(prompt.token_ids) + _ANSWER_TOKENS <= min(pair.max_positions):
            tasks.append(Task(haystack.kind, haystack, prompt, answers, num_tokens))
    return tasks


def see(pair: ModelPair, task: Task, calibrated: Any, seed: int) -> Seen:
    """Return what rules are shown of a task, with the draft's pass."""
    text = task.haystack.content
    if getattr(pair.tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": text}]
        text = pair.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        encoded = pair.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    else:
        encoded = pair.tokenizer(text, return_offsets_mapping=True)
    layers, plain = look_at(pair, task.prompt.token_ids, calibrated)
    return Seen(task.prompt.token_ids, encoded["offset_mapping"], text, task.haystack.question, layers, plain, seed)


def keep(rule: Rule, seen: Seen, keep_rate: float) -> tuple[set[int], float]:
    """Positions that a rule keeps, and the processor seconds it took to say so."""
    config = replace(rule.config, keep_rate=keep_rate)
    started = process_time()
    votes = rule.votes(seen, config)
    kept = Chunks(len(seen.prompt_ids), config.chunk_size).chosen(votes, config, keep_rate)
    return kept, process_time() - started


class Judge:
    """Asks the target about one prompt: densely once, then over what each rule keeps."""

    def __init__(self, pair: ModelPair, task: Task, prefill_chunk: int) -> None:
        self._pair, self._task, self._prefill_chunk = pair, task, prefill_chunk
        ids = task.prompt.token_ids
        self._answer, rows = self._greedy(range(len(ids)))
        self._dense = rows.float().log_softmax(dim=-1)
        self.dense_score = self._score(self._answer)

    def judge(self, kept: set[int]) -> Answer:
        """Over these positions of the prompt."""
        positions = sorted(kept)
        own, _ = self._greedy(positions)
        ids = self._task.prompt.token_ids
        target = self._pair.open_target(self._prefill_chunk)
        later = range(len(ids), len(ids) + len(self._answer) - 1)
        rows = target.forward(
            [*(ids[at] for at in positions), *self._answer[:-1]], [*positions, *later], len(self._answer)
        )
        sparse = rows.float().log_softmax(dim=-1)
        kl = (self._dense.exp() * (self._dense - sparse)).sum(dim=-1).mean()
        return Answer(self._score(own), float(kl))

    def _greedy(self, positions: Sequence[int]) -> tuple[list[int], torch.Tensor]:
        """The answer over some positions of the prompt, and the logits (n, vocab) that its n tokens come from."""
        ids = self._task.prompt.token_ids
        target = self._pair.open_target(self._prefill_chunk)
        rows = [target.forward([ids[at] for at in positions], positions, 1)]
        answer = [int(rows[0].argmax())]
        while len(answer) < _ANSWER_TOKENS and answer[-1] not in self._pair.end_ids:
            rows.append(target.forward(answer[-1:], [len(ids) + len(answer) - 1], 1))
            answer.append(int(rows[-1].argmax()))
        return answer, torch.cat(rows)

    def _score(self, answer: Sequence[int]) -> float:
        text = self._pair.tokenizer.decode(answer, skip_special_tokens=True)
        return float(np.mean([wanted in text for wanted in self._task.answers]))


def measure(
    pair: ModelPair, tasks: Sequence[Task], known: Mapping[str, Rule], keep_rates: Sequence[float], answers: bool
) -> list[dict[str, Any]]:
    """A row per task: what each rule keeps of it, and what that does."""
    rows = []
    config = next(iter(known.values())).config
    for index, task in enumerate(tqdm(tasks, leave=False)):
        started = process_time()
        seen = see(pair, task, config, index)
        draft_s = process_time() - started
        judge = Judge(pair, task, config.prefill_chunk) if answers else None
        found: dict[str, dict[str, float]] = {}
        for name, rule in known.items():
            for rate in keep_rates:
                kept, seconds = keep(rule, seen, rate)
                entry = {"kept": recall(task.prompt, kept), "rule_s": seconds}
                if judge is not None:
                    answer = judge.judge(kept)
                    entry |= {"score": answer.score, "kl": answer.kl}
                found[f"{name} @ {rate}"] = entry
        row: dict[str, Any] = {"kind": task.kind, "tokens": task.num_tokens, "draft_s": draft_s, "rules": found}
        if judge is not None:
            row["dense_score"] = judge.dense_score
        rows.append(row)
    return rows


def summarise(rows: Sequence[dict[str, Any]], known: Mapping[str, Rule], keep_rates: Sequence[float]) -> dict[str, Any]:
    """Per rule and rate: means, intervals, by kind; answers over all prompts and over those that dense has right."""
    table: dict[str, Any] = {}
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    has_answers = "dense_score" in rows[0]
    for name, rule in known.items():
        for rate in keep_rates:
            key = f"{name} @ {rate}"
            own = [row["rules"][key] for row in rows]
            kept = [entry["kept"] for entry in own]
            entry: dict[str, Any] = {
                "kept": float(np.mean(kept)),
                "interval": interval(kept),
                "by_kind": {
                    kind: float(np.mean([row["rules"][key]["kept"] for row in rows if row["kind"] == kind]))
                    for kind in kinds
                },
                "rule_ms": 1e3 * float(np.median([each["rule_s"] for each in own])),
                "needs_draft": rule.needs_draft,
                "source": rule.source,
            }
            if has_answers:
                right = [row["rules"][key]["score"] for row in rows if row["dense_score"] == 1]
                kl = [each["kl"] for each in own]
                entry |= {
                    "score": float(np.mean([each["score"] for each in own])),
                    "score_where_dense_is_right": float(np.mean(right)) if right else None,
                    "kl": float(np.mean(kl)),
                    "kl_interval": interval(kl),
                }
            table[key] = entry
    return table


def format_table(table: Mapping[str, Any]) -> str:
    """For a terminal."""
    heads = ("evidence kept", "answers", "of dense", "KL", "rule ms")
    lines = [f"{'rule @ keep rate':34s}{heads[0]:>19s}" + "".join(f"{head:>10s}" for head in heads[1:]) + "  by kind"]
    for name, entry in table.items():
        low, high = entry["interval"]
        cells = [entry.get(key) for key in ("score", "score_where_dense_is_right", "kl")]
        answers = "".join(f"{'-' if cell is None else f'{cell:.2f}':>10s}" for cell in cells)
        kinds = " ".join(f"{kind} {value:.2f}" for kind, value in entry["by_kind"].items())
        cost = f"{entry['rule_ms']:.1f}{'+d' if entry['needs_draft'] else '  '}"
        lines.append(f"{name:34s}{entry['kept']:>7.2f} ({low:.2f}-{high:.2f}){answers}{cost:>10s}  {kinds}")
    return "\n".join([*lines, "+d: and a pass of the draft over the prompt"])


def plot(table: Mapping[str, Any], keep_rates: Sequence[float], to: Path) -> None:
    """Evidence kept by rule, a bar per keep rate, with intervals; and by kind at the middle rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(key.rsplit(" @ ", 1)[0] for key in table))
    shades = plt.colormaps["viridis"](np.linspace(0.15, 0.85, len(keep_rates)))
    middle = keep_rates[len(keep_rates) // 2]
    kinds = list(table[f"{names[0]} @ {middle}"]["by_kind"])
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 0.42 * len(names) + 1.6), layout="constrained")
    places = np.arange(len(names))[::-1]
    height = 0.8 / len(keep_rates)
    for index, rate in enumerate(keep_rates):
        entries = [table[f"{name} @ {rate}"] for name in names]
        means = np.array([entry["kept"] for entry in entries])
        errors = np.abs(np.array([entry["interval"] for entry in entries]).T - means)
        at = places + (index - (len(keep_rates) - 1) / 2) * -height
        left.barh(at, means, height, xerr=errors, color=shades[index], label=f"keep {rate}", error_kw={"lw": 0.8})
    left.set_yticks(places, names)
    left.set_xlim(0, 1)
    # So that a row of the right panel stands beside its rule.
    left.set_ylim(-0.5, len(names) - 0.5)
    left.set_xlabel("share of the evidence's spans kept whole, 95 % intervals")
    left.legend(loc="lower right")
    grid = np.array([[table[f"{name} @ {middle}"]["by_kind"][kind] for kind in kinds] for name in names])
    right.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    right.set_yticks(range(len(names)), [""] * len(names))
    right.set_xticks(range(len(kinds)), kinds, rotation=35, ha="right")
    right.set_title(f"by kind of task, keep {middle}", fontsize=10)
    for row, column in np.ndindex(grid.shape):
        value = grid[row, column]
        ink = "black" if value > 0.5 else "white"
        right.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=ink)
    figure.savefig(to, dpi=130, facecolor="white", metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 4000], help="(%(default)s)")
    parser.add_argument(
        "--prompts", type=int, default=48, help="needles per length; a quarter more are RULER's (%(default)s)"
    )
    parser.add_argument("--keep-rates", type=float, nargs="+", default=[0.05, 0.1, 0.2], help="(%(default)s)")
    parser.add_argument("--calibration", type=Path, help="a file, or its folder (default: the draft's own, if any)")
    parser.add_argument("--texts", type=Path, help="a folder of texts to hide in (default: standard library modules)")
    parser.add_argument("--half", choices=["test", "tuning"], default="test", help="whose wordings (%(default)s)")
    parser.add_argument("--rules", nargs="+", help="only these (default: all)")
    parser.add_argument("--no-answers", action="store_true", help="evidence and cost only")
    parser.add_argument("--seed", type=int, default=20)
    add_out_argument(parser)
    parser.add_argument("--plot", type=Path, help="draw a picture")
    arguments = parser.parse_args()
    pair = load_generator(arguments).pair
    known = dict(rules(read_calibrated(arguments.draft, arguments.calibration)))
    if arguments.rules:
        unknown = [name for name in arguments.rules if name not in known]
        if unknown:
            raise ValueError(f"unknown rules {unknown}; known: {', '.join(known)}")
        known = {name: known[name] for name in arguments.rules}
    texts = read_texts(arguments.texts)
    tasks = [
        task
        for num_tokens in arguments.tokens
        for task in make_tasks(pair, texts, num_tokens, arguments.prompts, arguments.half, arguments.seed)
    ]
    rows = measure(pair, tasks, known, arguments.keep_rates, not arguments.no_answers)
    table = summarise(rows, known, arguments.keep_rates)
    print(f"{arguments.half} wordings, {len(rows)} prompts")
    print(format_table(table))
    result = {
        "experiment": "head_to_head",
        **describe(),
        "half": arguments.half,
        "prompts": len(rows),
        "tokens": arguments.tokens,
        "dense_score": float(np.mean([row["dense_score"] for row in rows])) if "dense_score" in rows[0] else None,
        "draft_ms": 1e3 * float(np.median([row["draft_s"] for row in rows])),
        "table": table,
    }
    if arguments.plot is not None:
        plot(table, arguments.keep_rates, arguments.plot)
    print_report(result, arguments.out)


if __name__ == "__main__":
    run_script(main)
