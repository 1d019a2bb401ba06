"""The embedded pair after a pruned prefill that scored by the draft's first layer, live."""

from __future__ import annotations

import pytest

from spec_stack import PrefillConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.bench.demo import hide_fact
from tests.support.forwards import forwards_of, sizes_of


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["model", "both"])
def test_answers_of_eight_tokens_are_not_paid_for_by_running_the_kept_tokens(proposer: str) -> None:
    config = SpecStackConfig(PrefillConfig(scoring_heads=((0, 0), (0, 1))))
    # Its policy has learned nothing.
    generator = SpecStackGenerator.from_pretrained(device="cpu", calibration=False, config=config)
    num_run = 0
    for seed in range(10):
        messages = hide_fact(generator.tokenizer, 2048, seed).messages
        steps = generator.stream(messages=messages, max_tokens=8, ignore_eos=True, proposer=proposer)
        first = next(steps)
        assert first.record.keep_rate < 0.5
        with forwards_of(generator.draft) as fed:
            assert sum(len(step.token_ids) for step in steps) == 8 - len(first.token_ids)
        num_run += max(sizes_of(fed), default=0) > 8
    # A trial of an unknown draft may be made once.
    assert num_run <= 1
