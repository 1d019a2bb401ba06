"""Demo on a long document: a standard-library module, a hidden fact, and a question about it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from spec_stack.api.generator import SpecStackGenerator
from spec_stack.api.session import Session
from spec_stack.calibrate.documents import MODULES, module_source
from spec_stack.config import SessionConfig
from spec_stack.types import GenerationResult

_ADJECTIVES = ("secret", "red", "golden", "hidden", "silver", "ancient", "green", "blue")
_NAMES = ("Alice", "Bruno", "Carla", "Daniel", "Elena", "Felix", "Greta", "Hassan", "Irene", "Jonas", "Maria", "Oscar")


@dataclass(frozen=True)
class Question:
    """A question about one line of a document."""

    line: str
    text: str
    answer: str


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
    adjective, name, code = rng.choice(_ADJECTIVES), rng.choice(_NAMES), str(rng.randint(10000, 99999))
    fact = _asked(adjective, name, code)
    document = "\n".join([*lines[:line], fact.line, *lines[line:]])
    return HiddenFact(module, line / len(lines), document, fact.text, fact.answer)


def _asked(adjective: str, name: str, code: str) -> Question:
    return Question(f"The {adjective} code for {name} is {code}.", f"What is the {adjective} code for {name}?", code)


def hide_more(fact: HiddenFact, seed: int) -> tuple[str, list[Question]]:
    """The document with similar facts about four other people, for later turns."""
    rng = random.Random(f"more {seed}")
    names = rng.sample([name for name in _NAMES if f" {name}" not in fact.question], 4)
    questions = [_asked(rng.choice(_ADJECTIVES), name, str(rng.randint(10000, 99999))) for name in names]
    lines = fact.document.split("\n")
    places = sorted(rng.sample(range(len(lines)), len(questions)), reverse=True)
    for question, at in zip(questions, places, strict=True):
        lines.insert(at, question.line)
    return "\n".join(lines), questions


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
        "turns": run_conversation(generator, fact, seed, repeats, progress),
    }


def run_conversation(
    generator: SpecStackGenerator,
    fact: HiddenFact,
    seed: int,
    repeats: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Three turns in a session and in a dense one; medians of `repeats`. The first turn asks for the hidden fact, later
    ones for the facts that the selection kept least."""
    document, questions = hide_more(fact, seed)
    asked = [Question("", fact.question, fact.answer)]
    runs: dict[str, list[list[GenerationResult]]] = {"session": [], "dense": []}
    for repeat in range(repeats):
        for arm, results in runs.items():
            progress(f"conversation {repeat + 1} of {repeats}: {arm}")
            options: dict[str, Any] = {"sparse_prefill": "off", "gamma": 0} if arm == "dense" else {}
            config = SessionConfig(restore=False) if arm == "dense" else None
            results.append([])
            messages: list[Mapping[str, str]] = []
            with generator.session(config) as session:
                for turn in range(3):
                    text = asked[turn].text
                    messages.append({"role": "user", "content": text if turn else f"{document}\n\n{text}"})
                    more = {"sparse_prefill": "on"} if arm == "session" and not turn else {}
                    result = session.generate(messages=messages, max_tokens=48, **options | more)
                    results[-1].append(result)
                    messages.append({"role": "assistant", "content": result.text})
                    if len(asked) == 1:
                        asked += _dropped_first(generator.tokenizer, messages[0], questions, session)[:2]
    return [_summarise_turn(asked[turn], *([run[turn] for run in runs[arm]] for arm in runs)) for turn in range(3)]


def _dropped_first(
    tokenizer: Any, message: Mapping[str, str], questions: list[Question], session: Session
) -> list[Question]:
    """Questions sorted by the kept share of their line, least first."""
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False).offset_mapping
    dropped = set(session.dropped_positions)

    def share_held(question: Question) -> float:
        start = text.index(question.line)
        stop = start + len(question.line)
        tokens = [at for at, (first, last) in enumerate(offsets) if first < stop and last > start]
        return sum(at not in dropped for at in tokens) / len(tokens)

    return sorted(questions, key=share_held)


