"""A real pair on SGLang servers: what each turn of a conversation waits for, and whether its tokens are right.

Each arm is a server of its own: "off" (no speculation, none of ours), "STANDALONE" (SGLang's own, same draft) and
"SPEC_STACK" at its defaults, with the calibration that ships for the draft. All run at once and sleep while they have
nothing to do; every turn goes to one arm after the other, in an order that rotates. A conversation is a document of a
length with facts in it, one asked for in every turn, and goes on from its arm's own replies. A line is printed after
every reply: seconds to its first streamed chunk, tokens cached and given to the target, whether the fact is in it; what
each server's processes hold then, shared pages shared out, after every conversation, which is a row of --rows for every
arm. A run goes on after those it finds. Afterwards, with `--check`, every reply beside Transformers' greedy text over
the same tokens at the same positions, in the order in which the server wrote them: where they part, the token and the
gap of the two logits, a tie or not. Ends in one JSON line. On a CPU it needs the stand-ins of tests/serving/support.

    python -m experiments.serving.real_pair --target TARGET --draft DRAFT --rows real_pair.jsonl
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from experiments.common.conversations import Conversation, make_conversation
from experiments.common.environment import describe, note_pair
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.real.answers import Target
from experiments.real.rows import Row, Rows, add_row_arguments
from experiments.serving.client import Answer, Client
from experiments.serving.traffic import OFF, SPEC_STACK, STANDALONE, Arms, server_of
from spec_stack.hf.loading import load_tokenizer
from spec_stack.hf.prompt import encode_messages

ARMS = (OFF, STANDALONE, SPEC_STACK)


def row_of(answer: Answer, text: str, prompt: Sequence[int], wanted: str) -> Row:
    """What a reply waited for, and what its report says."""
    report = answer.meta_info.get("spec_stack", {})
    return {
        "ttft_s": answer.ttft_s,
        "num_tokens": len(prompt),
        "cached": answer.meta_info["cached_tokens"],
        "given": report.get("num_kept_tokens") or len(prompt),
        "scored": report.get("num_scored_tokens", 0),
        "is_right": wanted in text,
        "kept_spans": report.get("kept_spans"),
        "prompt_ids": list(prompt),
        "output_ids": list(answer.output_ids),
    }


def converse(
    arms: Arms, tokenizer: Any, conversation: Conversation, num_turns: int, num_new: int
) -> Iterator[tuple[str, int, Row]]:
    """The turns of a conversation, each by all arms before the next, as arm, turn and row."""
    arms.forget()
    histories: dict[str, list[dict[str, str]]] = {arm: [] for arm in arms.clients}
    for turn in range(num_turns):
        for arm, client in arms.in_turn():
            messages = conversation.ask(turn, histories[arm])
            prompt = encode_messages(tokenizer, messages)[0]
            answer = client.ask(prompt, num_new, may_end=True, **({"explain": True} if arm == SPEC_STACK else {}))
            ended = answer.meta_info["finish_reason"]
            if ended["type"] == "abort":
                raise ValueError(f"{arm}: {ended}; give its server more room (--server-args)")
            text = tokenizer.decode(answer.output_ids, skip_special_tokens=True)
            histories[arm] = [*messages, {"role": "assistant", "content": text}]
            yield arm, turn, row_of(answer, text, prompt, conversation.facts[turn].answer)


def memory_mb(pid: int) -> float:
    """What a process and its children hold, a page that several have counted once in all (Linux)."""
    process = psutil.Process(pid)
    return sum(one.memory_full_info().pss for one in (process, *process.children(recursive=True))) / 1e6


@torch.inference_mode()
def parting(target: Target, row: Row) -> list[float] | None:
    """Where a reply parts from Transformers' greedy text, and the two logits' gap; None where it does not.

    A later turn's tokens are computed at once, each over those that were written before it, as the server's cache has
    them.
    """
    ids, spans = row["prompt_ids"], row["kept_spans"]
    positions = [at for start, stop in spans for at in range(start, stop)] if spans else list(range(len(ids)))
    output = row["output_ids"]
    prefilled = target.prefill(ids, positions)
    (wanted,) = target.decode([prefilled], len(output))
    at = next((index for index, (a, b) in enumerate(zip(wanted, output, strict=False)) if a != b), None)
    if at is None:
        return None
    tokens = [ids[position] for position in positions] + wanted[:at]
    places = [*positions, *range(len(ids), len(ids) + at)]
    made = target.model(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        position_ids=torch.tensor([places]),
        logits_to_keep=1,
    )
    logits = made.logits[0, -1].float()
    return [float(at), float(logits[wanted[at]] - logits[output[at]])]


def summarise(rows: Mapping[str, Mapping[str, Sequence[Sequence[Row]]]]) -> dict[str, Any]:
    """Print, by length and turn, medians by arm and the ratio to SPEC_STACK's, with least and most; the same as values.

    rows: by length and arm, the turns of each conversation; without SPEC_STACK's the last arm stands in its place.
    """
    report: dict[str, Any] = {}
    for length, by_arm in rows.items():
        own = by_arm.get(SPEC_STACK, list(by_arm.values())[-1])
        for turn in range(len(own[0])):
            told: dict[str, Any] = {"n": len(own)}
            for arm, every in by_arm.items():
                ratios = [other[turn]["ttft_s"] / ours[turn]["ttft_s"] for other, ours in zip(every, own, strict=True)]
                told[arm] = {
                    "ttft_s": median(each[turn]["ttft_s"] for each in every),
                    "over_spec_stack": [median(ratios), min(ratios), max(ratios)],
                    "given": median(each[turn]["given"] for each in every),
                    "right": sum(each[turn]["is_right"] for each in every),
                }
            report[f"{length}, turn {turn + 1}"] = told
            line = "  ".join(
                f"{arm} {one['ttft_s']:.2f} s ({one['over_spec_stack'][0]:.2f}x, {one['right']} right)"
                for arm, one in told.items()
                if arm != "n"
            )
            print(f"{length} tokens, turn {turn + 1}, n={len(own)}: {line}", flush=True)
    return report


def check(folder: str, rows: Mapping[str, Mapping[str, Sequence[Sequence[Row]]]], precision: str) -> dict[str, Any]:
    """Compare replies with Transformers, turn by turn; print and return where they part."""
    target = Target(Path(folder), precision)
    report: dict[str, Any] = {}
    # The same reply to the same prompt, as two arms without pruning should give it, is compared once.
    known: dict[str, list[float] | None] = {}

    def found(row: Row) -> list[float] | None:
        key = repr([row[name] for name in ("prompt_ids", "kept_spans", "output_ids")])
        if key not in known:
            known[key] = parting(target, row)
        return known[key]

    for length, by_arm in rows.items():
        for arm, every in by_arm.items():
            for turn in range(len(every[0])):
                partings = [found(turns[turn]) for turns in every]
                num_tokens = sum(len(turns[turn]["output_ids"]) for turns in every)
                name = f"{length}, turn {turn + 1}, {arm}"
                report[name] = {"n": len(every), "tokens": num_tokens, "partings": partings}
                same = sum(each is None for each in partings)
                print(f"{name}: {same} of {len(every)} replies the same, {partings}", flush=True)
    return report


def serve(arguments: argparse.Namespace, tokenizer: Any, kept: Rows, left: Mapping[str, tuple[int, int]]) -> None:
    """Have conversations, by key each of a length and a seed, with servers of all arms, and keep their rows."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        pair = arguments.target, arguments.draft
        servers = {arm: stack.enter_context(server_of(arm, arguments, Path(folder), pair)) for arm in arguments.arms}
        arms = Arms({arm: Client(server.port, extra_key="real") for arm, server in servers.items()})
        warm = make_conversation(tokenizer, min(arguments.tokens), 2, 0, "mixed")
        for client in arms.clients.values():
            client.ask(encode_messages(tokenizer, warm.ask(0, []))[0], 4)
        for key, (num_tokens, seed) in left.items():
            if not kept.has_time:
                break
            conversation = make_conversation(tokenizer, num_tokens, 8, seed, "mixed")
            turns: dict[str, list[Row]] = {arm: [] for arm in arguments.arms}
            for arm, turn, row in converse(arms, tokenizer, conversation, arguments.turns, arguments.max_tokens):
                turns[arm].append(row)
                shown = {name: row[name] for name in ("ttft_s", "cached", "given", "scored", "is_right")}
                print(f"{num_tokens:6d} {seed:5d} {turn + 1}  {arm:12s}{shown}", flush=True)
            for arm, found in turns.items():
                kept.add(key, arm, {"turns": found, "memory_mb": memory_mb(servers[arm].pid)})


