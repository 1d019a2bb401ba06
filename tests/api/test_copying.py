"""What a generator and its session refuse to have done to them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from spec_stack import SpecStackConfig, SpecStackGenerator
from spec_stack.hf.prepack import PrepackedLinear


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
