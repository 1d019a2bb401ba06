"""Conversations on a server: what a follow-up waits for, and what is left of the text it asks about, by rule.

Arms are what a request asks for, of one server: "dense" (sparse_prefill off, so the radix cache alone), "freeze",
"afresh" and "recall". "earlier" is a server of its own from another checkout of this project (--earlier FOLDER), at its
defaults. Every part goes to one arm after the other, in an order that rotates, with empty caches. A conversation goes
on from its arm's own replies. Every time is from sending a request to its first streamed chunk, and one run is one
figure: on a busy machine compare arms, not times.

- document: an 8K document, then short questions about it; 1 and 4 clients at once.
- tools: 2K to 4K of new text a turn; 1 and 4 clients at once.
- facts: 12 facts in a document of 4,200 tokens, another one asked for in every turn: whether its line is among what the
  target was given, whole, and whether the reply is right (which is as much the target's skill as the rule's).
- pool: what the draft's pool costs beside the target's, and what a follow-up costs whose text has left it.

On a CPU it needs the stand-ins of tests/serving/support. Prints a line per part and arm with what it took, ends in one
JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

from transformers import AutoTokenizer

from experiments.common.conversations import FAMILIES, make_conversation
from experiments.common.environment import describe
from experiments.common.report import print_report
from experiments.common.script import run_script
from experiments.serving.client import Answer, Client, Prompts
from experiments.serving.server import CPU_ARGUMENTS, CPU_ENVIRONMENT, HOST, SglangServer, free_port
from spec_stack.cli.demo import hide_fact
from spec_stack.hf.loading import resolve_pair

DENSE, EARLIER, FREEZE, AFRESH, RECALL = "dense", "earlier", "freeze", "afresh", "recall"
RULES = (FREEZE, AFRESH, RECALL)
ARMS = (DENSE, *RULES, EARLIER)
PARTS = ("document", "tools", "facts", "pool")
# All of them from the length on from which new text is pruned by default.
_TOOL_TOKENS = (2200, 3000, 4000, 2500)


@dataclass(frozen=True)
class Arm:
    """Whom it asks, and with which options."""

    client: Client
    custom: dict[str, Any]


class Talk:
    """One conversation, in token ids: every turn goes on from the reply before."""

    def __init__(self, arm: Arm, tokenizer: Any, first: Sequence[int]) -> None:
        self._arm, self._tokenizer = arm, tokenizer
        self._history = list(first)
        self.turns: list[dict[str, Any]] = []

    def ask(self, num_new: int = 8, **custom: Any) -> Answer:
        """The next reply; `turns` takes in what it waited for and what was reported."""
        answer = self._arm.client.ask(self._history, num_new, **{**custom, **self._arm.custom})
        report = answer.meta_info.get("spec_stack", {})
        self.turns.append(
            {
                "ttft_s": answer.ttft_s,
                "prompt": len(self._history),
                "kept": report.get("num_kept_tokens"),
                "cached": answer.meta_info["cached_tokens"],
                "draft_read": report.get("num_draft_tokens", report.get("num_scored_tokens")),
                "recalled": report.get("num_recalled_tokens"),
                "outcome": report.get("outcome"),
            }
        )
        # The mark that ends a reply comes with the next turn.
        ended = len(answer.output_ids) and answer.output_ids[-1] in self._tokenizer.all_special_ids
        self._history += answer.output_ids[:-1] if ended else answer.output_ids
        return answer

    @property
    def history(self) -> list[int]:
        return self._history

    def go_on(self, text: str, reply_text: str = "") -> int:
        """Append what the template ends the reply with, and the user's next turn; return where these begin. reply_text:
        what was replied, where nobody was asked."""
        if reply_text:
            self._history += self._tokenizer(reply_text, add_special_tokens=False).input_ids
        start = len(self._history)
        reply = "the reply before"
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": reply},
            {"role": "user", "content": text},
        ]
        rendered = str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        self._history += self._tokenizer(rendered.partition(reply)[2], add_special_tokens=False).input_ids
        return start


class Script:
    """The texts, the same to every arm. Every document begins with a number of its own."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._prompts = Prompts(tokenizer)
        # Token by token it takes longer than many a reply.
        self._text = lru_cache(maxsize=4)(self._decode)

    def _decode(self, ids: tuple[int, ...]) -> tuple[str, list[int]]:
        """A prompt's text, and where in it every token ends."""
        pieces = [str(self.tokenizer.decode([token_id])) for token_id in ids]
        return "".join(pieces), list(accumulate(len(piece) for piece in pieces))

    def document(self, num_tokens: int, number: int) -> list[int]:
        hidden = hide_fact(self.tokenizer, num_tokens, number)
        return self.chat(f"Document {number}:\n{hidden.document}\n\n{hidden.question}")

    def chat(self, content: str) -> list[int]:
        return self._prompts.chat([{"role": "user", "content": content}])

    def text(self, num_tokens: int, number: int) -> str:
        return self._prompts.text(num_tokens, number)

    def span(self, ids: Sequence[int], line: str) -> tuple[int, int]:
        """Where a line stands in a prompt: the shortest run of tokens whose text has it."""
        text, ends = self._text(tuple(ids))
        start = text.find(line)
        if start < 0:
            raise ValueError(f"the prompt has no line {line!r}")
        first = next(at for at, end in enumerate(ends) if end > start)
        return first, next(at for at, end in enumerate(ends) if end >= start + len(line)) + 1


