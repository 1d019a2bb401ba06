from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from spec_stack.decode.sampler import Sampler
from spec_stack.decode.verify import verify
from spec_stack.hf.processors import make_warp
from spec_stack.types import Proposal
from tests.support import reference
from tests.support.enumeration import assert_law, exact_law, tiny_pair


def one_hot_logits(*choices: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(choices), 10).float()


@pytest.mark.parametrize(
    ("drafted", "num_accepted", "next_token"),
    [([], 0, 4), ([4, 5, 6], 3, 7), ([4, 5, 9], 2, 6), ([9, 5, 6], 0, 4), ([4, 9, 6], 1, 5)],
)
def test_greedy_accepts_the_prefix_that_matches(drafted: list[int], num_accepted: int, next_token: int) -> None:
    verification = verify(one_hot_logits(4, 5, 6, 7), Proposal(drafted), Sampler())
    assert (verification.num_accepted, verification.next_token) == (num_accepted, next_token)


class RecordedPrefixes:
    """Logits processors that leave the logits as they are, and record the prefixes of their rows."""

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []

    def __call__(self, prefix_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        self.prefixes.append(list(prefix_ids))
        return logits

    def fork_for_draft(self) -> RecordedPrefixes:
        return RecordedPrefixes()


def test_an_accepted_end_token_ends_the_verification_before_another_row_is_processed() -> None:
    shaper = RecordedPrefixes()
    verification = verify(one_hot_logits(4, 2, 6), Proposal([4, 2]), Sampler(shaper=shaper), [1], end_ids={2})
    assert (verification.num_accepted, verification.next_token) == (1, 2)
    assert shaper.prefixes == [[1], [1, 4]]


def test_warps_are_temperature_then_top_k_then_top_p() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()

    def probs(temperature: float, top_k: int, top_p: float) -> list[float]:
        warp = make_warp(temperature, top_k, top_p)
        assert warp is not None
        return warp(logits).softmax(-1)[0].tolist()

    squares = [0.25, 0.09, 0.0225, 0.0025]
    assert probs(0.5, 0, 1.0) == pytest.approx([square / sum(squares) for square in squares])
    assert probs(1.0, 2, 1.0) == pytest.approx([0.625, 0.375, 0, 0])
    assert probs(1.0, 0, 0.7) == pytest.approx([0.625, 0.375, 0, 0])
    # Top-p after top-k: of the two that are left the first has 0.625; before it, two would be needed for 0.6.
    assert probs(1.0, 2, 0.6) == pytest.approx([1, 0, 0, 0])
    # After the temperature: at 2 the first has 0.38 of the mass and is not enough for 0.5.
    assert sum(p > 0 for p in probs(2.0, 0, 0.5)) == 2
    assert make_warp(0, 5, 0.5) is None


class Rigged(Sampler):
    """A sampler whose uniform draws are all the same."""

    def __init__(self, value: float) -> None:
        super().__init__(make_warp(1.0, 0, 1.0), torch.Generator().manual_seed(0))
        self._value = value

    def uniform(self, num: int, device: torch.device) -> torch.Tensor:
        return torch.full((num,), self._value)


def test_a_token_the_target_cannot_say_is_never_accepted() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0]] * 2)
    assert verify(logits, Proposal([1]), Rigged(0.0)).num_accepted == 0


def test_a_rejection_by_rounding_draws_from_the_target() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0]] * 2)
    assert verify(logits, Proposal([0], logits[:1].softmax(-1)), Rigged(1.0)).next_token in (0, 2)


# Rows that are accepted in part: half of token 0 is rejected, and two tokens may replace it.
TARGET = torch.tensor([[0.4, 0.3, 0.3], [0.25, 0.25, 0.5], [0.5, 0.25, 0.25]])
DRAFT = torch.tensor([[0.8, 0.1, 0.1], [0.5, 0.5, 0.0]])


