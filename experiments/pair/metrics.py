"""What `eval_pair.py` measures of a draft/target pair: held-out quality, acceptance, retrieval and cost.

Each function takes a loaded generator and returns plain numbers. Prompts and windows are fixed by seeds, so that pairs
with the same tokenizer are compared on the same tokens.
"""

from __future__ import annotations

import math
import random
import statistics
import sysconfig
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spec_stack import PrefillConfig, SpecStackGenerator
from spec_stack.decode.propose import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.hf.model import CachedModel
from spec_stack.hf.prompt import encode_messages
from spec_stack.prefill.scoring import score_prompt

CATEGORIES = {
    "code": ("code_",),
    "math": ("math_",),
    "chat": ("instruct_", "qa_"),
    "summaries": ("summaries_",),
    "prose": ("prose_", "stories_"),
    "docs": ("docs_",),
}
# Modules of the standard library that no training text of the pair's continuation contains.
MODULES = (
    "argparse subprocess tarfile inspect typing zipfile doctest pickletools ast logging/__init__ decimal _pydecimal "
    "datetime unittest/mock smtplib turtle pdb difflib ssl threading"
)
NAMES = "Alice Bruno Carla Daniel Elena Felix Greta Hassan Irene Jonas Kavita Liam Maria Nadia Oscar Paula"
ADJECTIVES = "red blue green silver golden secret hidden special magic ancient"
MIN_MODULE_BYTES = 40_000


def category(domain: str) -> str:
    for name, prefixes in CATEGORIES.items():
        if domain.startswith(prefixes):
            return name
    raise ValueError(f"unknown domain {domain!r} in the held-out file; expected one starting with {CATEGORIES}")


def record_text(tokenizer: Any, record: dict[str, Any], answered: bool = True) -> tuple[list[int], int]:
    """A record as tokens (through the chat template where it is a pair), and its bytes of text."""
    if "text" in record:
        return tokenizer(record["text"]).input_ids, len(record["text"].encode())
    prompt, response = record["prompt"].strip(), record["response"].strip()
    messages = [{"role": "user", "content": prompt}]
    if answered:
        messages.append({"role": "assistant", "content": response})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=not answered)
    return tokenizer(text, add_special_tokens=False).input_ids, len(prompt.encode()) + len(response.encode())


def quality(
    generator: SpecStackGenerator, records: Sequence[dict[str, Any]], window: int, share: float
) -> dict[str, Any]:
    """Bits per byte of both models, top-1 agreement, expected acceptance (sum of the lower probability); per category.

    Documents are cut into windows; every 1/share-th window is taken. Raises ValueError where none is.
    """
    if not 0 < share <= 1:
        raise ValueError(f"--share lies in (0, 1], got {share}")
    every = max(1, round(1 / share))
    sums: dict[str, list[float]] = {}
    count = 0
    for record in records:
        ids, num_bytes = record_text(generator.tokenizer, record)
        per_token = num_bytes / max(1, len(ids) - 1)
        for start in range(0, len(ids) - 1, window - 1):
            piece = [ids[0], *ids[start + 1 : start + window]]
            count += 1
            if count % every or len(piece) < 2:
                continue
            inputs, labels = torch.tensor([piece[:-1]]), torch.tensor(piece[1:])
            target = generator.target(inputs, use_cache=False).logits[0].float().log_softmax(-1)
            draft = generator.draft(inputs, use_cache=False).logits[0].float().log_softmax(-1)
            row = sums.setdefault(category(record["domain"]), [0.0] * 6)
            at = torch.arange(len(labels))
            for index, value in enumerate(
                (
                    len(labels),
                    len(labels) * per_token,
                    -target[at, labels].sum().item(),
                    -draft[at, labels].sum().item(),
                    (target.argmax(-1) == draft.argmax(-1)).sum().item(),
                    torch.minimum(target, draft).exp().sum().item(),
                )
            ):
                row[index] += value
    if not sums:
        raise ValueError(f"{count} windows of held-out text are too few for --share {share}; raise it")
    everything = [sum(column) for column in zip(*sums.values(), strict=True)]
    return {name: _quality_row(row) for name, row in {"all": everything, **sums}.items()}


