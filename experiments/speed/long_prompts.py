"""What scoring and selection take of very long prompts: time, and memory per token.

A draft with random weights and the layer shape of Qwen2.5-0.5B (hidden size 896, 14 query and 2 key heads of 64,
feed-forward 4,864) goes through prompts of up to 128K random tokens with a window and scores them. Random weights
choose nothing sensible; time and memory are those of any weights. Cut against the model itself: --layers (2 of 24;
time is linear in them, but for the last, of which only the keys are computed) and the vocabulary (4,096 of 151,936; no
logits of the prompt are computed either way). No target: none worth a draft of this size fits beside 128K tokens here.
Each length runs in a process of its own, whose peak is over what it held before the prompt. Prints a table, ends in one
JSON line.
"""

from __future__ import annotations

import argparse
import multiprocessing
from functools import partial
from time import perf_counter
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from experiments.common.environment import describe
from experiments.common.memory import peak_over, reset_peak
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from spec_stack import PrefillConfig
from spec_stack.decode.propose import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.hf.attention import install
from spec_stack.hf.loading import resolve_device
from spec_stack.hf.model import CachedModel
from spec_stack.prefill.scoring import score_prompt

VOCAB_SIZE = 4096


def make_draft(num_layers: int, num_positions: int, device: str | None) -> Qwen2ForCausalLM:
    """Random weights; the same for the same shape."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=num_layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=num_positions,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    model = Qwen2ForCausalLM(config).eval().to(resolve_device(device))
    install(model)
    return model


def measure(
    num_tokens: int, config: PrefillConfig, num_layers: int, device: str | None, threads: int
) -> dict[str, Any]:
    """Score and select one prompt, after a short one that warms up."""
    torch.set_num_threads(threads)
    model = make_draft(num_layers, num_tokens + 64, device)
    prompt = torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    score_once(model, prompt[:2048], config)
    before = reset_peak(model.device)
    started = perf_counter()
    num_kept, parts = score_once(model, prompt, config)
    seconds = perf_counter() - started
    peak_bytes = peak_over(model.device, before)
    text = model.config
    kv_bytes = 2 * num_layers * text.num_key_value_heads * 64 * model.dtype.itemsize
    return {
        "num_tokens": num_tokens,
        "seconds": seconds,
        "prefill_s": parts,
        "scoring_and_selection_s": seconds - parts,
        "us_per_token": seconds / num_tokens * 1e6,
        "peak_mb": peak_bytes / 1e6,
        "peak_bytes_per_token": peak_bytes / num_tokens,
        "kv_bytes_per_token": kv_bytes,
        "num_kept": num_kept,
    }


@torch.no_grad()
def score_once(model: Any, prompt: list[int], config: PrefillConfig) -> tuple[int, float]:
    """How many tokens are kept, and the seconds of the draft's pass."""
    draft = CachedModel(model, config.prefill_chunk)
    look_ahead = partial(propose, draft, sampler=Sampler(), end_ids=frozenset())
    seconds = 0.0
    prefill = draft.prefill

    def timed(*args: Any, **options: Any) -> None:
        nonlocal seconds
        started = perf_counter()
        prefill(*args, **options)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds += perf_counter() - started

    draft.prefill = timed  # type: ignore[method-assign]
    selection, _ = score_prompt(draft, prompt, look_ahead, config)
    return len(selection.positions), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768, 65536, 131072], help="(%(default)s)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--keep-rate", type=float, default=0.05)
    parser.add_argument("--scorer", choices=["attention", "anchors", "fused"], default="fused")
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int, default=1)
    add_out_argument(parser)
    arguments = parser.parse_args()
    config = PrefillConfig(draft_window=arguments.window, keep_rate=arguments.keep_rate, scorer=arguments.scorer)
    context = multiprocessing.get_context("spawn")
    rows = []
    print(f"{arguments.layers} layers, window {arguments.window}, {arguments.scorer}, keep_rate {arguments.keep_rate}")
    for num_tokens in arguments.tokens:
        with context.Pool(1) as pool:
            row = pool.apply(measure, (num_tokens, config, arguments.layers, arguments.device, arguments.threads))
        rows.append(row)
        print(
            f"{num_tokens:8d} tokens  {row['seconds']:7.2f} s (draft's pass {row['prefill_s']:.2f}, rest "
            f"{row['scoring_and_selection_s']:.2f})  {row['us_per_token']:6.0f} us/token  peak {row['peak_mb']:6.0f} "
            f"MB, {row['peak_bytes_per_token']:.0f} bytes/token (KV {row['kv_bytes_per_token']})  "
            f"{row['num_kept']} kept",
            flush=True,
        )
    report = {"experiment": "long_prompts", **describe(), "layers": arguments.layers, "rows": rows}
    print_report(report, arguments.out)


if __name__ == "__main__":
    run_script(main)
