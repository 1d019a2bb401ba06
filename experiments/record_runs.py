"""Record greedy speculative runs of a draft/target pair at several fixed gammas, for training and replay.

Asks: what do the draft's signals look like token by token, and what does a step really cost here? It runs a plain loop
over Transformers with a cache for each model, so it shares no code with the generator whose policies are trained on
the result. One run per prompt and gamma, ignoring the end-of-sequence token so that all runs have one length.

Prompts come as JSON lines with "task" and "prompt" (Spec-Bench's "category" and "turns" are understood too).
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from spec_stack.record_io import write_records
from spec_stack.records import DraftSignals, StepRecord


class Reader:
    """A model with its cache; feed() appends tokens and gives the logits of the last `num_logits`."""

    def __init__(self, path: str, dtype: torch.dtype) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self.cache = DynamicCache()

    def start(self) -> None:
        self.cache = DynamicCache()

    @property
    def num_cached(self) -> int:
        return int(self.cache.get_seq_length())

    def feed(self, tokens: list[int], num_logits: int) -> torch.Tensor:
        output = self.model(torch.tensor([tokens]), past_key_values=self.cache, logits_to_keep=num_logits)
        return output.logits[0].float()

    def crop(self, length: int) -> None:
        if surplus := self.num_cached - length:
            self.cache.crop(-surplus)


def draft_signals(logits: torch.Tensor) -> tuple[int, float, float]:
    """The greedy token, the entropy in bits and the largest probability."""
    log_probs = torch.log_softmax(logits, dim=-1)
    probs = log_probs.exp()
    entropy = -(probs * log_probs).sum().item() / 0.6931471805599453
    return int(logits.argmax()), max(entropy, 0.0), float(probs.max())


def record_run(
    draft: Reader, target: Reader, prompt_ids: list[int], gamma: int, num_tokens: int, names: dict[str, str]
) -> list[StepRecord]:
    """One request at a fixed gamma, decode steps only: both prompts are read before the clock starts."""
    draft.start()
    target.start()
    draft.feed(prompt_ids[:-1], 1)
    target.feed(prompt_ids[:-1], 1)
    tokens = list(prompt_ids)
    records: list[StepRecord] = []
    while (room := len(prompt_ids) + num_tokens - len(tokens)) > 0:
        signals, proposal = DraftSignals(), []
        began = perf_counter()
        pending = tokens[draft.num_cached :]
        for _ in range(min(gamma, room - 1)):
            token, entropy, confidence = draft_signals(draft.feed(pending, 1)[-1])
            signals.append(entropy, confidence)
            proposal.append(token)
            pending = [token]
        drafted = perf_counter()
        answers = target.feed(tokens[target.num_cached :] + proposal, len(proposal) + 1).argmax(dim=-1).tolist()
        accepted = 0
        while accepted < len(proposal) and answers[accepted] == proposal[accepted]:
            accepted += 1
        verified = perf_counter()
        tokens += [*proposal[:accepted], answers[accepted]]
        target.crop(len(tokens) - 1)
        draft.crop(min(draft.num_cached, len(tokens) - 1))
        record = StepRecord(
            request_id=names["request_id"],
            step=len(records),
            policy=f"fixed-{gamma}",
            precision=names["precision"],
            task=names["task"],
            is_prefill=False,
            keep_rate=1.0,
            gamma=len(proposal),
            num_accepted=accepted,
            num_tokens=accepted + 1,
            signals=signals,
            draft_s=drafted - began,
            verify_s=verified - drafted,
            controller_s=0.0,
        )
        records.append(record)
    return records


def read_prompts(path: Path, per_task: int) -> list[tuple[str, str]]:
    chosen: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        task, prompt = row.get("task", row.get("category")), row.get("prompt") or row["turns"][0]
        if len(chosen[task]) < per_task:
            chosen[task].append(prompt)
    return [(task, prompt) for task, prompts in chosen.items() for prompt in prompts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--per-task", type=int, default=5, help="prompts per task (default 5)")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="longer prompts lose their middle (default 512)")
    parser.add_argument("--gammas", type=int, nargs="+", default=[2, 4, 6, 8])
    parser.add_argument("--tokens", type=int, default=80, help="tokens per run (default 80)")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--out", type=Path, required=True, help=".csv or .parquet")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[options.precision]
    draft, target = Reader(options.draft, dtype), Reader(options.target, dtype)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    records: list[StepRecord] = []
    for number, (task, prompt) in enumerate(tqdm(read_prompts(options.prompts, options.per_task))):
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(chat, add_special_tokens=False)["input_ids"]
        if len(ids) > options.prompt_tokens:
            half = options.prompt_tokens // 2
            ids = ids[:half] + ids[-half:]
        names = {"request_id": f"{task}-{number}", "task": task, "precision": options.precision}
        for gamma in options.gammas:
            records += record_run(draft, target, ids, gamma, options.tokens, names)
    write_records(records, options.out)
    print("gamma  steps  tokens/step  tokens/s  draft ms/token  verify ms/step")
    result = {}
    for gamma in options.gammas:
        mine = [record for record in records if record.policy == f"fixed-{gamma}"]
        num_tokens, drafted = sum(record.num_tokens for record in mine), sum(record.gamma for record in mine)
        draft_s, verify_s = sum(record.draft_s for record in mine), sum(record.verify_s for record in mine)
        rate = num_tokens / (draft_s + verify_s)
        print(
            f"{gamma:5d} {len(mine):6d} {num_tokens / len(mine):12.3f} {rate:9.1f} "
            f"{1e3 * draft_s / max(drafted, 1):15.3f} {1e3 * verify_s / len(mine):15.3f}"
        )
        result[str(gamma)] = {"tokens_per_step": num_tokens / len(mine), "tokens_per_s": rate}
    print(json.dumps({"records": len(records), "out": str(options.out), "fixed": result}))


if __name__ == "__main__":
    main()
