"""Conversations, shared system prompts, arrivals in the middle of a stream, clients that hang up: what they wait for.

Each arm is a server of its own with the same requests: "off" (no speculation), "STANDALONE", "dense" (SPEC_STACK with
keep_rate 1) and "SPEC_STACK". Every time is from sending a request to its first streamed chunk, and one run is one
figure: on a busy machine compare arms, not times.

- conversation: an 8K document, dense in the first turn, then short questions about it.
- pruned first: the same, the first turn as the server has it by default (only SPEC_STACK prunes it).
- shared system: 20 clients with one system prompt of 2K and a question each, one after the other.
- system and tools: 5K of system prompt and tool schemas, and a short question: how much of it is kept.
- arrivals: a stream runs while one 8K prompt arrives, then five of 4K at once: the stream's longest gap.
- hang-ups: four clients send 8K prompts and close their connections; how long a short request waits then.

On a CPU it needs the stand-ins of tests/serving/support. Prints a table, ends in one JSON line. About 3 minutes an arm
on two cores with nothing else running.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Thread
from time import perf_counter, sleep
from typing import Any

from transformers import AutoTokenizer

from experiments.common.environment import describe
from experiments.common.script import run_script
from experiments.serving.bench_serving import CPU_ARGUMENTS
from experiments.serving.server import CPU_ENVIRONMENT, HOST, SglangServer, free_port, other_plugins
from spec_stack.demo import hide_fact
from spec_stack.hf.loading import resolve_pair
from spec_stack.hf.prompt import encode_messages

ARMS = OFF, STANDALONE, DENSE, SPEC_STACK = "off", "STANDALONE", "dense", "SPEC_STACK"
LIMIT_S = 300.0


@dataclass
class Answer:
    """One streamed reply. chunk_times: of every chunk, on the clock of this process."""

    started: float
    chunk_times: list[float] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    meta_info: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        return self.chunk_times[0] - self.started

    def longest_gap_s(self, since: float, until: float) -> float:
        times = [since, *(at for at in self.chunk_times if since < at < until), until]
        return max(b - a for a, b in pairwise(times))


class Client:
    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, input_ids: Sequence[int], num_new: int, answer: Answer | None = None, **custom: Any) -> Answer:
        """Stream a greedy reply; fills `answer` as it comes."""
        answer = answer or Answer(perf_counter())
        connection = self._send(input_ids, num_new, custom)
        reply = connection.getresponse()
        for line in reply:
            data = line.decode().removeprefix("data:").strip()
            if data and data != "[DONE]":
                chunk = json.loads(data)
                answer.chunk_times.append(perf_counter())
                answer.output_ids, answer.meta_info = chunk["output_ids"], chunk["meta_info"]
        connection.close()
        return answer

    def hang_up(self, input_ids: Sequence[int], after_s: float) -> None:
        connection = self._send(input_ids, 16, {})
        sleep(after_s)
        connection.close()

    def _send(self, input_ids: Sequence[int], num_new: int, custom: Mapping[str, Any]) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=LIMIT_S)
        sampling = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True, "custom_params": dict(custom)}
        body = {"input_ids": list(input_ids), "sampling_params": sampling, "stream": True}
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        return connection


class Prompts:
    """Chats as token ids, of real text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def document(self, num_tokens: int, seed: int) -> list[int]:
        return self.chat(hide_fact(self._tokenizer, num_tokens, seed).messages)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return encode_messages(self._tokenizer, messages)[0]

    def text(self, num_tokens: int, seed: int) -> str:
        document = hide_fact(self._tokenizer, num_tokens + 100, seed).document
        ids = self._tokenizer(document, add_special_tokens=False).input_ids[:num_tokens]
        return str(self._tokenizer.decode(ids))

    def follow_up(self, number: int) -> list[int]:
        """What comes after a reply: its end, and the next question."""
        asked = self.chat([{"role": "user", "content": f"And what does part {number} of it say?"}])
        first = self._tokenizer.convert_tokens_to_ids("<|user|>")
        end = self._tokenizer.convert_tokens_to_ids("<|end|>")
        return [end, *asked[asked.index(first) :]]


def conversation(client: Client, prompts: Prompts, seed: int, num_turns: int, **first: Any) -> list[dict[str, Any]]:
    history, turns = prompts.document(8000, seed), []
    for turn in range(num_turns):
        answer = client.ask(history, 16, **(first if turn == 0 else {}))
        report = answer.meta_info.get("spec_stack", {})
        turns.append(
            {
                "ttft_s": answer.ttft_s,
                "cached": answer.meta_info["cached_tokens"],
                "scored": report.get("num_scored_tokens", 0),
                "reason": report.get("specprefill_reason", ""),
            }
        )
        history = [*history, *answer.output_ids, *prompts.follow_up(turn)]
    return turns


def shared_system(client: Client, prompts: Prompts, num_clients: int) -> dict[str, Any]:
    system = {"role": "system", "content": prompts.text(2000, seed=500)}
    answers = [
        client.ask(
            prompts.chat([system, {"role": "user", "content": f"{prompts.text(150, seed=510 + at)} What is this?"}]), 8
        )
        for at in range(num_clients)
    ]
    return {
        "first_ttft_s": answers[0].ttft_s,
        "median_ttft_s": median(answer.ttft_s for answer in answers[1:]),
        "median_cached": median(answer.meta_info["cached_tokens"] for answer in answers[1:]),
    }


