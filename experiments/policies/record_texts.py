"""Record a pair's own texts for `simulate_texts.py`: what the target writes, and what the draft thinks at every place.

Asks, once and at length, what a policy needs to be judged without the models: the target's greedy text, and at each of
its places the draft's likeliest token, its confidence and entropy, and what it would go on with behind a wrong one.
Writes one JSON line per prompt as soon as it is done, and passes over those that the file has: stop it and start it
again at will. A prompt of 160 tokens takes about a minute of CPU with a target of 1.5 B parameters.

    record_texts.py code=HumanEval.jsonl.gz math=gsm8k.jsonl --target T --draft D --out texts.jsonl
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.prompt_files import Prompt, choose_prompts
from experiments.common.script import run_script
from spec_stack import SpecStackGenerator
from spec_stack.decode.propose import entropy_and_confidence
from spec_stack.hf.cache import cache_argument

TAIL_TOKENS = 8


def in_turns(prompts: Sequence[Prompt]) -> list[tuple[str, Prompt]]:
    """The prompts with a key each, one of every task in turn, so that a run cut short has some of all."""
    by_task: dict[str, list[tuple[str, Prompt]]] = {}
    for prompt in prompts:
        of_task = by_task.setdefault(prompt.task, [])
        of_task.append((f"{prompt.task}-{len(of_task)}", prompt))
    return [each for row in zip_longest(*by_task.values()) for each in row if each is not None]


@torch.inference_mode()
def record_draft(draft: PreTrainedModel, prompt_ids: list[int], text_ids: list[int]) -> dict[str, Any]:
    """Record what the draft thinks along a text, and behind each of its own wrong tokens.

    Returns
    -------
    dict
        draft, correct, conf, ent: a list each, one entry per token of the text (entropy in bits). tails: by place,
        [entropies, confidences] of the TAIL_TOKENS tokens that the draft puts behind its wrong one there.
    """
    cache = DynamicCache(config=draft.config)
    ids = torch.tensor([prompt_ids + text_ids[:-1]], device=draft.device)
    logits = draft(input_ids=ids, logits_to_keep=len(text_ids), **cache_argument(draft, cache)).logits[0]
    seen = [entropy_and_confidence(row) for row in logits]
    drafted = [token_id for _, _, token_id in seen]
    wrong = [place for place, token_id in enumerate(drafted) if token_id != text_ids[place]]
    return {
        "draft": drafted,
        "correct": [int(a == b) for a, b in zip(drafted, text_ids, strict=True)],
        "ent": [round(entropy, 5) for entropy, _, _ in seen],
        "conf": [round(confidence, 5) for _, confidence, _ in seen],
        "tails": _tails(draft, cache, len(prompt_ids), wrong, drafted),
    }


def _tails(
    draft: PreTrainedModel, cache: DynamicCache, num_prompt: int, wrong: list[int], drafted: list[int]
) -> dict[str, list[list[float]]]:
    """All wrong places as one batch: each row of it is masked from its own place on."""
    if not wrong:
        return {}
    num_cached = cache.get_seq_length()
    cache.batch_repeat_interleave(len(wrong))
    ends = torch.tensor([num_prompt + place for place in wrong], device=draft.device)
    mask = (torch.arange(num_cached, device=draft.device) < ends[:, None]).long()
    ids = torch.tensor([[drafted[place]] for place in wrong], device=draft.device)
    tails: dict[str, list[list[float]]] = {str(place): [[], []] for place in wrong}
    for depth in range(TAIL_TOKENS):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        positions = (ends + depth)[:, None]
        made = draft(input_ids=ids, attention_mask=mask, position_ids=positions, **cache_argument(draft, cache))
        rows = made.logits[:, -1]
        for tail, row in zip(tails.values(), rows, strict=True):
            entropy, confidence, _ = entropy_and_confidence(row)
            tail[0].append(round(entropy, 5))
            tail[1].append(round(confidence, 5))
        ids = rows.argmax(dim=-1, keepdim=True)
    return tails


def record(generator: SpecStackGenerator, prompt_ids: list[int], num_tokens: int, task: str) -> dict[str, Any] | None:
    """One prompt's row; None where the target ends before its second token."""
    result = generator.generate(input_ids=prompt_ids, max_tokens=num_tokens, sparse_prefill="draft_only", task=task)
    text_ids = [token_id for token_id in result.token_ids if token_id not in generator.pair.end_ids]
    if len(text_ids) < 2:
        return None
    return {"task": task, "prompt": prompt_ids, "text": text_ids} | record_draft(
        generator.pair.draft, prompt_ids, text_ids
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+", help="TASK=FILE or TASK=FILE:CATEGORY")
    add_pair_arguments(parser)
    parser.add_argument("--per-task", type=int, default=10, help="prompts per task (%(default)s)")
    parser.add_argument("--max-prompt-tokens", type=int, default=512, help="longer ones lose their middle")
    parser.add_argument("--tokens", type=int, default=160, help="most tokens of a text (%(default)s)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no prompt after so many")
    parser.add_argument("--out", type=Path, required=True, help=".jsonl; prompts that it has are passed over")
    arguments = parser.parse_args()
    start = time.perf_counter()
    prompts = in_turns(choose_prompts(arguments.prompts, arguments.per_task))
    done = set()
    if arguments.out.exists():
        done = {json.loads(line)["key"] for line in arguments.out.read_text(encoding="utf-8").splitlines()}
    left = [(key, prompt) for key, prompt in prompts if key not in done]
    if left:
        generator = load_generator(arguments)
        if generator.pair.translation is not None:
            parser.error("the draft has another tokenizer than the target; a recording needs the same tokens")
    for key, prompt in left:
        if time.perf_counter() - start > 60 * arguments.minutes:
            break
        before = time.process_time()
        row = record(
            generator, prompt.encode(generator.tokenizer, arguments.max_prompt_tokens), arguments.tokens, prompt.task
        )
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, **(row or {"task": prompt.task, "text": []})}) + "\n")
        done.add(key)
        share = f"{sum(row['correct']) / len(row['correct']):.2f} right" if row else "no text"
        print(f"{len(done)}/{len(prompts)} {key}: {share}, {time.process_time() - before:.0f} s of CPU", flush=True)
    print(json.dumps({"experiment": "record_texts", **describe(), "texts": len(done), "wanted": len(prompts)}))


if __name__ == "__main__":
    run_script(main)