def timed_turns(arm: Arm, script: Script, num_clients: int, num_turns: int, tools: bool) -> list[list[dict[str, Any]]]:
    """Every client's turns. Clients go on when their own reply has ended, whatever the others do."""

    def one(index: int) -> list[dict[str, Any]]:
        number = 1000 * num_clients + 100 * tools + index
        talk = Talk(arm, script.tokenizer, script.document(3000 if tools else 8000, number))
        for turn in range(num_turns):
            talk.ask()
            if tools:
                output = script.text(_TOOL_TOKENS[turn % len(_TOOL_TOKENS)], number + 10 * turn)
                talk.go_on(f"The tool said:\n{output}\nGo on with step {turn}.")
            else:
                talk.go_on(f"And what does part {turn} of it say?")
        return talk.turns

    with ThreadPoolExecutor(num_clients) as pool:
        return list(pool.map(one, range(num_clients)))


def kept_lines(arm: Arm, script: Script, num_documents: int, num_turns: int, family: str) -> dict[str, Any]:
    """By turn, the shares of documents of which the target was given the line asked for, and of right replies."""
    held: list[list[bool]] = [[] for _ in range(num_turns)]
    right: list[list[bool]] = [[] for _ in range(num_turns)]
    num_kept: list[list[int]] = [[] for _ in range(num_turns)]
    for number in range(num_documents):
        conversation = make_conversation(script.tokenizer, 4200, 12, 4000 + number, family)
        first = script.chat(conversation.ask(0, [])[0]["content"])
        talk = Talk(arm, script.tokenizer, first)
        for turn in range(num_turns):
            fact = conversation.facts[turn]
            answer = talk.ask(24, may_end=True, explain=True)
            given = {
                position
                for start, stop in answer.meta_info["spec_stack"]["kept_spans"]
                for position in range(start, stop)
            }
            held[turn].append(set(range(*script.span(first, fact.text))) <= given)
            right[turn].append(fact.answer in script.tokenizer.decode(answer.output_ids))
            num_kept[turn].append(talk.turns[-1]["kept"] or talk.turns[-1]["prompt"])
            if turn + 1 < num_turns:
                talk.go_on(conversation.facts[turn + 1].question)
    shares = {name: [mean(turn) for turn in by_turn] for name, by_turn in (("held", held), ("right", right))}
    return {**shares, "kept": [mean(turn) for turn in num_kept], "num_documents": num_documents}


def fill_pool(arm: Arm, script: Script, port: int, most_others: int) -> dict[str, Any]:
    """A conversation's second turn, and its third after other texts have taken the draft's pool."""
    talk = Talk(arm, script.tokenizer, script.document(8000, 900))
    talk.ask()
    talk.go_on("And then?")
    talk.ask()
    num_others = 0
    while num_others < most_others and pool_state(port)["num_held"] < 0.98 * pool_state(port)["num_tokens"]:
        arm.client.ask(script.document(8000, 901 + num_others), 1, **arm.custom)
        num_others += 1
    for number in range(2):
        arm.client.ask(script.document(8000, 950 + number), 1, **arm.custom)
    talk.go_on("And after that?")
    talk.ask()
    return {"state": pool_state(port), "num_others": num_others + 2, "turns": talk.turns}


