"""From scores of units to the prompt tokens that the target prefills. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from spec_stack.config import PrefillConfig
from spec_stack.prefill.registry import make_rule
from spec_stack.prefill.rule import Evidence
from spec_stack.prefill.units import make_units
from spec_stack.types import Selection


def select(evidence: Evidence, config: PrefillConfig, protected: Iterable[tuple[int, int]] = ()) -> Selection:
    """The kept units as token ids at their original positions.

    protected: half-open token spans that are kept in addition, token by token (system message, template). Raises
    ValueError unless the rule gives one score per unit, or where it lacks its evidence.
    """
    prompt_ids = evidence.prompt_ids
    num_tokens = len(prompt_ids)
    units = make_units(num_tokens, evidence.pieces, config)
    scores = make_rule(config.scorer).score(evidence, units, config)
    if scores.shape != (len(units),):
        raise ValueError(
            f"the rule {config.scorer!r} gave scores of shape {tuple(scores.shape)} for {len(units)} units; one each"
        )
    if evidence.observer is not None:
        evidence.observer.voted(units, scores)
    anyway = {at for start, stop in protected for at in range(max(start, 0), min(stop, num_tokens))}
    positions = sorted(units.chosen(scores, config, config.rate_for(num_tokens), anyway) | anyway)
    return Selection([prompt_ids[position] for position in positions], positions, num_tokens)
