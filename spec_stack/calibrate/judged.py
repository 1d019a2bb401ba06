"""One pass of the draft over a prompt, and what is kept of it: enough to judge every setting without another pass.

How it is used: `judge(pair, index, prompt)` makes a `Judged`; `needed(judged, scores)` says how small a share of the
prompt would hold the evidence if its units were ranked by such scores. A calibration goes on from files of `Judged`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from spec_stack.calibrate.prompts import Prompt
from spec_stack.config import PrefillConfig
from spec_stack.engine.pair import DraftModel, ModelPair
from spec_stack.hf.model import CachedModel
from spec_stack.hf.prompt import num_shared
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.registry import make_rule
from spec_stack.prefill.rule import Evidence
from spec_stack.prefill.scoring import look_at
from spec_stack.prefill.units import Units, forced_ends, make_units
from spec_stack.types import Proposal

BY_HEAD = PrefillConfig(head_vote="mean")
"""How heads are judged: by the mean of their attention, over lines."""
WORDS = PrefillConfig(scorer="bm25")


@dataclass(frozen=True)
class Judged:
    """A prompt after the draft's pass, unit by unit.

    Attributes
    ----------
    heads : torch.Tensor
        (num_heads, 2): layer and head of each row below.
    by_head : torch.Tensor
        (num_heads, num_units): what a unit is worth by a head alone (`Units.worth`).
    words, default : torch.Tensor
        (num_units,): BM25's scores, and those of the default rule.
    costs : torch.Tensor
        (num_units,): tokens of a unit that are not kept anyway.
    wanted : torch.Tensor
        (num_units,), bool: holds evidence that is not kept anyway.
    num_tokens : torch.Tensor
        Of the prompt, and how many are kept at its ends whatever their scores: (2,).
    """

    heads: torch.Tensor
    by_head: torch.Tensor
    words: torch.Tensor
    default: torch.Tensor
    costs: torch.Tensor
    wanted: torch.Tensor
    num_tokens: torch.Tensor

    @cached_property
    def alone(self) -> torch.Tensor:
        """The share of the prompt that every head by itself needs, (num_heads,)."""
        return needed(self, self.by_head)

    def save(self, file: Path) -> None:
        """Write it, whole or not at all."""
        part = file.with_suffix(".part")
        save_file({each.name: getattr(self, each.name).contiguous() for each in fields(self)}, part)
        part.replace(file)

    @classmethod
    def load(cls, file: Path) -> Judged:
        return cls(**load_file(file))


def needed(judged: Judged, scores: torch.Tensor) -> torch.Tensor:
    """Return the share of a prompt at which all of its evidence is kept, ranked by scores (..., num_units).

    A smaller one may do, where a unit that does not fit is passed over for one of the evidence; a larger one always
    does.
    """
    num_tokens, num_forced = judged.num_tokens
    order = scores.argsort(dim=-1, descending=True, stable=True)
    spent = judged.costs[order].cumsum(dim=-1)
    last = torch.where(judged.wanted[order], spent, torch.zeros_like(spent)).amax(dim=-1)
    share: torch.Tensor = (last + num_forced) / num_tokens
    return share.clamp(max=1.0)


def judge(
    pair: ModelPair, index: CachedModel, prompt: Prompt, on_piece: Callable[[int, float], None] | None = None
) -> Judged:
    """Pass once over what a prompt does not share with the one before it.

    Parameters
    ----------
    pair
        Its target's weights are not used.
    index
        The draft (`ModelPair.open_index`), empty or with the prompt before.
    prompt
        With its evidence, and in the draft's tokens where these are others.
    on_piece
        As `hf.model.CachedModel` has it; what it raises ends the pass.
    """
    token_ids, protected = prompt.token_ids, prompt.protected
    pieces = pair.pieces(token_ids)
    draft = open_prompt(pair, index, prompt, on_piece)
    look, _ = look_at(
        draft, token_ids, lambda *_: Proposal(), BY_HEAD, prompt.tokenization, pieces=pieces, protected=protected
    )
    units = make_units(len(token_ids), pieces, BY_HEAD)
    evidence = Evidence(token_ids, look, protected, pieces)
    by_head = look.by_head(BY_HEAD)
    forced = forced_ends(units.num_tokens, BY_HEAD)
    is_free = _marked(units, [(at, at + 1) for at in forced] + list(protected))
    wanted = _marked(units, prompt.spans)
    return Judged(
        heads=torch.tensor(list(by_head)),
        by_head=torch.stack([units.worth(importance, BY_HEAD) for importance in by_head.values()]),
        words=make_rule("bm25").score(evidence, units, WORDS),
        default=make_rule(PrefillConfig.scorer).score(evidence, units, PrefillConfig()),
        costs=_count(units, ~is_free),
        wanted=_count(units, wanted & ~is_free) > 0,
        num_tokens=torch.tensor([units.num_tokens, len(forced)]),
    )


def open_prompt(
    pair: ModelPair, index: CachedModel, prompt: Prompt, on_piece: Callable[[int, float], None] | None = None
) -> DraftModel:
    """The draft with what a prompt shares with the one before it."""
    index.on_piece = on_piece
    index.forget_from(num_shared(index.token_ids, draft_ids(prompt)))
    return pair.view_draft(index, prompt.tokenization)


def draft_ids(prompt: Prompt) -> Sequence[int]:
    """A prompt in the draft's tokens."""
    return prompt.token_ids if prompt.tokenization is None else prompt.tokenization.token_ids


def _marked(units: Units, spans: Sequence[Span]) -> torch.Tensor:
    """Which tokens (num_tokens,) these spans hold."""
    marked = torch.zeros(units.num_tokens, dtype=torch.bool)
    for start, stop in spans:
        marked[start:stop] = True
    return marked


def _count(units: Units, marked: torch.Tensor) -> torch.Tensor:
    """How many tokens of each unit (num_units,) are marked."""
    return torch.bincount(units.owner, weights=marked.double(), minlength=len(units)).long()
