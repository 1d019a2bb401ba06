"""Record greedy speculative runs of a draft/target pair, at fixed gammas for training and replay, and under live
policies.

Asks: what do the draft's signals look like token by token, what does a step really cost here, and does a policy win on
the clock what replay says? It runs a plain loop over Transformers with a cache for each model, so it shares no code
with the generator whose policies are trained on the result. One run per prompt and policy, one after the other on each
prompt so that a busy machine slows all alike, ignoring the end-of-sequence token so that all runs have one length.
Gains are against the fixed gamma that was best in hindsight, with intervals over prompts.

Prompts come as JSON lines with "task" and "prompt" (Spec-Bench's "category" and "turns" are understood too).
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from spec_stack.controller.policies import LIVE_POLICY_NAMES, make_policy
from spec_stack.record_io import write_records
from spec_stack.records import DraftSignals, GammaPolicy, StepContext, StepRecord


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
    draft: Reader, target: Reader, prompt_ids: list[int], policy: GammaPolicy, num_tokens: int, names: dict[str, str]
) -> list[StepRecord]:
    """One request under a policy, decode steps only: both prompts are read before the clock starts."""
    draft.start()
    target.start()
    draft.feed(prompt_ids[:-1], 1)
    target.feed(prompt_ids[:-1], 1)
    tokens = list(prompt_ids)
    records: list[StepRecord] = []
    while (room := len(prompt_ids) + num_tokens - len(tokens)) > 0:
        signals, proposal = DraftSignals(), []
        began = perf_counter()
        last = records[-1] if records else None
        num_generated = len(tokens) - len(prompt_ids)
        context = StepContext(
            len(records), room - 1, len(prompt_ids), target.num_cached, num_generated, last, names["precision"]
        )
        gamma = min(policy.choose(context), context.max_gamma)
        controller_s = perf_counter() - began
        pending = tokens[draft.num_cached :]
        while len(proposal) < gamma:
            token, entropy, confidence = draft_signals(draft.feed(pending, 1)[-1])
            signals.append(entropy, confidence)
            proposal.append(token)
            pending = [token]
            asked = perf_counter()
            keep = policy.keep_drafting(context, signals)
            controller_s += perf_counter() - asked
            if not keep:
                break
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
            policy=names["policy"],
            precision=names["precision"],
            task=names["task"],
            is_prefill=False,
            keep_rate=1.0,
            gamma=len(proposal),
            num_accepted=accepted,
            num_tokens=accepted + 1,
            signals=signals,
            draft_s=drafted - began - controller_s,
            verify_s=verified - drafted,
            controller_s=controller_s,
        )
        began = perf_counter()
        policy.observe(record)
        records.append(replace(record, controller_s=controller_s + perf_counter() - began))
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
    parser.add_argument("--policies", nargs="*", default=[], choices=LIVE_POLICY_NAMES, help="run these live as well")
    parser.add_argument("--tokens", type=int, default=80, help="tokens per run (default 80)")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--out", type=Path, required=True, help=".csv or .parquet")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[options.precision]
    draft, target = Reader(options.draft, dtype), Reader(options.target, dtype)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    policies = {f"fixed-{gamma}": make_policy("fixed", gamma=gamma) for gamma in options.gammas}
    policies |= {name: make_policy(name) for name in options.policies}
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
        for name, policy in policies.items():
            records += record_run(draft, target, ids, policy, options.tokens, {**names, "policy": name})
    write_records(records, options.out)
    print(json.dumps({"records": len(records), "out": str(options.out), "policies": summarise(records)}))


def summarise(records: list[StepRecord]) -> dict[str, dict[str, Any]]:
    """Print and return what every policy measured, gains against the best fixed gamma in hindsight."""
    sums: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0] * 6))
    for record in records:
        seconds = record.draft_s + record.verify_s + record.controller_s
        values = (record.num_tokens, seconds, record.gamma, 1, record.draft_s, record.controller_s)
        total = sums[record.policy][record.request_id]
        for index, value in enumerate(values):
            total[index] += value
    tables = {name: np.array(list(by_prompt.values())) for name, by_prompt in sums.items()}
    fixed = [name for name in tables if name.startswith("fixed-")]
    best = tables[max(fixed, key=lambda name: tables[name][:, 0].sum() / tables[name][:, 1].sum())]
    picked = np.random.default_rng(0).integers(0, len(best), (2000, len(best)))

    def gains(table: np.ndarray, rows: np.ndarray) -> np.ndarray:
        mine, base = table[rows].sum(axis=-2), best[rows].sum(axis=-2)
        return np.asarray((mine[..., 0] / mine[..., 1]) / (base[..., 0] / base[..., 1]) - 1)

    print(
        f"{'policy':12s} {'tok/s':>7s} {'gain':>7s} {'interval':>16s} {'tok/step':>8s} {'gamma':>6s} "
        f"{'draft ms/token':>14s} {'verify ms':>9s} {'policy µs/step':>14s}"
    )
    result = {}
    for name, table in tables.items():
        num_tokens, seconds, drafted, steps, draft_s, controller_s = table.sum(axis=0).tolist()
        gain = float(gains(table, np.arange(len(best))))
        low, high = np.percentile(gains(table, picked), [2.5, 97.5]).tolist()
        interval = f"[{low:+.1%}, {high:+.1%}]"
        print(
            f"{name:12s} {num_tokens / seconds:7.1f} {gain:+7.1%} {interval:>16s} {num_tokens / steps:8.2f} "
            f"{drafted / steps:6.2f} {1e3 * draft_s / drafted if drafted else 0:14.3f} "
            f"{1e3 * (seconds - draft_s - controller_s) / steps:9.3f} {1e6 * controller_s / steps:14.1f}"
        )
        result[name] = {"tokens_per_s": num_tokens / seconds, "gain": gain, "interval": [low, high]}
    return result


if __name__ == "__main__":
    main()
