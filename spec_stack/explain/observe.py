"""Runs requests and observes the selection of each prompt. Generation is unchanged."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from typing import Any, cast

import torch

from spec_stack.api.generator import SpecStackGenerator
from spec_stack.engine.conversation import Turn
from spec_stack.engine.engine import Engine
from spec_stack.engine.pair import ModelPair
from spec_stack.engine.request import Call, Request
from spec_stack.explain.page import STATE_LETTERS, written
from spec_stack.hf.prompt import EncodedPrompt
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.segments import Segments
from spec_stack.types import GenerationResult, Proposal, Selection, StepOutput

_MAX_HEADING = 120


@dataclass
class Seen:
    """Observations of a running request (`prefill.rule.Observer`).

    held: positions in the target's cache before the prefill. importance: (N,) of the prompt; None for a rule without a
    draft. votes: per segment from borders[0] on. weights: of the scoring segments, in prompt tokens. look_ahead:
    drafted scoring tokens.
    """

    request: Request
    held: list[int] = field(default_factory=list)
    selection: Selection | None = None
    importance: list[float] | None = None
    votes: list[float] | None = None
    borders: list[int] | None = None
    weights: dict[Span, float] = field(default_factory=dict)
    look_ahead: list[int] = field(default_factory=list)

    def scored(self, inputs: ScoringInputs) -> None:
        """Store the prompt's importance and the segments' weights."""
        # BM25 sees only a turn's new text.
        by_words = _by_words(self.request)
        num_cached, prefill = self.request.num_cached, self.request.prefill
        self.weights = inputs.weights_by_words(num_cached) if by_words else inputs.weights_by_attention(prefill)
        if inputs.attention is not None:
            self.importance = _short(inputs.token_importance(prefill))

    def voted(self, segments: Segments, scores: torch.Tensor) -> None:
        """Store the segments' scores."""
        self.votes, self.borders = _short(scores), [self.request.num_cached + border for border in segments.borders]

    def selected(self, selection: Selection, look_ahead: Proposal) -> None:
        """Store the selection and the look-ahead."""
        self.selection, self.look_ahead = selection, list(look_ahead.token_ids)


class TracedEngine(Engine):
    """An engine that stores its last request's observations in `seen`."""

    seen: Seen

    def plan(self, call: Call, held_ids: Sequence[int] = (), known: EncodedPrompt | None = None) -> Request:
        request = super().plan(call, held_ids, known)
        return replace(request, observer=Seen(request))

    def answer(self, request: Request, caches: Turn) -> Generator[StepOutput, None, None]:
        self.seen = cast(Seen, request.observer)
        self.seen.held = list(caches.target.positions)
        return super().answer(request, caches)


def explain_live(
    generator: SpecStackGenerator,
    *,
    title: str,
    pair: str,
    options: Mapping[str, Any],
    messages: Sequence[Mapping[str, str]] | None,
    questions: Sequence[str],
    compare: bool = False,
) -> dict[str, Any]:
    """Run questions as turns of a session after `messages`, or as plain texts without, and return the page data.

    compare: run again with dense prefill and the same decoding.
    """
    # A process's first forward is slower than later ones.
    generator.generate(input_ids=[0] * 8, max_tokens=4, ignore_eos=True)
    ways = {"sparse prefill" if compare else "this run": dict(options)}
    if compare:
        ways["dense prefill"] = {**options, "sparse_prefill": "off"}
    runs = [watch(generator, name, messages, questions, **own) for name, own in ways.items()]
    metrics = runs[0]["turns"][0]["metrics"]
    about = {
        "pair": pair,
        "precision": f"{metrics['precision']}, draft {metrics['draft_precision']}",
        "policy": str(metrics["policy"]),
        "device": f"{generator.target.device}, {torch.get_num_threads()} threads",
        "date": date.today().isoformat(),
    }
    return {"title": title, "about": about, "runs": runs}


