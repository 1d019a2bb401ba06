"""The prefill stage: the draft scores the whole prompt, and the target's part is selected.

`run_draft` gives the draft's attention, and `gather_inputs` everything that a rule scores a prompt by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Protocol, TypeVar

from spec_stack.config import PrefillConfig
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.attention import CapturedAttention, CapturedLayer, Parts, run, scored_layers
from spec_stack.prefill.importance import Ranks, ScoredLayer, Segment
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.prefill.queries import Candidates, find_candidates
from spec_stack.prefill.registry import needs_attention
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.types import DraftTokenization, Proposal, Selection, SteppableModel

C_co = TypeVar("C_co", covariant=True)
"""What a draft captures of a layer."""


class Draft(Protocol[C_co]):
    """A small model over one text, as it scores: the Transformers draft, or SGLang's in the scheduler."""

    @property
    def num_cached(self) -> int: ...
    @property
    def next_position(self) -> int: ...
    @property
    def is_stateful(self) -> bool: ...
    def rollback(self, num_tokens: int) -> None: ...
    def prefill(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        window: int | None = None,
        num_sinks: int = 0,
        num_layers: int | None = None,
    ) -> None: ...
    def checkpoint(self) -> None: ...
    def capture(self, first: int = 0) -> AbstractContextManager[Mapping[int, C_co]]: ...


class ScoringDraft(Draft[CapturedLayer], SteppableModel, Protocol):
    """A draft that scores, and is then used."""

    @property
    def num_layers(self) -> int: ...
    def reset_to(self, prompt_ids: Sequence[int], positions: Sequence[int]) -> None: ...
    def keep_slots(self, slots: Sequence[int]) -> None: ...


LookAhead = Callable[[Sequence[int], int], Proposal]
"""Drafts up to so many tokens after the prompt, greedily at any temperature (`decode.proposer.propose`): the selection
depends on them, so rejection sampling would not be exact with drawn ones."""
PartSize = Callable[[int], int]
"""Most tokens of the next part, given the configured chunk; called before every part."""


def num_layers_needed(config: PrefillConfig, num_layers: int) -> int | None:
    """How many of a draft's num_layers layers scoring a prompt needs; None for all."""
    needed = config.num_scoring_layers
    return None if needed is None or needed >= num_layers else needed


def has_one_forward(config: PrefillConfig, num_tokens: int) -> bool:
    """Whether one forward has a prompt and its scoring queries, in the draft's own tokens: they see all of it."""
    return config.queries_from_prompt and config.window_for(num_tokens) is None


def run_draft(
    draft: Draft[CapturedLayer],
    inputs: ScoringInputs,
    look_ahead: LookAhead,
    config: PrefillConfig,
    tokenization: DraftTokenization | None = None,
    num_layers: int | None = None,
    first_query: int = 0,
) -> tuple[CapturedAttention, Proposal]:
    """Run all parts of `capture_in_parts`: the captured attention, and the look-ahead as the first proposal.

    tokenization: the prompt in the draft's own tokens. first_query: first token whose segment may hold the question.
    """

    def at_once(token_ids: Sequence[int], most: int) -> Parts[Proposal]:
        yield from ()
        return look_ahead(token_ids, most)

    queries = ScoringQueries.of(inputs.text, config, first_query, tokenization)
    captured, proposal, sizes = run(capture_in_parts(draft, queries, at_once, config, num_layers))
    return queries.attention(scored_layers(captured, queries.num_draft_tokens), sizes), proposal


def capture_in_parts(
    draft: Draft[C_co],
    queries: ScoringQueries,
    look_ahead: Callable[[Sequence[int], int], Parts[Proposal]],
    config: PrefillConfig,
    num_layers: int | None = None,
    most_of_a_part: PartSize | None = None,
) -> Parts[tuple[Mapping[int, C_co], Proposal, list[int]]]:
    """Prefill the draft with the unseen part of a prompt, and capture the scoring queries: of the prompt's end and of
    spans that are read again behind it, or of a look-ahead.

    Returns what was captured by layer, the look-ahead, empty without one, and the queries of every span in the draft's
    tokens. The draft holds nothing or a prefix of the prompt, and afterwards the whole prompt and the look-ahead.

    num_layers: layers that run; None is all, and fewer make the draft useless for anything else. most_of_a_part: None
    leaves the parts to the draft.
    """
    token_ids, num_tokens, start = queries.text.token_ids, len(queries.text), queries.start
    draft.rollback(max(0, draft.next_position - start))
    window = config.window_for(num_tokens)
    is_one_forward = queries.tokenization is None and has_one_forward(config, num_tokens)

    def stop_of_part() -> int:
        """End of the next part that has no scoring queries; the last part of a scheduler is a whole chunk with them."""
        num_left = num_tokens - draft.next_position
        if most_of_a_part is None:
            return 0 if is_one_forward else start
        chunk = max(most_of_a_part(config.prefill_chunk), num_tokens - start)
        return num_tokens - (num_left - 1) // chunk * chunk if num_left > chunk else 0

    while (stop := stop_of_part()) > draft.next_position:
        unseen = range(draft.next_position, stop)
        draft.prefill(token_ids[unseen.start : stop], unseen, window, config.draft_sinks, num_layers)
        yield
    proposal, sizes = Proposal(), list[int]()
    # Tokens that a recurrent draft recomputes before the first query are none.
    with draft.capture(queries.first) as captured:
        if queries.found is None and config.look_ahead:
            proposal, num_layers = (yield from look_ahead(token_ids, config.look_ahead)), None
        # The last drafted token has not been through the draft yet, and its query is one of the scorers.
        rest = [*token_ids[draft.next_position :], *proposal.token_ids[-1:]]
        behind = [token for span in queries.repeated for token in span]
        # Tokens of another tokenizer are counted as they run; the state of the prompt's end is kept for the rollback.
        apart = queries.repeated if queries.tokenization else [behind] if draft.is_stateful and behind else []
        for part in [rest, *apart] if apart else [[*rest, *behind]]:
            num_cached = draft.num_cached
            draft.prefill(part, range(draft.next_position, draft.next_position + len(part)), num_layers=num_layers)
            if queries.found is not None and not sizes and num_layers is None:
                draft.checkpoint()
            sizes.append(draft.num_cached - num_cached)
    yield
    if queries.repeated:
        draft.rollback(draft.next_position - num_tokens)
    return captured, proposal, sizes[1:]


