"""Measure, for orientation, what a target answers over a KV cache that SnapKV compresses (kvpress 0.5.5), beside dense.

SnapKV prefills the whole prompt and then drops keys and values, per head: it saves memory and decoding time, and the
first token comes no sooner. Prompts: those of answers.py whose question stands last. Every prompt is prefilled once;
its layers are compressed to each share, and decoded greedily over each copy with the positions of the whole prompt, as
kvpress does. kvpress needs transformers under 5.3, so it has an environment of its own. A row per prompt and arm; a run
goes on where it ended.

    python -m experiments.real.snapkv --data DATA --target TARGET --rows ROWS --seed 331 --documents 16 --limit 104
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import process_time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from experiments.common import script
from experiments.common.bootstrap import mean_interval
from experiments.real.answers import DENSE, RATES, is_right
from experiments.real.evidence_prompts import shaped_prompts
from experiments.real.scoring import add_prompt_arguments, encode, measure_with
from spec_stack.bench.rows import Rows
from spec_stack.hf.loading import load_tokenizer

SHAPE, SHAPES = "bare", ("bare", "briefly", "json", "ahead")
ARMS = {f"SnapKV {rate}": rate for rate in RATES}


class Copies:
    """Runs SnapKV on every layer of a prefill at several shares, and leaves the prefill's own cache whole."""

    def __init__(self, shares: Sequence[float]) -> None:
        # Not in the project's environment.
        from kvpress import SnapKVPress

        self._presses = {share: SnapKVPress(compression_ratio=1 - share) for share in shares}
        self.caches = {share: DynamicCache() for share in shares}

    @contextmanager
    def of(self, model: Any) -> Iterator[None]:
        """In this block, `model` is observed."""
        layers = model.model.layers
        hooks = [layer.self_attn.register_forward_hook(self._compress, with_kwargs=True) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _compress(self, module: Any, given: Any, options: dict[str, Any], output: Any) -> None:
        layer = options["past_key_values"].layers[module.layer_idx]
        for share, press in self._presses.items():
            found = press.compress(module, options["hidden_states"], layer.keys, layer.values, output[1], options)
            self.caches[share].update(*found, module.layer_idx)


def greedy(model: Any, cache: Any, first: int, num_read: int, max_tokens: int) -> list[int]:
    """The answer over a cache, from its first token on. num_read: tokens of the whole prompt."""
    ends, answer = model.generation_config.eos_token_id, [first]
    ends = ends if isinstance(ends, list) else [ends]
    while answer[-1] not in ends and len(answer) < max_tokens:
        at = torch.tensor([[num_read + len(answer) - 1]])
        step = model(torch.tensor([answer[-1:]]), past_key_values=cache, position_ids=at)
        answer.append(int(step.logits[0, -1].argmax()))
    return answer


@torch.inference_mode()
def run(arguments: argparse.Namespace, tokenizer: Any, rows: Rows) -> int:
    """Answer what is left of the prompts; how many stay."""
    measure = measure_with(tokenizer)
    every = shaped_prompts(arguments.data, arguments.num_tokens, arguments.documents, measure, arguments.seed)
    selected = [prompt for prompt in every if prompt.shape in SHAPES][: arguments.limit]
    prompts = [prompt for prompt in selected if prompt.shape == SHAPE]
    dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=dtype, attn_implementation="sdpa").eval()
    for prompt in prompts:
        if not rows.left(prompt.name, {DENSE: None, **ARMS}):
            continue
        began, encoded, copies = process_time(), encode(tokenizer, prompt), Copies(RATES)
        ids = torch.tensor([list(encoded.token_ids)])
        cache = DynamicCache()
        with copies.of(model):
            first = int(model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1].argmax())
        for arm, own in {DENSE: cache, **{arm: copies.caches[rate] for arm, rate in ARMS.items()}}.items():
            num_kept = own.layers[0].keys.shape[2]
            text = tokenizer.decode(greedy(model, own, first, ids.shape[1], arguments.max_tokens))
            told = {"source": prompt.source, "num_tokens": ids.shape[1], "num_kept": num_kept, "text": text}
            rows.add(prompt.name, arm, {**told, "is_right": is_right(text, prompt.answers)})
        right = {arm: rows.of_arm(arm)[prompt.name]["is_right"] for arm in (DENSE, *ARMS)}
        shown = "  ".join(f"{arm} {'+' if is_it else '-'}" for arm, is_it in right.items())
        print(f"{prompt.name:30s}{shown}  {process_time() - began:.0f} CPU s", flush=True)
    return rows.num_left([prompt.name for prompt in prompts], [DENSE, *ARMS])


def summary(rows: Rows) -> dict[str, Any]:
    """Right answers of every arm, and less those of dense."""
    report: dict[str, Any] = {}
    for arm in (DENSE, *ARMS):
        pairs = rows.pairs(DENSE, arm)
        sources = [row["source"] for _, row in pairs]
        over = mean_interval([float(row["is_right"]) - float(dense["is_right"]) for dense, row in pairs], sources)
        num_right = sum(row["is_right"] for _, row in pairs)
        report[arm] = {"n": len(pairs), "num_right": num_right, "right_over": [round(each, 3) for each in over]}
        print(f"{arm:12s}{report[arm]}")
    return report


def main() -> None:
    parser = script.make_parser(__doc__)
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32)
    add_prompt_arguments(parser)
    script.add_row_arguments(parser, limited=False)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = Rows(arguments.rows, arguments.minutes)
    left = run(arguments, load_tokenizer(str(arguments.target)), rows)
    script.print_report("snapkv", {"num_left": left, "arms": summary(rows)}, arguments.out)


if __name__ == "__main__":
    script.run(main)
