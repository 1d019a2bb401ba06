"""A capped chain keeps the target's law."""

from __future__ import annotations

import math

import pytest
import torch

from spec_stack.sglang.batch_policy import end_chains


def _law(next_tokens: list[int], target: list[list[float]], proposal: list[int]) -> dict[tuple[int, ...], float]:
    """What SGLang's verification of a chain hands out, with its probability: its kernel, by exact enumeration.

    From the root on, the token that the pointer names is accepted with the target's probability of it; where it is not,
    the target's distribution without it is drawn from; where the pointer is -1, the target's whole one.
    """
    law: dict[tuple[int, ...], float] = {}
    at, so_far, chance = 0, (), 1.0
    while True:
        following = next_tokens[at]
        refused = None if following == -1 else proposal[following - 1]
        for token, prob in enumerate(target[at]):
            if token != refused:
                law[*so_far, token] = law.get((*so_far, token), 0.0) + chance * prob
        if refused is None:
            return law
        chance *= target[at][refused]
        so_far, at = (*so_far, refused), following


@pytest.mark.parametrize("cap", [0, 1, 2, 3, 8])
def test_a_chain_that_ends_at_a_cap_keeps_the_targets_law(cap: int) -> None:
    """Every first token, and every next one after an accepted one, has the target's own probability."""
    target = [[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4], [0.25, 0.5, 0.25]]
    proposal = [0, 2, 1]
    pointers = torch.tensor([[1, 2, 3, -1], [1, 2, 3, -1]])
    end_chains(pointers, [cap, 8])
    assert pointers[1].tolist() == [1, 2, 3, -1]
    law = _law(pointers[0].tolist(), target, proposal)
    assert max(len(tokens) for tokens in law) == min(cap, 3) + 1
    assert sum(law.values()) == pytest.approx(1)
    for length in range(min(cap, 3) + 1):
        prefix = tuple(proposal[:length])
        reached = math.prod(target[at][token] for at, token in enumerate(prefix))
        for token in range(3):
            mass = sum(prob for tokens, prob in law.items() if tokens[: length + 1] == (*prefix, token))
            assert mass == pytest.approx(reached * target[length][token])
