"""Agents' conversations: the user asks once, and tool calls and results follow."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence

from experiments.real.evidence_prompts import TOWNS, Measure
from experiments.real.judging.documents import WORDS, Needle, Texts, draw, fill, haystack, hide
from experiments.real.judging.prompt import JudgingPrompt, Message

_MEDIA = ("log", "python", "yaml", "english")
_BEHIND = (0, 1, 3, 10)
_RESULT = "[tool result]"


def loops(texts: Texts, size: int, num_tokens: int, measure: Measure) -> Iterator[JudgingPrompt]:
    """The evidence in the first result, and 0 to 10 results behind it; and in the newest, behind 1 to 9 others."""
    for number in range(4 * size):
        medium, group = _MEDIA[number // 2 % len(_MEDIA)], f"loop/{number}"
        rng = random.Random(group)
        source, lines = haystack(texts, medium, 30 + number, num_tokens * 3 // 4, measure, rng)
        (needle,) = draw(rng, medium, lines, 1)
        chat = [_user(rng, number, needle), *_step(rng, ["\n".join(hide(rng, lines, [needle], medium))])]
        for behind in range(max(_BEHIND) + 1):
            if behind:
                chat += _step(rng, [_other(texts, rng, 150, measure)])
            if behind in _BEHIND:
                shape = f"{behind} results behind"
                yield JudgingPrompt(
                    f"{group}/{behind}", "agents", shape, medium, source, group, list(chat), needle.evidence
                )


def newest(texts: Texts, size: int, num_tokens: int, measure: Measure) -> Iterator[JudgingPrompt]:
    """The evidence in the newest result behind 1 to 9 others, or in one of two to six parallel results."""
    for number in range(4 * size):
        for kind, counts in (("newest", (1, 3, 9)), ("parallel", (2, 3, 6))):
            medium, group = _MEDIA[(number // 2 + 1) % len(_MEDIA)], f"{kind}/{number}"
            rng = random.Random(group)
            count = counts[number // 2 % len(counts)]
            room = num_tokens // 2 if kind == "newest" else num_tokens // count
            source, lines = haystack(texts, medium, 40 + number, room, measure, rng)
            (needle,) = draw(rng, medium, lines, 1)
            document = "\n".join(hide(rng, lines, [needle], medium))
            chat = [_user(rng, number, needle)]
            if kind == "newest":
                for _ in range(count):
                    chat += _step(rng, [_other(texts, rng, num_tokens // 2 // count, measure)])
                chat += _step(rng, [document])
            else:
                results = [_other(texts, rng, room, measure) for _ in range(count)]
                results[rng.randrange(count)] = document
                chat += _step(rng, results)
            shape = f"{kind}"
            yield JudgingPrompt(f"{group}/{count}", "agents", shape, medium, source, group, chat, needle.evidence)


def own_plans(texts: Texts, size: int, num_tokens: int, measure: Measure) -> Iterator[JudgingPrompt]:
    """The user gives a task, and the assistant's own plan asks for the evidence; up to two results behind it."""
    for number in range(2 * size):
        medium, group = ("yaml", "log")[number // 2 % 2], f"plan/{number}"
        rng = random.Random(group)
        source, lines = haystack(texts, medium, 50 + number, num_tokens * 3 // 4, measure, rng)
        (needle,) = draw(rng, medium, lines, 1)
        task = fill(WORDS["task"], {"town": rng.choice(TOWNS)})
        chat: list[Message] = [{"role": "user", "content": task}]
        chat += _step(rng, [_other(texts, rng, num_tokens // 4, measure)])
        plan = fill(WORDS["own_plan"], needle.asks)
        chat += _step(rng, ["\n".join(hide(rng, lines, [needle], medium))], plan)
        yield JudgingPrompt(group, "agents", "own plan", medium, source, group, chat, needle.evidence)


def recorded(texts: Texts, size: int, num_tokens: int, measure: Measure) -> Iterator[JudgingPrompt]:
    """Recorded sessions to about num_tokens, with a line hidden in a result and asked for at the end of the task."""
    number = 0
    for at in range(10**3):
        if number == 2 * size:
            return
        source, text = texts.get("session", at)
        rng = random.Random(f"recorded/{at}")
        (needle,) = draw(rng, "log", [], 1)
        chat = _begun(json.loads(text), num_tokens, measure, needle, rng)
        if chat:
            group = f"recorded/{number}"
            number += 1
            yield JudgingPrompt(group, "agents", "recorded", "session", source, group, chat, needle.evidence)


def _begun(
    messages: Sequence[Message], num_tokens: int, measure: Measure, needle: Needle, rng: random.Random
) -> list[Message]:
    """The messages up to a result, as many as fit; none where fewer than two results do."""
    chat: list[Message] = []
    total = 0
    for message in messages:
        content = message["content"]
        total += measure(content)
        if total > 1.6 * num_tokens:
            break
        is_result = content.startswith(_RESULT)
        role = "tool" if is_result else message["role"]
        chat.append({"role": role, "content": content.removeprefix(_RESULT).strip()})
    while chat and chat[-1]["role"] != "tool":
        chat.pop()
    places = [at for at, message in enumerate(chat) if message["role"] == "tool" and len(message["content"]) > 600]
    if len(places) < 2 or total < num_tokens // 2 or chat[0]["role"] != "user":
        return []
    at = rng.choice(places)
    lines = hide(rng, chat[at]["content"].split("\n"), [needle], "log")
    chat[at] = {"role": "tool", "content": "\n".join(lines)}
    task = f"{chat[0]['content']}\n\n{needle.asks['instruction']}"
    return [{"role": "user", "content": task}, *chat[1:]]


def _user(rng: random.Random, number: int, needle: Needle) -> Message:
    wordings = WORDS["agent_request"]
    return {"role": "user", "content": fill(wordings[number // 2 % len(wordings)], needle.asks)}


def _step(rng: random.Random, results: Sequence[str], plan: str = "") -> list[Message]:
    """An assistant's plan and calls, and their results."""
    numbers = [rng.randrange(10**6) for _ in results]
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "read_file", "arguments": json.dumps({"path": f"data/{number}.txt"})},
        }
        for number in numbers
    ]
    said: list[Message] = [{"role": "assistant", "content": plan or rng.choice(WORDS["plans"]), "tool_calls": calls}]
    told = zip(numbers, results, strict=True)
    return said + [{"role": "tool", "tool_call_id": f"call_{number}", "content": text} for number, text in told]


def _other(texts: Texts, rng: random.Random, num_tokens: int, measure: Measure) -> str:
    """A result that holds no evidence."""
    medium = rng.choice(("log", "python", "english", "csv", "javascript"))
    return "\n".join(haystack(texts, medium, 100 + rng.randrange(10**4), num_tokens, measure, rng)[1])