def system_and_tools(client: Client, prompts: Prompts) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    rules = prompts.text(4600, seed=600) + "\nTools: " + json.dumps([tool] * 12)
    ids = prompts.chat([{"role": "system", "content": rules}, {"role": "user", "content": "Say hello."}])
    answer = client.ask(ids, 4)
    report = answer.meta_info.get("spec_stack", {})
    return {
        "num_prompt_tokens": len(ids),
        "num_kept_tokens": report.get("num_kept_tokens", len(ids)),
        "reason": report.get("specprefill_reason", ""),
    }


def arrivals(client: Client, prompts: Prompts) -> dict[str, Any]:
    """Gaps of a running stream; a step of it alone is the median gap before anything arrives."""
    stream = Answer(perf_counter())
    running = Thread(target=client.ask, args=(prompts.document(60, 700), 3000, stream), kwargs={"gamma": 0})
    running.start()
    while len(stream.chunk_times) < 40:
        sleep(0.02)
    alone = [b - a for a, b in pairwise(stream.chunk_times[5:])]
    found: dict[str, Any] = {"step_s": median(alone)}
    for name, lengths in (("one_8k", [8000]), ("five_4k", [4000] * 5)):
        since = perf_counter()
        with ThreadPoolExecutor(len(lengths)) as pool:
            asked = [
                pool.submit(client.ask, prompts.document(length, 710 + at + len(lengths)), 2)
                for at, length in enumerate(lengths)
            ]
            ttfts = sorted(future.result().ttft_s for future in asked)
        found[name] = {"longest_gap_s": stream.longest_gap_s(since, perf_counter()), "ttfts_s": ttfts}
    running_alone = stream.chunk_times[-1] if stream.chunk_times else 0.0
    found["stream_was_running"] = perf_counter() - running_alone < 1.0
    return found


def hang_ups(client: Client, prompts: Prompts) -> dict[str, Any]:
    long = [prompts.document(8000, 720 + at) for at in range(4)]
    short = prompts.document(20, 730)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda ids: client.hang_up(ids, 0.3), long))
    return {"short_request_ttft_s": client.ask(short, 2).ttft_s}


def run_arm(arm: str, options: argparse.Namespace, folder: Path, pair: tuple[str, str]) -> dict[str, Any]:
    target, draft = pair
    arguments = ["--model-path", target, "--device", options.device, "--chunked-prefill-size", str(options.chunk)]
    arguments += CPU_ARGUMENTS if options.device == "cpu" else []
    arguments += shlex.split(options.server_args)
    algorithm = {STANDALONE: STANDALONE, DENSE: SPEC_STACK, SPEC_STACK: SPEC_STACK}.get(arm)
    if algorithm is not None:
        arguments += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", draft]
    if arm == STANDALONE:
        arguments += ["--speculative-num-steps", "4", "--speculative-num-draft-tokens", "5"]
        arguments += ["--speculative-eagle-topk", "1"]
    if arm == DENSE:
        arguments += ["--spec-stack-keep-rate", "1"]
    environment = dict(CPU_ENVIRONMENT) if options.device == "cpu" else {}
    if algorithm != SPEC_STACK:
        environment["SGLANG_PLUGINS"] = other_plugins()
    prompts = Prompts(AutoTokenizer.from_pretrained(target))
    wanted = {
        "conversation": lambda: conversation(client, prompts, 800, 4, specprefill=False),
        "pruned_first": lambda: conversation(client, prompts, 801, 3),
        "shared_system": lambda: shared_system(client, prompts, options.clients),
        "system_and_tools": lambda: system_and_tools(client, prompts),
        "arrivals": lambda: arrivals(client, prompts),
        "hang_ups": lambda: hang_ups(client, prompts),
    }
    with SglangServer(arguments, environment, free_port(), folder / f"{arm}.log", options.start_limit) as server:
        client = Client(server.port)
        client.ask(prompts.document(300, 790), 8)
        client.ask(prompts.document(3000, 791), 8)
        return {name: wanted[name]() for name in options.parts}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("conversation", "pruned_first", "shared_system", "system_and_tools", "arrivals", "hang_ups")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--target", help="model folder or name (default: the embedded pair's)")
    parser.add_argument("--draft", help="model folder or name (default: the embedded pair's)")
    parser.add_argument("--device", default="cpu", help="(default %(default)s)")
    parser.add_argument("--chunk", type=int, default=512, help="--chunked-prefill-size (default %(default)s)")
    parser.add_argument("--clients", type=int, default=20, help="of one system prompt (default %(default)s)")
    parser.add_argument("--start-limit", type=float, default=300, metavar="S", help="(default %(default)s)")
    parser.add_argument("--server-args", default="", metavar="'--FLAG VALUE …'", help="more launch arguments for all")
    parser.add_argument("--out", type=Path, help="also write the JSON line here")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_args(argv)
    pair = resolve_pair(options.target, options.draft)
    arms: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for arm in options.arms:
            arms[arm] = run_arm(arm, options, Path(folder), pair)
            for part, found in arms[arm].items():
                print(f"{arm:11} {part:17} {json.dumps(found)}", flush=True)
    report = {"experiment": "traffic", **describe(), "chunk": options.chunk, "device": options.device, "arms": arms}
    line = json.dumps(report)
    if options.out:
        options.out.write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    run_script(main)
