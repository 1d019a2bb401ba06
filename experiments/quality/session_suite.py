"""Do facts that the first question had dropped come back when a later turn asks for them?

Conversations about a document with several facts, one asked for in every turn. Arms: a dense session (keep_rate 1.0),
a session without restoration, sessions with it for every setting given as THRESHOLDxCHUNKS, and sparse prefill from
nothing on every turn. The sessions below keep_rate 1.0 are branches of one first turn; each arm has its own answers in
its history. Before a turn, "held" says whether the target has every token of the fact that is asked for, "after" the
same with what the turn restored. Greedy. Prints a table, ends in one JSON line.

Choose thresholds on other seeds than those you report.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.common.conversations import FAMILIES, Conversation, make_conversation
from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.script import run_script
from spec_stack import GenerationResult, Session, SessionConfig, SpecStackGenerator

Messages = list[dict[str, str]]


def parse_setting(text: str) -> SessionConfig:
    """THRESHOLDxCHUNKS. Raises ValueError for anything else."""
    threshold, separator, chunks = text.partition("x")
    try:
        return SessionConfig(restore_threshold=float(threshold), max_restored_chunks=int(chunks))
    except ValueError as error:
        raise ValueError(f"{text!r} is not of the form THRESHOLDxCHUNKS{separator and f': {error}'}") from error


class Watch:
    """Positions that the target has been given, by a hook on it."""

    def __init__(self, generator: SpecStackGenerator) -> None:
        self.positions: set[int] = set()
        generator.target.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, args: Any, kwargs: Any) -> None:
        self.positions.update(kwargs["position_ids"][0].tolist())

    def take(self) -> set[int]:
        taken, self.positions = self.positions, set()
        return taken


def span_of(tokenizer: Any, conversation: Conversation, turn: int) -> set[int]:
    """Token positions of the fact of a turn, in the first prompt and so in all."""
    messages = conversation.ask(0, [])
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    start = text.index(conversation.facts[turn].text)
    stop = start + len(conversation.facts[turn].text)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False).offset_mapping
    return {at for at, (first, last) in enumerate(offsets) if first < stop and last > start}


class Arm:
    """One way to answer, with its own history; held: positions that its target has."""

    def __init__(self, session: Session | None, history: Messages, held: Collection[int]) -> None:
        self.session, self.history, self.held = session, history, set(held)

    def ask(self, generator: SpecStackGenerator, content: str, options: dict[str, Any]) -> GenerationResult:
        self.history = [*self.history, {"role": "user", "content": content}]
        result = (self.session or generator).generate(messages=self.history, **options)
        self.history.append({"role": "assistant", "content": result.text})
        return result


def run_conversation(
    generator: SpecStackGenerator,
    watch: Watch,
    conversation: Conversation,
    turns: int,
    settings: list[str],
    keep: float,
) -> list[dict[str, Any]]:
    rows = []
    options: dict[str, Any] = {"max_tokens": 32, "keep_rate": keep, "specprefill": None}
    spans = [span_of(generator.tokenizer, conversation, turn) for turn in range(turns)]
    dense, stem = Arm(generator.session(), [], ()), Arm(generator.session(SessionConfig(restore=False)), [], ())
    arms = {"dense": dense, "stem": stem}
    for turn in range(turns):
        content = conversation.ask(turn, [])[0]["content"]
        for name, arm in arms.items():
            held = spans[turn] <= arm.held
            watch.take()
            of_arm = options | ({"keep_rate": 1.0} if name == "dense" else {})
            result = arm.ask(generator, content, of_arm | ({"specprefill": True} if not turn else {}))
            if name == "sparse":
                arm.held = set()
            arm.held |= watch.take()
            metrics = result.metrics
            rows.append(
                {
                    "arm": name,
                    "turn": turn,
                    "right": conversation.facts[turn].answer in result.text,
                    "held": held,
                    "after": spans[turn] <= arm.held,
                    "restored": metrics.num_restored_tokens,
                    "prompt_tokens": metrics.num_prompt_tokens,
                    "kept_tokens": metrics.num_kept_tokens,
                    "ttft_s": metrics.ttft_s,
                }
            )
        if turn == 0:
            del arms["stem"]
            arms["none"] = Arm(_branch(stem, SessionConfig(restore=False)), stem.history, stem.held)
            arms["sparse"] = Arm(None, stem.history, stem.held)
            arms |= {text: Arm(_branch(stem, parse_setting(text)), stem.history, stem.held) for text in settings}
    return rows


def _branch(arm: Arm, config: SessionConfig) -> Session:
    if arm.session is None:
        raise ValueError("only a session has branches")
    branch = arm.session.fork()
    branch.config = config
    return branch


def interval(rows: list[dict[str, Any]], arm: str, draws: int = 2000) -> tuple[float, float, float]:
    """Share right of an arm less that of dense, with its 95 % bootstrap interval over conversations."""
    sums: dict[int, float] = defaultdict(float)
    nums: dict[int, int] = defaultdict(int)
    for row in rows:
        if row["turn"] and row["arm"] in (arm, "dense"):
            sums[row["conversation"]] += row["right"] * ((row["arm"] == arm) - (row["arm"] == "dense"))
            nums[row["conversation"]] += row["arm"] == arm
    difference = np.array([sums[key] / nums[key] for key in sums])
    drawn = np.random.default_rng(0).choice(difference, (draws, len(difference))).mean(1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(difference.mean()), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--tokens", type=int, default=4200)
    parser.add_argument("--facts", type=int, default=12)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--keep-rate", type=float, default=0.05)
    parser.add_argument(
        "--settings",
        nargs="+",
        default=[f"{SessionConfig.restore_threshold:g}x{SessionConfig.max_restored_chunks}"],
        help="THRESHOLDxCHUNKS (%(default)s)",
    )
    arguments = parser.parse_args()
    for setting in arguments.settings:
        parse_setting(setting)
    generator = load_generator(arguments)
    watch = Watch(generator)
    rows: list[dict[str, Any]] = []
    for family in arguments.families:
        for seed in tqdm(
            range(arguments.first_seed, arguments.first_seed + arguments.conversations), desc=family, leave=False
        ):
            conversation = make_conversation(generator.tokenizer, arguments.tokens, arguments.facts, seed, family)
            measured = run_conversation(
                generator, watch, conversation, arguments.turns, arguments.settings, arguments.keep_rate
            )
            rows += [{"family": family, "conversation": seed, **row} for row in measured]
    print("family  arm       right          less dense [95 %]         held  after  restored/turn")
    summary: list[dict[str, Any]] = []
    for family in arguments.families:
        own = [row for row in rows if row["family"] == family]
        for arm in ["dense", "sparse", "none", *arguments.settings]:
            later = [row for row in own if row["arm"] == arm and row["turn"]]
            difference, low, high = interval(own, arm)
            num = len(later)
            entry = {
                "family": family,
                "arm": arm,
                "right": sum(row["right"] for row in later) / num,
                "asked": num,
                "less_dense": [difference, low, high],
                "held": sum(row["held"] for row in later) / num,
                "after": sum(row["after"] for row in later) / num,
                "restored_per_turn": sum(row["restored"] for row in later) / num,
            }
            summary.append(entry)
            print(
                f"{family:6s}  {arm:8s}  {entry['right']:.3f} of {num:3d}  "
                f"{difference:+.3f} [{low:+.3f}, {high:+.3f}]  {entry['held']:9.2f}  {entry['after']:5.2f}  "
                f"{entry['restored_per_turn']:8.1f}"
            )
    settings = {name: value for name, value in vars(arguments).items() if name not in ("target", "draft", "device")}
    print(json.dumps({"experiment": "session_suite", **describe(), **settings, "summary": summary, "rows": rows}))


if __name__ == "__main__":
    run_script(main)
