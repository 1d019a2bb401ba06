"""The embedded pair after a pruned prefill that scored by the draft's first layer, live."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.bench.demo import hide_fact

NUM_ANSWERS = 10


@pytest.fixture
def fed() -> Iterator[tuple[SpecStackGenerator, list[int]]]:
    """A new generator, whose policy has learned nothing, and the tokens that each forward of its draft is fed."""
    config = SpecStackConfig(PrefillConfig(scoring_heads=((0, 0), (0, 1))))
    generator = SpecStackGenerator.from_pretrained(device="cpu", calibration=False, config=config)
    sizes: list[int] = []
    hook = generator.draft.register_forward_pre_hook(
        lambda _, positional, named: sizes.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    yield generator, sizes
    hook.remove()


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["model", "both"])
def test_answers_of_eight_tokens_are_not_paid_for_by_running_the_kept_tokens(
    proposer: str, fed: tuple[SpecStackGenerator, list[int]]
) -> None:
    generator, sizes = fed
    num_run = 0
    for seed in range(NUM_ANSWERS):
        messages = hide_fact(generator.tokenizer, 2048, seed).messages
        steps = generator.stream(messages=messages, max_tokens=8, ignore_eos=True, proposer=proposer)
        first = next(steps)
        assert first.record.keep_rate < 0.5
        sizes.clear()
        assert sum(len(step.token_ids) for step in steps) == 8 - len(first.token_ids)
        num_run += max(sizes, default=0) > 8
    # A trial of an unknown draft may be made once.
    assert num_run <= 1


@pytest.mark.slow
def test_a_resumed_draft_is_accepted_as_one_whose_layers_all_read_the_prompt(
    fed: tuple[SpecStackGenerator, list[int]],
) -> None:
    generator, _ = fed
    whole = SpecStackGenerator.from_pretrained(device="cpu", calibration=False)
    accepted = []
    for each in (generator, whole):
        num_accepted = 0
        for seed in range(2):
            messages = hide_fact(each.tokenizer, 2048, seed).messages
            options = {"messages": messages, "max_tokens": 40, "ignore_eos": True, "sparse_prefill": "on"}
            result = each.generate(**options, gamma=4)
            assert result.token_ids == each.generate(**options, gamma=0).token_ids
            num_accepted += result.metrics.num_accepted
        accepted.append(num_accepted)
    assert accepted[0] > 0.8 * accepted[1] > 0
