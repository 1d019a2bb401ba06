"""Do facts that the first question had dropped come back when a later turn asks for them?

Conversations about a document with several facts, one asked for in every turn. Arms: *dense*, a session at keep_rate
1.0; *session*, at --keep-rate; and as controls *none*, a session that recalls nothing, and *sparse*, sparse prefill
from nothing on every turn. The last three are branches of one first turn; each arm has its own answers in its history.
Greedy. The arms of a turn are asked in a drawn order; what a turn costs is CPU seconds up to its first token.

Before a turn, "dropped" is the share of the earlier prompt that the target lacks, "held" whether it has every token of
the fact that is asked for, "after" the same with what the turn recalled. A run goes on after the conversations that
--rows holds. Prints a table, ends in one JSON line.

    python -m experiments.quality.session_suite --rows ROWS.jsonl [--target TARGET --draft DRAFT]
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from experiments.common.bootstrap import mean_interval
from experiments.common.conversations import FAMILIES, Conversation, make_conversation
from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.real.rows import Row, Rows, add_row_arguments
from spec_stack import PrefillConfig, Session, SessionConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.types import Metrics

Messages = list[dict[str, str]]
ARMS = ("dense", "session", "none", "sparse")


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

    def branch(self, session: Session | None) -> Arm:
        """Another way to go on from here."""
        return Arm(session, self.history, self.held, self.num_seen)


def branches(stem: Arm) -> dict[str, Arm]:
    """The arms that go on from a first turn in a session."""
    if stem.session is None:
        raise ValueError("only a session has branches")
    recalling, forgetful = stem.session.fork(), stem.session.fork()
    recalling.config, forgetful.config = SessionConfig(), SessionConfig(restore=False)
    return {"session": stem.branch(recalling), "none": stem.branch(forgetful), "sparse": stem.branch(None)}


def converse(
    generator: SpecStackGenerator, watch: Watch, conversation: Conversation, num_turns: int, keep_rate: float
) -> dict[str, list[Row]]:
    """The turns of a conversation after the first, by arm."""
    found: dict[str, list[Row]] = defaultdict(list)
    arms = {"dense": Arm(generator.session(), []), "stem": Arm(generator.session(SessionConfig(restore=False)), [])}
    for turn in range(num_turns):
        span = span_of(generator.tokenizer, conversation, turn)
        content = conversation.ask(turn, [])[0]["content"]
        order = random.Random(f"{content} {turn}").sample(list(arms.items()), len(arms))
        for name, arm in order:
            # Rejected drafts of the last turn are no part of the conversation.
            num_seen, num_held = arm.num_seen, sum(position < arm.num_seen for position in arm.held)
            held_before = len(span & arm.held) / len(span)
            watch.take()
            options = {"max_tokens": 32, "keep_rate": 1.0 if name == "dense" else keep_rate}
            text, metrics, ttft_cpu_s = arm.ask(
                generator, content, options | ({} if turn else {"sparse_prefill": "on"})
            )
            arm.held = watch.take() | (set() if name == "sparse" else arm.held)
            if turn:
                found[name].append(
                    {
                        "text": text,
                        "right": conversation.facts[turn].answer in text,
                        "dropped": 1 - num_held / num_seen,
                        "held": held_before,
                        "after": len(span & arm.held) / len(span),
                        "recalled": metrics.num_restored_tokens,
                        "prefilled_again": metrics.num_rewritten_tokens,
                        "ttft_cpu_s": ttft_cpu_s,
                        "ttft_s": metrics.ttft_s,
                    }
                )
        if turn == 0:
            arms = {"dense": arms["dense"], **branches(arms["stem"])}
    return found


def less_dense(pairs: Sequence[tuple[Row, Row]]) -> list[float]:
    """Share right of an arm less that of dense, with its interval over conversations."""

    def right(row: Row) -> float:
        return sum(turn["right"] for turn in row["turns"]) / len(row["turns"])

    return mean_interval([right(own) - right(dense) for own, dense in pairs])


def summarise(rows: Rows, families: Sequence[str]) -> list[dict[str, Any]]:
    """Means over the turns after the first, by family and arm."""
    summary = []
    for family in families:
        for arm in ARMS:
            pairs = [pair for pair in rows.pairs(arm, "dense") if pair[0]["family"] == family]
            turns = [turn for own, _ in pairs for turn in own["turns"]]
            if not turns:
                continue
            means = {name: float(np.mean([turn[name] for turn in turns])) for name in ("dropped", "recalled")}
            told = {
                "family": family,
                "arm": arm,
                "asked": len(turns),
                "right": float(np.mean([turn["right"] for turn in turns])),
                "less_dense": less_dense(pairs),
                "held": float(np.mean([turn["held"] == 1 for turn in turns])),
                "after": float(np.mean([turn["after"] == 1 for turn in turns])),
                "prefilled_again": float(np.mean([turn["prefilled_again"] for turn in turns])),
                "ttft_cpu_s": float(np.median([turn["ttft_cpu_s"] for turn in turns])),
                **means,
            }
            summary.append(told)
            shown = "  ".join(f"{name} {value:.3f}" for name, value in told.items() if isinstance(value, float))
            print(f"{family:11s}{arm:9s} n={len(turns):4d}  {shown}")
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    add_row_arguments(parser, limited=False)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--tokens", type=int, default=4200, help="of the document (%(default)s)")
    parser.add_argument("--facts", type=int, default=12)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--conversations", type=int, default=40, help="of each family (%(default)s)")
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--keep-rate", type=float, default=0.05, help="(%(default)s)")
    add_out_argument(parser)
    arguments = parser.parse_args()
    # Whatever a calibration says: attention selects, so that facts of other wordings are dropped.
    generator = load_generator(arguments, SpecStackConfig(PrefillConfig(scorer="attention")), calibration=False)
    rows, watch = Rows(Path(arguments.rows), arguments.minutes), Watch(generator)
    for family in arguments.families:
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.conversations):
            key = f"{family} {seed}"
            if (key, "dense") in rows or not rows.has_time:
                continue
            conversation = make_conversation(generator.tokenizer, arguments.tokens, arguments.facts, seed, family)
            found = converse(generator, watch, conversation, arguments.turns, arguments.keep_rate)
            for arm, turns in found.items():
                rows.add(key, arm, {"family": family, "turns": turns})
    settings = {name: getattr(arguments, name) for name in ("tokens", "facts", "turns", "conversations", "keep_rate")}
    report = {"experiment": "session_suite", **describe(), **settings}
    print_report({**report, "summary": summarise(rows, arguments.families)}, arguments.out)


if __name__ == "__main__":
    run_script(main)