@dataclass(frozen=True)
class ScoringQueries:
    """Which queries score a prompt: those of its tokens from `start` on, in place, and then those of spans that the
    draft reads again behind it. found: the segments that they are of; None where a look-ahead scores. tokenization: the
    prompt in the draft's own tokens, where they differ."""

    text: PromptText
    found: Candidates | None = None
    tokenization: DraftTokenization | None = None

    @classmethod
    def of(
        cls,
        text: PromptText,
        config: PrefillConfig,
        first_query: int = 0,
        tokenization: DraftTokenization | None = None,
    ) -> ScoringQueries:
        """first_query: first token whose segment may hold the question."""
        found = find_candidates(text).reaching(first_query) if config.queries_from_prompt else None
        return cls(text, found, tokenization)

    @property
    def start(self) -> int:
        return len(self.text) - 1 if self.found is None else self.found.start

    @property
    def repeated(self) -> list[Sequence[int]]:
        """The tokens of the spans that are read again."""
        return [] if self.found is None else [self.text.all_ids[slice(*segment)] for segment in self.found.repeated]

    @property
    def num_draft_tokens(self) -> int:
        """The prompt's length in the draft's own tokens."""
        return len(self.text) if self.tokenization is None else len(self.tokenization.token_ids)

    @property
    def first(self) -> int:
        """The first token in place, in the draft's own tokens."""
        return min(self._in_draft_tokens((self.start, len(self.text)))[0], self.num_draft_tokens - 1)

    def attention(
        self, layers: Mapping[int, ScoredLayer], sizes: Sequence[int] = (), ranks: Ranks | None = None
    ) -> CapturedAttention:
        """What was captured of these queries. sizes: queries of every repeated span, where a tokenization is given."""
        ranges, ranks = None if self.tokenization is None else self.tokenization.ranges, ranks or Ranks()
        if self.found is None:
            return CapturedAttention(layers, ranges=ranges, ranks=ranks)
        first, found = self.first, self.found
        num_in_place = self.num_draft_tokens - first
        spans = [self._in_draft_tokens(segment) for segment in found.segments]
        sizes = [*map(len, self.repeated)] if ranges is None else sizes
        repeated = pairwise(accumulate(sizes, initial=num_in_place))
        in_place = [(max(start - first, 0), stop - first) for start, stop in spans[found.num_repeated :]]
        segments = [
            Segment(row, span, *flags)
            for row, span, *flags in zip(
                [*repeated, *in_place], spans, found.asks, found.is_marked, found.is_question, strict=True
            )
            if row[0] < row[1] and span[0] < span[1]
        ]
        return CapturedAttention(layers, num_in_place, ranges, tuple(segments), found, ranks)

    def _in_draft_tokens(self, span: Span) -> Span:
        """A span of the target's tokens in the draft's."""
        if self.tokenization is None:
            return span
        inside = self.tokenization.ranges[slice(*span)]
        if not inside:
            # A question behind the prompt.
            end = max(stop for _, stop in self.tokenization.ranges)
            return end, end + span[1] - span[0]
        return inside[0][0], max(end for _, end in inside)


def gather_inputs(
    draft: ScoringDraft,
    inputs: ScoringInputs,
    look_ahead: LookAhead,
    config: PrefillConfig,
    tokenization: DraftTokenization | None = None,
    whole: bool = False,
    first_query: int = 0,
) -> tuple[ScoringInputs, Proposal]:
    """A prompt with the draft's attention, and the look-ahead as the first proposal (SpecPrefill,
    https://arxiv.org/abs/2502.02789, alg. 1). The draft runs only where the rule needs its attention, or the check its
    answer, which then is the first proposal.

    whole: run all layers even where scoring needs fewer, to reuse the draft. Other arguments as in `run_draft`.
    """
    proposal = Proposal()
    if needs_attention(config.scorer):
        num_layers = None if whole else num_layers_needed(config, draft.num_layers)
        attention, proposal = run_draft(draft, inputs, look_ahead, config, tokenization, num_layers, first_query)
        inputs = replace(inputs, attention=attention, importance=attention.importance(config))
    if config.max_dropped_attention is not None:
        answering = config.answering
        answer, proposal = run_draft(draft, inputs, look_ahead, answering, tokenization)
        inputs = replace(inputs, answer_attention=answer.importance(answering))
    if inputs.observer is not None:
        inputs.observer.scored(inputs)
    return inputs, proposal


def drop_unselected(draft: ScoringDraft, inputs: ScoringInputs, selection: Selection) -> None:
    """Leave to the draft the kept slots of the prompt, and any look-ahead; without a score the kept tokens, unread."""
    if inputs.attention is None and inputs.answer_attention is None:
        draft.reset_to(inputs.prompt_ids, selection.positions)
    else:
        draft.keep_slots([*selection.positions, *range(len(inputs.prompt_ids), draft.next_position)])
