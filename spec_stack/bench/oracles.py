"""What no live policy can know, for comparison: the best gammas in hindsight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial

from spec_stack.bench.replay import Costs, ReplayText, Score, replay
from spec_stack.config import MAX_GAMMA
from spec_stack.controller.simple import Fixed


def oracle(text: ReplayText, costs: Costs, *, max_gamma: int = MAX_GAMMA) -> Score:
    """The least time any choice of gammas could take over a text.

    Parameters as in `replay`. By dynamic programming over positions, from the last to the first.
    """
    best: dict[int, tuple[float, int, int]] = {}
    for position in range(text.end - 1, text.start - 1, -1):
        room = min(max_gamma, text.end - position - 1)
        # Past the first wrong token too: costs as measured may say that a longer proposal takes less time.
        num_right = text.run_length(position, room)
        options = []
        for gamma in range(room + 1):
            following = position + min(gamma, num_right) + 1
            rest = best[following][0] if following < text.end else 0.0
            options.append((costs.step_s(gamma) + rest, gamma, following))
        best[position] = min(options)
    position, gammas = text.start, []
    while position < text.end:
        gammas.append(best[position][1])
        position = best[position][2]
    return Score(position - text.start, best[text.start][0] if gammas else 0.0, gammas)


def best_fixed(texts: Iterable[ReplayText], costs: Mapping[str, Costs]) -> dict[str, int]:
    """The fixed gamma with most tokens/s on these texts, by precision."""
    by_precision: dict[str, list[ReplayText]] = defaultdict(list)
    for text in texts:
        by_precision[text.precision].append(text)

    def tokens_per_s(precision: str, gamma: int) -> float:
        policy = Fixed(gamma)
        scores = [replay(text, policy, costs[precision]) for text in by_precision[precision]]
        return sum(score.num_tokens for score in scores) / sum(score.seconds for score in scores)

    return {precision: max(range(MAX_GAMMA + 1), key=partial(tokens_per_s, precision)) for precision in by_precision}