def _quality_row(row: Sequence[float]) -> dict[str, float]:
    tokens, num_bytes, target, draft, agree, accepted = row
    return {
        "num_tokens": int(tokens),
        "target_bits_per_byte": target / math.log(2) / num_bytes,
        "draft_bits_per_byte": draft / math.log(2) / num_bytes,
        "agreement": agree / tokens,
        "expected_acceptance": accepted / tokens,
    }


def acceptance(
    generator: SpecStackGenerator,
    records: Sequence[dict[str, Any]],
    num_prompts: int,
    num_tokens: int,
    gammas: Sequence[int],
) -> dict[str, dict[str, float]]:
    """Mean accepted drafts per whole step, per category and gamma, under greedy decoding.

    Greedy speculation is lossless, so the target's own continuation is the text, and a step accepts the run of
    positions where the draft's argmax is that text: one continuation serves every gamma.
    """
    result: dict[str, dict[str, float]] = {}
    rng = random.Random(17)
    for name in CATEGORIES:
        pool = [record for record in records if category(record["domain"]) == name]
        rng.shuffle(pool)
        lengths: dict[int, list[int]] = {gamma: [] for gamma in gammas}
        taken = 0
        for record in pool:
            ids, _ = record_text(generator.tokenizer, record, answered=False)
            if "text" in record:
                start = rng.randrange(max(1, len(ids) - 128))
                ids = [ids[0], *ids[start + 1 : start + 128]]
            if taken == num_prompts or not 16 <= len(ids) <= 900:
                continue
            taken += 1
            text = generator.generate(input_ids=ids, max_tokens=num_tokens, specprefill=False, gamma=0).token_ids
            guesses = generator.draft(torch.tensor([ids + text[:-1]])).logits[0, len(ids) - 1 :].argmax(-1).tolist()
            right = [guess == token for guess, token in zip(guesses, text, strict=True)]
            for gamma in gammas:
                lengths[gamma] += accepted_runs(right, gamma)
        result[name] = {f"gamma{g}": sum(runs) / len(runs) for g, runs in lengths.items() if runs}
    keys = [f"gamma{gamma}" for gamma in gammas]
    result["all"] = {key: _mean([row[key] for row in result.values() if key in row]) for key in keys}
    return result


def accepted_runs(right: Sequence[bool], gamma: int) -> list[int]:
    """Accepted drafts of each whole step, given where the draft is right."""
    runs, at = [], 0
    while at + gamma < len(right):
        run = next((n for n in range(gamma) if not right[at + n]), gamma)
        runs.append(run)
        at += run + 1
    return runs


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def needle_prompt(tokenizer: Any, length: int, seed: int) -> tuple[str, str, str, float]:
    """A module's source of `length` tokens with one fact as a line of its own: (content, fact, code, depth)."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = [stdlib / f"{module}.py" for module in MODULES.split()]
    files = [file for file in files if file.exists() and file.stat().st_size > MIN_MODULE_BYTES]
    if not files:
        raise ValueError(f"no source files in {stdlib}; retrieval needs the standard library's sources")
    rng = random.Random(seed)
    source = files[seed % len(files)].read_text(encoding="utf-8")
    lines = tokenizer.decode(tokenizer(source[: length * 6], add_special_tokens=False).input_ids[:length]).split("\n")
    at = rng.randrange(len(lines))
    adjective, name, code = rng.choice(ADJECTIVES.split()), rng.choice(NAMES.split()), str(rng.randint(10_000, 99_999))
    fact = f"The {adjective} code for {name} is {code}."
    content = "\n".join([*lines[:at], fact, *lines[at:]]) + f"\n\nWhat is the {adjective} code for {name}?"
    return content, fact, code, at / len(lines)


def needle_kept(generator: SpecStackGenerator, content: str, fact: str, config: PrefillConfig) -> bool:
    """Whether every token of the fact is in the draft's selection."""
    messages = [{"role": "user", "content": content}]
    prompt_ids, protected = encode_messages(generator.tokenizer, messages)
    text = generator.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    offsets = generator.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
    start = text.index(fact)
    wanted = {at for at, (first, last) in enumerate(offsets) if first < start + len(fact) and last > start}
    draft = CachedModel(generator.draft, config.prefill_chunk)
    look_ahead = partial(propose, draft, sampler=Sampler(), end_ids=frozenset())
    selection, _ = score_prompt(draft, prompt_ids, look_ahead, config, protected)
    return wanted <= set(selection.positions)


