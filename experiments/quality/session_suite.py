"""Do facts that the first question had dropped come back when a later turn asks for them?

Conversations about a document with several facts, one asked for in every turn. Arms: a dense session (keep_rate 1.0),
sessions with it for every setting given as THRESHOLDxCHUNKSxMARGINxANCHORS (the fields of SessionConfig; anchors
of 0 have no vote; the order may be left out), and as controls a session without restoration ("none") and sparse prefill
from nothing on every turn. The sessions below keep_rate 1.0 are branches of one first turn; each arm has its own
answers in its history. Greedy. The arms of a turn take turns in being first; what a turn costs is CPU seconds up to its
first token.

Before a turn, "dropped" is the share of the earlier prompt that the target lacks, "held" whether it has every token of
the fact that is asked for, "after" the same with what the turn restored. Prints a table, ends in one JSON line; with
--out the answers are kept in a file from conversation to conversation, and a run that was cut short goes on there.

Choose thresholds on other seeds than those you report.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.common.conversations import FAMILIES, Conversation, make_conversation
from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.script import run_script
from spec_stack import PrefillConfig, Session, SessionConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.types import Metrics

Messages = list[dict[str, str]]


def parse_setting(text: str) -> SessionConfig:
    """Read THRESHOLDxCHUNKSxMARGINxANCHORS; anchors of 0 have no vote.

    Raises
    ------
    ValueError
        For anything else.
    """
    try:
        threshold, chunks, margin, anchors = text.split("x")
        return SessionConfig(
            restore_threshold=float(threshold),
            max_restored_chunks=int(chunks),
            restore_margin=int(margin),
            anchor_threshold=float(anchors) or None,
        )
    except ValueError as error:
        raise ValueError(f"{text!r} is not of the form THRESHOLDxCHUNKSxMARGINxANCHORS: {error}") from error


def name_of(config: SessionConfig) -> str:
    """The setting as it is written on the command line."""
    anchors = config.anchor_threshold or 0
    return f"{config.restore_threshold:g}x{config.max_restored_chunks}x{config.restore_margin}x{anchors:g}"


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
    """One way to answer, with its own history of num_seen tokens; held: positions that its target has."""

    def __init__(
        self, session: Session | None, history: Messages, held: Collection[int] = (), num_seen: int = 0
    ) -> None:
        self.session, self.history, self.held, self.num_seen = session, history, set(held), num_seen

    def ask(self, generator: SpecStackGenerator, content: str, options: dict[str, Any]) -> tuple[str, Metrics, float]:
        """Return the answer, what it cost, and CPU seconds up to its first token."""
        self.history = [*self.history, {"role": "user", "content": content}]
        started = process_time()
        steps = (self.session or generator).stream(messages=self.history, **options)
        outputs = [next(steps)]
        ttft_cpu_s = process_time() - started
        outputs += steps
        text, metrics = "".join(output.text for output in outputs), outputs[-1].metrics
        if metrics is None:
            raise RuntimeError("the stream ended without a last step")
        self.history.append({"role": "assistant", "content": text})
        self.num_seen = metrics.num_prompt_tokens + metrics.num_tokens - 1
        return text, metrics, ttft_cpu_s

    def branch(self, config: SessionConfig) -> Arm:
        """Another session that goes on from here."""
        if self.session is None:
            raise ValueError("only a session has branches")
        session = self.session.fork()
        session.config = config
        return Arm(session, self.history, self.held, self.num_seen)


def run_conversation(
    generator: SpecStackGenerator,
    watch: Watch,
    conversation: Conversation,
    turns: int,
    settings: list[str],
    keep: float,
    controls: bool = True,
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    options: dict[str, Any] = {"max_tokens": 32, "keep_rate": keep, "sparse_prefill": None}
    spans = [span_of(generator.tokenizer, conversation, turn) for turn in range(turns)]
    dense, stem = Arm(generator.session(), []), Arm(generator.session(SessionConfig(restore=False)), [])
    arms = {"dense": dense, "stem": stem}
    for turn in range(turns):
        content = conversation.ask(turn, [])[0]["content"]
        rng = random.Random(f"{content} {turn}")
        for name, arm in rng.sample(list(arms.items()), len(arms)):
            held = spans[turn] & arm.held
            # Rejected drafts of the last turn are no part of the conversation.
            num_seen, num_held = arm.num_seen, sum(position < arm.num_seen for position in arm.held)
            watch.take()
            of_arm = options | ({"keep_rate": 1.0} if name == "dense" else {})
            text, metrics, ttft_cpu_s = arm.ask(
                generator, content, of_arm | ({"sparse_prefill": "on"} if not turn else {})
            )
            if name == "sparse":
                arm.held = set()
            arm.held |= watch.take()
            rows.append(
                {
                    "arm": name,
                    "turn": turn,
                    "question": conversation.facts[turn].question,
                    "expected": conversation.facts[turn].answer,
                    "text": text,
                    "right": conversation.facts[turn].answer in text,
                    "dropped": 1 - num_held / num_seen if turn else 0.0,
                    "held": len(held) / len(spans[turn]),
                    "after": len(spans[turn] & arm.held) / len(spans[turn]),
                    "restored": metrics.num_restored_tokens,
                    "rewritten": metrics.num_rewritten_tokens,
                    "ttft_cpu_s": ttft_cpu_s,
                    "prompt_tokens": metrics.num_prompt_tokens,
                    "kept_tokens": metrics.num_kept_tokens,
                    "ttft_s": metrics.ttft_s,
                }
            )
        if turn == 0:
            del arms["stem"]
            if controls:
                arms["none"] = stem.branch(SessionConfig(restore=False))
                arms["sparse"] = Arm(None, stem.history, stem.held, stem.num_seen)
            arms |= {text: stem.branch(parse_setting(text)) for text in settings}
    return rows


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
    parser.add_argument("--no-controls", action="store_true", help="leave out the arms none and sparse")
    parser.add_argument(
        "--settings",
        nargs="+",
        default=[name_of(SessionConfig())],
        help="THRESHOLDxCHUNKSxMARGINxANCHORS (%(default)s); costs are over the first one's",
    )
    parser.add_argument("--out", type=Path, help="file for the JSON, from which a run that was cut short goes on")
    arguments = parser.parse_args()
    for setting in arguments.settings:
        parse_setting(setting)
    # Whatever a calibration says: attention selects, so that facts of other wordings are dropped.
    generator = load_generator(arguments, SpecStackConfig(PrefillConfig(scorer="attention")), calibration=False)
    settings = {
        name: value for name, value in vars(arguments).items() if name not in ("target", "draft", "device", "out")
    }
    rows = read_rows(arguments.out, settings)
    asked = {(row["family"], row["conversation"]) for row in rows}
    watch = Watch(generator)
    for family in arguments.families:
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.conversations)
        for seed in tqdm([seed for seed in seeds if (family, seed) not in asked], desc=family, leave=False):
            conversation = make_conversation(generator.tokenizer, arguments.tokens, arguments.facts, seed, family)
            measured = run_conversation(
                generator,
                watch,
                conversation,
                arguments.turns,
                arguments.settings,
                arguments.keep_rate,
                not arguments.no_controls,
            )
            rows += [{"family": family, "conversation": seed, **row} for row in measured]
            if arguments.out is not None:
                write_rows(arguments.out, settings, rows)
    arms = ["dense", *([] if arguments.no_controls else ["sparse", "none"]), *arguments.settings]
    summary = summarise(rows, arguments.families, arms, arguments.settings[0])
    print(
        "family  arm                       right          less dense [95 %]         dropped   held  after  "
        "restored/turn  rewritten  TTFT where it restores, elsewhere"
    )
    for entry in summary:
        difference, low, high = entry["less_dense"]
        print(
            f"{entry['family']:6s}  {entry['arm']:24s}  {entry['right']:.3f} of {entry['asked']:3d}  "
            f"{difference:+.3f} [{low:+.3f}, {high:+.3f}]  {entry['dropped']:10.2f}  {entry['held']:5.2f}  "
            f"{entry['after']:5.2f}  {entry['restored_per_turn']:13.1f}  {entry['rewritten_per_turn']:9.1f}  "
            f"{entry['ttft_restoring'] or math.nan:.2f}x, {entry['ttft_elsewhere'] or math.nan:.2f}x"
        )
    line = {"experiment": "session_suite", **describe(), **settings, "summary": summary}
    print(json.dumps(line))
    if arguments.out is not None:
        write_rows(arguments.out, settings, rows, summary)


def read_rows(path: Path | None, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers that an earlier run left. Raises ValueError where it asked in another way."""
    if path is None or not path.exists():
        return []
    earlier = json.loads(path.read_text(encoding="utf-8"))
    # How many conversations, and of which family, may differ from piece to piece.
    free = ("families", "conversations", "first_seed", "no_controls")
    other = [name for name, value in settings.items() if name not in free and earlier.get(name) != value]
    if other:
        raise ValueError(f"{path} holds answers to another run ({', '.join(other)} differ); name another --out")
    rows: list[dict[str, Any]] = earlier["rows"]
    return rows


