"""From scores of segments to the prompt tokens that the target prefills. Pure."""

from __future__ import annotations

from spec_stack.config import PrefillConfig
from spec_stack.prefill.registry import make_rule
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.segments import make_segments
from spec_stack.types import Selection


def select(inputs: ScoringInputs, config: PrefillConfig) -> Selection:
    """The kept segments as token ids at their original positions; the template and what is protected are kept in
    addition, token by token.

    Raises ValueError unless the rule gives one score per segment, or where it lacks an input.
    """
    prompt_ids = inputs.prompt_ids
    num_tokens = len(prompt_ids)
    segments = make_segments(num_tokens, inputs.pieces, config)
    scores = make_rule(config.scorer).score(inputs, segments, config)
    if scores.shape != (len(segments),):
        raise ValueError(
            f"the rule {config.scorer!r} gave scores of shape {tuple(scores.shape)}, not one for each of "
            f"{len(segments)} segments"
        )
    anyway = {at for start, stop in inputs.text.kept for at in range(start, stop)}
    asking = inputs.candidates.asking_tokens
    positions = sorted(segments.chosen(scores, config, config.rate_for(num_tokens), anyway, asking) | anyway)
    if inputs.observer is not None:
        inputs.observer.chosen(segments, scores, positions, segments.ends(config, anyway, asking), anyway)
    return Selection([prompt_ids[position] for position in positions], positions, num_tokens)
