"""The embedded pair with templates that think, and answers in their formats."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from spec_stack import SpecStackGenerator
from spec_stack.hf.loading import ASSETS
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


@dataclass(frozen=True)
class Marked:
    """A chat template that thinks, and answers in its format. renamed: special tokens that have other names here."""

    template: str
    thought: str
    plain: str
    renamed: dict[str, str] = field(default_factory=dict)


_BLOCK = """{% for m in messages %}{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{%
endif %}{# OPENS CLOSES #}"""
_CHANNELS = """{% for m in messages %}<|start|>{{ m.role }}{% if m.thinking
%}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}{% if m.role == 'assistant'
%}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt
%}<|start|>assistant{% endif %}"""
REASONING, ANSWER = "a < b, [so] it is", "It is {warm}: <yes>."


def _block(opens: str, closes: str, renamed: dict[str, str] | None = None) -> Marked:
    template = _BLOCK.replace("OPENS", opens).replace("CLOSES", closes)
    return Marked(template, f"{opens}\n{REASONING}\n{closes}\n\n{ANSWER}", ANSWER, renamed or {})


MARKED = {
    "think": _block("<think>", "</think>"),
    "thinking": _block("<thinking>", "</thinking>"),
    "thought": _block("<thought>", "</thought>"),
    "reasoning": _block("<reasoning>", "</reasoning>"),
    "Seed": _block("<seed:think>", "</seed:think>"),
    "Mistral": _block("[THINK]", "[/THINK]", {"<|system|>": "[THINK]", "<|user|>": "[/THINK]"}),
    "Mistral, text": _block("[THINK]", "[/THINK]"),
    "Command A": _block(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        {"<|system|>": "<|START_THINKING|>", "<|user|>": "<|END_THINKING|>"},
    ),
    "GPT-OSS": Marked(
        _CHANNELS,
        f"<|channel|>analysis<|message|>{REASONING}<|end|><|start|>assistant<|channel|>final<|message|>{ANSWER}",
        f"<|channel|>final<|message|>{ANSWER}",
        {
            "<|system|>": "<|channel|>",
            "<|user|>": "<|start|>",
            "<|assistant|>": "<|message|>",
            # There, <|end|> ends a part of an answer and no answer.
            "<|end|>": "<|return|>",
            "<|bos|>": "<|end|>",
        },
    ),
}


class Script:
    """A logits processor under which the answer is this text."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self._ids = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        self._num_prompt: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._num_prompt is None:
            self._num_prompt = input_ids.shape[1]
        wanted = self._ids[min(input_ids.shape[1] - self._num_prompt, len(self._ids) - 1)]
        scores = torch.full_like(scores, -torch.inf)
        scores[:, wanted] = 0.0
        return scores


def marked_generator(marked: Marked, folder: Path) -> SpecStackGenerator:
    """The embedded pair with this template. folder: an empty one for its tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (ASSETS / "target" / name).read_text(encoding="utf-8")
        for old, new in marked.renamed.items():
            text = text.replace(f'"{old}"', f'"{new}"')
        (folder / name).write_text(text, encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = marked.template
    pair = SpecStackGenerator.from_pretrained(device="cpu", precision="fp32", calibration=False).pair
    return SpecStackGenerator(pair.target, pair.draft, tokenizer)
