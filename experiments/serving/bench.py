"""SGLang servers side by side: conversations and long documents.

Each arm is a server of its own: *off* (no speculation, none of ours), *STANDALONE* (SGLang's own, same draft), *dense*
(SPEC_STACK with keep_rate 1), *slots* (a dense target whose draft decodes over its own slots), *SPEC_STACK* at its
defaults, and any other: --arm NAME='--LAUNCH FLAGS', where DRAFT stands for the draft. All run at once and sleep while
they have nothing to do; every request goes to one arm after the other, in a rotating order. Times are from sending a
request to its first chunk.

- conversations: documents with facts, one asked for in every turn: seconds to the first token, tokens given to the
  target, right answers. With --check every reply beside Transformers' greedy text over the kept tokens: where they
  part, and the gap of the two logits (a tie or not).
- lengths: one and four documents at once: tokens/s, acceptance, and how often all tokens are those of *off*. A run goes
  on after --rows.

Request rates are what `python -m sglang.benchmark.serving` measures. On a CPU it needs the stand-ins of
tests/serving/support, and its times show a direction only. Ends in one JSON line.

    python -m experiments.serving.bench --parts conversations lengths [--target TARGET --draft DRAFT]
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from experiments.common import script
from experiments.common.environment import note_pair
from experiments.real.target import Target
from experiments.serving import parts
from experiments.serving.client import Client, document
from experiments.serving.parts import OFF, Arms
from experiments.serving.server import CPU_ARGUMENTS, CPU_ENVIRONMENT, other_plugins, sglang_server
from spec_stack.bench.rows import Row, Rows
from spec_stack.hf.loading import resolve_device, resolve_pair

STANDALONE, DENSE, SLOTS, SPEC_STACK = "STANDALONE", "dense", "slots", "SPEC_STACK"
_OURS = f"--speculative-algorithm {SPEC_STACK}"
ARMS = {
    OFF: "",
    STANDALONE: f"--speculative-algorithm {STANDALONE} --speculative-num-steps 4 --speculative-num-draft-tokens 5 "
    "--speculative-eagle-topk 1",
    DENSE: f"{_OURS} --spec-stack-keep-rate 1",
    SLOTS: f"{_OURS} --spec-stack-sparse-prefill draft_only",
    SPEC_STACK: _OURS,
}
PARTS = ("conversations", "lengths")


def launch_of(flags: str, options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of an arm's server: these flags over those of all arms."""
    target, draft = resolve_pair(options.target, options.draft)
    arguments = ["--model-path", str(target), "--device", options.device, "--chunked-prefill-size", str(options.chunk)]
    arguments += CPU_ARGUMENTS if options.device == "cpu" else []
    # Servers that wait by looking again and again would take turns with the one that is measured.
    arguments += ["--sleep-on-idle", *shlex.split(options.server_args)]
    if "DRAFT" in flags:
        flags = flags.replace("DRAFT", str(draft))
    elif "--speculative-algorithm" in flags:
        flags = f"{flags} --speculative-draft-model-path {draft}"
    arguments += shlex.split(flags)
    environment = dict(CPU_ENVIRONMENT) if options.device == "cpu" else {}
    if SPEC_STACK not in flags and "--spec-stack" not in flags:
        environment["SGLANG_PLUGINS"] = other_plugins()
    return arguments, environment


