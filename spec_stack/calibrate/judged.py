"""A prompt's scores from one draft pass, enough to judge every setting. `judge(pair, index, prompt)` makes a `Judged`,
which can be stored; `needed(judged, scores)` is the smallest share of the prompt that keeps the evidence under these
scores."""

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
from spec_stack.prefill.question import rare_word_factor
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
    """A prompt's scores per unit after the draft's pass.

    heads: (num_heads, 2), layer and head of each row. by_head: (num_heads, num_units), the unit's score by each head
    alone. words, default: (num_units,), scores of BM25 and of the default rule. costs: (num_units,), tokens of a unit
    that are not kept anyway. wanted: (num_units,) bool, units with evidence that is not kept anyway. num_tokens: (2,),
    of the prompt and of its always kept ends.
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
        """Needed share of the prompt by each head alone, (num_heads,)."""
        return needed(self, self.by_head)

    def save(self, file: Path) -> None:
        """Write the file atomically."""
        part = file.with_suffix(".part")
        save_file({each.name: getattr(self, each.name).contiguous() for each in fields(self)}, part)
        part.replace(file)

    @classmethod
    def load(cls, file: Path) -> Judged:
        return cls(**load_file(file))


def needed(judged: Judged, scores: torch.Tensor) -> torch.Tensor:
    """The share of a prompt at which all evidence is kept, by scores (..., num_units). Any larger share keeps it too; a
    smaller one may, if a unit that does not fit is skipped for evidence."""
    num_tokens, num_forced = judged.num_tokens
    order = scores.argsort(dim=-1, descending=True, stable=True)
    spent = judged.costs[order].cumsum(dim=-1)
    last = torch.where(judged.wanted[order], spent, torch.zeros_like(spent)).amax(dim=-1)
    share: torch.Tensor = (last + num_forced) / num_tokens
    return share.clamp(max=1.0)


def judge(
    pair: ModelPair, index: CachedModel, prompt: Prompt, on_piece: Callable[[int, float], None] | None = None
) -> Judged:
    """Score the part of a prompt that the index does not hold yet. index: the draft (`ModelPair.open_index`), empty or
    with the previous prompt. on_piece: as in `hf.model.CachedModel`. The target's weights are not used."""
    token_ids, protected = prompt.token_ids, prompt.protected
    pieces = pair.pieces(token_ids)
    draft = open_prompt(pair, index, prompt, on_piece)
    look, _ = look_at(
        draft, token_ids, lambda *_: Proposal(), BY_HEAD, prompt.tokenization, pieces=pieces, protected=protected
    )
    units = make_units(len(token_ids), pieces, BY_HEAD)
    evidence = Evidence(token_ids, look, protected, pieces)
    by_head, factor = look.by_head(BY_HEAD), rare_word_factor(evidence, units)
    forced = forced_ends(units.num_tokens, BY_HEAD)
    is_free = _marked(units, [(at, at + 1) for at in forced] + list(protected))
    wanted = _marked(units, prompt.spans)
    return Judged(
        heads=torch.tensor(list(by_head)),
        by_head=torch.stack([factor * units.worth(importance, BY_HEAD) for importance in by_head.values()]),
        words=make_rule("bm25").score(evidence, units, WORDS),
        default=make_rule(PrefillConfig.scorer).score(evidence, units, PrefillConfig()),
        costs=_count(units, ~is_free),
        wanted=_count(units, wanted & ~is_free) > 0,
        num_tokens=torch.tensor([units.num_tokens, len(forced)]),
    )


def open_prompt(
    pair: ModelPair, index: CachedModel, prompt: Prompt, on_piece: Callable[[int, float], None] | None = None
) -> DraftModel:
    """The draft with the prompt's prefix that it shares with the previous prompt."""
    index.on_piece = on_piece
    index.forget_from(num_shared(index.token_ids, draft_ids(prompt)))
    return pair.view_draft(index, prompt.tokenization)


def draft_ids(prompt: Prompt) -> Sequence[int]:
    """A prompt in the draft's tokens."""
    return prompt.token_ids if prompt.tokenization is None else prompt.tokenization.token_ids


def _marked(units: Units, spans: Sequence[Span]) -> torch.Tensor:
    """Mask (num_tokens,) of these spans."""
    marked = torch.zeros(units.num_tokens, dtype=torch.bool)
    for start, stop in spans:
        marked[start:stop] = True
    return marked


def _count(units: Units, marked: torch.Tensor) -> torch.Tensor:
    """Marked tokens per unit, (num_units,)."""
    return torch.bincount(units.owner, weights=marked.double(), minlength=len(units)).long()
