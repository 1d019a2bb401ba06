"""Record the grid precision × gamma × task × prompt: what do a step's signals, acceptance and time look like at each?

Every prompt is run at every precision of the target with every gamma and under --random policies that draw the gamma
of each step anew (a controller that is trained on fixed gammas never sees the signals of one gamma before another).
The runs of a prompt come in an order drawn anew for each prompt, all precisions mixed, so that a drift of the machine's
speed favours none. Greedy, dense prefill, past the end-of-sequence token.

--out gets the records (numbers rounded to what the clock and the file size are worth) and, beside them in a .json file,
the settings and every run whose tokens differ from plain decoding's at the same precision, with the gap between the
target's two logits where they part. Both are written after every prompt: the same command goes on where it stopped.
Prints what each precision did, ends in one JSON line. evaluate_policies.py replays the records.

    profile_steps.py [TASK=FILE ...] --precisions bf16 int8 nf4 --gammas 0 1 2 4 6 8 --out records.parquet
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.common.environment import describe, pair_fingerprint
from experiments.common.pair_arguments import add_model_arguments, load_generators
from experiments.common.prompt_files import Prompt, choose_prompts
from experiments.common.script import run_script
from experiments.policies.record_runs import check_tokens, run_prompt, summarise
from spec_stack import DraftSignals, SpecStackGenerator, StepContext, StepRecord
from spec_stack.config import PRECISIONS
from spec_stack.controller.base import Policy
from spec_stack.controller.registry import make_policy
from spec_stack.hf.model import CachedModel
from spec_stack.hf.precision import TIE_TOLERANCE
from spec_stack.offline.records import SUFFIXES, check_record_path, read_records, write_records

PLAIN = "fixed-0"


class RandomGamma(Policy):
    """Draws every step's gamma from the given ones. Equal names and request seeds draw alike."""

    def __init__(self, gammas: Sequence[int], number: int, seed: str) -> None:
        self.name = f"random-{number}"
        self._gammas = gammas
        self._random = random.Random(f"{number} {seed}")

    def choose(self, context: StepContext) -> int:
        return self._random.choice(self._gammas)


@dataclass(frozen=True)
class Difference:
    """A run whose tokens part from plain decoding's. gap: between the target's logits of the two tokens there."""

    precision: str
    request_id: str
    policy: str
    position: int
    gap: float

    @property
    def is_tie(self) -> bool:
        return abs(self.gap) <= TIE_TOLERANCE[self.precision]


