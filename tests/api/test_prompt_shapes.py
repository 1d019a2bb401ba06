"""Prompts as people have them: one row in any shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spec_stack import SpecStackGenerator

PROMPT = "def read_lines(path):\n"


def test_prompts_come_in_every_shape_of_one_row(embedded: SpecStackGenerator) -> None:
    ids = embedded.tokenizer(PROMPT).input_ids
    expected = embedded.generate(PROMPT, max_tokens=4).token_ids
    shapes = [ids, tuple(ids), np.array(ids), torch.tensor(ids), torch.tensor([ids])]
    assert all(embedded.generate(input_ids=shape, max_tokens=4).token_ids == expected for shape in shapes)
    inputs = embedded.tokenizer(PROMPT, return_tensors="pt")
    assert embedded.generate(**inputs, max_tokens=4).token_ids == expected


def test_several_rows_are_refused(embedded: SpecStackGenerator) -> None:
    with pytest.raises(ValueError, match="once for each"):
        embedded.generate(input_ids=torch.ones(2, 4, dtype=torch.long))