def measure(options: argparse.Namespace, arms: Arms, tokenizer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parts asked for, with what they found by arm, or by length, arm and turn."""
    tried, rows = (arms, tokenizer, options.lengths, options.repeats), Rows(options.rows, options.minutes)
    for part in options.parts:
        arms.forget()
        if part == "conversations":
            yield part, parts.conversations(*tried, options.turns, options.max_tokens)
        else:
            yield part, parts.lengths(*tried, rows)


@torch.inference_mode()
def parting(target: Target, row: Row) -> list[float] | None:
    """Where a reply parts from Transformers' greedy text, and the two logits' gap; None where it does not."""
    ids, spans, output = row["prompt_ids"], row["kept_spans"], row["output_ids"]
    kept = [ids[at] for start, stop in spans for at in range(start, stop)] if spans else list(ids)
    (wanted,) = target.decode([target.prefill(kept, range(len(kept)))], len(output))
    at = next((index for index, (a, b) in enumerate(zip(wanted, output, strict=False)) if a != b), None)
    if at is None:
        return None
    logits = target.model(torch.tensor([kept + wanted[:at]]), logits_to_keep=1).logits[0, -1].float()
    return [float(at), float(logits[wanted[at]] - logits[output[at]])]


def check(folder: Path, precision: str, found: Mapping[str, Sequence[Sequence[Row]]]) -> dict[str, Any]:
    """By length and arm, where each reply parts from Transformers' text."""
    target = Target(folder, precision)
    report: dict[str, Any] = {}
    for name, every in found.items():
        partings = [parting(target, row) for turns in every for row in turns]
        report[name] = partings
        print(f"{name}: {sum(each is None for each in partings)} of {len(partings)} replies the same", flush=True)
    return report


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Launch the servers, measure the parts, print what they found and return it."""
    resolve_device(options.device)
    target, draft = resolve_pair(options.target, options.draft)
    note_pair(target, draft)
    tokenizer, found = AutoTokenizer.from_pretrained(target), {}
    flags = {name: ARMS[name] for name in options.arms} | dict(arm.split("=", 1) for arm in options.arm)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        clients = {}
        for name, own in flags.items():
            server = sglang_server(*launch_of(own, options), Path(folder) / f"{name}.log", options.start_limit)
            clients[name] = Client(stack.enter_context(server), options.limit, "bench")
        arms = Arms(clients)
        for client in arms.clients.values():
            client.ask(document(tokenizer, 3000, 791), 8)
        for part, figures in measure(options, arms, tokenizer):
            shown = found[part] = parts.turns_told(figures) if part == "conversations" else figures
            print(f"{part}:", *(f"  {name:28} {json.dumps(own)}" for name, own in shown.items()), sep="\n", flush=True)
            if part == "conversations":
                replies = figures
    if options.check and "conversations" in options.parts:
        found["partings"] = check(Path(target), options.precision, replies)
    return found


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = script.make_parser(__doc__)
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=[OFF, STANDALONE, DENSE, SPEC_STACK])
    parser.add_argument("--arm", action="append", default=[], metavar="NAME='--FLAG VALUE …'", help="one arm more")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["conversations"])
    parser.add_argument("--target", help="model folder or name (default: the embedded pair's)")
    parser.add_argument("--draft", help="model folder or name (default: the embedded pair's)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of --check (%(default)s)")
    parser.add_argument("--device", default="cpu", help="(%(default)s)")
    parser.add_argument("--chunk", type=int, default=512, help="--chunked-prefill-size (%(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096], help="of documents (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="conversations or documents (%(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="of each conversation (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=16, help="of a conversation's reply (%(default)s)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a client waits for a chunk (%(default)s)")
    parser.add_argument("--rows", type=Path, help="file of the rows of lengths; a run goes on after those it holds")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin none of them after so many (no limit)")
    parser.add_argument("--check", action="store_true", help="compare replies with Transformers' greedy text")
    parser.add_argument("--start-limit", type=float, default=300, metavar="S", help="(%(default)s)")
    parser.add_argument("--server-args", default="", metavar="'--FLAG VALUE …'", help="more launch arguments for all")
    options = parser.parse_args(argv)
    if options.repeats < 1 or options.turns < 2:
        raise ValueError("--repeats must be 1 or more, --turns 2 or more")
    if wrong := [arm for arm in options.arm if "=" not in arm]:
        raise ValueError(f"--arm {wrong[0]!r} is not of the form NAME='--FLAG VALUE …'")
    return options


def main() -> None:
    options = parse_args()
    found = run(options)
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "target", "draft", "rows")}
    report = {"sglang": version("sglang"), "settings": settings, "parts": found}
    script.print_report("bench", report, options.out)


if __name__ == "__main__":
    script.run(main)
