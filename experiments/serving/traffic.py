"""Conversations, shared system prompts, arrivals in the middle of a stream, clients that hang up: what they wait for.

Each arm is a server of its own: "off" (no speculation, none of ours), "STANDALONE" (SGLang's own, same draft), "dense"
(SPEC_STACK with keep_rate 1) and "SPEC_STACK". All servers run at once and sleep while they have nothing to do; every
request goes to one arm after the other, in an order that rotates, so that what else the machine does falls on all of
them alike. Every time is from sending a request to its first streamed chunk.

- dense first: an 8K document whose first turn is prefilled densely, then short questions about it; beside it, turn by
  turn, a second conversation whose first turn is as the server has it by default (only SPEC_STACK prunes it).
- shared system: 20 clients with one system prompt of 2K and a question each, one after the other.
- system and tools: 5K of system prompt and tool schemas, and a short question: how much of it is kept.
- arrivals: a stream runs while one 8K prompt arrives, then five of 4K at once: the stream's longest gap, and what it
  may be: one chunk's work (a part of a scoring, or a prefill batch of the chunk size, whichever is longer) and a step.
- lengths (asked for by --parts, with --arms off STANDALONE dense slots): documents of 1K to 8K, one and four at once:
  seconds to the first token, tokens/s after it, the share of drafted tokens that is accepted, whether all tokens are
  those of "off". "slots" is SPEC_STACK with `--spec-stack-sparse-prefill draft_only`.
- growing (asked for by --parts, same arms): a conversation to which every turn adds 1,000 tokens of text and a
  question: by turn the same values. All arms go on from the replies of "off", or of the first arm without it.
- hang-ups: four clients send 8K prompts and close their connections; how long a short request waits then, alone and
  beside a stream.

On a CPU it needs the stand-ins of tests/serving/support. Prints a table, ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Thread
from time import perf_counter, sleep
from typing import Any

from transformers import AutoTokenizer

from experiments.common.environment import describe
from experiments.common.report import print_report
from experiments.common.script import run_script
from experiments.serving.client import Answer, Client, Prompts
from experiments.serving.server import (
    CPU_ARGUMENTS,
    CPU_ENVIRONMENT,
    ServerError,
    SglangServer,
    free_port,
    other_plugins,
)
from spec_stack.hf.loading import resolve_pair

ARMS = OFF, STANDALONE, DENSE, SPEC_STACK = "off", "STANDALONE", "dense", "SPEC_STACK"
SLOTS = "slots"


@dataclass
class Arms:
    """The running servers' clients, by arm, and whose turn it is to be the first."""

    clients: Mapping[str, Client]
    first: int = 0

    def forget(self) -> None:
        """Empty every server's caches: documents begin like others."""
        for client in self.clients.values():
            client.forget()

    def in_turn(self) -> Iterator[tuple[str, Client]]:
        """All of them, each time beginning with another."""
        names = list(self.clients)
        self.first = (self.first + 1) % len(names)
        for name in [*names[self.first :], *names[: self.first]]:
            yield name, self.clients[name]


def turn_of(answer: Answer) -> dict[str, Any]:
    report = answer.meta_info.get("spec_stack", {})
    return {
        "ttft_s": answer.ttft_s,
        "cached": answer.meta_info["cached_tokens"],
        "scored": report.get("num_scored_tokens", 0),
        "reason": report.get("sparse_prefill_reason", ""),
    }


