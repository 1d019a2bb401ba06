"""The cases of `bench_gpu.py`, one function a case, each of which returns plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from experiments.gpu.shapes import Models, random_prompt
from experiments.gpu.timing import interleave, once, rounded, summary
from spec_stack import PrefillConfig, Selection, SpecStackConfig, SpecStackGenerator
from spec_stack.config import DraftStep
from spec_stack.devices import attend
from spec_stack.hf.attention import install
from spec_stack.hf.fixed_step import FixedStep
from spec_stack.hf.model import CachedModel
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.selection import select

BLOCKS = range(1, 10)
GROWN = 64
# Tokens by which the second of two prompts of nearly one length is longer.
APART = 37


def select_anything(prompt: list[int], config: PrefillConfig) -> Selection:
    """As many tokens as the config keeps, chosen by random importance."""
    importance = torch.rand(len(prompt), generator=torch.Generator().manual_seed(1))
    return select(ScoringInputs(PromptText(prompt), importance=importance), config)


def bench_prefill(models: Models, length: int, repeats: int) -> dict[str, Any]:
    """Time to first token through the generator, beside the bare forwards that bound it."""
    shape = models.shape
    # Random weights have no tokenizer, and so no lines.
    config = PrefillConfig(prefill_chunk=shape.prefill_chunk, granularity="chunks")
    generator = SpecStackGenerator(models.target, models.draft, config=SpecStackConfig(config))
    prompt = random_prompt(shape.num_tokens(length), shape.target.vocab_size)
    selections = {rate: select_anything(prompt, replace(config, keep_rate=rate)) for rate in shape.keep_rates}
    scoring_s: dict[float, list[float]] = {rate: [] for rate in selections}

    def first_step(keep_rate: float | None) -> None:
        options: dict[str, Any] = {"gamma": 0, "sparse_prefill": "off"}
        if keep_rate is not None:
            options = {"keep_rate": keep_rate, "sparse_prefill": "on"}
        step = next(generator.stream(input_ids=prompt, max_tokens=16, **options))
        if keep_rate is not None:
            if step.record.keep_rate == 1:
                raise RuntimeError("the prompt was prefilled densely: generate() says why in sparse_prefill_reason")
            scoring_s[keep_rate].append(step.record.draft_s)

    def bare(model: Any, part: Selection) -> Callable[[], Any]:
        return lambda: CachedModel(model, shape.prefill_chunk).forward(part.token_ids, part.positions, 1)

    variants: dict[str, Callable[[], Any]] = {
        "dense": partial(first_step, None),
        "draft, whole prompt": bare(generator.draft, Selection(prompt, range(len(prompt)), len(prompt))),
    }
    for rate, selection in selections.items():
        variants[f"kept {rate}"] = bare(generator.target, selection)
        variants[f"sparse {rate}"] = partial(first_step, rate)
    times = interleave(variants, repeats, models.device)
    medians = {name: median(own) for name, own in times.items()}
    r = medians["draft, whole prompt"] / medians["dense"]
    rows = []
    for rate, selection in selections.items():
        gain, s = medians["dense"] / medians[f"sparse {rate}"], medians[f"kept {rate}"] / medians["dense"]
        row = {
            "keep_rate": rate,
            "kept_tokens": len(selection.positions),
            "ttft_gain": gain,
            "s": s,
            "bound": 1 / (r + s),
            "share_of_bound": gain * (r + s),
            "scoring_s": median(scoring_s[rate]),
        }
        rows.append({name: rounded(value) for name, value in row.items()})
    return {"tokens": len(prompt), "r": rounded(r), "rows": rows, "times": summary(times)}


def bench_decode(models: Models, role: str, cached: int, repeats: int) -> dict[str, Any]:
    """Time a block of 1 to 9 tokens over a cache; of 1 and 2 for the draft, which is fed the last token or two."""
    model = models.draft if role == "draft" else models.target
    install(model)
    prompt = random_prompt(cached, models.shape.target.vocab_size)
    stepped = CachedModel(model, models.shape.prefill_chunk)
    stepped.forward(prompt, range(cached), 1)

    def block(num_tokens: int) -> None:
        stepped.forward(prompt[:num_tokens], range(cached, cached + num_tokens), num_tokens)
        stepped.rollback(num_tokens)

    sizes = (1, 2) if role == "draft" else BLOCKS
    times = interleave({str(size): partial(block, size) for size in sizes}, repeats, models.device)
    over_one = {name: rounded(median(own) / median(times["1"])) for name, own in times.items()}
    return {"role": role, "cached": cached, "over_one": over_one, "times": summary(times)}


def bench_scoring_attention(models: Models, length: int) -> dict[str, Any]:
    """The server's scoring attention, one layer of the draft over a prompt in chunks: cold (its kernels are new to this
    process, or its shapes to cuDNN) and warm, at two lengths that are close, as two prompts are."""
    config, device, chunk = models.shape.draft, models.device, models.shape.prefill_chunk
    made = partial(torch.randn, device=device, dtype=torch.bfloat16)
    longest = length + APART
    queries = made(config.num_attention_heads, longest, config.head_dim)
    keys, values = (made(config.num_key_value_heads, longest, config.head_dim) for _ in range(2))

    def prompt(num_tokens: int) -> None:
        first = num_tokens - (num_tokens - 1) // chunk * chunk
        start = 0
        for stop in range(first, num_tokens + 1, chunk):
            seen = keys[:, :stop], values[:, :stop]
            attend(queries[:, start:stop], *seen, config.head_dim**-0.5)
            start = stop

    rows: dict[str, Any] = {}
    for num_tokens in (length, longest):
        run = partial(prompt, num_tokens)
        with torch.inference_mode():
            cold, warm = once(run, device), min(once(run, device) for _ in range(3))
        rows[f"all {num_tokens}"] = {"cold_ms": rounded(cold), "warm_ms": rounded(warm)}
    return {"chunk": chunk, "rows": rows}


def _verification_ms(stepped: CachedModel, cached: int, device: torch.device) -> float:
    """A verification of five tokens, warm."""
    spent: list[float] = []
    for _ in range(8):
        spent.append(once(partial(stepped.forward, [5] * 5, range(cached, cached + 5), 5), device))
        stepped.rollback(5)
    return median(spent[4:])


def bench_growing(models: Models, cached: int, draft_step: DraftStep = "eager") -> dict[str, Any]:
    """Steps of one token that append, so that each has a length of its own, as decoding does; and c, what a forward of
    the draft takes over one of the target. In fixed shapes, the first step of a bucket is among them, and a capture."""
    report: dict[str, Any] = {"cached": cached, "draft_step": draft_step}
    prompt = random_prompt(cached, models.shape.target.vocab_size)
    for role, model in (("draft", models.draft), ("target", models.target)):
        install(model)
        step = FixedStep(model, draft_step, is_draft=role == "draft")
        stepped = CachedModel(model, models.shape.prefill_chunk, step=step)
        stepped.forward(prompt, range(cached), 1)
        steps = [partial(stepped.forward, [5], [cached + step], 1) for step in range(GROWN)]
        spent = [once(step, models.device) for step in steps]
        told = {"median_ms": median(spent), "first_ms": spent[0], "longest_ms": max(spent[1:])}
        if draft_step != "eager":
            told["verify_5_ms"] = _verification_ms(stepped, cached + GROWN, models.device)
        report[role] = {name: rounded(value) for name, value in told.items()} | {"ran": str(step)}
    report["c"] = rounded(report["draft"]["median_ms"] / report["target"]["median_ms"])
    return report
