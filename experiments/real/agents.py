"""Recorded agents, replayed: what does a turn prefill, and how soon comes its first token?

Reads conversations as OpenAI's messages, a JSON object with "messages" (and "tools", "id") a line: anyone's log. Every
prefix that ends before an assistant's message is a turn. Two sessions go through all of them, the order turning: *kept*
is the dense target with its cache kept; *session* prunes what a turn adds where that is long, and drafts. What a log
lacks of a system message and tools stands before it, as an agent has them. At the last turn two more: *cold kept* and
*cold session* begin with the whole conversation, as after an eviction. Every row says whether the system message or a
schema lost a token (there must be none). Resumable by conversation; seconds are of the wall, so nothing else may run.

    agents.py sessions.jsonl --target T --draft D --rows rows.jsonl --most-tokens 11000
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from experiments.common import script
from experiments.common.answers import timed
from spec_stack import Session, SpecStackGenerator
from spec_stack.bench.rows import Rows

KEPT, SESSION = "kept", "session"
_SYSTEM = "You are a coding agent. Work in small steps, use the tools, and say what you did in one sentence."
_DENSE = {"sparse_prefill": "off", "gamma": 0}
_COUNTED = (
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_new_tokens",
    "num_kept_tokens",
    "num_recalled_tokens",
    "num_recomputed_tokens",
    "sparse_prefill",
)


def _tool(name: str, does: str, **arguments: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": said} for key, said in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": [*arguments]}
    return {"type": "function", "function": {"name": name, "description": does, "parameters": parameters}}


TOOLS = [
    _tool("shell", "Run a command and return what it prints", command="the command line"),
    _tool("read_file", "Return a file's text", path="its path in the repository"),
    _tool("apply_patch", "Change files by a unified diff", patch="the diff"),
]


def turns_of(row: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """The messages of every turn: all that stands before an assistant's message, and the whole, if a user ends it."""
    messages = list(row["messages"])
    if messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _SYSTEM})
    ends = [at for at, message in enumerate(messages) if message["role"] == "assistant" and at > 1]
    if messages[-1]["role"] != "assistant":
        ends.append(len(messages))
    return [messages[:end] for end in ends]


