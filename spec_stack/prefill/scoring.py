"""The prefill stage: the draft reads the whole prompt and says which part of it the target needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from spec_stack.config import PrefillConfig
from spec_stack.prefill.alignment import map_importance
from spec_stack.prefill.importance import ScoredLayer, token_importance
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
    def recompute_slots(self, slots: Sequence[int]) -> None: ...
    def keep_slots(self, slots: Sequence[int]) -> None: ...
    def capture(self) -> AbstractContextManager[Mapping[int, CapturedLayer]]: ...


class LookAhead(Protocol):
    """Drafts up to num_tokens tokens after the prompt, greedily whatever the temperature (see `decode.draft.propose`).

    The selection depends on these tokens. Were they drawn at random, the target's distribution would depend on
    the very draws it is to judge, and rejection sampling would no longer be exact; chosen, they leave it exact,
    and every seed reads the same part of the prompt.
    """

    def __call__(self, committed_ids: Sequence[int], num_tokens: int) -> Proposal: ...


def captured_layers(captured: Mapping[int, CapturedLayer], num_prompt_tokens: int) -> Iterator[ScoredLayer]:
    """The layers that see the whole prompt; a sliding window leaves no keys."""
    for layer in captured.values():
        if layer.keys is not None:
            yield torch.cat(layer.queries, dim=1), layer.keys[:, :num_prompt_tokens], layer.scaling, layer.sinks


def score(
    draft: ScoringModel,
    prompt_ids: Sequence[int],
    look_ahead: LookAhead,
    config: PrefillConfig,
    tokenization: DraftTokenization | None = None,
) -> tuple[torch.Tensor, Proposal]:
    """Prefill the draft with what it has not seen of the prompt, look ahead, and score the whole prompt.

    Queries come from the last prompt token and from every look-ahead token; the long prefill before them
    runs uncaptured. The draft's cache is left with the prompt and the look-ahead, ready for decoding. Returns the
    importance (num_prompt_tokens,) and the look-ahead as the first proposal, which is shorter than config.look_ahead
    when the draft ends its text. tokenization: the prompt in the draft's own tokens where it has another tokenizer;
    they are scored, and each prompt token takes the most of what it overlaps.
    """
    num_tokens, start = len(prompt_ids), draft.next_position
    if start < num_tokens - 1:
        draft.prefill(prompt_ids[start:-1], range(start, num_tokens - 1))
    with draft.capture() as captured:
        if config.look_ahead:
            proposal = look_ahead(prompt_ids, config.look_ahead)
            # The last drafted token has not been through the draft yet, and its query is one of the scorers.
            draft.forward(proposal.token_ids[-1:], [draft.next_position], num_logits=1)
        else:
            proposal = Proposal()
            draft.forward(prompt_ids[-1:], [num_tokens - 1], num_logits=1)
    num_draft_tokens = num_tokens if tokenization is None else len(tokenization.token_ids)
    importance = token_importance(captured_layers(captured, num_draft_tokens), config.pool_kernel)
    if tokenization is not None:
        importance = map_importance(importance, tokenization.ranges)
    return importance, proposal


def score_prompt(
    draft: ScoringModel,
    prompt_ids: Sequence[int],
    look_ahead: LookAhead,
    config: PrefillConfig,
    protected: Sequence[tuple[int, int]] = (),
    tokenization: DraftTokenization | None = None,
) -> tuple[Selection, Proposal]:
    """Score a prompt that the draft has not seen, and select (SpecPrefill, algorithm 1).

    Under draft_context="kept" the draft's cache is left with the kept slots of the prompt alone, where the draft can
    drop slots.
    """
    importance, proposal = score(draft, prompt_ids, look_ahead, config, tokenization)
    selection = select(prompt_ids, importance, config, protected)
    if config.draft_context == "kept":
        draft.keep_slots([*selection.positions, *range(len(prompt_ids), draft.next_position)])
    return selection, proposal