@pytest.mark.parametrize("is_chosen", [False, True])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(("gamma", "grid"), [(0, 1), (1, 40), (2, 4)])
def test_every_way_through_a_verification_has_exactly_the_law(
    gamma: int, grid: int, in_order: bool, is_chosen: bool
) -> None:
    target = TARGET[: gamma + 1]
    draft = torch.eye(3)[[1, 2][:gamma]] if is_chosen else DRAFT[:gamma]
    if is_chosen and gamma == 2:
        target = TARGET[[1, 1, 2]]

    def run(sampler: Sampler) -> tuple[int, ...]:
        sampler.shaper = RecordedPrefixes() if in_order else None
        drafted = [sampler.pick(row) for row in draft]
        verification = verify(target.log(), Proposal(drafted, None if is_chosen else draft), sampler)
        return *drafted[: verification.num_accepted], verification.next_token

    expected = reference.speculative_law(target.numpy(), draft.numpy())
    assert exact_law(run, grid) == pytest.approx({outcome: chance for outcome, chance in expected.items() if chance})


def test_a_target_equal_to_the_draft_accepts_everything() -> None:
    sampler = Sampler(make_warp(1.0, 0, 1.0), torch.Generator().manual_seed(0))
    rows = torch.tensor(np.random.default_rng(6).dirichlet(np.full(3, 0.7), size=3)).float()
    for _ in range(200):
        # The draft's probabilities go through the same softmax as the target's, as they do in the loop.
        proposal = Proposal([sampler.pick(row) for row in rows[:2]], sampler.probs(rows.log())[:2])
        assert verify(rows.log(), proposal, sampler).num_accepted == 2


def pair_law(model: PreTrainedModel, kept: list[int], positions: list[int], start: int) -> np.ndarray:
    """Exact law (vocab, vocab) of the second and third token sampled after a (pruned) prompt."""
    vocab = model.config.vocab_size

    def probs(new: list[int]) -> np.ndarray:
        places = [*positions, *range(start, start + len(new))]
        return reference.logits(model, kept + new, places)[-1].double().softmax(-1).numpy()

    law = np.zeros((vocab, vocab))
    for first, p_first in enumerate(probs([])):
        for second, p_second in enumerate(probs([first])):
            law[second] += p_first * p_second * probs([first, second])
    return law


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pruned", "kind"),
    [
        pytest.param(False, "same", marks=pytest.mark.nightly),
        pytest.param(True, "same", marks=pytest.mark.nightly),
        pytest.param(False, "narrower", marks=pytest.mark.nightly),
        pytest.param(True, "wider", marks=pytest.mark.nightly),
        (True, "other"),
    ],
)
def test_sampled_text_of_the_real_loop_has_the_targets_distribution(pruned: bool, kind: str) -> None:
    """Three tokens, so that the plain first step, drafted tokens, corrections and bonus tokens all take part; with
    pruning also the look-ahead as the first proposal, judged over the pruned cache. The draft's vocabulary may be
    narrower or wider than the target's, or another one."""
    generator, prompt = tiny_pair(kind)
    options = {"gamma": 2, "sparse_prefill": "on" if pruned else "off", "max_tokens": 3, "temperature": 1.0}
    read: list[int] = []
    handle = generator.target.register_forward_pre_hook(
        lambda module, args, kwargs: read.extend(kwargs["position_ids"][0].tolist()), with_kwargs=True
    )
    metrics = generator.generate(input_ids=prompt, seed=0, **options).metrics
    handle.remove()
    assert metrics.num_proposed
    positions = [position for position in read if position < 40]
    assert len(positions) == (16 if pruned else 40)
    law = pair_law(generator.target, [prompt[position] for position in positions], positions, 40)

    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(250):
        counts[tuple(generator.generate(input_ids=prompt, seed=seed, **options).token_ids[1:])] += 1
    assert_law(counts, dict(np.ndenumerate(law)))
