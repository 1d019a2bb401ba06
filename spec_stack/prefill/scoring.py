"""The prefill stage: the draft goes over the whole prompt and says which part of it the target needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.alignment import map_importance
from spec_stack.prefill.chunks import DRAFT_FREE
from spec_stack.prefill.importance import ScoredLayer, choose_heads, token_importance
from spec_stack.prefill.selection import select
from spec_stack.types import DraftTokenization, Proposal, Selection, SteppableModel


class CapturedLayer(Protocol):
    scaling: float
    queries: list[torch.Tensor]
    keys: torch.Tensor | None
    sinks: torch.Tensor | None


class ScoringModel(SteppableModel, Protocol):
    """What scoring needs of the draft on top."""

    def prefill(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        window: int | None = None,
        num_sinks: int = 0,
        num_layers: int | None = None,
    ) -> None: ...
    def prefill_kept(self, prompt_ids: Sequence[int], positions: Sequence[int]) -> None: ...
    def keep_slots(self, slots: Sequence[int]) -> None: ...
    def capture(self) -> AbstractContextManager[Mapping[int, CapturedLayer]]: ...


class LookAhead(Protocol):
    """Drafts up to num_tokens tokens after the prompt, greedily whatever the temperature (see `decode.draft.propose`).

    The selection depends on these tokens. Were they drawn at random, the target's distribution would depend on
    the very draws it is to judge, and rejection sampling would no longer be exact; chosen, they leave it exact,
    and every seed keeps the same part of the prompt.
    """

    def __call__(self, committed_ids: Sequence[int], num_tokens: int) -> Proposal: ...


def captured_layers(
    captured: Mapping[int, CapturedLayer],
    num_prompt_tokens: int,
    heads: Sequence[tuple[int, int]] | None = None,
) -> Iterator[ScoredLayer]:
    """The layers that see the whole prompt (a sliding window leaves no keys), and of them these (layer, head) pairs."""
    by_layer: dict[int, list[int]] = {}
    for index, head in heads or ():
        by_layer.setdefault(index, []).append(head)
    for index, layer in captured.items():
        if layer.keys is not None and (heads is None or index in by_layer):
            whole = torch.cat(layer.queries, dim=1), layer.keys[:, :num_prompt_tokens], layer.scaling, layer.sinks
            yield choose_heads(whole, by_layer.get(index))


def score(
    draft: ScoringModel,
    prompt_ids: Sequence[int],
    look_ahead: LookAhead,
    config: PrefillConfig,
    tokenization: DraftTokenization | None = None,
) -> tuple[torch.Tensor, Proposal]:
    """Prefill the draft with what it has not seen of a text, look ahead, and score the whole of it by all layers.

    Returns
    -------
    tuple
        The importance (num_prompt_tokens,), and the look-ahead as the first proposal. The draft's cache is left with
        the text and the look-ahead, ready for decoding.
    """
    proposal, captured = capture_look_ahead(draft, prompt_ids, look_ahead, config)
    return _importance(captured, len(prompt_ids), config, tokenization), proposal


def score_prompt(
    draft: ScoringModel,
    prompt_ids: Sequence[int],
    look_ahead: LookAhead,
    config: PrefillConfig,
    protected: Sequence[tuple[int, int]] = (),
    tokenization: DraftTokenization | None = None,
    question: tuple[int, int] | None = None,
) -> tuple[Selection, Proposal]:
    """Have the draft say which part of the prompt matters, and select it.

    Parameters
    ----------
    draft
        Fresh. It is left with the prompt (with the kept slots of it under draft_context="kept", where the draft can
        drop slots, and always where not all of its layers saw the prompt) and the look-ahead, ready for decoding.
    prompt_ids
        The prompt in the target's tokens.
    look_ahead
        Drafts the first tokens after the prompt.
    config
        How to prefill, to score and to select.
    protected
        Half-open token spans to keep whatever their scores.
    tokenization
        The prompt in the draft's own tokens where it has another tokenizer; they are scored, and each prompt token
        takes the most of what it overlaps.
    question
        Half-open span that is or ends with what is asked (the last user turn); None is the whole prompt.

    Returns
    -------
    tuple
        The selection, and the look-ahead as the first proposal; it is shorter than config.look_ahead when the draft
        ends its text.

    Notes
    -----
    SpecPrefill, https://arxiv.org/abs/2502.02789, algorithm 1. Queries come from the last prompt token and from every
    look-ahead token; the long prefill before them runs uncaptured, with config.draft_window where there is one.
    """
    scorer_takes_part = config.scorer not in DRAFT_FREE
    if scorer_takes_part and config.scoring_layers is None:
        proposal, captured = capture_look_ahead(draft, prompt_ids, look_ahead, config)
    else:
        proposal = None
        captured = capture_first_layers(draft, prompt_ids, config) if scorer_takes_part else {}
    importance = _importance(captured, len(prompt_ids), config, tokenization) if scorer_takes_part else None
    selection = select(prompt_ids, importance, config, protected, question)
    if proposal is None:
        # The last token is left to the look-ahead, or to the first proposal.
        draft.prefill_kept(prompt_ids, [position for position in selection.positions if position < len(prompt_ids) - 1])
        return selection, look_ahead(prompt_ids, config.look_ahead)
    if config.draft_context == "kept":
        draft.keep_slots([*selection.positions, *range(len(prompt_ids), draft.next_position)])
    return selection, proposal


def capture_look_ahead(
    draft: ScoringModel, prompt_ids: Sequence[int], look_ahead: LookAhead, config: PrefillConfig
) -> tuple[Proposal, Mapping[int, CapturedLayer]]:
    """The look-ahead, and what it and the last prompt token ask."""
    num_tokens, start = len(prompt_ids), draft.next_position
    if start < num_tokens - 1:
        unseen = prompt_ids[start:-1]
        draft.prefill(unseen, range(start, num_tokens - 1), config.draft_window, config.draft_sinks)
    with draft.capture() as captured:
        if config.look_ahead:
            proposal = look_ahead(prompt_ids, config.look_ahead)
            # The last drafted token has not been through the draft yet, and its query is one of the scorers.
            draft.forward(proposal.token_ids[-1:], [draft.next_position], num_logits=1)
        else:
            proposal = Proposal()
            draft.forward(prompt_ids[-1:], [num_tokens - 1], num_logits=1)
    return proposal, captured


def _importance(
    captured: Mapping[int, CapturedLayer],
    num_prompt_tokens: int,
    config: PrefillConfig,
    tokenization: DraftTokenization | None,
) -> torch.Tensor:
    """Importance (num_prompt_tokens,) of the target's tokens from what was captured of the draft's."""
    num_scored = num_prompt_tokens if tokenization is None else len(tokenization.token_ids)
    importance = token_importance(captured_layers(captured, num_scored, config.scoring_heads), config.pool_kernel)
    mapped = importance if tokenization is None else map_importance(importance, tokenization.ranges)
    return mapped.cpu()


def capture_first_layers(
    draft: ScoringModel, prompt_ids: Sequence[int], config: PrefillConfig
) -> Mapping[int, CapturedLayer]:
    """What the last look_ahead + 1 prompt tokens ask in the first layers. Nobody knows yet what comes after them."""
    num_tokens = len(prompt_ids)
    start = max(0, num_tokens - config.look_ahead - 1)
    if start:
        draft.prefill(prompt_ids[:start], range(start), config.draft_window, config.draft_sinks, config.scoring_layers)
    with draft.capture() as captured:
        draft.prefill(prompt_ids[start:], range(start, num_tokens), num_layers=config.scoring_layers)
    return captured
