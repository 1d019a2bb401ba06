"""The prefill stage as one call over an open draft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from spec_stack.config import PrefillConfig
from spec_stack.decode.proposer import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.hf.model import CachedModel
from spec_stack.prefill.attention import CapturedAttention
from spec_stack.prefill.importance import ScoredLayer
from spec_stack.prefill.prompt_text import PromptText
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.scoring import drop_unselected, gather_inputs
from spec_stack.prefill.selection import select
from spec_stack.types import Proposal, Selection


def score_prompt(
    draft: CachedModel,
    prompt_ids: Sequence[int],
    config: PrefillConfig,
    protected: Sequence[tuple[int, int]] = (),
    pieces: Sequence[str] | None = None,
) -> tuple[Selection, Proposal]:
    """The selection and the first proposal; the draft is left as decoding finds it."""
    look_ahead = partial(propose, draft, sampler=Sampler(), end_ids=())
    prompt = ScoringInputs(PromptText(prompt_ids, pieces, protected))
    inputs, proposal = gather_inputs(draft, prompt, look_ahead, config)
    selection = select(inputs, config)
    drop_unselected(draft, inputs, selection)
    return selection, proposal


def token_importance(layers: Iterable[ScoredLayer], pool_kernel: int) -> torch.Tensor:
    """The paper's importance (num_prompt_tokens,) by all heads of these layers."""
    config = PrefillConfig(head_reduction="max", pool_kernel=pool_kernel, first_scoring_layer=0)
    return CapturedAttention(dict(enumerate(layers))).importance(config)