def _summarise_turn(
    question: Question, results: list[GenerationResult], dense: list[GenerationResult]
) -> dict[str, Any]:
    metrics = results[-1].metrics
    return {
        "question": question.text,
        "expected": question.answer,
        "new_tokens": metrics.num_new_tokens,
        "cached_tokens": metrics.num_cached_tokens,
        "kept_tokens": metrics.num_kept_tokens,
        "restored_tokens": metrics.num_restored_tokens,
        "ttft_s": median(result.metrics.ttft_s for result in results),
        "dense_ttft_s": median(result.metrics.ttft_s for result in dense),
        # Over the whole answer: most of a short answer comes with its first token.
        "tokens_per_s": median(len(result.token_ids) / result.metrics.total_s for result in results),
        "dense_tokens_per_s": median(len(result.token_ids) / result.metrics.total_s for result in dense),
        "answer": results[-1].text,
        "correct": question.answer in results[-1].text,
        "dense_correct": question.answer in dense[-1].text,
    }


def _summarise(fact: HiddenFact, answers: list[GenerationResult], texts: list[GenerationResult]) -> dict[str, Any]:
    last = texts[-1].metrics
    return {
        "prompt_tokens": answers[-1].metrics.num_prompt_tokens,
        "kept_tokens": answers[-1].metrics.num_kept_tokens,
        "keep_rate": answers[-1].metrics.keep_rate,
        "ttft_s": median(result.metrics.ttft_s for result in answers),
        "decode_tokens_per_s": median(result.metrics.decode_tokens_per_s or 0.0 for result in texts),
        "acceptance_rate": last.acceptance_rate,
        "tokens_per_step": last.tokens_per_step,
        "answer": answers[-1].text,
        "correct": fact.is_answered_by(answers[-1].text),
    }


def format_demo(report: dict[str, Any]) -> str:
    """The report as a terminal table."""
    columns = list(report["modes"].values())
    acceptance = ["–" if c["acceptance_rate"] is None else f"{c['acceptance_rate']:.0%}" for c in columns]
    speeds = [f"{c['decode_tokens_per_s']:.0f} tokens/s" for c in columns]
    table = [
        ("", "dense + plain", "sparse + speculative", ""),
        ("prompt tokens prefilled", *(f"{c['kept_tokens']:,} of {c['prompt_tokens']:,}" for c in columns), ""),
        ("share of the prompt kept", *(f"{c['keep_rate']:.0%}" for c in columns), ""),
        ("time to first token", *(f"{c['ttft_s']:.2f} s" for c in columns), f"{report['ttft_ratio']:.1f}x sooner"),
        ("decoding", *speeds, f"{report['decode_ratio']:.1f}x faster"),
        ("tokens per step", *(f"{c['tokens_per_step']:.2f}" for c in columns), ""),
        ("drafted tokens accepted", *acceptance, ""),
        ("fact found", *("yes" if c["correct"] else "no" for c in columns), f"expected {report['expected']}"),
    ]
    verdict = "the same tokens as" if report["lossless"] else "NOT the same tokens as"
    lines = [
        *aligned(table),
        "",
        f"Q: {report['question']}",
        *(f"A ({mode}): {row['answer']}" for mode, row in report["modes"].items()),
        "",
        f"Speculative decoding gave {verdict} plain greedy decoding over the same sparse prefill.",
        "",
        *_format_turns(report["turns"]),
    ]
    return "\n".join(lines)


def aligned(table: list[tuple[str, ...]]) -> list[str]:
    """Rows of cells as aligned lines, with a rule below the first."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _format_turns(turns: list[dict[str, Any]]) -> list[str]:
    """The conversation as a table: a session beside dense prefill with plain decoding and a cache."""
    table: list[tuple[str, ...]] = [
        ("turn", "new", "cached", "kept", "restored", "TTFT", "dense", "tokens/s", "dense", "found", "dense")
    ]
    for number, turn in enumerate(turns, start=1):
        counts = (f"{turn[f'{name}_tokens']:,}" for name in ("new", "cached", "kept", "restored"))
        times = (f"{1e3 * turn['ttft_s']:.0f} ms", f"{1e3 * turn['dense_ttft_s']:.0f} ms")
        speeds = (f"{turn['tokens_per_s']:.0f}", f"{turn['dense_tokens_per_s']:.0f}")
        found = ("yes" if turn[name] else "no" for name in ("correct", "dense_correct"))
        table.append((str(number), *counts, *times, *speeds, *found))
    said = [line for turn in turns for line in (f"Q: {turn['question']}", f"A: {turn['answer']}")]
    head = "A conversation with a session; dense keeps its cache too. Tokens/s over the whole answer."
    return [head, "", *aligned(table), "", *said]
