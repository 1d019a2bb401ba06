"""The embedded pair with a template that opens a thought, and a target that ends it soon."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from spec_stack import SpecStackGenerator
from tests.support.tools import TEMPLATE

# The prompt ends inside the thought, as with R1's distills, QwQ and Qwen3-Thinking.
THINKING = TEMPLATE.replace(
    "<|assistant|>{% endif %}",
    "<|assistant|><think>\n{% if enable_thinking is false %}\n</think>\n\n{% endif %}{% endif %}",
)
THOUGHT = " <b> and no more</think>"


def thinker() -> SpecStackGenerator:
    """A generator whose answers think `THOUGHT`."""
    plain = SpecStackGenerator.from_pretrained(device="cpu", precision="fp32", calibration=False)
    plain.tokenizer.chat_template = THINKING
    ids = plain.tokenizer("\n" + THOUGHT, add_special_tokens=False).input_ids
    following = dict(pairwise(ids))

    def go_on(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        rows = output.logits[0]
        for row, token_id in zip(rows, kwargs["input_ids"][0, -len(rows) :].tolist(), strict=True):
            if token_id in following:
                row[following[token_id]] += 100

    assert isinstance(plain.pair.target, torch.nn.Module)
    plain.pair.target.register_forward_hook(go_on, with_kwargs=True)
    return SpecStackGenerator(plain.pair.target, plain.pair.draft, plain.tokenizer)
