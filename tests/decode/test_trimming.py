"""To decide about a drafted token after having seen past it biases the output: DSpark's counter-example (appendix A
of https://arxiv.org/abs/2607.05147) on the real loop, which passes, and with the forbidden rule, which does not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import pytest

from spec_stack.controller.base import DraftSignals, Policy, StepContext
from spec_stack.decode.proposer import Proposer
from spec_stack.decode.sampler import Sampler
from spec_stack.types import Proposal
from tests.support.enumeration import chain_tokens, exact_law

# Tokens: 0 and 1 are the example's, 2 comes before them, 3 begins the prompt.
TARGET = [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0.7, 0.3, 0, 0], [0, 0, 1, 0]]
# After a 0 the draft is sure of what follows, after a 1 it is not.
DRAFT = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 1, 0]]
SURE = 0.9


class TwoAtMost(Policy):
    """Stops after a token that the draft doubts, seeing no further than that token."""

    def choose(self, context: StepContext) -> int:
        return 2

    def keep_drafting(self, context: StepContext, signals: DraftSignals) -> bool:
        return signals.confidence[-1] >= 0.5


class TrimsAfterLooking(Proposer):
    """Drafts two tokens, and keeps the first only where the second turned out sure: the mistake."""

    def propose(self, committed_ids: Sequence[int], policy: Policy, context: StepContext) -> Proposal:
        drafted = super().propose(committed_ids, policy, context)
        if len(drafted.token_ids) == 2 and drafted.signals.confidence[1] < SURE:
            return Proposal()
        return drafted


def law_after_two(source: str, proposer: type[Proposer] = Proposer) -> dict[int, float]:
    """The law of the token that follows token 2."""

    def run(sampler: Sampler) -> list[int]:
        tokens = chain_tokens((TARGET, DRAFT), source, [3, 3], 4, TwoAtMost(), sampler, proposer)
        # What is drawn after the second token makes more ways, and changes none of its chances.
        return list(islice(tokens, 1, 2))

    return {tokens[0]: chance for tokens, chance in exact_law(run, grid=10).items()}


# By day the law of the real loop is that of tests/decode/test_verify.py, by draws, and the mistake is caught here.
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("source", ["model", "both", "ngram"])
def test_the_loop_keeps_the_targets_law_in_the_counter_example(source: str) -> None:
    law = law_after_two(source)
    assert law[0] == pytest.approx(0.7, abs=1e-3)
    assert law[1] == pytest.approx(0.3, abs=1e-3)


@pytest.mark.slow
def test_trimming_after_looking_past_a_token_is_caught() -> None:
    law = law_after_two("model", TrimsAfterLooking)
    assert law[0] == pytest.approx(0.85, abs=1e-3)
    assert law[1] == pytest.approx(0.15, abs=1e-3)
