"""A prompt's scores from one draft pass, enough to judge every setting. `judge(pair, draft_cache, prompt)` makes a
`ScoredPrompt`; `needed(judged, scores)` is the smallest share of the prompt that keeps the evidence under these
scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from spec_stack.calibrate.prompts import EncodedHaystack
from spec_stack.config import PrefillConfig
from spec_stack.engine.pair import DraftModel, ModelPair
from spec_stack.hf.model import CachedModel
from spec_stack.hf.prompt import num_shared
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.question import NamedSegments
from spec_stack.prefill.registry import make_rule
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.scoring import run_draft
from spec_stack.prefill.segments import Segments, make_segments
from spec_stack.types import Proposal

BY_HEAD = PrefillConfig(head_reduction="mean")
"""How heads are judged: by the mean of their attention, over lines."""


@dataclass(frozen=True)
class ScoredPrompt:
    """A prompt's scores per segment after the draft's pass.

    heads: (num_heads, 2), layer and head of each row. by_head: (num_heads, num_segments), the segment's mean importance
    by each head alone. default: (num_segments,), scores of the default rule. costs: (num_segments,), tokens of a
    segment that are not kept anyway. wanted: (num_segments,) bool, segments with evidence that is not kept anyway.
    num_tokens: (2,), of the prompt and of its always kept ends. named: what the question names; None is nothing.
    """

    heads: torch.Tensor
    by_head: torch.Tensor
    default: torch.Tensor
    costs: torch.Tensor
    wanted: torch.Tensor
    num_tokens: torch.Tensor
    named: NamedSegments | None = None

    @cached_property
    def alone(self) -> torch.Tensor:
        """Needed share of the prompt by each head alone, (num_heads,)."""
        return needed(self, self._raised(self.by_head))

    def score(self, rows: Sequence[int]) -> torch.Tensor:
        """Scores (num_segments,) of the rule with these rows' heads."""
        return self._raised(self.by_head[list(rows)].mean(dim=0))

    def _raised(self, scores: torch.Tensor) -> torch.Tensor:
        if self.named is None:
            return scores
        return self.named.raised_by_heads(self.named.raised_by_words(scores))


def needed(judged: ScoredPrompt, scores: torch.Tensor) -> torch.Tensor:
    """The share of a prompt at which all evidence is kept, by scores (..., num_segments). Any larger share keeps it
    too; a smaller one may, if a segment that does not fit is skipped for evidence."""
    num_tokens, num_forced = judged.num_tokens
    order = scores.argsort(dim=-1, descending=True, stable=True)
    spent = judged.costs[order].cumsum(dim=-1)
    last = torch.where(judged.wanted[order], spent, torch.zeros_like(spent)).amax(dim=-1)
    share: torch.Tensor = (last + num_forced) / num_tokens
    return share.clamp(max=1.0)


def judge(pair: ModelPair, draft_cache: CachedModel, prompt: EncodedHaystack) -> ScoredPrompt:
    """Score the part of a prompt that the draft's cache (`ModelPair.new_draft_cache`) does not hold yet; it is empty or
    holds the previous prompt. The target's weights are not used."""
    draft = open_prompt(pair, draft_cache, prompt)
    inputs = ScoringInputs(pair.reader.with_pieces(prompt.text))
    look, _ = run_draft(draft, inputs, lambda *_: Proposal(), BY_HEAD, prompt.tokenization)
    segments = make_segments(len(prompt.token_ids), inputs.pieces, BY_HEAD)
    evidence = replace(inputs, attention=look)
    by_head = look.by_head(BY_HEAD)
    is_protected = _marked(segments, prompt.text.kept)
    free = {at for span in prompt.text.kept for at in range(*span)}
    ends = segments.ends(BY_HEAD, free, evidence.candidates.asking_tokens)
    is_paid_end = _marked(segments, [(at, at + 1) for at in ends]) & ~is_protected
    is_free = is_protected | is_paid_end
    wanted = _marked(segments, prompt.spans)
    return ScoredPrompt(
        heads=torch.tensor(list(by_head)),
        by_head=torch.stack([segments.mean_importance(importance, BY_HEAD) for importance in by_head.values()]),
        default=make_rule(PrefillConfig.scorer).score(evidence, segments, PrefillConfig()),
        costs=_count(segments, ~is_free),
        wanted=_count(segments, wanted & ~is_free) > 0,
        num_tokens=torch.tensor([segments.num_tokens, int(is_paid_end.sum())]),
        named=NamedSegments.of(evidence, segments),
    )


def open_prompt(pair: ModelPair, draft_cache: CachedModel, prompt: EncodedHaystack) -> DraftModel:
    """The draft with the prompt's prefix that it shares with the previous prompt."""
    draft_ids = prompt.token_ids if prompt.tokenization is None else prompt.tokenization.token_ids
    draft_cache.truncate(num_shared(draft_cache.token_ids, draft_ids))
    return pair.draft_in_target_vocab(draft_cache, prompt.tokenization)


def _marked(segments: Segments, spans: Sequence[Span]) -> torch.Tensor:
    """Mask (num_tokens,) of these spans."""
    marked = torch.zeros(segments.num_tokens, dtype=torch.bool)
    for start, stop in spans:
        marked[start:stop] = True
    return marked


def _count(segments: Segments, marked: torch.Tensor) -> torch.Tensor:
    """Marked tokens per segment, (num_segments,)."""
    return torch.bincount(segments.owner, weights=marked.double(), minlength=len(segments)).long()
