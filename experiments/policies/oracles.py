"""Policies that know what no live one can, for comparison: the best gammas in hindsight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from experiments.policies.replay import Costs, ReplayText, Score, replay
from spec_stack.config import MAX_GAMMA
from spec_stack.controller.base import Policy, StepContext, check_gamma
from spec_stack.controller.simple import Fixed


def oracle(text: ReplayText, costs: Costs, *, max_gamma: int = MAX_GAMMA, reserve: int = 1) -> Score:
    """The least time any choice of gammas could take over a text.

    Parameters as in `replay`. By dynamic programming over positions, from the last to the first.
    """
    best: dict[int, tuple[float, int, int]] = {}
    for position in range(text.end - 1, text.start - 1, -1):
        room = min(max_gamma, text.end - position - reserve)
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


def best_fixed(
    texts: Iterable[ReplayText],
    costs: Mapping[str, Costs],
    *,
    gammas: Sequence[int] = range(MAX_GAMMA + 1),
    reserve: int = 1,
) -> dict[str, int]:
    """The fixed gamma with most tokens/s on these texts, by precision, as `BestFixed` takes it."""
    by_precision: dict[str, list[ReplayText]] = defaultdict(list)
    for text in texts:
        by_precision[text.precision].append(text)

    def tokens_per_s(precision: str, gamma: int) -> float:
        policy = Fixed(gamma)
        scores = [replay(text, policy, costs[precision], reserve=reserve) for text in by_precision[precision]]
        return sum(score.num_tokens for score in scores) / sum(score.seconds for score in scores)

    return {precision: max(gammas, key=lambda gamma: tokens_per_s(precision, gamma)) for precision in by_precision}


@dataclass
class BestFixed(Policy):
    """The gamma that gave most tokens/s at its precision in earlier records.

    Parameters
    ----------
    gammas : mapping of str to int
        By precision, as `best_fixed` finds them.
    """

    gammas: Mapping[str, int]

    name = "best-fixed"

    def __post_init__(self) -> None:
        if not self.gammas:
            raise ValueError("best-fixed needs gammas={precision: gamma}; find them with oracles.best_fixed")
        for precision, gamma in self.gammas.items():
            check_gamma(f"gammas[{precision!r}]", gamma)

    def choose(self, context: StepContext) -> int:
        """Raises ValueError for a precision that was not measured."""
        gamma = self.gammas.get(context.precision)
        if gamma is None:
            raise ValueError(
                f"best-fixed knows no gamma for {context.precision!r}; it has {', '.join(sorted(self.gammas))}"
            )
        return gamma


@dataclass
class TaskOracle(Policy):
    """The best gamma for the request's task, which a server does not know (SpecKV, section 4.4).

    Parameters
    ----------
    gammas : mapping of (str, str) to int
        By precision and task, measured beforehand on the very tasks it is used for.
    """

    gammas: Mapping[tuple[str, str], int]

    name = "task-oracle"

    def __post_init__(self) -> None:
        if not self.gammas:
            raise ValueError("task-oracle needs gammas={(precision, task): gamma}; it is for comparison only")
        for (precision, task), gamma in self.gammas.items():
            check_gamma(f"gammas[{precision!r}, {task!r}]", gamma)

    def choose(self, context: StepContext) -> int:
        """Raises ValueError for a precision and task that were not measured."""
        gamma = self.gammas.get((context.precision, context.task))
        if gamma is None:
            raise ValueError(f"task-oracle knows no gamma for {context.precision!r} and task {context.task!r}")
        return gamma
