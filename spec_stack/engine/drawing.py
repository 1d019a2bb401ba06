"""The samplers and the stopper of a request."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from spec_stack.decode.sampler import Sampler
from spec_stack.decode.stopping import Stopper
from spec_stack.engine.request import Request
from spec_stack.hf.processors import ProcessedRows
from spec_stack.hf.sampling import make_warp
from spec_stack.hf.text import open_text_stream

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Drawing:
    """The samplers of a request.

    sampler: for the steps' tokens of both models. look_ahead: always greedy. seed: None where the sampler is greedy.
    """

    sampler: Sampler
    look_ahead: Sampler
    seed: int | None = None


def drawing_of(request: Request, target: PreTrainedModel) -> Drawing:
    """Make a request's samplers, on the target's device."""
    params = request.params
    shaper = ProcessedRows(request.processors, request.grammar) if request.is_shaped else None
    warp = make_warp(params.temperature, params.top_k, params.top_p, params.min_p)
    greedy = Sampler(shaper=shaper)
    if warp is None:
        return Drawing(greedy, greedy)
    seed = params.seed if params.seed is not None else secrets.randbits(63)
    return Drawing(Sampler(warp, torch.Generator(target.device).manual_seed(seed), shaper), greedy, seed)


def stopper_of(request: Request, tokenizer: Any, shown: Collection[str] = ()) -> Stopper:
    """The stopping rule of a request. shown: special tokens that the text of a chat's answer contains."""
    text = open_text_stream(tokenizer, request.prompt_ids, shown if request.parser else ())
    return Stopper(
        request.params.num_tokens,
        request.stop_tokens.end_ids,
        request.stop_strings,
        text,
        request.stop_tokens.stop_ids,
    )
