"""One pass of the draft over a prompt, and what is kept of it: enough to judge every setting without another pass.

How it is used: `judge(pair, prompt)` makes a `Judged`; `needed(judged, scores)` says how small a share of the prompt
would hold the evidence if its units were ranked by such scores. Files of `Judged` are what a calibration goes on from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from spec_stack.calibrate.prompts import Prompt
from spec_stack.config import PrefillConfig, ScoringQueries
from spec_stack.decode.propose import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.engine.pair import ModelPair
from spec_stack.prefill.attention import CapturedAttention
from spec_stack.prefill.registry import make_rule
from spec_stack.prefill.rule import Evidence
from spec_stack.prefill.units import Units, forced_ends, make_units
from spec_stack.types import DraftTokenization

SHARES = PrefillConfig(scoring_queries="prompt", head_vote="share")
"""How heads are judged: by their mean shares, over lines."""
WORDS = PrefillConfig(scorer="bm25")


@dataclass(frozen=True)
class Judged:
    """A prompt after the draft's pass, unit by unit.

    Attributes
    ----------
    heads : torch.Tensor
        (num_heads, 2): layer and head of each row below.
    prompt, look_ahead : torch.Tensor
        (num_heads, num_units): the mean share of a unit's tokens, by who asks.
    words, default : torch.Tensor
        (num_units,): BM25's scores, and those of the default rule.
    costs : torch.Tensor
        (num_units,): tokens of a unit that are not kept anyway.
    wanted : torch.Tensor
        (num_units,), bool: holds evidence that is not kept anyway.
    num_tokens : torch.Tensor
        Of the prompt, and how many are kept anyway, at its ends: (2,).
    """

    heads: torch.Tensor
    prompt: torch.Tensor
    look_ahead: torch.Tensor
    words: torch.Tensor
    default: torch.Tensor
    costs: torch.Tensor
    wanted: torch.Tensor
    num_tokens: torch.Tensor

    @cached_property
    def alone(self) -> dict[str, torch.Tensor]:
        """By who asks, the share of the prompt that every head by itself needs, (num_heads,)."""
        return {name: needed(self, getattr(self, name)) for name in ("prompt", "look_ahead")}

    @cached_property
    def standard_words(self) -> torch.Tensor:
        """BM25's scores in their standard deviations, as `attention_bm25` adds them."""
        spread = self.words.std(unbiased=False)
        return (self.words - self.words.mean()) / spread if spread > 0 else torch.zeros_like(self.words)

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


def judge(pair: ModelPair, prompt: Prompt, on_piece: Callable[[int, float], None] | None = None) -> Judged:
    """Pass once over a prompt.

    Parameters
    ----------
    pair
        Its target's weights are not used.
    prompt
        With its evidence, and in the draft's tokens where these are others.
    on_piece
        As `hf.model.CachedModel` has it; what it raises ends the pass.
    """
    looks = by_asker(attend(pair, prompt.token_ids, prompt.tokenization, on_piece))
    pieces = pair.pieces(prompt.token_ids)
    units = make_units(len(prompt.token_ids), pieces, SHARES)
    turn = None if prompt.turn is None else (prompt.turn[0], prompt.turn[1])
    evidence = Evidence(prompt.token_ids, looks[PrefillConfig.scoring_queries], turn, pieces)
    shares = {name: look.shares(SHARES) for name, look in looks.items()}
    forced = forced_ends(units.num_tokens, SHARES)
    free = torch.tensor([at in forced for at in range(units.num_tokens)])
    wanted = torch.zeros(units.num_tokens, dtype=torch.bool)
    for start, stop in prompt.spans:
        wanted[start:stop] = True
    return Judged(
        heads=torch.tensor(list(shares["prompt"])),
        prompt=_means(units, shares["prompt"].values()),
        look_ahead=_means(units, shares["look_ahead"].values()),
        words=make_rule("bm25").score(evidence, units, WORDS),
        default=make_rule(PrefillConfig.scorer).score(evidence, units, PrefillConfig()),
        costs=_count(units, ~free),
        wanted=_count(units, wanted & ~free) > 0,
        num_tokens=torch.tensor([units.num_tokens, len(forced)]),
    )


def attend(
    pair: ModelPair,
    token_ids: Sequence[int],
    tokenization: DraftTokenization | None,
    on_piece: Callable[[int, float], None] | None = None,
    window: int | None = None,
) -> CapturedAttention:
    """Pass the draft once over a prompt, for `by_asker`: the queries of the prompt's last tokens, then a look-ahead's.

    Parameters
    ----------
    pair
        Its target's weights are not used.
    token_ids, tokenization
        The prompt, and how the draft splits it where its tokens are others.
    on_piece
        As `hf.model.CachedModel` has it; what it raises ends the pass.
    window
        As `PrefillConfig.draft_window`.
    """
    num_tokens, look_ahead = len(token_ids), PrefillConfig.look_ahead
    index = pair.open_index(PrefillConfig.prefill_chunk)
    index.on_piece = on_piece
    draft = pair.view_draft(index, tokenization)
    start = max(0, num_tokens - look_ahead - 1)
    draft.prefill(token_ids[:start], range(start), window, PrefillConfig.draft_sinks)
    with draft.capture() as captured:
        draft.prefill(token_ids[start:-1], range(start, num_tokens - 1))
        num_forwards = len(next(iter(captured.values())).queries)
        proposal = propose(draft, token_ids, look_ahead, Sampler(), pair.end_ids)
        # The last token of the prompt is the first that the proposal goes over.
        num_asking = sum(part.shape[1] for part in next(iter(captured.values())).queries[: num_forwards + 1])
        draft.forward(proposal.token_ids[-1:], [draft.next_position], 1)
    num_draft_tokens = num_tokens if tokenization is None else len(tokenization.token_ids)
    ranges = None if tokenization is None else tokenization.ranges
    return CapturedAttention.of(captured, num_draft_tokens, num_asking, ranges)


def by_asker(attention: CapturedAttention) -> dict[ScoringQueries, CapturedAttention]:
    """What the prompt's last tokens attend to, and what its very last one and the look-ahead do, of one pass."""
    own = attention.num_asking
    return {
        "prompt": _asked_by(attention, slice(own), own),
        "look_ahead": _asked_by(attention, slice(own - 1, None), 1),
    }


def _asked_by(attention: CapturedAttention, asking: slice, num_asking: int) -> CapturedAttention:
    layers = {index: (layer[0][:, asking], *layer[1:]) for index, layer in attention.layers.items()}
    return replace(attention, layers=layers, num_asking=num_asking)


def _means(units: Units, shares: Iterable[torch.Tensor]) -> torch.Tensor:
    """The mean of each unit (num_heads, num_units), of one share per token and head."""
    return torch.stack([units.means(share) for share in shares])


def _count(units: Units, marked: torch.Tensor) -> torch.Tensor:
    """How many tokens of each unit (num_units,) are marked."""
    return torch.bincount(units.owner, weights=marked.double(), minlength=len(units)).long()
