"""Time to the first token, to the first eight and to the whole answer, turn by turn of a conversation.

Arms, all on the same document and the same questions, each with its own answers in the history:

    dense      the generator, from nothing on every turn, plain decoding
    kept       plain transformers: its own model and attention, `past_key_values` kept and cropped to what is shared
    sparse     the generator with sparse prefill and speculation, from nothing on every turn
    session    a session with restoration
    bare       a session without

Encoding counts: every clock begins with the messages. The arms are interleaved turn by turn. --agent makes every turn
a question with so many new tokens of tool output instead. "slots" is the largest cache of the target. Prints a table,
ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from experiments.common.conversations import FAMILIES, Conversation, make_conversation
from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.script import run_script
from spec_stack import SessionConfig, SpecStackGenerator

Messages = list[dict[str, str]]
ARMS = ("dense", "kept", "sparse", "session", "bare")
_FIRST = 8


@dataclass
class Timing:
    """Seconds from the messages to the first token, the first eight and the last, and what came of it."""

    ttft_s: float
    first_s: float
    total_s: float
    text: str
    num_slots: int
    num_restored: int = 0


class KeptCache:
    """A careful user of transformers: one cache for the conversation, cropped to what a prompt shares with it."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._cache = DynamicCache(config=model.config)
        self._ids: list[int] = []
        ends = model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])

    @torch.inference_mode()
    def answer(self, messages: Messages, max_tokens: int) -> Timing:
        started = perf_counter()
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        shared = 0
        for held, asked in zip(self._ids, prompt[:-1], strict=False):
            if held != asked:
                break
            shared += 1
        if shared < len(self._ids):
            self._cache.crop(shared - len(self._ids))
        self._ids = self._ids[:shared]
        answer: list[int] = []
        times = []
        new = prompt[shared:]
        while len(answer) < max_tokens:
            logits = self._model(
                torch.tensor([new], device=self._model.device), past_key_values=self._cache, logits_to_keep=1
            ).logits
            self._ids += new
            new = [int(logits[0, -1].argmax())]
            answer += new
            times.append(perf_counter() - started)
            if new[0] in self._ends:
                break
        text = self._tokenizer.decode(answer, skip_special_tokens=True)
        return Timing(times[0], times[min(_FIRST, len(times)) - 1], times[-1], text, len(self._ids))


def ask(run: Callable[..., Any], num_slots: Callable[[], int], messages: Messages, options: dict[str, Any]) -> Timing:
    started, num, first_s, texts = perf_counter(), 0, 0.0, []
    ttft_s = 0.0
    for output in run(messages=messages, **options):
        now = perf_counter() - started
        ttft_s = ttft_s or now
        num += len(output.token_ids)
        first_s = first_s or (now if num >= _FIRST else 0.0)
        texts.append(output.text)
        metrics = output.metrics
    slots = num_slots() or metrics.num_kept_tokens + metrics.num_tokens
    return Timing(ttft_s, first_s or now, now, "".join(texts), slots, metrics.num_restored_tokens)


def make_arms(
    generator: SpecStackGenerator,
    plain: PreTrainedModel,
    arms: list[str],
    config: SessionConfig,
    options: dict[str, Any],
) -> dict[str, Callable[[Messages], Timing]]:
    made: dict[str, Callable[[Messages], Timing]] = {}
    none = lambda: 0  # noqa: E731
    for arm in arms:
        if arm == "kept":
            kept = KeptCache(plain, generator.tokenizer)
            made[arm] = partial(kept.answer, max_tokens=options["max_tokens"])
        elif arm in ("dense", "sparse"):
            more = {"specprefill": False, "gamma": 0} if arm == "dense" else {}
            made[arm] = partial(ask, generator.stream, none, options=options | more)
        else:
            session = generator.session(config if arm == "session" else SessionConfig(restore=False))
            made[arm] = partial(ask, session.stream, partial(getattr, session, "num_cached_tokens"), options=options)
    return made


def run_conversation(arms: dict[str, Callable[[Messages], Timing]], turns: list[Conversation]) -> list[dict[str, Any]]:
    """One row per turn and arm. turns: whose turn i asks for fact i; several documents make an agent's trace."""
    histories: dict[str, Messages] = {arm: [] for arm in arms}
    rows = []
    for turn in range(len(turns)):
        for arm in [*arms][turn % len(arms) :] + [*arms][: turn % len(arms)]:
            conversation = turns[turn]
            is_new = turn == 0 or conversation is not turns[turn - 1]
            fact = conversation.facts[turn]
            content = f"{conversation.document}\n\n{fact.question}" if is_new else fact.question
            histories[arm].append({"role": "user", "content": content})
            timing = arms[arm](histories[arm])
            histories[arm].append({"role": "assistant", "content": timing.text})
            rows.append({"arm": arm, "turn": turn, "right": fact.answer in timing.text, **vars(timing)})
    return rows


