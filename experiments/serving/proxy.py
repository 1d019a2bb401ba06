"""A running engine, direct and behind `spec-stack proxy`: conversations about a document, another fact in every turn.

Every turn goes to one arm after the other, in a rotating order; each arm goes on from its own replies, behind a prefix
cache of its own (`cache_salt`, which vLLM knows). By arm, length and turn: seconds to the first text, prompt tokens
that the engine saw, those of them that its prefix cache held, right answers. A row a turn, whole conversations at once;
a run goes on after those that are there. Ends in one JSON line.

    python -m experiments.serving.proxy --arm direct=http://127.0.0.1:8701 --arm proxy=http://127.0.0.1:8702
        --model NAME --tokenizer FOLDER --rows ROWS.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

from openai import OpenAI
from transformers import AutoTokenizer

from experiments.common import script
from experiments.common.conversations import FactsConversation, make_conversation
from spec_stack.bench.rows import Row, Rows

Messages = list[dict[str, str]]


def ask(client: OpenAI, model: str, messages: Messages, salt: str, max_tokens: int) -> tuple[str, Row]:
    """A greedy reply's text, and what it waited for."""
    began, first_s, text, usage = perf_counter(), 0.0, "", None
    create: Any = client.chat.completions.create
    stream = create(
        model=model,
        messages=messages,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"cache_salt": salt},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices and chunk.choices[0].delta.content:
            first_s = first_s or perf_counter() - began
            text += chunk.choices[0].delta.content
    if usage is None:
        raise ValueError("the engine counted no tokens (stream_options.include_usage)")
    cached = getattr(usage.prompt_tokens_details, "cached_tokens", None) or 0
    return text, {"ttft_s": first_s, "num_prompt_tokens": usage.prompt_tokens, "num_cached": cached}


def converse(
    conversation: FactsConversation, arms: dict[str, OpenAI], key: str, options: argparse.Namespace
) -> dict[str, list[Row]]:
    """A conversation with every arm: the rows of its turns."""
    histories: dict[str, Messages] = {arm: [] for arm in arms}
    turns: dict[str, list[Row]] = {arm: [] for arm in arms}
    names = list(arms)
    for turn in range(options.turns):
        names.append(names.pop(0))
        for name in names:
            messages = conversation.ask(turn, histories[name])
            text, row = ask(arms[name], options.model, messages, f"{key} {name}".replace("/", " "), options.max_tokens)
            turns[name].append({**row, "is_right": conversation.facts[turn].answer in text, "text": text})
            histories[name] = [*messages, {"role": "assistant", "content": text}]
    return turns


def run(options: argparse.Namespace, rows: Rows, lengths: Sequence[int]) -> None:
    """The conversations that are left."""
    arms = dict(arm.split("=", 1) for arm in options.arm)
    clients = {name: OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600) for name, url in arms.items()}
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    for length in lengths:
        for seed in range(options.repeats):
            left = rows.left(f"{length}/{seed}/{options.turns}", clients)
            if not left:
                continue
            turns = converse(make_conversation(tokenizer, length, 8, 6000 + seed), left, f"{length}/{seed}", options)
            for turn in range(options.turns):
                for name, own in turns.items():
                    rows.add(f"{length}/{seed}/{turn + 1}", name, own[turn])
                told = (f"{name} {own[turn]['ttft_s']:.1f} s {own[turn]['is_right']}" for name, own in turns.items())
                print(f"{length} tokens, {seed}, turn {turn + 1}:", *told, sep="  ", flush=True)


def summary(rows: Rows, names: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Medians over conversations, by length, turn and arm; of seconds the range too."""
    report: dict[str, Any] = {}
    for length in options.lengths:
        for turn in range(1, options.turns + 1):
            for name in names:
                keys = [f"{length}/{seed}/{turn}" for seed in range(options.repeats)]
                own = [rows.of_arm(name)[key] for key in keys if (key, name) in rows]
                if own:
                    seconds = [row["ttft_s"] for row in own]
                    told = {"n": len(own), "ttft_s": [round(of(seconds), 2) for of in (median, min, max)]}
                    told |= {key: median(row[key] for row in own) for key in ("num_prompt_tokens", "num_cached")}
                    told["right"] = sum(row["is_right"] for row in own)
                    report[f"{length}, turn {turn}, {name}"] = told
                    print(f"{length}, turn {turn}, {name:24s}{told}")
    return report


def main() -> None:
    parser = script.make_parser(__doc__)
    parser.add_argument("--arm", action="append", required=True, metavar="NAME=URL", help="an engine or a proxy")
    parser.add_argument("--model", required=True, help="the engine's name of it")
    parser.add_argument("--tokenizer", required=True, help="folder of the model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192], help="of documents (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="conversations a length (%(default)s)")
    parser.add_argument("--turns", type=int, default=2, help="of each conversation (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=24, help="of a reply (%(default)s)")
    script.add_row_arguments(parser, limited=False)
    options = parser.parse_args()
    if wrong := [arm for arm in options.arm if "=" not in arm]:
        raise ValueError(f"--arm {wrong[0]!r} is not of the form NAME=URL")
    rows = Rows(options.rows, options.minutes)
    run(options, rows, options.lengths)
    report = {"model": options.model}
    script.print_report(
        "proxy", {**report, "turns": summary(rows, [arm.split("=")[0] for arm in options.arm], options)}, options.out
    )


if __name__ == "__main__":
    script.run(main)