def converse(arms: Arms, prompts: Prompts, seed: int, num_turns: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Two conversations per arm, turn by turn: dense in the first turn, and as the server has it. By kind and arm."""
    kinds: dict[str, dict[str, Any]] = {"dense_first": {"sparse_prefill": "off"}, "as_it_comes": {}}
    arms.forget()
    documents = {kind: prompts.document(8000, seed + at) for at, kind in enumerate(kinds)}
    histories = {(kind, arm): list(document) for kind, document in documents.items() for arm in arms.clients}
    turns: dict[str, dict[str, list[dict[str, Any]]]] = {kind: {arm: [] for arm in arms.clients} for kind in kinds}
    for turn in range(num_turns):
        for kind, first in kinds.items():
            for arm, client in arms.in_turn():
                answer = client.ask(histories[kind, arm], 16, **(first if turn == 0 else {}))
                turns[kind][arm].append(turn_of(answer))
                histories[kind, arm] += [*answer.output_ids, *prompts.follow_up(turn)]
    return turns


def conversations(arms: Arms, prompts: Prompts, repeats: int, num_turns: int) -> dict[str, Any]:
    """Medians over conversations; against: SPEC_STACK's time over another arm's, of the same turn, from turn 2 on."""
    found = [converse(arms, prompts, 800 + 10 * at, num_turns) for at in range(repeats)]
    report: dict[str, Any] = {}
    for kind in found[0]:
        by_arm = {
            arm: [
                {
                    "ttft_s": median(each[kind][arm][turn]["ttft_s"] for each in found),
                    "cached": [each[kind][arm][turn]["cached"] for each in found],
                    "scored": [each[kind][arm][turn]["scored"] for each in found],
                    "reason": found[0][kind][arm][turn]["reason"],
                }
                for turn in range(num_turns)
            ]
            for arm in arms.clients
        }
        report[kind] = {"turns": by_arm}
        if SPEC_STACK in by_arm:
            report[kind]["against"] = {
                arm: ratio_of_later_turns([(each[kind][SPEC_STACK], each[kind][arm]) for each in found])
                for arm in by_arm
                if arm != SPEC_STACK
            }
    return report


def ratio_of_later_turns(pairs: Sequence[tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]]) -> float:
    """Median of ours over theirs, of all turns but the first ones."""
    return median(
        ours["ttft_s"] / theirs["ttft_s"]
        for own_turns, other_turns in pairs
        for ours, theirs in zip(own_turns[1:], other_turns[1:], strict=True)
    )


def shared_system(arms: Arms, prompts: Prompts, num_clients: int) -> dict[str, Any]:
    system = {"role": "system", "content": prompts.text(2000, seed=500)}
    answers: dict[str, list[Answer]] = {arm: [] for arm in arms.clients}
    for at in range(num_clients):
        ids = prompts.chat([system, {"role": "user", "content": f"{prompts.text(150, seed=510 + at)} What is this?"}])
        for arm, client in arms.in_turn():
            answers[arm].append(client.ask(ids, 8))
    return {
        arm: {
            "first_ttft_s": each[0].ttft_s,
            "median_ttft_s": median(answer.ttft_s for answer in each[1:]),
            "median_cached": median(answer.meta_info["cached_tokens"] for answer in each[1:]),
            "num_pruned": sum(answer.meta_info.get("spec_stack", {}).get("sparse_prefill", False) for answer in each),
        }
        for arm, each in answers.items()
    }


def system_and_tools(arms: Arms, prompts: Prompts) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    rules = prompts.text(4600, seed=600) + "\nTools: " + json.dumps([tool] * 12)
    ids = prompts.chat([{"role": "system", "content": rules}, {"role": "user", "content": "Say hello."}])
    found = {}
    for arm, client in arms.in_turn():
        report = client.ask(ids, 4).meta_info.get("spec_stack", {})
        found[arm] = {
            "num_prompt_tokens": len(ids),
            "num_kept_tokens": report.get("num_kept_tokens", len(ids)),
            "reason": report.get("sparse_prefill_reason", ""),
        }
    return found


@contextmanager
def running_stream(client: Client, prompts: Prompts, seed: int) -> Iterator[Answer]:
    """A stream without drafting, with its first 60 chunks here; hangs up at the end."""
    stream = Answer(perf_counter())
    running = Thread(target=client.ask, args=(prompts.document(60, seed), 3000, stream), kwargs={"gamma": 0})
    running.start()
    try:
        while len(stream.chunk_times) < 60:
            if not running.is_alive():
                raise ServerError("a stream ended before its 60th chunk")
            sleep(0.02)
        yield stream
        if not running.is_alive():
            raise ServerError("the stream ended before what it was to run beside; nothing was measured")
    finally:
        stream.is_enough = True
        running.join()


def prefill_chunk_s(client: Client, prompts: Prompts, chunk: int) -> float:
    """How long the server takes over one chunk behind two that are cached, about where a pruned prompt's last ones are:
    the median of three."""
    times = []
    for at in range(3):
        ids = prompts.document(3 * chunk + 100, 740 + at)[: 3 * chunk]
        client.ask(ids[: 2 * chunk], 1, sparse_prefill="off")
        times.append(client.ask(ids, 1, sparse_prefill="off").ttft_s)
    return median(times)


def arrivals(client: Client, prompts: Prompts, chunk: int) -> dict[str, Any]:
    """Gaps of a running stream, beside the work that they may hold."""
    found: dict[str, Any] = {"prefill_chunk_s": prefill_chunk_s(client, prompts, chunk)}
    parts: list[float] = []
    with running_stream(client, prompts, 700) as stream:
        alone = [b - a for a, b in pairwise(stream.chunk_times[5:60])]
        found |= {"step_s": median(alone), "longest_step_s": max(alone)}
        for name, lengths in (("one_8k", [8000]), ("five_4k", [4000] * 5)):
            documents = [prompts.document(length, 710 + at + len(lengths)) for at, length in enumerate(lengths)]
            since = perf_counter()
            with ThreadPoolExecutor(len(lengths)) as pool:
                answers = list(pool.map(lambda ids: client.ask(ids, 2), documents))
            gap_s = stream.longest_gap_s(since, perf_counter())
            found[name] = {"longest_gap_s": gap_s, "ttfts_s": sorted(answer.ttft_s for answer in answers)}
            parts += [answer.meta_info.get("spec_stack", {}).get("longest_part_s", 0.0) for answer in answers]
    found["scoring_part_s"] = max(parts)
    found["chunk_and_step_s"] = max(found["prefill_chunk_s"], found["scoring_part_s"]) + found["longest_step_s"]
    return found


def hang_ups(client: Client, prompts: Prompts) -> dict[str, Any]:
    def short_after_hang_ups(seed: int) -> float:
        long = [prompts.document(8000, seed + at) for at in range(4)]
        short = prompts.document(20, seed + 5)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda ids: client.hang_up(ids, 0.3), long))
        return client.ask(short, 2).ttft_s

    found = {"short_alone_s": client.ask(prompts.document(20, 729), 2).ttft_s, "ttft_s": short_after_hang_ups(720)}
    # SGLang tells its scheduler two seconds after a client has gone.
    sleep(6)
    with running_stream(client, prompts, 760):
        found["beside_a_stream_ttft_s"] = short_after_hang_ups(770)
    sleep(6)
    return found


def by_length(arms: Arms, prompts: Prompts, lengths: Sequence[int], repeats: int, num_new: int = 128) -> dict[str, Any]:
    """Medians over documents, by arm, length and how many are asked about at once."""
    found: dict[str, Any] = {arm: {} for arm in arms.clients}
    for length in lengths:
        for num_at_once in (1, 4):
            rows: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms.clients}
            as_off = dict.fromkeys(arms.clients, True)
            for repeat in range(repeats):
                asked = [prompts.document(length, 900 + 10 * repeat + at) for at in range(num_at_once)]
                tokens: dict[str, list[list[int]]] = {}
                for arm, client in arms.in_turn():
                    client.forget()
                    with ThreadPoolExecutor(num_at_once) as pool:
                        answers = list(pool.map(lambda prompt, client=client: client.ask(prompt, num_new), asked))
                    tokens[arm] = [answer.output_ids for answer in answers]
                    rows[arm] += [length_row(answer) for answer in answers]
                as_off = {arm: is_so and tokens[arm] == tokens.get(OFF) for arm, is_so in as_off.items()}
            for arm, measured in rows.items():
                found[arm][f"{length} x {num_at_once}"] = {
                    **medians(measured),
                    "as_off": as_off[arm],
                }
    return found


def growing(arms: Arms, prompts: Prompts, num_turns: int, repeats: int, num_new: int = 64) -> dict[str, Any]:
    """Medians over conversations by arm and turn, each beginning with the tokens of its prompt."""
    rows: dict[str, list[list[dict[str, float]]]] = {arm: [[] for _ in range(num_turns)] for arm in arms.clients}
    as_off = {arm: [True] * num_turns for arm in arms.clients}
    for at in range(repeats):
        arms.forget()
        messages: list[dict[str, str]] = []
        for turn in range(num_turns):
            text = prompts.text(1000, 1400 + num_turns * at + turn)
            messages.append({"role": "user", "content": f"{text}\n\nWhat does part {turn} of this say?"})
            prompt = prompts.chat(messages)
            answers = {arm: client.ask(prompt, num_new) for arm, client in arms.in_turn()}
            lead = answers.get(OFF, next(iter(answers.values())))
            for arm, answer in answers.items():
                rows[arm][turn].append({"num_tokens": len(prompt), **length_row(answer)})
                as_off[arm][turn] &= OFF in answers and answer.output_ids == lead.output_ids
            messages.append({"role": "assistant", "content": prompts.words(lead.output_ids)})
    return {
        arm: {f"turn {turn + 1}": {**medians(own), "as_off": as_off[arm][turn]} for turn, own in enumerate(of_arm)}
        for arm, of_arm in rows.items()
    }


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(median(row[name] for row in rows), 4) for name in rows[0]}


def length_row(answer: Answer) -> dict[str, float]:
    report = answer.meta_info.get("spec_stack", answer.meta_info)
    seconds = answer.chunk_times[-1] - answer.chunk_times[0]
    proposed, accepted = (report.get(name, 0) for name in ("num_proposed", "num_accepted"))
    return {
        "ttft_s": answer.ttft_s,
        "tokens_per_s": (len(answer.output_ids) - 1) / seconds,
        "accepted": accepted / proposed if proposed else report.get("spec_accept_rate", 0.0),
    }


def server_of(arm: str, options: argparse.Namespace, folder: Path, pair: tuple[str, str]) -> SglangServer:
    target, draft = pair
    arguments = ["--model-path", target, "--device", options.device, "--chunked-prefill-size", str(options.chunk)]
    arguments += CPU_ARGUMENTS if options.device == "cpu" else []
    # Servers that wait by looking again and again would take turns with the one that is measured.
    arguments += ["--sleep-on-idle", *shlex.split(options.server_args)]
    algorithm = {STANDALONE: STANDALONE, OFF: None}.get(arm, SPEC_STACK)
    if algorithm is not None:
        arguments += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", draft]
    if arm == STANDALONE:
        arguments += ["--speculative-num-steps", "4", "--speculative-num-draft-tokens", "5"]
        arguments += ["--speculative-eagle-topk", "1"]
    if arm == DENSE:
        arguments += ["--spec-stack-keep-rate", "1"]
    if arm == SLOTS:
        arguments += ["--spec-stack-sparse-prefill", "draft_only"]
    environment = dict(CPU_ENVIRONMENT) if options.device == "cpu" else {}
    if algorithm != SPEC_STACK:
        environment["SGLANG_PLUGINS"] = other_plugins()
    return SglangServer(arguments, environment, free_port(), folder / f"{arm}.log", options.start_limit)


def run(options: argparse.Namespace, arms: Arms, prompts: Prompts) -> Iterator[tuple[str, Any]]:
    """The parts asked for, with what they found."""
    together: dict[str, Callable[[], Any]] = {
        "conversations": lambda: conversations(arms, prompts, options.repeats, options.turns),
        "shared_system": lambda: shared_system(arms, prompts, options.clients),
        "system_and_tools": lambda: system_and_tools(arms, prompts),
        "lengths": lambda: by_length(arms, prompts, options.lengths, options.repeats),
        "growing": lambda: growing(arms, prompts, options.turns, options.repeats),
    }
    each: dict[str, Callable[[Client], Any]] = {
        "arrivals": lambda client: arrivals(client, prompts, options.chunk),
        "hang_ups": lambda client: hang_ups(client, prompts),
    }
    for part in options.parts:
        arms.forget()
        if part in together:
            yield part, together[part]()
        else:
            yield part, {arm: each[part](client) for arm, client in arms.clients.items()}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("conversations", "shared_system", "system_and_tools", "arrivals", "hang_ups")
    parser.add_argument("--arms", nargs="+", choices=(*ARMS, SLOTS), default=list(ARMS))
    parser.add_argument("--parts", nargs="+", choices=(*parts, "lengths", "growing"), default=list(parts))
    parser.add_argument("--target", help="model folder or name (default: the embedded pair's)")
    parser.add_argument("--draft", help="model folder or name (default: the embedded pair's)")
    parser.add_argument("--device", default="cpu", help="(default %(default)s)")
    parser.add_argument("--chunk", type=int, default=512, help="--chunked-prefill-size (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="conversations of each kind (default %(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 2000, 4000, 8000], help="of documents")
    parser.add_argument("--turns", type=int, default=4, help="of each conversation (default %(default)s)")
    parser.add_argument("--clients", type=int, default=20, help="of one system prompt (default %(default)s)")
    parser.add_argument("--start-limit", type=float, default=300, metavar="S", help="(default %(default)s)")
    parser.add_argument("--server-args", default="", metavar="'--FLAG VALUE …'", help="more launch arguments for all")
    parser.add_argument("--out", type=Path, help="also write the JSON line here")
    options = parser.parse_args(argv)
    if options.repeats < 1 or options.turns < 2 or options.clients < 2:
        raise ValueError("--repeats must be 1 or more, --turns and --clients 2 or more")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_args(argv)
    pair = resolve_pair(options.target, options.draft)
    prompts = Prompts(AutoTokenizer.from_pretrained(pair[0]))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = {arm: stack.enter_context(server_of(arm, options, Path(folder), pair)) for arm in options.arms}
        arms = Arms({arm: Client(server.port) for arm, server in servers.items()})
        for client in arms.clients.values():
            client.ask(prompts.document(300, 790), 8)
            client.ask(prompts.document(3000, 791), 8)
        for part, figures in run(options, arms, prompts):
            found[part] = figures
            print(f"{part}:", flush=True)
            for name, values in figures.items():
                print(f"  {name:12} {json.dumps(values)}", flush=True)
    report = {
        "experiment": "traffic",
        **describe(),
        "sglang": version("sglang"),
        "chunk": options.chunk,
        "device": options.device,
        "repeats": options.repeats,
        "parts": found,
    }
    print_report(report, options.out)


if __name__ == "__main__":
    run_script(main)
