"""The decision for one prompt or turn: a plan, dense or by a score. Pure; alike at every entry point.

`plan_turn` decides from the text and from what the target has of it, `plan_scored` from the score.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from spec_stack.config import PrefillConfig, SessionConfig
from spec_stack.prefill.check import checked_selection, dropped_attention, told
from spec_stack.prefill.prompt_text import PromptText, clip_spans
from spec_stack.prefill.queries import MOST_REPEATED
from spec_stack.prefill.recall import recall_dropped
from spec_stack.prefill.registry import needs_draft
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.selection import select
from spec_stack.types import Selection

RecallPlace = Literal["last", "in_text"]
"""Slots of recalled tokens. "last": behind all others, of which later text is hidden from them. "in_text": in text
order."""


@dataclass(frozen=True)
class Cached:
    """What the target has of a text: num_tokens of it are from earlier turns, and those at `positions` are in the
    cache, in write order. start: where the turn's own text begins; None is behind the earlier turns."""

    num_tokens: int = 0
    positions: Sequence[int] = ()
    start: int | None = None

    @classmethod
    def dense(cls, num_tokens: int) -> Cached:
        return cls(num_tokens, tuple(range(num_tokens)))

    @property
    def is_dense(self) -> bool:
        return len(self.positions) == self.num_tokens

    def missing(self, text: PromptText) -> list[int]:
        """Old tokens that are always kept, and that an earlier turn dropped: it did not know them as protected."""
        if self.is_dense:
            return []
        has, num_old = set(self.positions), self.num_tokens
        return [at for start, stop in text.kept for at in range(start, min(stop, num_old)) if at not in has]


@dataclass(frozen=True)
class Plan:
    """What of a text the target prefills, and why."""

    selection: Selection
    reason: str


@dataclass(frozen=True)
class NeedsScore:
    """The text is scored first. prunes: the new text is pruned. recalls: dropped text may be recalled by its score.
    missing: protected tokens (`Cached.missing`), which are recalled in any case."""

    text: PromptText
    cached: Cached
    prunes: bool
    recalls: bool
    reason: str
    missing: Sequence[int]

    @property
    def is_recall_only(self) -> bool:
        return self.recalls and not self.prunes

    @property
    def first_query(self) -> int:
        """The first token whose segment may hold the question: earlier questions count again only where new text is
        pruned."""
        if self.prunes:
            return 0
        # The answer's last token is not cached.
        return self.cached.num_tokens + 1 if self.cached.start is None else self.cached.start

    @property
    def num_to_score(self) -> int:
        """Tokens that the score decides about."""
        num_old = self.cached.num_tokens
        return num_old * self.recalls + (len(self.text) - num_old) * self.prunes

    def unscored(self, reason: str, place: RecallPlace = "last") -> Plan:
        """The plan where scoring failed: what is cached stays, and what is protected and all new text is prefilled."""
        return Plan(select_turn(self.text, self.cached, self.missing, place=place), reason)


def plan_turn(
    token_ids: Sequence[int],
    read: Callable[[], PromptText],
    cached: Cached,
    config: PrefillConfig,
    recall: SessionConfig | None = None,
    obstacle: str = "",
    place: RecallPlace = "last",
) -> Plan | NeedsScore:
    """Decide for a prompt, or the new text of a turn.

    token_ids: the whole prompt, which `read` reads where it may be scored, or hold protected text to recall.
    cached: what earlier turns left of it. recall: rules for dropped text, of which protected text is always recalled;
    None where the target cannot recall. obstacle: why the draft cannot score the prompt, if so (`scoring_obstacle`).
    """
    num_new, what = len(token_ids) - cached.num_tokens, "new text" if cached.num_tokens else "prompt"
    can_recall = recall is not None and not cached.is_dense
    recalls = recall is not None and recall.recall and can_recall and not obstacle
    unless = " unless it is recalled" if recalls else ""
    earlier = "" if cached.is_dense else f"; text that earlier turns dropped stays dropped{unless}"
    off = why_whole(config, num_new, obstacle, what)
    off = off and off + earlier
    if off and not can_recall:
        return Plan(select_turn(PromptText(token_ids), cached), off)
    text = read()
    missing = cached.missing(text) if can_recall else []
    num_prunable = num_new - sum(stop - start for start, stop in clip_spans(text.kept, cached.num_tokens))
    if not off and num_prunable <= sum(config.forced_tokens):
        off = f"off: no more than {num_prunable} of {num_new} {what} tokens could be pruned{earlier}"
    if off and not recalls:
        return Plan(select_turn(text, cached, missing, place=place), off)
    on = "; ".join(filter(None, [why_pruned(config, what), text.note]))
    return NeedsScore(text, cached, not off, recalls, off or on, missing)


