"""Do facts that the first question had dropped come back when a later turn asks for them?

Conversations about a document with several facts, one asked for in every turn, in two sessions with answers of their
own: *dense*, at keep_rate 1.0, and *session*, at --keep-rate. Greedy, in a drawn order; what a turn costs is CPU
seconds up to its first token.

Of a turn, "dropped" is the share of the earlier prompt that the target lacks, "held" whether it has every token of the
fact that is asked for, "after" the same with what the turn recalled. A run goes on after the conversations that --rows
holds. Prints a table, ends in one JSON line.

    python -m experiments.quality.session_suite --rows ROWS.jsonl [--target TARGET --draft DRAFT]
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from functools import partial
from statistics import fmean, median
from time import process_time
from typing import Any

from experiments.common import script
from experiments.common.answers import timed
from experiments.common.bootstrap import mean_interval
from experiments.common.conversations import FactsConversation, make_conversation
from spec_stack import PrefillConfig, Session, SpecStackConfig, SpecStackGenerator
from spec_stack.bench.rows import Row, Rows

DENSE, SESSION = "dense", "session"
ARMS = (DENSE, SESSION)


def span_of(tokenizer: Any, conversation: FactsConversation, turn: int) -> set[int]:
    """Token positions of the fact of a turn, in the first prompt and so in all."""
    messages = conversation.ask(0, [])
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    start = text.index(conversation.facts[turn].text)
    stop = start + len(conversation.facts[turn].text)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False).offset_mapping
    return {at for at, (first, last) in enumerate(offsets) if first < stop and last > start}


def ask(session: Session, messages: list[dict[str, str]], options: dict[str, Any]) -> tuple[str, Row]:
    """One turn's answer, and what it cost up to its first token."""
    answer = timed(partial(session.stream, messages=messages, **options), process_time)
    metrics = answer.metrics
    return answer.text, {
        "recalled": metrics.num_recalled_tokens,
        "ttft_cpu_s": answer.first_s,
    }


def converse(
    generator: SpecStackGenerator, conversation: FactsConversation, num_turns: int, keep_rate: float
) -> dict[str, list[Row]]:
    """The turns of a conversation after the first, by arm."""
    found: dict[str, list[Row]] = {arm: [] for arm in ARMS}
    histories: dict[str, list[dict[str, str]]] = {arm: [] for arm in ARMS}
    with ExitStack() as stack:
        sessions = {arm: stack.enter_context(generator.session()) for arm in ARMS}
        for turn in range(num_turns):
            span = span_of(generator.tokenizer, conversation, turn)
            for arm in random.Random(f"{conversation.document} {turn}").sample(ARMS, len(ARMS)):
                session, messages = sessions[arm], conversation.ask(turn, histories[arm])
                lacking = {*session.dropped_positions}
                num_seen = len(lacking) + session.num_cached_tokens
                options = {"max_tokens": 32, "keep_rate": 1.0 if arm == DENSE else keep_rate}
                text, cost = ask(session, messages, options | ({} if turn else {"sparse_prefill": "on"}))
                histories[arm] = [*messages, {"role": "assistant", "content": text}]
                if turn:
                    found[arm].append(
                        {
                            "text": text,
                            "right": conversation.facts[turn].answer in text,
                            "dropped": len(lacking) / num_seen,
                            "held": 1 - len(span & lacking) / len(span),
                            "after": 1 - len(span & {*session.dropped_positions}) / len(span),
                            **cost,
                        }
                    )
    return found


def summarise(rows: Rows) -> list[dict[str, Any]]:
    """Means over the turns after the first, by arm; less_dense: share right less that of dense, by conversations."""
    summary = []
    for arm in ARMS:
        pairs = rows.pairs(arm, DENSE)
        turns = [turn for own, _ in pairs for turn in own["turns"]]
        right = [[fmean(turn["right"] for turn in row["turns"]) for row in pair] for pair in pairs]
        if not turns:
            continue
        told = {
            "arm": arm,
            "asked": len(turns),
            "right": fmean(turn["right"] for turn in turns),
            "less_dense": mean_interval([own - dense for own, dense in right]),
            "held": fmean(turn["held"] == 1 for turn in turns),
            "after": fmean(turn["after"] == 1 for turn in turns),
            **{name: fmean(turn[name] for turn in turns) for name in ("dropped", "recalled")},
            "ttft_cpu_s": median(turn["ttft_cpu_s"] for turn in turns),
        }
        summary.append(told)
        shown = "  ".join(f"{name} {value:.3f}" for name, value in told.items() if isinstance(value, float))
        print(f"{arm:9s} n={len(turns):4d}  {shown}")
    return summary


def main() -> None:
    parser = script.make_parser(__doc__)
    script.add_pair_arguments(parser)
    script.add_row_arguments(parser, limited=False)
    parser.add_argument("--tokens", type=int, default=4200, help="of the document (%(default)s)")
    parser.add_argument("--facts", type=int, default=12)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--conversations", type=int, default=40, help="(%(default)s)")
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--keep-rate", type=float, default=0.05, help="(%(default)s)")
    arguments = parser.parse_args()
    # Whatever a calibration says: attention selects, so that facts of other wordings are dropped.
    generator = script.load_generator(arguments, SpecStackConfig(PrefillConfig(scorer="attention")), calibration=False)
    rows = Rows(arguments.rows, arguments.minutes)
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.conversations):
        key = f"mixed {seed}"
        if (key, DENSE) in rows or not rows.has_time:
            continue
        conversation = make_conversation(generator.tokenizer, arguments.tokens, arguments.facts, seed)
        for arm, turns in converse(generator, conversation, arguments.turns, arguments.keep_rate).items():
            rows.add(key, arm, {"turns": turns})
    settings = {name: getattr(arguments, name) for name in ("tokens", "facts", "turns", "conversations", "keep_rate")}
    report = {**settings}
    script.print_report("session_suite", {**report, "summary": summarise(rows)}, arguments.out)


if __name__ == "__main__":
    script.run(main)