def pool_state(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{HOST}:{port}/server_info", timeout=60) as reply:
        return dict(json.load(reply)["internal_states"][0]["spec_stack"]["draft_pool"])


def short(found: Any) -> Any:
    """Return, of timed turns, the mean over clients by turn."""
    if not isinstance(found, list):
        return found
    by_turn = list(zip(*found, strict=True))
    return {
        "ttft_s": [round(mean(turn["ttft_s"] for turn in turns), 3) for turns in by_turn],
        "cached": [round(mean(turn["cached"] for turn in turns)) for turns in by_turn],
    }


def server_of(options: argparse.Namespace, folder: Path, pair: tuple[str, str], is_earlier: bool) -> SglangServer:
    target, draft = pair
    arguments = ["--model-path", target, "--device", options.device, "--chunked-prefill-size", str(options.chunk)]
    if options.device == "cpu":
        arguments += [*CPU_ARGUMENTS, "--max-total-tokens", str(options.pool_tokens)]
    arguments += ["--speculative-algorithm", "SPEC_STACK", "--speculative-draft-model-path", draft]
    # Servers that wait by looking again and again would take turns with the one that is measured.
    arguments += ["--sleep-on-idle", *shlex.split(options.server_args)]
    environment = dict(CPU_ENVIRONMENT) if options.device == "cpu" else {}
    if is_earlier:
        environment["PYTHONPATH"] = os.pathsep.join([str(options.earlier), os.environ.get("PYTHONPATH", "")])
        # Else `python -m` takes the package of the working folder.
        environment["PYTHONSAFEPATH"] = "1"
    log = folder / ("earlier.log" if is_earlier else "server.log")
    return SglangServer(arguments, environment, free_port(), log, options.start_limit)


def run(options: argparse.Namespace, folder: Path, pair: tuple[str, str]) -> dict[str, dict[str, Any]]:
    """By part and arm."""
    script = Script(AutoTokenizer.from_pretrained(pair[0]))
    found: dict[str, dict[str, Any]] = {}
    with ExitStack() as servers:
        server = servers.enter_context(server_of(options, folder, pair, False))
        client = Client(server.port, extra_key="follow-ups")
        customs = {DENSE: {"sparse_prefill": "off"}, **{rule: {"follow_up": rule} for rule in RULES}}
        arms = {arm: Arm(client, customs[arm]) for arm in options.arms if arm != EARLIER}
        if EARLIER in options.arms:
            arms[EARLIER] = Arm(Client(servers.enter_context(server_of(options, folder, pair, True)).port), {})
        parts: dict[str, tuple[Sequence[str], Callable[[Arm], Any]]] = {}
        for num in options.clients:
            parts[f"document x{num}"] = (
                ARMS,
                lambda arm, num=num: timed_turns(arm, script, num, options.turns, False),
            )
            parts[f"tools x{num}"] = (
                ARMS,
                lambda arm, num=num: timed_turns(arm, script, num, options.tool_turns, True),
            )
        parts["facts"] = (
            (DENSE, *RULES),
            lambda arm: kept_lines(arm, script, options.documents, options.fact_turns, options.family),
        )
        parts["pool"] = (RECALL,), lambda arm: fill_pool(arm, script, server.port, options.others)
        for arm in arms.values():
            arm.client.ask(script.document(300, 790), 8)
            arm.client.ask(script.document(3000, 791), 8)
        for at, (part, (allowed, measure)) in enumerate(parts.items()):
            names = [arm for arm in arms if arm in allowed]
            if part.split()[0] not in options.parts or not names:
                continue
            turn = at % len(names)
            for name in [*names[turn:], *names[:turn]]:
                arms[name].client.forget()
                begun = perf_counter()
                found.setdefault(part, {})[name] = measure(arms[name])
                took_s = perf_counter() - begun
                print(f"{part:12} {name:8} {took_s:6.1f} s  {json.dumps(short(found[part][name]))}", flush=True)
    return found


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[DENSE, *RULES])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--earlier", type=Path, metavar="FOLDER", help="checkout of this project for the arm 'earlier'")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4], help="at once (default 1 4)")
    parser.add_argument("--turns", type=int, default=8, help="over the document (default %(default)s)")
    parser.add_argument("--tool-turns", type=int, default=4, help="with tool output (default %(default)s)")
    parser.add_argument("--documents", type=int, default=20, help="with facts in them (default %(default)s)")
    parser.add_argument("--fact-turns", type=int, default=4, help="(default %(default)s)")
    parser.add_argument("--family", choices=FAMILIES, default="codes", help="of facts (default %(default)s)")
    parser.add_argument("--others", type=int, default=12, help="most texts that fill the pool (default %(default)s)")
    parser.add_argument("--target", help="model folder or name (default: the embedded pair's)")
    parser.add_argument("--draft", help="model folder or name (default: the embedded pair's)")
    parser.add_argument("--device", default="cpu", help="(default %(default)s)")
    parser.add_argument("--chunk", type=int, default=512, help="--chunked-prefill-size (default %(default)s)")
    parser.add_argument("--pool-tokens", type=int, default=80000, help="the target's, on a CPU (default %(default)s)")
    parser.add_argument("--start-limit", type=float, default=300, metavar="S", help="(default %(default)s)")
    parser.add_argument("--server-args", default="", metavar="'--FLAG VALUE …'", help="more launch arguments")
    parser.add_argument("--out", type=Path, help="also write the JSON line here")
    options = parser.parse_args(argv)
    if EARLIER in options.arms and options.earlier is None:
        parser.error("the arm 'earlier' needs --earlier FOLDER, a checkout of this project")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = run(options, Path(folder), resolve_pair(options.target, options.draft))
    report = {"experiment": "follow_ups", **describe(), "chunk": options.chunk, "device": options.device, **found}
    print_report(report, options.out)


if __name__ == "__main__":
    run_script(main)