def summarise(rows: list[dict[str, Any]], arms: list[str]) -> dict[str, Any]:
    """Medians of turn 1 and of the later turns, of the ratios to the kept cache turn by turn, and sums of TTFT."""
    by: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by[row["arm"]].append(row)
    table = {}
    for arm in arms:
        later = [row for row in by[arm] if row["turn"]]
        entry: dict[str, Any] = {
            "turn_1_ttft_ms": 1e3 * median(row["ttft_s"] for row in by[arm] if not row["turn"]),
            "right": sum(row["right"] for row in by[arm]),
            "asked": len(by[arm]),
            "most_slots": max(row["num_slots"] for row in by[arm]),
            "restored_per_turn": sum(row["num_restored"] for row in later) / max(1, len(later)),
            "sum_ttft_s": sum(row["ttft_s"] for row in by[arm]),
        }
        for name in ("ttft_s", "first_s", "total_s"):
            entry[f"later_{name}"] = median(row[name] for row in later)
            if "kept" in by:
                pairs = zip(later, [row for row in by["kept"] if row["turn"]], strict=True)
                entry[f"over_kept_{name}"] = median(own[name] / kept[name] for own, kept in pairs)
        table[arm] = entry
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--family", choices=FAMILIES, default="codes")
    parser.add_argument("--tokens", type=int, default=5200, help="of the document, or of a turn's (%(default)s)")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--conversations", type=int, default=7)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--keep-rate", type=float, default=0.2)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--agent", action="store_true", help="a new document with every turn")
    parser.add_argument("--threshold", type=float, default=SessionConfig.restore_threshold)
    parser.add_argument("--chunks", type=int, default=SessionConfig.max_restored_chunks)
    arguments = parser.parse_args()
    generator = load_generator(arguments)
    plain = AutoModelForCausalLM.from_pretrained(
        generator.target.config._name_or_path, dtype=generator.target.dtype, attn_implementation="sdpa"
    )
    plain = plain.to(generator.target.device).eval()
    config = SessionConfig(restore_threshold=arguments.threshold, max_restored_chunks=arguments.chunks)
    options = {"max_tokens": arguments.max_tokens, "keep_rate": arguments.keep_rate}
    rows: list[dict[str, Any]] = []
    # The first conversation warms up.
    seeds = [arguments.first_seed, *range(arguments.first_seed, arguments.first_seed + arguments.conversations)]
    for index, seed in enumerate(tqdm(seeds, leave=False)):
        make = partial(make_conversation, generator.tokenizer, arguments.tokens, max(8, arguments.turns))
        if arguments.agent:
            turns = [make(seed=100 * seed + turn, family=arguments.family) for turn in range(arguments.turns)]
        else:
            turns = [make(seed=seed, family=arguments.family)] * arguments.turns
        arms = make_arms(generator, plain, arguments.arms, config, options)
        measured = run_conversation(arms, turns)
        rows += [{"conversation": seed, **row} for row in measured] if index else []
    table = summarise(rows, arguments.arms)
    print("arm       turn 1  later TTFT  first 8   answer   over kept (TTFT, first 8, answer)  restored  slots   right")
    for arm, row in table.items():
        ratios = [f"{row.get(f'over_kept_{name}', float('nan')):.2f}" for name in ("ttft_s", "first_s", "total_s")]
        later = [f"{1e3 * row[f'later_{name}']:8.1f}" for name in ("ttft_s", "first_s", "total_s")]
        print(
            f"{arm:8s} {row['turn_1_ttft_ms']:7.0f}  {'  '.join(later)}   {'  '.join(ratios):>32s}  "
            f"{row['restored_per_turn']:8.1f}  {row['most_slots']:5d}  {row['right']:3d} of {row['asked']}"
        )
    settings = {name: value for name, value in vars(arguments).items() if name not in ("target", "draft", "device")}
    print(json.dumps({"experiment": "bench_session", **describe(), **settings, "arms": table, "rows": rows}))


if __name__ == "__main__":
    run_script(main)
