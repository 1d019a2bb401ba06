"""Look-ups over recorded answers: accepted tokens a step, and the speed that measured verifications make of them.

No model runs. A file of texts, {"task", "prompt", "text"} with token ids a line, says what the target writes; a step
accepts what a look-up proposes as far as the text goes on so, and takes the seconds of a verification of that many
tokens (--block-s, measured on the target) and those of the look-up itself (CPU seconds, measured here). Arms:
transformers' prompt look-up over a grid of its two settings, of which the best on --tune counts; ours; and ours with
the answers before this one in a shared memory. What the gate learns it keeps over the run, as in a server.

    lookup_texts.py TEXTS --tune OTHER_TEXTS --block-s 1:0.319 8:0.346 16:0.475 32:0.753 64:1.285
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoTokenizer
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from experiments.common.environment import describe
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from spec_stack.config import MAX_LOOKED_UP
from spec_stack.controller.base import DraftSignals, StepRecord
from spec_stack.controller.lookup import LookupGate
from spec_stack.decode.lookup_index import LookupIndex, TextMemory
from spec_stack.hf.prompt import encode_messages

GRID = [(num_tokens, ngram) for num_tokens in (3, 5, 10, 20) for ngram in (2, 3)]


class Arm(Protocol):
    """Proposes after a text that grows. accepted: tokens by where they were found."""

    accepted: dict[str, int]

    def begin(self, prompt_ids: list[int]) -> None: ...
    def propose(self, ids: list[int], most: int) -> list[int]: ...
    def observe(self, num_proposed: int, num_accepted: int, seconds: float) -> None: ...
    def end(self, prompt_ids: list[int], answer_ids: list[int]) -> None: ...


class Theirs:
    """Transformers' prompt look-up."""

    def __init__(self, num_tokens: int, ngram: int) -> None:
        self._generator = PromptLookupCandidateGenerator(
            num_output_tokens=num_tokens, max_matching_ngram_size=ngram, max_length=1 << 30
        )
        self.accepted = {"this text": 0}

    def begin(self, prompt_ids: list[int]) -> None:
        """Nothing is kept."""

    def propose(self, ids: list[int], most: int) -> list[int]:
        found, _ = self._generator.get_candidates(torch.tensor([ids]))
        return [int(token) for token in found[0, len(ids) :]][:most]

    def observe(self, num_proposed: int, num_accepted: int, seconds: float) -> None:
        self.accepted["this text"] += num_accepted

    def end(self, prompt_ids: list[int], answer_ids: list[int]) -> None:
        """Nothing is remembered."""


class Ours:
    """The suffix automaton under its gate; with earlier answers where a memory is given."""

    def __init__(self, memory: TextMemory | None = None) -> None:
        self._gate, self._memory = LookupGate(), memory
        self.accepted = {"this text": 0, "earlier answers": 0}
        # Of the step under way.
        self._source = "this text"

    def begin(self, prompt_ids: list[int]) -> None:
        self._index = LookupIndex(self._memory)
        self._index.extend(prompt_ids)

    def propose(self, ids: list[int], most: int) -> list[int]:
        self._index.extend(ids[len(self._index) :])
        offer = self._gate.offer(self._index.continuations(), min(most, MAX_LOOKED_UP))
        self._source = "earlier answers" if any(each.is_shared for each in offer.found) else "this text"
        return offer.token_ids

    def observe(self, num_proposed: int, num_accepted: int, seconds: float) -> None:
        self.accepted[self._source] += num_accepted
        self._gate.observe(
            StepRecord(
                "", 1, "", "fp32", "", False, 1.0, num_proposed, num_accepted, num_accepted + 1, DraftSignals(), 0.0,
                seconds, 0.0, proposer="lookup" if num_proposed else "model", num_looked_up=num_proposed,
            )
        )  # fmt: skip

    def end(self, prompt_ids: list[int], answer_ids: list[int]) -> None:
        if self._memory is not None:
            self._memory.remember(prompt_ids, answer_ids)