def ask(session: Session, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """One turn: seconds to its first token, the template included, and what was counted."""
    answer = timed(partial(session.stream, messages=messages, **options), perf_counter)
    counted = {name: getattr(answer.metrics, name) for name in _COUNTED}
    return {"ttft_s": answer.first_s, "total_s": answer.total_s, **counted}


def shared_tokens(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> int:
    """Tokens of the system message and the schemas: those that two conversations of other users have in common."""
    texts = [
        tokenizer.apply_chat_template(
            [messages[0], {"role": "user", "content": content}], tools=list(tools), tokenize=False
        )
        for content in ("x", "7")
    ]
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    return next(at for at, (one, other) in enumerate(zip(*ids, strict=False)) if one != other)


def replay(
    generator: SpecStackGenerator,
    key: str,
    row: Mapping[str, Any],
    rows: Rows,
    max_tokens: int,
    only_cold: bool = False,
) -> None:
    """One conversation through all arms, or the cold ones, a row printed after every answer; they are kept when all are
    there."""
    tools = list(row.get("tools") or TOOLS)
    turns = turns_of(row)
    options: dict[str, dict[str, Any]] = {KEPT: {**_DENSE}, SESSION: {}}
    for each in options.values():
        each.update(tools=tools, max_tokens=max_tokens)
    protected = shared_tokens(generator.tokenizer, turns[0], tools)
    found: list[dict[str, Any]] = []

    def note(arm: str, turn: int, session: Session, told: dict[str, Any]) -> None:
        lost = sum(position < protected for position in session.dropped_positions)
        found.append({"arm": arm, "turn": turn, "num_turns": len(turns), "system_tokens_lost": lost, **told})
        print(
            f"{key[:34]:34s} {turn:3d} {arm:14s} {told['ttft_s']:7.2f} s  {told['num_prompt_tokens']:6d} tokens, "
            f"{told['num_cached_tokens']:6d} cached, {told['num_new_tokens']:6d} new, "
            f"{told['num_recalled_tokens']:5d} recalled, {told['num_kept_tokens']:6d} held",
            flush=True,
        )

    with generator.session() as kept, generator.session() as session:
        arms = {KEPT: kept, SESSION: session}
        for turn, messages in enumerate([] if only_cold else turns):
            for arm in [*arms][:: -1 if turn % 2 else 1]:
                note(arm, turn, arms[arm], ask(arms[arm], messages, options[arm]))
    last = len(turns) - 1
    for arm in (KEPT, SESSION):
        with generator.session() as cold:
            note(f"cold {arm}", last, cold, ask(cold, turns[last], options[arm]))
    for each in found:
        rows.add(f"{key}/{each['turn']}", each["arm"], {name: value for name, value in each.items() if name != "arm"})


def compare(kind: str, seconds: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Print and return the ratios of some turns' first tokens to another arm's: median, least and most."""
    ratios = [one / other for one, other in seconds]
    middle, least, most = median(ratios), min(ratios), max(ratios)
    print(f"{kind:28s} n={len(ratios):3d}  TTFT {middle:5.2f} of dense [{least:.2f}, {most:.2f}]")
    return {"n": len(ratios), "ttft_ratio": [middle, least, most]}


def report_of(rows: Rows) -> dict[str, Any]:
    """Print the ratios to the dense target, by kind of turn: median, least and most."""
    pairs = rows.pairs(SESSION, KEPT)
    later = [(one, other) for one, other in pairs if one["turn"]]
    kinds = {
        "first turns": [pair for pair in pairs if not pair[0]["turn"]],
        "warm turns, nothing pruned": [pair for pair in later if not pair[0]["sparse_prefill"]],
        "warm turns, pruned": [pair for pair in later if pair[0]["sparse_prefill"]],
        "cold, whole conversation": rows.pairs(f"cold {SESSION}", f"cold {KEPT}"),
    }
    report: dict[str, Any] = {}
    for name, found in kinds.items():
        if not found:
            continue
        report[name] = compare(name, [(one["ttft_s"], other["ttft_s"]) for one, other in found])
    pruning = (SESSION, f"cold {SESSION}")
    lost = sum(row["system_tokens_lost"] for arm in pruning for row in rows.of_arm(arm).values())
    restored = sum(row["num_recalled_tokens"] for row in rows.of_arm(SESSION).values())
    print(f"tokens of system messages and schemas that were dropped: {lost}; tokens recalled: {restored}")
    return {"kinds": report, "system_tokens_lost": lost, "restored": restored}


def main() -> None:
    parser = script.make_parser(__doc__)
    parser.add_argument("sessions", type=Path, help="conversations as JSON Lines")
    script.add_pair_arguments(parser)
    script.add_row_arguments(parser)
    parser.add_argument("--most-tokens", type=int, default=1 << 30, help="pass over longer conversations")
    parser.add_argument("--max-tokens", type=int, default=4, help="of an answer; the log's own goes on (%(default)s)")
    parser.add_argument("--cold", action="store_true", help="the last turns alone, from nothing")
    parser.add_argument("--ids", nargs="+", help="of the conversations to replay; all where none are given")
    arguments = parser.parse_args()
    generator = script.load_generator(arguments, calibration=None)
    rows = Rows(arguments.rows, arguments.minutes)
    read = [json.loads(line) for line in arguments.sessions.read_text(encoding="utf-8").splitlines() if line.strip()]
    conversations = {str(row.get("id", at)): row for at, row in enumerate(read)}
    limit = min(arguments.most_tokens, min(generator.pair.max_positions) - arguments.max_tokens)
    generator.generate("Warm up.", max_tokens=2)
    done = 0
    for key, row in conversations.items():
        turns = turns_of(row)
        if (f"{key}/{len(turns) - 1}", f"cold {SESSION}") in rows or (arguments.ids and key not in arguments.ids):
            continue
        text = generator.tokenizer.apply_chat_template(turns[-1], tools=row.get("tools") or TOOLS, tokenize=False)
        length = len(generator.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        if length > limit:
            print(f"{key}: {length} tokens, over {limit}; passed over")
            continue
        if done == arguments.limit or not rows.has_time:
            break
        replay(generator, key, row, rows, arguments.max_tokens, arguments.cold)
        done += 1
    script.print_report("agents", {**report_of(rows)}, arguments.out)


if __name__ == "__main__":
    script.run(main)
