"""Demo on a long document: a standard-library module, a hidden fact, and a question about it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from spec_stack.api.generator import SpecStackGenerator
from spec_stack.calibrate.documents import MODULES, module_source
from spec_stack.types import GenerationResult

_ADJECTIVES = ("secret", "red", "golden", "hidden", "silver", "ancient", "green", "blue")
_NAMES = ("Alice", "Bruno", "Carla", "Daniel", "Elena", "Felix", "Greta", "Hassan", "Irene", "Jonas", "Maria", "Oscar")


@dataclass(frozen=True)
class HiddenFact:
    """A long document with a hidden fact. depth: the fact's relative place, 0 (start) to 1 (end)."""

    module: str
    depth: float
    document: str
    question: str
    answer: str

    @property
    def messages(self) -> list[Mapping[str, str]]:
        return [{"role": "user", "content": f"{self.document}\n\n{self.question}"}]

    def is_answered_by(self, text: str) -> bool:
        return self.answer in text


def hide_fact(tokenizer: Any, num_tokens: int, seed: int) -> HiddenFact:
    """The first tokens of a module with a fact on its own line; the seed chooses both. Raises ValueError for a module
    that is too short."""
    rng = random.Random(seed)
    module = MODULES[seed % len(MODULES)]
    source = module_source(module)
    # Code has fewer than six characters per token; the rest of the file need not be tokenized.
    token_ids = tokenizer(source[: 6 * num_tokens], add_special_tokens=False, verbose=False).input_ids[:num_tokens]
    if len(token_ids) < num_tokens:
        raise ValueError(f"module {module!r} has {len(token_ids)} tokens, fewer than the {num_tokens} asked for")
    lines = tokenizer.decode(token_ids).split("\n")
    line = rng.randrange(len(lines))
    subject = f"{rng.choice(_ADJECTIVES)} code for {rng.choice(_NAMES)}"
    answer = str(rng.randint(10000, 99999))
    document = "\n".join([*lines[:line], f"The {subject} is {answer}.", *lines[line:]])
    return HiddenFact(module, line / len(lines), document, f"What is the {subject}?", answer)


_NUM_CONTINUED = 128
MODES: dict[str, dict[str, Any]] = {
    "dense prefill + plain decoding": {"sparse_prefill": "off", "gamma": 0},
    "sparse prefill + speculative decoding": {"sparse_prefill": "on"},
}


def run_demo(
    generator: SpecStackGenerator,
    num_tokens: int = 8200,
    seed: int = 0,
    repeats: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Ask for the hidden fact and continue the document, sparse and dense in turn; medians of `repeats` runs.

    The question measures the time to first token, the continuation the decoding speed. "lossless": speculative tokens
    equal plain greedy tokens over the same sparse prefill.
    """
    fact = hide_fact(generator.tokenizer, num_tokens, seed)
    needed = len(generator.tokenizer(fact.document).input_ids) + _NUM_CONTINUED
    limit = min(generator.pair.max_positions)
    if needed > limit:
        raise ValueError(
            f"a document of {num_tokens} tokens takes {needed} of the pair's {limit} positions; ask for less"
        )
    answers: dict[str, list[GenerationResult]] = {mode: [] for mode in MODES}
    texts: dict[str, list[GenerationResult]] = {mode: [] for mode in MODES}
    for repeat in range(repeats + 1):
        for mode, options in MODES.items():
            progress(f"{'warm-up' if repeat == 0 else f'run {repeat} of {repeats}'}: {mode}")
            answers[mode].append(generator.generate(messages=fact.messages, max_tokens=48, **options))
            texts[mode].append(generator.generate(fact.document, max_tokens=_NUM_CONTINUED, ignore_eos=True, **options))
    plain = generator.generate(fact.document, max_tokens=_NUM_CONTINUED, ignore_eos=True, sparse_prefill="on", gamma=0)
    rows = {mode: _summarise(fact, answers[mode][1:], texts[mode][1:]) for mode in MODES}
    dense, sparse = rows.values()
    return {
        "module": fact.module,
        "fact_depth": fact.depth,
        "question": fact.question,
        "expected": fact.answer,
        "modes": rows,
        "ttft_ratio": dense["ttft_s"] / sparse["ttft_s"],
        "decode_ratio": sparse["decode_tokens_per_s"] / dense["decode_tokens_per_s"],
        "lossless": list(texts.values())[1][-1].token_ids == plain.token_ids,
    }


def _summarise(fact: HiddenFact, answers: list[GenerationResult], texts: list[GenerationResult]) -> dict[str, Any]:
    answer, text = answers[-1], texts[-1]
    return {
        "prompt_tokens": answer.metrics.num_prompt_tokens,
        "kept_tokens": answer.metrics.num_kept_tokens,
        "keep_rate": answer.metrics.keep_rate,
        "ttft_s": median(result.metrics.ttft_s for result in answers),
        "decode_tokens_per_s": median(result.metrics.decode_tokens_per_s or 0.0 for result in texts),
        "acceptance_rate": text.metrics.acceptance_rate,
        "tokens_per_step": text.metrics.tokens_per_step,
        "answer": answer.text,
        "correct": fact.is_answered_by(answer.text),
    }