class Profile:
    """Records and differences so far, kept in two files; a prompt counts once the second file names it."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        """Goes on where the files end. Raises ValueError for files of another kind or of other settings."""
        check_record_path(out, suffixes=SUFFIXES)
        self.out, self.settings = out, settings
        self.side_file = out.with_suffix(".json")
        self.records: list[StepRecord] = []
        self.differences: list[Difference] = []
        self.done: list[str] = []
        if out.exists() and not self.side_file.exists():
            raise ValueError(f"{out} is there without {self.side_file}; give another --out")
        if self.side_file.exists():
            self._resume()

    def _resume(self) -> None:
        try:
            state = json.loads(self.side_file.read_text(encoding="utf-8"))
            earlier, self.done = state["settings"], state["done"]
            self.differences = [Difference(**each) for each in state["differences"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.side_file} is not what this script writes: {error}") from error
        other = [name for name in self.settings if earlier.get(name) != self.settings[name]]
        if other:
            raise ValueError(
                f"{self.out} was begun with other settings of {', '.join(other)}; give another --out, or remove it and "
                f"{self.side_file} to begin anew"
            )
        self.records = [record for record in read_records(self.out) if record.request_id in self.done]

    def add(self, request_id: str, records: list[StepRecord], differences: list[Difference]) -> None:
        self.records += records
        self.differences += differences
        self.done.append(request_id)
        write_records(self.records, self.out)
        state = {
            "settings": self.settings,
            **describe(),
            "done": self.done,
            "differences": [asdict(each) for each in self.differences],
        }
        unfinished = self.side_file.with_name(self.side_file.name + ".unfinished")
        unfinished.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self.side_file)


def rounded(record: StepRecord) -> StepRecord:
    """Times to 10 µs, signals to 4 digits after the point."""
    signals = DraftSignals(
        [round(value, 4) for value in record.signals.entropy], [round(value, 4) for value in record.signals.confidence]
    )
    times = {name: round(getattr(record, name), 5) for name in ("draft_s", "verify_s", "controller_s")}
    return replace(record, signals=signals, **times)


def gap_at(generator: SpecStackGenerator, ids: list[int], plain: list[int], other: list[int], position: int) -> float:
    """Plain decoding once more up to where the two part: its logit for the plain token less that for the other."""
    target = CachedModel(generator.target, generator.config.prefill.prefill_chunk)
    logits = target.forward(ids, range(len(ids)), 1)[0]
    for index in range(position):
        logits = target.forward([plain[index]], [len(ids) + index], 1)[0]
    return float(logits[plain[position]]) - float(logits[other[position]])


def run_block(
    generators: dict[str, SpecStackGenerator], prompt: Prompt, request_id: str, arguments: argparse.Namespace
) -> tuple[list[StepRecord], list[Difference]]:
    """All runs of one prompt, in an order of its own; records come out in the order of the grid."""
    policies: list[Policy] = [make_policy("fixed", gamma=gamma) for gamma in arguments.gammas]
    policies += [RandomGamma(arguments.gammas, number, request_id) for number in range(arguments.random)]
    grid = [(precision, policy) for precision in generators for policy in policies]
    records: dict[tuple[str, str], list[StepRecord]] = {}
    tokens: dict[tuple[str, str], list[int]] = {}
    ids: list[int] = []
    for precision, policy in random.Random(request_id).sample(grid, len(grid)):
        generator = generators[precision]
        ids = prompt.encode(generator.tokenizer, arguments.max_prompt_tokens)
        result = run_prompt(generator, ids, policy, arguments.tokens, prompt.task, request_id)
        records[precision, policy.name] = [rounded(record) for record in result.records or []]
        tokens[precision, policy.name] = result.token_ids
    differences = []
    for precision, policy in grid:
        plain, other = tokens.get((precision, PLAIN)), tokens[precision, policy.name]
        if plain is not None and other != plain:
            position = next(index for index, pair in enumerate(zip(plain, other, strict=True)) if pair[0] != pair[1])
            gap = gap_at(generators[precision], ids, plain, other, position)
            differences.append(Difference(precision, request_id, policy.name, position, gap))
    return [record for precision, policy in grid for record in records[precision, policy.name]], differences


def report(profile: Profile, precisions: list[str]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    print("precision  policy        steps  tokens/step  tokens/s  draft ms/token  verify ms/step")
    for precision in precisions:
        mine = [record for record in profile.records if record.precision == precision]
        rows[precision] = {}
        for policy in dict.fromkeys(record.policy for record in mine):
            rows[precision][policy] = row = summarise([record for record in mine if record.policy == policy])
            print("{:10s} {:12s} {:6d} {:12.3f} {:9.1f} {:15.3f} {:15.3f}".format(precision, policy, *row.values()))
    print("\nprecision  runs against plain  with other tokens  at a tie  tolerance  largest gap")
    counts: dict[str, Any] = {}
    for precision in precisions:
        mine = [record for record in profile.records if record.precision == precision]
        names = {record.policy for record in mine}
        parted = [each for each in profile.differences if each.precision == precision]
        counts[precision] = row = {
            "compared": len(profile.done) * (len(names) - 1) if PLAIN in names else 0,
            "differ": len(parted),
            "at_a_tie": sum(each.is_tie for each in parted),
            "tolerance": TIE_TOLERANCE[precision],
            "largest_gap": max((abs(each.gap) for each in parted), default=0.0),
        }
        print("{:10s} {:18d} {:18d} {:9d} {:10.3f} {:12.4f}".format(precision, *row.values()))
    return {"policies": rows, "greedy": counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", help="TASK=FILE or TASK=FILE:CATEGORY (default: the project's own)")
    add_model_arguments(parser)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["bf16", "int8", "nf4"])
    parser.add_argument("--gammas", type=int, nargs="*", default=[0, 1, 2, 4, 6, 8])
    parser.add_argument("--random", type=int, default=0, help="runs per prompt and precision with a random gamma")
    parser.add_argument("--per-task", type=int, default=6, help="prompts per task (%(default)s)")
    parser.add_argument("--max-prompt-tokens", type=int, default=512, help="longer ones lose their middle")
    parser.add_argument("--tokens", type=int, default=80, help="tokens per run (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help=".jsonl or .parquet; goes on where it ends")
    arguments = parser.parse_args()
    check_tokens(arguments.tokens)
    named = [f"--precisions {arguments.precisions}", f"--gammas {arguments.gammas}"]
    for text, values in zip(named, (arguments.precisions, arguments.gammas), strict=True):
        if len(set(values)) < len(values):
            raise ValueError(f"{text}: give each once")
    if not arguments.gammas:
        raise ValueError("give at least one gamma")
    prompts = choose_prompts(arguments.prompts, arguments.per_task)
    settings = {
        name: getattr(arguments, name)
        for name in ("precisions", "draft_precision", "gammas", "random", "tokens", "max_prompt_tokens", "threads")
    }
    settings["pair"] = pair_fingerprint(arguments.target, arguments.draft)
    texts = json.dumps([asdict(prompt) for prompt in prompts])
    settings["prompts_sha256"] = hashlib.sha256(texts.encode()).hexdigest()
    profile = Profile(arguments.out, settings)

    generators = dict(zip(arguments.precisions, load_generators(arguments, arguments.precisions), strict=True))
    todo = {f"{prompt.task}-{number}": prompt for number, prompt in enumerate(prompts)}
    todo = {request_id: prompt for request_id, prompt in todo.items() if request_id not in profile.done}
    for generator in generators.values() if todo else ():
        generator.generate("Hello", max_tokens=16, gamma=4, ignore_eos=True)
    with tqdm(total=len(prompts), initial=len(profile.done), unit="prompt") as bar:
        for request_id, prompt in todo.items():
            bar.set_postfix_str(request_id)
            profile.add(request_id, *run_block(generators, prompt, request_id, arguments))
            bar.update()
    result = report(profile, arguments.precisions)
    print(json.dumps({"experiment": "profile_steps", **describe(), "settings": settings, **result}))


if __name__ == "__main__":
    run_script(main)
