"""Seconds to encode a chat turn by turn: all of it anew, and in a session, where only the tail is tokenized.

A chat of many short messages on the embedded pair's tokenizer and template. "session" is what a call of a session does
before any model runs; both ways are checked to give the same tokens. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import random
from statistics import median
from time import perf_counter
from typing import Any

from transformers import AutoTokenizer

from experiments.common.environment import describe
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from spec_stack.calibrate.documents import module_source
from spec_stack.hf.loading import ASSETS
from spec_stack.hf.prompt import PromptSource, encode_prompt


def make_messages(tokenizer: Any, num_messages: int, num_tokens: int, seed: int = 0) -> list[dict[str, str]]:
    """Messages in turn of user and assistant, pieces of a standard-library module of about so many tokens together."""
    source, rng = module_source("argparse"), random.Random(seed)
    per_token = len(source) / len(tokenizer(source, verbose=False).input_ids)
    # Five tokens of a message are the template's and the cut words'.
    num_characters = round(per_token * (num_tokens / num_messages - 5))
    messages = []
    for index in range(num_messages):
        start = rng.randrange(len(source) - num_characters)
        messages.append({"role": ("user", "assistant")[index % 2], "content": source[start : start + num_characters]})
    return messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=401)
    parser.add_argument("--tokens", type=int, default=41000)
    parser.add_argument("--turns", type=int, default=5, help="the last so many turns are timed (%(default)s)")
    add_out_argument(parser)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target")
    messages = make_messages(tokenizer, arguments.messages, arguments.tokens)
    seconds: dict[str, list[float]] = {"anew": [], "session": []}
    first = len(messages) - 2 * (arguments.turns - 1)
    known = encode_prompt(tokenizer, len(tokenizer), PromptSource(messages=messages[: first - 2]))
    for end in range(first, len(messages) + 1, 2):
        source = PromptSource(messages=messages[:end])
        started = perf_counter()
        anew = encode_prompt(tokenizer, len(tokenizer), source)
        seconds["anew"].append(perf_counter() - started)
        started = perf_counter()
        known = encode_prompt(tokenizer, len(tokenizer), source, known)
        seconds["session"].append(perf_counter() - started)
        if (known.token_ids, known.protected) != (anew.token_ids, anew.protected):
            raise RuntimeError("the two ways differ")
    report = {
        "experiment": "bench_encoding",
        **describe(),
        "num_messages": len(messages),
        "num_tokens": len(known.token_ids),
        "seconds": {way: median(times) for way, times in seconds.items()},
    }
    for way, times in seconds.items():
        print(f"{way:8s} {median(times):.4f} s a turn, {len(messages)} messages of {len(known.token_ids)} tokens")
    print_report(report, arguments.out)


if __name__ == "__main__":
    run_script(main)