def by_length(
    kept: Rows, asked: Mapping[str, tuple[int, int]], arms: Sequence[str]
) -> dict[str, dict[str, list[list[Row]]]]:
    """The turns of the conversations asked for that have been had, by length and arm.

    Raises
    ------
    ValueError
        Where there is none.
    """
    rows: dict[str, dict[str, list[list[Row]]]] = {}
    for arm in arms:
        had = kept.of_arm(arm)
        for key, (num_tokens, _) in asked.items():
            if key in had:
                rows.setdefault(str(num_tokens), {}).setdefault(arm, []).append(had[key]["turns"])
    if not rows:
        raise ValueError("no conversation was had, and --rows holds none of those asked for; give it more --minutes")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument("--draft", required=True, help="folder of the draft")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="(%(default)s)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096], help="of the documents (%(default)s)")
    parser.add_argument("--conversations", type=int, default=5, help="of each length (%(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="of each conversation (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=16, help="of a reply (%(default)s)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    add_row_arguments(parser, limited=False)
    parser.add_argument("--check", action="store_true", help="compare replies with Transformers' greedy text")
    parser.add_argument("--device", default="cpu", help="(%(default)s)")
    parser.add_argument("--chunk", type=int, default=2048, help="--chunked-prefill-size (%(default)s)")
    parser.add_argument("--start-limit", type=float, default=300, metavar="S", help="(%(default)s)")
    parser.add_argument("--server-args", default="", metavar="'--FLAG VALUE …'", help="more launch arguments for all")
    add_out_argument(parser)
    arguments = parser.parse_args()
    note_pair(arguments.target, arguments.draft)
    tokenizer = load_tokenizer(arguments.target)
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[arguments.precision]
    arguments.server_args = f"--dtype {dtype} {arguments.server_args}"
    kept = Rows(arguments.rows, arguments.minutes)
    sizes = [(num_tokens, 5000 + seed) for num_tokens in arguments.tokens for seed in range(arguments.conversations)]
    asked = {f"{num_tokens} {seed}": (num_tokens, seed) for num_tokens, seed in sizes}
    left = {key: size for key, size in asked.items() if any((key, arm) not in kept for arm in arguments.arms)}
    if left and kept.has_time:
        serve(arguments, tokenizer, kept, left)
    rows = by_length(kept, asked, arguments.arms)
    memory = {
        arm: max(row["memory_mb"] for key, row in kept.of_arm(arm).items() if key in asked) for arm in arguments.arms
    }
    report = {
        "experiment": "real_pair",
        **describe(),
        "sglang": version("sglang"),
        "turns": summarise(rows),
        "memory_mb": memory,
    }
    print("MB held at most: " + ", ".join(f"{arm} {value:.0f}" for arm, value in memory.items()), flush=True)
    if arguments.check:
        report["replies"] = check(arguments.target, rows, arguments.precision)
    print_report(report, arguments.out)


if __name__ == "__main__":
    run_script(main)