def write_rows(
    path: Path, settings: dict[str, Any], rows: list[dict[str, Any]], summary: list[dict[str, Any]] | None = None
) -> None:
    report = {"experiment": "session_suite", **describe(), **settings, "summary": summary or [], "rows": rows}
    path.write_text(json.dumps(report) + "\n", encoding="utf-8")


def cost_over(rows: list[dict[str, Any]], arm: str, other: str, restores: bool) -> float | None:
    """Return the median of CPU seconds to the first token over another arm's, turn by turn of both."""
    cost = {(row["conversation"], row["turn"], row["arm"]): row for row in rows if row["turn"]}
    ratios = [
        row["ttft_cpu_s"] / cost[conversation, turn, other]["ttft_cpu_s"]
        for (conversation, turn, name), row in cost.items()
        if name == arm and bool(row["restored"]) == bool(cost[conversation, turn, other]["restored"]) == restores
    ]
    return float(np.median(ratios)) if ratios else None


def summarise(rows: list[dict[str, Any]], families: list[str], arms: list[str], first: str) -> list[dict[str, Any]]:
    """Sum up the turns after the first, by family and arm; costs are over the arm `first`."""
    summary = []
    for family in families:
        own = [row for row in rows if row["family"] == family]
        for arm in arms:
            later = [row for row in own if row["arm"] == arm and row["turn"]]
            num = len(later)
            summary.append(
                {
                    "family": family,
                    "arm": arm,
                    "right": sum(row["right"] for row in later) / num,
                    "asked": num,
                    "less_dense": list(interval(own, arm)),
                    "dropped": sum(row["dropped"] for row in later) / num,
                    "held": sum(row["held"] == 1 for row in later) / num,
                    "after": sum(row["after"] == 1 for row in later) / num,
                    "restored_per_turn": sum(row["restored"] for row in later) / num,
                    "rewritten_per_turn": sum(row["rewritten"] for row in later) / num,
                    "ttft_restoring": cost_over(own, arm, first, restores=True),
                    "ttft_elsewhere": cost_over(own, arm, first, restores=False),
                }
            )
    return summary


if __name__ == "__main__":
    run_script(main)
