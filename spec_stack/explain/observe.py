"""Runs requests and observes the selection of each prompt. Generation is unchanged."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from spec_stack.api.generator import SpecStackGenerator
from spec_stack.config import SpecStackConfig
from spec_stack.controller.base import StepRecord
from spec_stack.engine.conversation import Turn
from spec_stack.engine.engine import Engine
from spec_stack.engine.options import Call
from spec_stack.engine.pair import ModelPair
from spec_stack.engine.request import Request
from spec_stack.explain.data import STATE_LETTERS, PromptView, QuerySegment, RunView, TurnView, step_of, written
from spec_stack.hf.architectures import text_config
from spec_stack.hf.prompt import EncodedPrompt
from spec_stack.hf.text import open_text_stream
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.cost import Shape, prefill_flops
from spec_stack.prefill.rule import Evidence
from spec_stack.prefill.scoring import LookAhead
from spec_stack.prefill.units import Units
from spec_stack.types import Metrics, Proposal, Selection, StepOutput


@dataclass
class Seen:
    """Observations of a running request (`prefill.rule.Observer`).

    importance: (N,) of the prompt; None for a rule without a draft. votes: per unit from borders[0] on. weights: of the
    scoring segments, in prompt tokens. look_ahead: drafted scoring tokens.
    """

    request: Request
    held: list[int] = field(default_factory=list)
    selection: Selection | None = None
    importance: list[float] | None = None
    votes: list[float] | None = None
    borders: list[int] | None = None
    weights: dict[Span, float] = field(default_factory=dict)
    look_ahead: list[int] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    metrics: Metrics | None = None

    def scored(self, evidence: Evidence) -> None:
        """Store the prompt's importance and the segments' weights."""
        self.weights = query_weights(self.request, evidence)
        if evidence.attention is not None:
            importance = evidence.token_importance(self.request.prefill)
            self.importance = [_short(value) for value in importance.tolist()]

    def voted(self, units: Units, scores: torch.Tensor) -> None:
        """Store the units' scores."""
        self.votes, self.borders = [_short(value) for value in scores.tolist()], list(units.borders)


class WatchedCaches:
    """A request's caches (`engine.conversation.Turn`); stores the selection."""

    def __init__(self, caches: Turn, seen: Seen) -> None:
        self._caches, self._seen = caches, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._caches, name)

    def score(self, look_ahead: LookAhead) -> tuple[Selection, Proposal]:
        self._seen.selection, proposal = self._caches.score(look_ahead)
        self._seen.look_ahead = list(proposal.token_ids)
        return self._seen.selection, proposal

    def take_all(self) -> Selection:
        self._seen.selection = self._caches.take_all()
        return self._seen.selection


class WatchedEngine(Engine):
    """An engine that stores each request's observations in `seen`."""

    def __init__(self, pair: ModelPair, config: SpecStackConfig) -> None:
        super().__init__(pair, config)
        self.seen: list[Seen] = []

    def plan(self, call: Call, held_ids: Sequence[int] = (), known: EncodedPrompt | None = None) -> Request:
        request = super().plan(call, held_ids, known)
        return replace(request, observer=Seen(request))

    def answer(self, request: Request, caches: Turn) -> Generator[StepOutput, None, None]:
        seen = cast(Seen, request.observer)
        seen.held = list(caches.target.positions)
        self.seen.append(seen)
        watched: Any = WatchedCaches(caches, seen)
        with closing(super().answer(request, watched)) as outputs:
            for output in outputs:
                seen.records.append(output.record)
                seen.token_ids += output.token_ids
                seen.metrics = output.metrics or seen.metrics
                yield output


class WatchedGenerator(SpecStackGenerator):
    """A generator whose requests and sessions are observed."""

    engine: WatchedEngine

    @classmethod
    def watching(cls, generator: SpecStackGenerator) -> WatchedGenerator:
        """Observe a generator's models and configuration, with untrained policies."""
        watched = cls.__new__(cls)
        watched._set_up(WatchedEngine(generator.pair, generator.config))
        return watched


def watch_prompt(generator: WatchedGenerator, name: str, question: str, **options: Any) -> RunView:
    """Answer one prompt; options as in `generate`."""
    generator.engine.seen = []
    generator.generate(**options)
    return RunView(name, [view_of(generator.pair, generator.engine.seen[-1], question)])


def watch_turns(
    generator: WatchedGenerator,
    name: str,
    messages: Sequence[Mapping[str, str]],
    questions: Sequence[str],
    **options: Any,
) -> RunView:
    """Answer questions as turns of a session named `name`, after the messages; options as in `generate`."""
    generator.engine.seen = []
    said = list(messages)
    turns = []
    with generator.session() as session:
        for question in questions:
            said.append({"role": "user", "content": question})
            result = session.generate(messages=said, **options)
            said.append({"role": "assistant", "content": result.text})
            turns.append(view_of(generator.pair, generator.engine.seen[-1], question))
    return RunView(name, turns)


