"""Signals on the draft's device: what is measured, where it lies, and that a capped chain keeps the law."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spec_stack.sglang.signals import DraftSignalBuffers, as_signals, end_chains, measure


def _reference(logits: torch.Tensor) -> list[list[float]]:
    found = []
    for row in logits.double().tolist():
        weights = [math.exp(value) for value in row]
        probs = [weight / sum(weights) for weight in weights]
        found.append([max(probs), -sum(prob * math.log2(prob) for prob in probs if prob)])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_confidence_and_entropy_are_those_of_the_distribution(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(5, 40)).to(dtype)
    logits[2, 7:] = -math.inf
    logits[3] = -math.inf
    logits[3, 4] = 0.0
    out = torch.empty(5, 2)
    measure(logits, out)
    assert torch.allclose(out, torch.tensor(_reference(logits)), atol=1e-5)


class Draft(torch.nn.Module):
    """Stands where SGLang's logits processor does: hands out the logits it is called with."""

    def forward(self, logits: torch.Tensor) -> Any:
        return SimpleNamespace(next_token_logits=logits)


def _buffers() -> tuple[DraftSignalBuffers, Draft]:
    buffers, draft = DraftSignalBuffers(4, 6, "cpu"), Draft()
    buffers.watch(draft)
    return buffers, draft


def test_a_steps_signals_come_from_its_forwards_in_order_and_stay_with_their_requests() -> None:
    torch.manual_seed(1)
    buffers, draft = _buffers()
    rows = torch.tensor([4, 1])
    prompt, second, third, after = (3 * torch.randn(2, 9) for _ in range(4))
    with buffers.catching_up(rows, has_graph=False):
        draft(prompt)
    draft(torch.randn(2, 9))
    first = buffers.take_first(rows)
    with buffers.drafting():
        draft(second)
        draft(third)
    with buffers.catching_up(rows, has_graph=False):
        output = draft(torch.randn(8, 9))
        # SGLang keeps each request's row of them.
        output.next_token_logits = after
    found = buffers.of_step(first, 3, rows)
    expected = [_reference(each) for each in (prompt, second, third, after)]
    assert torch.allclose(found, torch.tensor(expected).transpose(0, 1), atol=1e-5)
    swapped = torch.tensor([1, 4])
    assert torch.allclose(buffers.take_first(swapped), torch.tensor(expected[3]).flip(0), atol=1e-5)


def test_a_smaller_batch_reads_nothing_of_the_larger_one_before_it() -> None:
    """The buffers are static: rows and places of earlier steps are still in them."""
    buffers, draft = _buffers()
    rows = torch.arange(5)
    for size, gamma in ((5, 4), (2, 2)):
        logits = torch.full((size, 3), -10.0)
        logits[:, 0] = 10.0 * (size == 5)
        with buffers.catching_up(rows[:size], has_graph=False):
            draft(logits)
        first = buffers.take_first(rows[:size])
        with buffers.drafting():
            for _ in range(gamma - 1):
                draft(logits)
        found = buffers.of_step(first, gamma, rows[:size])
        assert found.shape == (size, gamma + 1, 2)
        wanted = torch.tensor(_reference(logits))[:, None].expand(size, gamma, 2)
        assert torch.allclose(found[:, :gamma], wanted, atol=1e-5)


def test_what_a_captured_graph_writes_is_read_at_every_replay() -> None:
    """A graph calls no hook again; it writes again where the hook wrote when it was captured."""
    buffers, draft = _buffers()
    rows = torch.tensor([3, 0])
    with buffers.capturing():
        draft(torch.zeros(4, 2))
        with buffers.drafting():
            draft(torch.zeros(4, 2))
    for confidence in (0.7, 0.9):
        # The replay.
        buffers._caught_up[:4] = confidence
        with buffers.catching_up(rows, has_graph=True):
            pass
        assert buffers.take_first(rows).flatten().tolist() == pytest.approx([confidence] * 4)
    assert buffers.later[1, :4, 0].tolist() == [0.5] * 4


def test_what_was_not_seen_is_not_known() -> None:
    buffers, draft = _buffers()
    rows = torch.tensor([2])
    with buffers.catching_up(rows, has_graph=False):
        pass
    assert as_signals(buffers.of_step(buffers.take_first(rows), 1, rows)) == [
        (as_signals(torch.empty(1, 1, 2))[0][0], None)
    ]
    with buffers.catching_up(rows, has_graph=False):
        draft(torch.full((1, 3), math.nan))
    signals, upcoming = as_signals(buffers.of_step(buffers.take_first(rows), 1, rows))[0]
    assert not signals
    assert upcoming is None


def test_a_step_without_drafting_still_tells_of_the_next_first_token() -> None:
    buffers, draft = _buffers()
    rows = torch.tensor([2])
    first = buffers.take_first(rows)
    with buffers.catching_up(rows, has_graph=False):
        draft(torch.zeros(1, 4))
    signals, upcoming = as_signals(buffers.of_step(first, 0, rows))[0]
    assert not signals
    assert upcoming is not None
    assert (upcoming.entropy, upcoming.confidence) == ([2.0], [0.25])


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


def test_greedy_tokens_are_those_of_the_shorter_proposal() -> None:
    for predicted, cap in itertools.product(itertools.product(range(2), repeat=4), range(5)):
        target = [[float(token == wanted) for token in range(2)] for wanted in predicted]
        pointers = torch.tensor([[1, 2, 3, -1]])
        end_chains(pointers, [cap])
        ended = {tokens for tokens, prob in _law(pointers[0].tolist(), target, [0, 1, 0]).items() if prob}
        short = [*range(1, min(cap, 3) + 1), -1]
        assert ended == {tokens for tokens, prob in _law(short, target, [0, 1, 0]).items() if prob}
