"""How long a call may take and a generator lives, and what it refuses to have done to it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest

from spec_stack import SpecStackConfig, SpecStackGenerator
from spec_stack.hf.prepack import PrepackedLinear

PROMPT = "def read_lines(path):\n"


def test_a_call_ends_with_the_step_in_which_its_time_is_over(embedded: SpecStackGenerator) -> None:
    whole = embedded.generate(PROMPT, max_tokens=64, gamma=0)
    late = embedded.generate(PROMPT, max_tokens=64, gamma=0, max_time=1e-9)
    assert (late.finish_reason, late.token_ids) == ("time", whole.token_ids[:1])
    assert whole.text.startswith(late.text)
    in_time = embedded.generate(PROMPT, max_tokens=4, max_time=3600)
    assert (in_time.finish_reason, in_time.token_ids) == ("length", whole.token_ids[:4])


def test_a_session_goes_on_behind_an_answer_that_ran_out_of_time(embedded: SpecStackGenerator) -> None:
    with embedded.session() as session:
        late = session.generate(PROMPT, max_tokens=8, max_time=1e-9)
        assert late.finish_reason == "time"
        rest = session.generate(PROMPT + late.text, max_tokens=4)
        assert rest.metrics.num_cached_tokens > 0
    assert rest.text == embedded.generate(PROMPT + late.text, max_tokens=4).text


def test_a_closed_generator_frees_its_models_and_answers_nothing() -> None:
    with SpecStackGenerator.from_pretrained(device="cpu", precision="fp32") as generator:
        assert generator.generate(PROMPT, max_tokens=2).token_ids
        models = [weakref.ref(generator.target), weakref.ref(generator.draft)]
    gc.collect()
    assert [each() for each in models] == [None, None]
    assert repr(generator) == "SpecStackGenerator(closed)"
    for call in (lambda: generator.generate(PROMPT), generator.session, lambda: generator.config):
        with pytest.raises(ValueError, match="this generator is closed; make another one"):
            call()
    generator.close()


def test_a_session_outlives_its_generator() -> None:
    generator = SpecStackGenerator.from_pretrained(device="cpu", precision="fp32")
    expected = generator.generate(PROMPT, max_tokens=3).token_ids
    with generator.session() as session:
        generator.close()
        assert session.generate(PROMPT, max_tokens=3).token_ids == expected


@pytest.mark.parametrize("copying", [copy.deepcopy, copy.copy, pickle.dumps])
def test_what_cannot_be_copied_says_why(copying: Any, embedded: SpecStackGenerator) -> None:
    with pytest.raises(TypeError, match="Threads may share one"):
        copying(embedded)
    with pytest.raises(TypeError, match=r"fork\(\) makes another"):
        copying(embedded.session())
    if copying is not copy.copy and any(isinstance(each, PrepackedLinear) for each in embedded.target.modules()):
        with pytest.raises(TypeError, match="prepack_linears=False"):
            copying(embedded.target)


def test_the_configuration_of_a_generator_is_settled(embedded: SpecStackGenerator) -> None:
    with pytest.raises(AttributeError):
        embedded.config = SpecStackConfig()  # type: ignore[misc]