def view_of(pair: ModelPair, seen: Seen, question: str) -> TurnView:
    """A finished request as page data."""
    request = seen.request
    if seen.selection is None or seen.metrics is None:
        raise RuntimeError("the request has not run to its end")
    borders = None if seen.borders is None else [request.num_cached + border for border in seen.borders]
    tokens = token_texts(pair.tokenizer, request.prompt_ids)
    behind = token_texts(pair.tokenizer, seen.look_ahead, request.prompt_ids)
    prompt = PromptView(
        tokens=tokens,
        states=states_of(request, seen.held, seen.selection),
        importance=seen.importance,
        votes=seen.votes,
        borders=borders,
        queries=query_segments(request, seen, [*tokens, *behind]),
    )
    return TurnView(
        question=_heading(question),
        prompt=prompt,
        answer=written(seen.records, token_texts(pair.tokenizer, seen.token_ids, request.prompt_ids)),
        steps=[step_of(record) for record in seen.records],
        metrics=seen.metrics.as_dict(),
        dense_estimate_s=dense_estimate(pair, seen, seen.selection),
    )


def query_weights(request: Request, evidence: Evidence) -> dict[Span, float]:
    """A prompt's scoring segments, with weights from 0 to 1."""
    if _by_words(request):
        # The rule sees only a turn's new text.
        return evidence.weights_by_words(request.num_cached)
    return evidence.weights_by_attention(request.prefill)


def query_segments(request: Request, seen: Seen, texts: Sequence[str]) -> list[QuerySegment]:
    """Scoring segments by falling weight; texts: of the prompt's and the look-ahead's tokens. Weights that round to
    0.00 are omitted."""
    weights = dict(seen.weights)
    if seen.look_ahead and not _by_words(request):
        weights[len(texts) - len(seen.look_ahead), len(texts)] = 1.0
    segments = [
        QuerySegment(start, stop, round(weight, 2), "".join(texts[start:stop]))
        for (start, stop), weight in weights.items()
    ]
    return sorted((one for one in segments if one.weight), key=lambda one: -one.weight)


def states_of(request: Request, held: Sequence[int], selection: Selection) -> str:
    """One of STATE_LETTERS per prompt token. Earlier text is cached, restored or dropped; new text is protected, kept
    or dropped."""
    states = [STATE_LETTERS["dropped"]] * len(request.prompt_ids)
    for position in selection.positions:
        states[position] = STATE_LETTERS["kept" if position >= request.num_cached else "restored"]
    for start, stop in request.protected:
        for position in range(max(start, request.num_cached), stop):
            states[position] = STATE_LETTERS["protected"]
    for position in held:
        if position < len(states):
            states[position] = STATE_LETTERS["cached"]
    return "".join(states)


def dense_estimate(pair: ModelPair, seen: Seen, selection: Selection) -> float | None:
    """Estimated seconds of dense prefill to the first token.

    The target's time in the first step, scaled by multiply-adds (`prefill.cost`); None if they cannot be counted. Short
    forwards are less efficient, so it overestimates; `--compare` measures.
    """
    try:
        shape = Shape.of(text_config(pair.target.config))
    except ValueError:
        return None

    def work(num_tokens: int) -> float:
        return prefill_flops(shape, num_tokens, num_tokens / 2) if num_tokens else 0.0

    done = work(len(seen.held) + len(selection.positions)) - work(len(seen.held))
    dense = work(len(seen.request.prompt_ids)) - work(seen.request.num_cached)
    return seen.records[0].verify_s * dense / done


def token_texts(tokenizer: Any, token_ids: Sequence[int], context_ids: Sequence[int] = ()) -> list[str]:
    """The text that each token adds; special tokens by name, a multi-token character at its last token."""
    stream = open_text_stream(tokenizer, context_ids)
    if stream is None:
        return [f"[{token_id}]" for token_id in token_ids]
    special = frozenset(tokenizer.all_special_ids)
    texts = []
    for token_id in token_ids:
        text = stream.push([token_id])
        texts.append(text or (str(tokenizer.convert_ids_to_tokens(token_id)) if token_id in special else ""))
    if texts:
        texts[-1] += stream.flush()
    return texts


def _by_words(request: Request) -> bool:
    return request.scores and request.prefill.scorer == "bm25"


def _short(value: float) -> float:
    """Three digits, a third of the bytes."""
    return float(f"{value:.3g}")


def _heading(text: str) -> str:
    last = text.strip().rsplit("\n", 1)[-1]
    return last if len(last) <= 120 else last[:119] + "…"