@dataclass
class Outcome:
    """By task: seconds, of them the look-up's own, tokens and steps."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    own_s: float = 0.0
    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    steps: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def over(self, other: Outcome) -> dict[str, float]:
        """How many times as fast as another, by task, in their mean and over all."""
        ratios = {task: other.seconds[task] / self.seconds[task] for task in self.seconds}
        whole = sum(other.seconds.values()) / sum(self.seconds.values())
        return ratios | {"mean": float(np.mean(list(ratios.values()))), "all": whole}


def run(arm: Arm, texts: Sequence[dict[str, Any]], verify_s: Sequence[float], name: str) -> Outcome:
    """Write every text by the steps that an arm makes of it."""
    outcome = Outcome()
    for text in tqdm(texts, desc=name, leave=False):
        prompt_ids, whole = list(text["prompt"]), [*text["prompt"], *text["text"]]
        started, steps_s = process_time(), 0.0
        arm.begin(prompt_ids)
        at = len(prompt_ids) + 1
        while at < len(whole):
            proposed = arm.propose(whole[:at], len(whole) - at - 1)
            accepted = 0
            while accepted < len(proposed) and proposed[accepted] == whole[at + accepted]:
                accepted += 1
            arm.observe(len(proposed), accepted, verify_s[len(proposed)])
            steps_s += verify_s[len(proposed)]
            outcome.tokens[text["task"]] += accepted + 1
            outcome.steps[text["task"]] += 1
            at += accepted + 1
        arm.end(prompt_ids, list(text["text"]))
        own_s = process_time() - started
        outcome.own_s += own_s
        outcome.seconds[text["task"]] += steps_s + own_s
    return outcome


def read_texts(path: Path, tokenizer: Any = None) -> list[dict[str, Any]]:
    """Rows with more than one token of an answer; of recorded conversations every answer, tokenized."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if tokenizer is not None:
        rows = [text for row in rows for text in answers_of(row, tokenizer)]
    return [row for row in rows if len(row["text"]) > 1]


def answers_of(row: Mapping[str, Any], tokenizer: Any) -> Iterator[dict[str, Any]]:
    """An agent's messages, each with the conversation before it; its task is the agent's name."""
    for at, message in enumerate(row["messages"]):
        if at and message["role"] == "assistant" and isinstance(message.get("content"), str):
            prompt_ids = encode_messages(tokenizer, row["messages"][:at])[0]
            text_ids = tokenizer(message["content"], add_special_tokens=False).input_ids
            yield {"task": row["id"].partition("-")[0], "prompt": prompt_ids, "text": text_ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--tune", type=Path, required=True, help="texts on which transformers' setting is chosen")
    parser.add_argument("--block-s", nargs="+", required=True, metavar="TOKENS:SECONDS", help="verifications, measured")
    parser.add_argument("--tokenizer", help="folder; the texts are then conversations, rows with messages")
    parser.add_argument("--every", type=int, default=1, help="one text in so many (%(default)s)")
    add_out_argument(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pairs = (each.partition(":") for each in arguments.block_s)
    known = sorted((int(tokens), float(seconds)) for tokens, _, seconds in pairs)
    verify_s = [float(np.interp(1 + num, *zip(*known, strict=True))) for num in range(MAX_LOOKED_UP + 1)]
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer) if arguments.tokenizer else None
    tuning, texts = read_texts(arguments.tune), read_texts(arguments.texts, tokenizer)[:: arguments.every]
    tuned = {pair: sum(run(Theirs(*pair), tuning, verify_s, "tuning").seconds.values()) for pair in GRID}
    best = min(tuned, key=tuned.__getitem__)
    names: dict[str, Arm] = {
        f"transformers, {best[0]} tokens of {best[1]}-grams": Theirs(*best),
        "ours": Ours(),
        "ours, with earlier answers": Ours(TextMemory()),
    }
    found = {name: run(arm, texts, verify_s, name) for name, arm in names.items()}
    theirs = next(iter(found.values()))
    result: dict[str, Any] = {}
    for name, outcome in found.items():
        ratios, steps = outcome.over(theirs), sum(outcome.steps.values())
        accepted = {task: outcome.tokens[task] / outcome.steps[task] - 1 for task in outcome.tokens}
        result[name] = {
            "over_transformers": ratios,
            "accepted_per_step": accepted,
            "accepted_per_step_all": sum(outcome.tokens.values()) / steps - 1,
            "accepted_per_step_by_source": {source: num / steps for source, num in names[name].accepted.items()},
            "own_us_per_step": 1e6 * outcome.own_s / steps,
        }
        of_all, own_us = result[name]["accepted_per_step_all"], result[name]["own_us_per_step"]
        print(f"{name}: {ratios['mean']:.2f}x in the mean of tasks, {ratios['all']:.2f}x over all")
        sources = ", ".join(f"{source} {num / steps:.2f}" for source, num in names[name].accepted.items())
        print(f"  accepted a step {of_all:.2f} ({sources}); {own_us:.0f} us a step of its own")
        print("  " + "  ".join(f"{task} {ratios[task]:.2f}x ({accepted[task]:.2f})" for task in accepted))
    line = {
        "experiment": "lookup_texts",
        **describe(),
        "num_texts": len(texts),
        "block_s": dict(known),
        "result": result,
    }
    print_report(line, arguments.out)


if __name__ == "__main__":
    run_script(main)