def watch(
    generator: SpecStackGenerator,
    name: str,
    messages: Sequence[Mapping[str, str]] | None,
    questions: Sequence[str],
    **options: Any,
) -> dict[str, Any]:
    """Answer questions as turns of a session, after the messages; None continues each as a plain text. options: as in
    `generate`. The policy begins untrained."""
    engine = TracedEngine(generator.pair, generator.config)
    generator = SpecStackGenerator.over(engine)
    said, turns = list(messages or ()), []
    # A session has a last step more, which prepares the next turn.
    with generator.session() if len(questions) > 1 else nullcontext(generator) as answering:
        for question in questions:
            said.append({"role": "user", "content": question})
            prompt: dict[str, Any] = {"prompt": question} if messages is None else {"messages": said}
            result = answering.generate(**prompt, **options, return_records=True)
            said.append({"role": "assistant", "content": result.text})
            turns.append(view_of(engine, question, result))
    return {"name": name, "turns": turns}


def view_of(engine: TracedEngine, question: str, result: GenerationResult) -> dict[str, Any]:
    """The last request as a turn of the page."""
    seen, pair, records = engine.seen, engine.pair, result.records or []
    request, selection = seen.request, seen.selection
    if selection is None:
        raise RuntimeError("the request has not run to its end")
    tokens = token_texts(pair, request.prompt_ids)
    prompt = {
        "tokens": tokens,
        "states": states_of(request, seen.held, selection),
        "importance": seen.importance,
        "votes": seen.votes,
        "borders": seen.borders,
        "queries": query_segments(seen, [*tokens, *token_texts(pair, seen.look_ahead)]),
    }
    return {
        "question": _heading(question),
        "prompt": prompt,
        "answer": written(records, token_texts(pair, result.token_ids)),
        "steps": [asdict(record) for record in records],
        "metrics": result.metrics.as_dict(),
    }


def query_segments(seen: Seen, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Scoring segments by falling weight; texts: of the prompt's and the look-ahead's tokens. Weights that round to
    0.00 are omitted."""
    weights = dict(seen.weights)
    if seen.look_ahead and not _by_words(seen.request):
        weights[len(texts) - len(seen.look_ahead), len(texts)] = 1.0
    segments = [
        {"start": start, "stop": stop, "weight": round(weight, 2), "text": "".join(texts[start:stop])}
        for (start, stop), weight in weights.items()
    ]
    return sorted((one for one in segments if one["weight"]), key=lambda one: -one["weight"])


def states_of(request: Request, held: Sequence[int], selection: Selection) -> str:
    """One of STATE_LETTERS per prompt token. Earlier text is cached, recalled or dropped; new text is protected, kept
    or dropped."""
    num_cached = request.num_cached
    states = ["dropped"] * len(request.prompt_ids)
    for position in selection.positions:
        states[position] = "kept" if position >= num_cached else "recalled"
    for position in (at for start, stop in request.text.kept for at in range(max(start, num_cached), stop)):
        states[position] = "protected"
    for position in (at for at in held if at < len(states)):
        states[position] = "cached"
    return "".join(STATE_LETTERS[state] for state in states)


def token_texts(pair: ModelPair, token_ids: Sequence[int]) -> list[str]:
    """The text of each token; a character of several tokens at the last one."""
    return pair.pieces(token_ids) or [f"[{token_id}]" for token_id in token_ids]


def _by_words(request: Request) -> bool:
    return request.scores and request.prefill.scorer == "bm25"


def _short(values: torch.Tensor) -> list[float]:
    """Three digits, a third of the bytes."""
    return [float(f"{value:.3g}") for value in values.tolist()]


def _heading(text: str) -> str:
    """The last line, cut within words too: some scripts have no spaces."""
    last = text.strip().rsplit("\n", 1)[-1]
    return last if len(last) <= _MAX_HEADING else f"{last[: _MAX_HEADING - 1]}…"
