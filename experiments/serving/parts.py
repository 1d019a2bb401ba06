"""What `bench.py` measures of running servers. Every request goes to one arm after the other, in a rotating order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

from experiments.common.conversations import make_conversation
from experiments.serving.client import Answer, Client, document
from experiments.serving.server import ServerError
from spec_stack.bench.rows import Row, Rows
from spec_stack.hf.prompt import encode_messages

OFF = "off"


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


def conversations(
    arms: Arms, tokenizer: Any, lengths: Sequence[int], count: int, num_turns: int, num_new: int
) -> dict[str, list[list[Row]]]:
    """By length and arm ("2048 off") the turns of every conversation: documents with facts, one asked for in each turn.

    Each arm goes on from its own replies.
    """
    found: dict[str, list[list[Row]]] = {f"{length} {arm}": [] for length in lengths for arm in arms.clients}
    for length in lengths:
        for seed in range(count):
            arms.forget()
            conversation = make_conversation(tokenizer, length, 8, 5000 + seed)
            histories: dict[str, list[dict[str, str]]] = {arm: [] for arm in arms.clients}
            turns: dict[str, list[Row]] = {arm: [] for arm in arms.clients}
            for turn in range(num_turns):
                for arm, client in arms.in_turn():
                    messages = conversation.ask(turn, histories[arm])
                    prompt = encode_messages(tokenizer, messages).token_ids
                    answer = client.ask(prompt, num_new, may_end=True, explain=True)
                    text = tokenizer.decode(answer.output_ids, skip_special_tokens=True)
                    histories[arm] = [*messages, {"role": "assistant", "content": text}]
                    turns[arm].append(turn_row(answer, prompt, conversation.facts[turn].answer in text))
            for arm, rows in turns.items():
                found[f"{length} {arm}"].append(rows)
    return found


def turn_row(answer: Answer, prompt: Sequence[int], is_right: bool) -> Row:
    """What a reply waited for, and what its report says. Raises ServerError for a request that the server aborted."""
    ended = answer.meta_info["finish_reason"]
    if ended["type"] == "abort":
        raise ServerError(f"{ended}; give the server more room (--server-args)")
    report = answer.meta_info.get("spec_stack", {})
    return {
        "ttft_s": answer.ttft_s,
        "cached": answer.meta_info["cached_tokens"],
        "given": report.get("num_kept_tokens") or len(prompt),
        "is_right": is_right,
        "kept_spans": report.get("kept_spans"),
        "prompt_ids": list(prompt),
        "output_ids": list(answer.output_ids),
    }


def turns_told(found: Mapping[str, Sequence[Sequence[Row]]]) -> dict[str, Any]:
    """Medians over conversations by length, arm and turn."""
    report: dict[str, Any] = {}
    for name, every in found.items():
        for turn, rows in enumerate(zip(*every, strict=True), 1):
            medians = {key: median(row[key] for row in rows) for key in ("ttft_s", "cached", "given")}
            right = sum(row["is_right"] for row in rows)
            report[f"{name}, turn {turn}"] = {"n": len(rows), **medians, "right": right}
    return report


def lengths(
    arms: Arms, tokenizer: Any, tried: Sequence[int], repeats: int, rows: Rows, num_new: int = 128
) -> dict[str, Any]:
    """Medians over documents, by arm, length and how many are asked about at once."""
    found: dict[str, Any] = {arm: {} for arm in arms.clients}
    for length, num_at_once in product(tried, (1, 4)):
        keys = [f"{length} x {num_at_once}, {repeat}" for repeat in range(repeats)]
        for repeat, key in enumerate(keys):
            prompts = [document(tokenizer, length, 900 + 10 * repeat + at) for at in range(num_at_once)]
            for arm, client in arms.in_turn():
                if not rows.left(key, {arm: client}):
                    continue
                client.forget()
                with ThreadPoolExecutor(num_at_once) as pool:
                    answers = list(pool.map(lambda prompt, client=client: client.ask(prompt, num_new), prompts))
                tokens = [answer.output_ids for answer in answers]
                rows.add(key, arm, {"replies": [decode_row(answer) for answer in answers], "tokens": tokens})
        for arm in arms.clients:
            own = {key: row for key, row in rows.of_arm(arm).items() if key in keys}
            if own:
                off = [
                    rows.of_arm(OFF)[key]["tokens"] == row["tokens"] for key, row in own.items() if (key, OFF) in rows
                ]
                medians = _medians([reply for row in own.values() for reply in row["replies"]])
                found[arm][f"{length} x {num_at_once}"] = {
                    "n": len(own),
                    **medians,
                    "as_off": f"{sum(off)} of {len(off)}",
                }
    return found


def decode_row(answer: Answer) -> dict[str, float]:
    """Seconds to the first token, tokens/s after it, the accepted share of drafted tokens, tokens per step, and prompt
    tokens given to the target."""
    info = answer.meta_info
    report = info.get("spec_stack", info)
    seconds = answer.chunk_times[-1] - answer.chunk_times[0]
    proposed, accepted = (report.get(name, 0) for name in ("num_proposed", "num_accepted"))
    return {
        "ttft_s": answer.ttft_s,
        "tokens_per_s": (len(answer.output_ids) - 1) / seconds,
        "accepted": accepted / proposed if proposed else info.get("spec_accept_rate", 0.0),
        "per_step": info.get("spec_accept_length", 1.0),
        "given": report.get("num_kept_tokens", info.get("prompt_tokens", 0)),
    }


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(median(row[name] for row in rows), 4) for name in rows[0]}
