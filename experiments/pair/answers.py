"""Answers to questions in many wordings: the target dense and sparse, the draft alone, random and recent chunks, and
the share of prompts whose whole evidence is kept; per task, wording half and length.

Every prompt is a document of its own with one question, drawn from a seed, so pairs with one tokenizer get the same.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from experiments.pair.documents import Made
from experiments.pair.model import END, EOS
from experiments.pair.questions import QuestionMaker
from spec_stack import PrefillConfig, SpecStackGenerator
from spec_stack.decode.propose import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.hf.model import CachedModel
from spec_stack.prefill.scoring import score_prompt

# What a half's documents are made of, by the beginnings of a held-out record's domain: no kind is in both.
HAYSTACK_DOMAINS = {
    "train": {"code": ("code_",), "prose": ("prose_",), "docs": ("docs_",), "stories": ("stories_",)},
    "test": {"summaries": ("summaries_",), "questions": ("qa_",), "mathematics": ("math_",)},
}
EXHAUSTIVE = ("chains", "counting", "common", "several values")
SPARE_TOKENS = 20  # an answer may be a longer sentence around the value


def haystacks(documents: Sequence[tuple[str, Sequence[int] | np.ndarray]], half: str) -> dict[str, np.ndarray]:
    """Token ids by kind of text, from held-out documents (domain, ids). Raises ValueError where there are none."""
    found: dict[str, np.ndarray] = {}
    for name, prefixes in HAYSTACK_DOMAINS[half].items():
        pieces = [np.asarray(ids) for domain, ids in documents if domain.startswith(prefixes)]
        if pieces:
            found[name] = np.concatenate(pieces)
    if not found:
        raise ValueError(f"no held-out text of {sorted(HAYSTACK_DOMAINS[half])} for the {half} half's documents")
    return found


def interval(num_right: float, num: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share = num_right / num
    middle = (share + z * z / (2 * num)) / (1 + z * z / num)
    half = z / (1 + z * z / num) * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    return max(0.0, middle - half), min(1.0, middle + half)


def is_right(text: str, answer: str) -> bool:
    """Whether the answer stands in the text as words of their own, whatever the case and the white space."""
    wanted, given = (" ".join(part.split()).casefold() for part in (answer, text))
    return re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", given) is not None


def greedy(model: CachedModel, prompt_ids: Sequence[int], positions: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy tokens after the tokens of the prompt at these positions; the text goes on at the prompt's full length."""
    logits = model.forward([prompt_ids[at] for at in positions], positions, 1)
    text: list[int] = []
    for index in range(num_tokens):
        token = int(logits[-1].argmax())
        if token in (END, EOS):
            break
        text.append(token)
        logits = model.forward([token], [len(prompt_ids) + index], 1)
    return text


def control(num_tokens: int, num_kept: int, config: PrefillConfig, rng: random.Random | None) -> list[int]:
    """As many tokens as a selection has, in whole chunks with both ends; random, or without rng recent."""
    size = config.chunk_size
    last = (num_tokens - 1) // size
    forced = {*range(config.keep_first), *range(last + 1 - config.keep_last, last + 1)} & set(range(last + 1))
    others = [chunk for chunk in range(last, -1, -1) if chunk not in forced]
    if rng:
        rng.shuffle(others)
    taken = sum(1 for at in range(num_tokens) if at // size in forced)
    room = max(0, round((num_kept - taken) / size))
    chosen = forced | set(others[:room])
    return [at for at in range(num_tokens) if at // size in chosen]


def one_prompt(
    generator: SpecStackGenerator, made: Made, keep_rates: Sequence[float], rng: random.Random
) -> dict[str, bool]:
    """What came of one prompt, by column. The selection is the generator's own, calibrated where the pair is."""
    start, end = made.answers[0]
    prompt_ids, answer = made.sequence.ids[:start], made.questions[0].answer
    everything, prefill_chunk = range(start), generator.config.prefill.prefill_chunk
    num_tokens = end - start + SPARE_TOKENS

    def right(model: Any, positions: Sequence[int]) -> bool:
        text = greedy(CachedModel(model, prefill_chunk), prompt_ids, positions, num_tokens)
        return is_right(generator.tokenizer.decode(text), answer)

    found = {"dense": right(generator.target, everything), "draft alone": right(generator.draft, everything)}
    wanted = {at for first, last in made.spans[0] for at in range(first, last)}
    for rate in keep_rates:
        draft = CachedModel(generator.draft, prefill_chunk)
        look_ahead = partial(propose, draft, sampler=Sampler(), end_ids=frozenset())
        rated = replace(generator.config.prefill, keep_rate=rate)
        positions = score_prompt(draft, prompt_ids, look_ahead, rated)[0].positions
        found[f"sparse {rate}"] = right(generator.target, positions)
        found[f"kept {rate}"] = wanted <= set(positions)
        if rate == keep_rates[min(1, len(keep_rates) - 1)]:
            for name, drawn in ((f"random {rate}", rng), (f"recent {rate}", None)):
                found[name] = right(generator.target, control(start, len(positions), rated, drawn))
    return found


def answers(
    generator: SpecStackGenerator,
    documents: Sequence[tuple[str, Sequence[int] | np.ndarray]],
    *,
    halves: Sequence[str] = ("test",),
    lengths: Mapping[int, int],
    keep_rates: Sequence[float] = (0.1, 0.2, 0.3),
    kinds: Sequence[str] | None = None,
    seed: int = 1,
) -> dict[str, dict[str, Any]]:
    """Rows "half length kind" of shares with their counts, and "half length all" over the kinds that can be pruned.

    lengths: tokens of a prompt to number of prompts per kind. Each row: column to [share, low, high]; "num": prompts.
    """
    tokenizer = generator.tokenizer.backend_tokenizer
    rows: dict[str, dict[str, Any]] = {}
    for half in halves:
        maker = QuestionMaker(tokenizer, haystacks(documents, half), half)
        for length, num in lengths.items():
            pooled: list[dict[str, bool]] = []
            for kind in kinds or list(maker.kinds):
                found = []
                for index in range(num):
                    rng = random.Random(f"{seed}-{half}-{kind}-{length}-{index}")
                    found.append(one_prompt(generator, maker.made(rng, length, kind, 1), keep_rates, rng))
                rows[f"{half} {length} {kind}"] = shares(found)
                pooled += found if kind not in EXHAUSTIVE else []
            if pooled:
                rows[f"{half} {length} all"] = shares(pooled)
    return rows


def shares(found: Sequence[Mapping[str, bool]]) -> dict[str, Any]:
    """Column to [share, low, high], the number of prompts, and the share of sparse answers where dense is right."""
    row: dict[str, Any] = {"num": len(found)}
    for column in found[0]:
        right = sum(prompt[column] for prompt in found)
        row[column] = [round(number, 4) for number in (right / len(found), *interval(right, len(found)))]
    can = [prompt for prompt in found if prompt["dense"]]
    for column in found[0] if can else ():
        if column.startswith("sparse"):
            right = sum(prompt[column] for prompt in can)
            row[f"{column} of dense"] = [round(number, 4) for number in (right / len(can), *interval(right, len(can)))]
    return row