def plan_scored(
    needs: NeedsScore,
    inputs: ScoringInputs,
    config: PrefillConfig,
    recall: SessionConfig | None = None,
    place: RecallPlace = "last",
) -> Plan:
    """What the target prefills, by the score: recalled text, then what is kept of the new text."""
    cached, recalled, dropped = needs.cached, needs.missing, needs.missing
    if needs.recalls and recall is not None:
        found = recall_dropped(inputs, cached.positions, cached.num_tokens, config, recall)
        recalled = sorted({*found, *needs.missing})
        dropped = sorted({*range(cached.num_tokens)}.difference(cached.positions))

    def by(rule: PrefillConfig) -> Selection:
        own = (inputs, rule) if needs.prunes else None
        return select_turn(needs.text, cached, recalled, own, place)

    def everything() -> Selection:
        return select_turn(needs.text, cached, dropped, None, place)

    def lost_to(selection: Selection) -> float:
        seen = [*cached.positions[: selection.num_held], *selection.positions]
        return dropped_attention(inputs, seen, config)

    num_new, reason = len(needs.text) - cached.num_tokens, needs.reason
    selection = checked_selection(config, num_new, by, everything, lost_to, needs.prunes)
    is_whole = selection.num_new == num_new
    if selection.tried:
        reason = told(selection.tried, not is_whole if needs.prunes else selection.keep_rate < 1, reason)
    elif needs.prunes and is_whole:
        what = "new text" if cached.num_tokens else "prompt"
        reason += f", but the ends and protected spans cover the whole {what}"
    return Plan(selection, reason)


def select_turn(
    text: PromptText,
    cached: Cached,
    recalled: Sequence[int] = (),
    by: tuple[ScoringInputs, PrefillConfig] | None = None,
    place: RecallPlace = "last",
) -> Selection:
    """Select the target's prefill in a turn: recalled old text, then the kept new text.

    recalled: increasing. by: None keeps all of the new text. The selection's num_held says how many cached slots stay;
    the others are rolled back, and are part of it.
    """
    positions, num_old, token_ids = cached.positions, cached.num_tokens, text.token_ids
    num_unchanged = bisect_left(positions, recalled[0]) if recalled and place == "in_text" else len(positions)
    back = sorted([*positions[num_unchanged:], *recalled])
    kept: Sequence[int] = range(num_old, len(token_ids))
    if by is not None:
        inputs, config = by
        kept = [num_old + position for position in select(inputs.starting_at(num_old), config).positions]
    chosen = [*back, *kept]
    return Selection(
        token_ids=[token_ids[position] for position in chosen],
        positions=chosen,
        num_prompt_tokens=len(token_ids),
        num_recalled=len(recalled),
        num_held=num_unchanged,
        num_recomputed=len(back) - len(recalled),
    )


def why_whole(config: PrefillConfig, num_new_tokens: int, obstacle: str = "", text: str = "prompt") -> str:
    """Why a text is not scored in order to prune it, whatever is in it; empty where it may be.

    num_new_tokens: of the prompt, or of a turn's new text. obstacle: why the draft cannot score it, if so. text: its
    name in the reason.
    """
    if config.sparse_prefill in ("off", "draft_only"):
        return f'off: sparse_prefill="{config.sparse_prefill}" leaves the target dense'
    if config.rate_for(num_new_tokens) == 1:
        return "off: keep_rate is 1.0"
    if config.sparse_prefill == "auto" and num_new_tokens < config.min_prompt_tokens:
        return f"off: the {text} is shorter than min_prompt_tokens={config.min_prompt_tokens}"
    return f"off: {obstacle}" if obstacle else ""


def why_pruned(config: PrefillConfig, text: str) -> str:
    """Why a text is scored in order to prune it."""
    by = f"; calibrated by {config.calibrated_by}" if config.calibrated_by else ""
    if config.sparse_prefill == "on":
        return f'on: sparse_prefill="on"{by}'
    return f"on: the {text} has min_prompt_tokens={config.min_prompt_tokens} or more{by}"


def scoring_obstacle(
    config: PrefillConfig,
    num_draft_tokens: int,
    max_positions: int,
    scoring_limit: int | None = None,
    has_texts: bool = True,
) -> str:
    """Why a prompt of so many of the draft's tokens cannot be scored; empty if it can.

    max_positions: the draft's. scoring_limit: the longest context that a layer of it sees whole, None for any.
    has_texts: the texts of tokens are known.
    """
    if not has_texts and config.granularity == "lines":
        return "there is no tokenizer, without which a prompt has no lines; give one, or granularity='chunks'"
    # A look-ahead ends with the draft's positions.
    if num_draft_tokens + num_behind(config, 0) > max_positions:
        obstacle = f"the prompt has {num_draft_tokens} tokens, and the draft {max_positions} positions"
    elif scoring_limit is not None and num_draft_tokens + num_behind(config, config.look_ahead) > scoring_limit:
        obstacle = f"every attention layer of the draft slides over {scoring_limit} tokens, and none sees more"
    else:
        return ""
    return obstacle if needs_draft(config) else ""


def num_behind(config: PrefillConfig, look_ahead: int) -> int:
    """Most tokens that the draft reads behind a prompt that it scores, with a look-ahead of so many."""
    num_checked = 0 if config.max_dropped_attention is None else config.check_tokens
    return max(MOST_REPEATED if config.queries_from_prompt else look_ahead, num_checked)