def retrieval(
    generator: SpecStackGenerator, lengths: Sequence[int], keep_rates: Sequence[float], trials: int, depths: int = 3
) -> dict[str, Any]:
    """Right answers of the draft alone, of the target dense and at each keep_rate, by prompt length and by depth.

    keep_rates that are 1 are dense. "kept" counts prompts whose fact the draft's scores keep at that rate.
    """
    alone = SpecStackGenerator(generator.draft, generator.draft, generator.tokenizer)
    by_length: dict[str, dict[str, float]] = {}
    by_depth: dict[str, dict[str, list[bool]]] = {}
    for length in lengths:
        columns: dict[str, list[bool]] = {}
        for seed in range(trials):
            content, fact, code, depth = needle_prompt(generator.tokenizer, length, seed)
            messages = [{"role": "user", "content": content}]
            found = {
                "draft alone": code in _answer(alone, messages, 1.0),
                "dense": code in _answer(generator, messages, 1.0),
            }
            for rate in keep_rates:
                found[f"keep {rate}"] = code in _answer(generator, messages, rate)
                found[f"kept at {rate}"] = needle_kept(generator, content, fact, PrefillConfig(keep_rate=rate))
            third = f"{int(depth * depths) / depths:.2f}-{(int(depth * depths) + 1) / depths:.2f}"
            for key, right in found.items():
                columns.setdefault(key, []).append(right)
                by_depth.setdefault(third, {}).setdefault(key, []).append(right)
        by_length[str(length)] = {key: _mean(right) for key, right in columns.items()}
    depth_rows = {bin_: {key: _mean(right) for key, right in row.items()} for bin_, row in sorted(by_depth.items())}
    return {"trials": trials, "by_length": by_length, "by_depth": depth_rows}


def _answer(generator: SpecStackGenerator, messages: list[dict[str, str]], keep_rate: float) -> str:
    sparse = keep_rate < 1
    return generator.generate(
        messages=messages, max_tokens=24, gamma=4, specprefill=sparse, keep_rate=keep_rate if sparse else None
    ).text


def cost_ratio(generator: SpecStackGenerator, context: int = 1024, repeats: int = 15) -> dict[str, float]:
    """Median milliseconds of a one-token step and of a prefill, and draft over target; the two models take turns."""
    ids = torch.randint(7, generator.target.config.vocab_size, (context,), generator=torch.Generator().manual_seed(3))
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(repeats + 1):
        for name, model in (("target", generator.target), ("draft", generator.draft)):
            cached = CachedModel(model, 8192)
            started = time.perf_counter()
            cached.forward(ids.tolist(), range(context), 1)
            times.setdefault((name, "prefill"), []).append(time.perf_counter() - started)
            for _ in range(4):
                started = time.perf_counter()
                cached.forward([100], [cached.next_position], 1)
                times.setdefault((name, "step"), []).append(time.perf_counter() - started)
                cached.rollback(1)
    # The first round warms up.
    median = {key: statistics.median(values[len(values) // (repeats + 1) :]) for key, values in times.items()}
    return {
        "draft_step_ms": median["draft", "step"] * 1e3,
        "target_step_ms": median["target", "step"] * 1e3,
        "step_ratio": median["draft", "step"] / median["target", "step"],
        "draft_prefill_ms": median["draft", "prefill"] * 1e3,
        "target_prefill_ms": median["target", "prefill"] * 1e3,
        "prefill_ratio": median["draft", "prefill"] / median["target", "prefill"],
    }
