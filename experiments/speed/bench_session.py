"""Time to the first token, to the first eight and to the whole answer, turn by turn of a conversation.

Arms, all on the same document and the same questions, each with its own answers in the history:

    dense      the generator, from nothing on every turn, plain decoding
    kept       plain transformers: its own model and attention, `past_key_values` kept and cropped to what is shared
    sparse     the generator with sparse prefill and speculation, from nothing on every turn
    session    a session with restoration
    bare       a session without

Encoding counts: every clock begins with the messages. The arms are interleaved turn by turn.

--agent makes every turn a question behind so much new tool output: --tokens of it, or as much less as lets all turns
and answers stand in the models' positions (the script says how much that is). --random takes a pair of random weights
of real shapes, a few layers of each, with as many positions as the trace needs; it answers nothing, so its drafts are
not accepted either, and its turns are of equal length. "kv" is the largest cache, of the target and with the draft's.
Prints a table, ends in one JSON line; --out keeps it with every turn.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, Qwen3Config

from experiments.common.conversations import FAMILIES, Conversation, make_conversation
from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.script import run_script
from spec_stack import PrefillConfig, SessionConfig, SpecStackConfig, SpecStackGenerator
from spec_stack.hf.architectures import text_config
from spec_stack.hf.cache import cache_argument

Messages = list[dict[str, str]]
ARMS = ("dense", "kept", "sparse", "session", "bare")
_FIRST = 8
# Template, question and answer of a turn, beside its document.
_TOKENS_AROUND = 160
# Qwen3-0.6B and Qwen3-4B are of these widths; of their 28 and 36 layers so many are left.
_DRAFT_SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_TARGET_SHAPE = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


@dataclass
class Timing:
    """Seconds from the messages to the first token, the first eight and the last, and what came of it."""

    ttft_s: float
    first_s: float
    total_s: float
    text: str
    num_slots: int
    num_restored: int = 0
    num_draft_slots: int = 0


class KeptCache:
    """A careful user of transformers: one cache for the conversation, cropped to what a prompt shares with it."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._cache = DynamicCache(config=model.config)
        self._ids: list[int] = []
        ends = model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])

    @torch.inference_mode()
    def answer(self, messages: Messages, max_tokens: int) -> Timing:
        started = perf_counter()
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        shared = 0
        for held, asked in zip(self._ids, prompt[:-1], strict=False):
            if held != asked:
                break
            shared += 1
        if shared < len(self._ids):
            self._cache.crop(shared - len(self._ids))
        self._ids = self._ids[:shared]
        answer: list[int] = []
        times = []
        new = prompt[shared:]
        while len(answer) < max_tokens:
            logits = self._model(
                torch.tensor([new], device=self._model.device),
                logits_to_keep=1,
                **cache_argument(self._model, self._cache),
            ).logits
            self._ids += new
            new = [int(logits[0, -1].argmax())]
            answer += new
            times.append(perf_counter() - started)
            if new[0] in self._ends:
                break
        text = self._tokenizer.decode(answer, skip_special_tokens=True)
        return Timing(times[0], times[min(_FIRST, len(times)) - 1], times[-1], text, len(self._ids))


def ask(run: Callable[..., Any], in_session: bool, messages: Messages, options: dict[str, Any]) -> Timing:
    """One turn. num_slots: of the target at its largest, the tokens in flight of a step aside; a draft that scores has
    read the whole text."""
    started, num, first_s, texts = perf_counter(), 0, 0.0, []
    ttft_s = 0.0
    for output in run(messages=messages, **options):
        now = perf_counter() - started
        ttft_s = ttft_s or now
        num += len(output.token_ids)
        first_s = first_s or (now if num >= _FIRST else 0.0)
        texts.append(output.text)
        metrics = output.metrics
    slots = metrics.num_kept_tokens + metrics.num_tokens
    drafted = metrics.num_scored_tokens or in_session or metrics.num_proposed
    return Timing(
        ttft_s=ttft_s,
        first_s=first_s or now,
        total_s=now,
        text="".join(texts),
        num_slots=slots,
        num_restored=metrics.num_restored_tokens,
        num_draft_slots=metrics.num_prompt_tokens + metrics.num_tokens if drafted else 0,
    )


def make_arms(
    generator: SpecStackGenerator,
    plain: PreTrainedModel,
    arms: list[str],
    config: SessionConfig,
    options: dict[str, Any],
) -> dict[str, Callable[[Messages], Timing]]:
    made: dict[str, Callable[[Messages], Timing]] = {}
    for arm in arms:
        if arm == "kept":
            kept = KeptCache(plain, generator.tokenizer)
            made[arm] = partial(kept.answer, max_tokens=options["max_tokens"])
        elif arm in ("dense", "sparse"):
            more = {"sparse_prefill": "off", "gamma": 0} if arm == "dense" else {}
            made[arm] = partial(ask, generator.stream, False, options=options | more)
        else:
            session = generator.session(config if arm == "session" else SessionConfig(restore=False))
            made[arm] = partial(ask, session.stream, True, options=options)
    return made


def run_conversation(
    arms: dict[str, Callable[[Messages], Timing]], turns: list[Conversation], progress: Callable[[], object]
) -> list[dict[str, Any]]:
    """One row per turn and arm. turns: whose turn i asks for fact i; several documents make an agent's trace. progress:
    called after each answer."""
    histories: dict[str, Messages] = {arm: [] for arm in arms}
    rows = []
    for turn in range(len(turns)):
        for arm in [*arms][turn % len(arms) :] + [*arms][: turn % len(arms)]:
            conversation = turns[turn]
            is_new = turn == 0 or conversation is not turns[turn - 1]
            fact = conversation.facts[turn]
            content = f"{conversation.document}\n\n{fact.question}" if is_new else fact.question
            histories[arm].append({"role": "user", "content": content})
            timing = arms[arm](histories[arm])
            histories[arm].append({"role": "assistant", "content": timing.text})
            rows.append({"arm": arm, "turn": turn, "right": fact.answer in timing.text, **vars(timing)})
            progress()
    return rows


def kv_bytes(model: PreTrainedModel) -> int:
    """Bytes of keys and values per cached token."""
    config = text_config(model.config)
    size = torch.empty((), dtype=model.dtype).element_size()
    return 2 * int(config.num_hidden_layers) * int(config.num_key_value_heads) * int(config.head_dim) * size


def summarise(rows: list[dict[str, Any]], arms: list[str], sizes: tuple[int, int]) -> dict[str, Any]:
    """Medians of turn 1 and of the later turns, of the ratios to the kept cache turn by turn, sums of TTFT by
    conversation. sizes: bytes per token of the target's and the draft's cache."""
    by: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by[row["arm"]].append(row)
    table = {}
    for arm in arms:
        later = [row for row in by[arm] if row["turn"]]
        entry: dict[str, Any] = {
            "turn_1_ttft_ms": 1e3 * median(row["ttft_s"] for row in by[arm] if not row["turn"]),
            "right": sum(row["right"] for row in by[arm]),
            "asked": len(by[arm]),
            "most_slots": max(row["num_slots"] for row in by[arm]),
            "most_bytes": max(row["num_slots"] * sizes[0] + row["num_draft_slots"] * sizes[1] for row in by[arm]),
            "restored_per_turn": sum(row["num_restored"] for row in later) / max(1, len(later)),
            "sum_ttft_s": sum(row["ttft_s"] for row in by[arm]) / len({row["conversation"] for row in by[arm]}),
        }
        if "sparse" in by:
            pairs = zip(by[arm], by["sparse"], strict=True)
            ratios = [own["ttft_s"] / sparse["ttft_s"] for own, sparse in pairs if not own["turn"]]
            entry["turn_1_over_sparse"] = median(ratios)
        for name in ("ttft_s", "first_s", "total_s"):
            entry[f"later_{name}"] = median(row[name] for row in later)
            if "kept" in by:
                pairs = zip(later, [row for row in by["kept"] if row["turn"]], strict=True)
                entry[f"over_kept_{name}"] = median(own[name] / kept[name] for own, kept in pairs)
        table[arm] = entry
    return table


def random_pair(tokenizer: Any, num_positions: int, config: SpecStackConfig) -> SpecStackGenerator:
    """Random weights of real shapes, with the embedded pair's tokenizer."""
    torch.manual_seed(0)
    models = [
        AutoModelForCausalLM.from_config(
            Qwen3Config(
                vocab_size=len(tokenizer), max_position_embeddings=num_positions, tie_word_embeddings=True, **shape
            )
        ).eval()
        for shape in (_TARGET_SHAPE, _DRAFT_SHAPE)
    ]
    return SpecStackGenerator(*models, tokenizer, config=config)


def plain_copy(generator: SpecStackGenerator) -> PreTrainedModel:
    """The target as transformers runs it, with its own attention."""
    path = generator.target.config._name_or_path
    if path:
        plain = AutoModelForCausalLM.from_pretrained(path, dtype=generator.target.dtype, attn_implementation="sdpa")
    else:
        config = Qwen3Config(**{**generator.target.config.to_dict(), "attn_implementation": "sdpa"})
        plain = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        plain.load_state_dict(generator.target.state_dict())
    return plain.to(generator.target.device).eval()  # type: ignore[no-any-return]


def fitting(asked: int, turns: int, max_tokens: int, num_positions: int) -> int:
    """Tokens of tool output per turn, so that all turns and answers have positions."""
    fit = num_positions // turns - max_tokens - _TOKENS_AROUND
    if fit < 1:
        raise ValueError(f"{turns} turns do not fit {num_positions} positions; ask for fewer")
    return min(asked, fit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--family", choices=FAMILIES, default="codes")
    parser.add_argument("--tokens", type=int, default=5200, help="of the document, or of a turn's (%(default)s)")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--conversations", type=int, default=7)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--keep-rate", type=float, default=0.2)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--agent", action="store_true", help="a new document with every turn")
    parser.add_argument("--random", action="store_true", help="a random pair of real shapes instead of a trained one")
    parser.add_argument("--no-warm-up", action="store_true", help="count the first conversation, too")
    parser.add_argument("--threshold", type=float, default=SessionConfig.restore_threshold)
    parser.add_argument("--chunks", type=int, default=SessionConfig.max_restored_chunks)
    parser.add_argument("--out", type=Path, help="file for the JSON, with every turn")
    arguments = parser.parse_args()
    session = SessionConfig(restore_threshold=arguments.threshold, max_restored_chunks=arguments.chunks)
    # Whatever a calibration says: the paper's selection.
    config = SpecStackConfig(PrefillConfig(scorer="attention", min_prompt_tokens=1024), session=session)
    generator = load_generator(arguments, config, calibration=False)
    if arguments.random:
        num_positions = arguments.turns * (arguments.tokens + arguments.max_tokens + _TOKENS_AROUND)
        generator = random_pair(generator.tokenizer, num_positions, config)
    if arguments.agent:
        positions = min(generator.pair.max_positions)
        arguments.tokens = fitting(arguments.tokens, arguments.turns, arguments.max_tokens, positions)
        print(f"{arguments.turns} turns with {arguments.tokens} new tokens each, in {positions} positions")
    plain = plain_copy(generator)
    # A random pair says what it says, and no two arms the same: to the end.
    options = {"max_tokens": arguments.max_tokens, "keep_rate": arguments.keep_rate}
    rows: list[dict[str, Any]] = []
    warm_up = [] if arguments.no_warm_up else [arguments.first_seed]
    seeds = [*warm_up, *range(arguments.first_seed, arguments.first_seed + arguments.conversations)]
    bar = tqdm(total=len(seeds) * arguments.turns * len(arguments.arms), unit="answer", leave=False)
    for index, seed in enumerate(seeds):
        make = partial(make_conversation, generator.tokenizer, arguments.tokens, max(8, arguments.turns))
        if arguments.agent:
            turns = [make(seed=100 * seed + turn, family=arguments.family) for turn in range(arguments.turns)]
        else:
            turns = [make(seed=seed, family=arguments.family)] * arguments.turns
        arms = make_arms(generator, plain, arguments.arms, session, options)
        measured = run_conversation(arms, turns, bar.update)
        rows += [{"conversation": seed, **row} for row in measured] if index >= len(warm_up) else []
    bar.close()
    table = summarise(rows, arguments.arms, (kv_bytes(generator.target), kv_bytes(generator.draft)))
    print(
        "arm       turn 1  later TTFT  first 8   answer   over kept (TTFT, first 8, answer)  sum TTFT  restored  "
        "slots   kv MB  right"
    )
    for arm, row in table.items():
        ratios = [f"{row.get(f'over_kept_{name}', float('nan')):.2f}" for name in ("ttft_s", "first_s", "total_s")]
        later = [f"{1e3 * row[f'later_{name}']:8.1f}" for name in ("ttft_s", "first_s", "total_s")]
        print(
            f"{arm:8s} {row['turn_1_ttft_ms']:7.0f}  {'  '.join(later)}   {'  '.join(ratios):>32s}  "
            f"{row['sum_ttft_s']:7.2f} s  {row['restored_per_turn']:8.1f}  {row['most_slots']:5d}  "
            f"{row['most_bytes'] / 1e6:6.1f}  {row['right']:3d} of {row['asked']}"
        )
    settings = {
        name: value for name, value in vars(arguments).items() if name not in ("target", "draft", "device", "out")
    }
    shapes = {"target_shape": _TARGET_SHAPE, "draft_shape": _DRAFT_SHAPE} if arguments.random else {}
    report = {"experiment": "bench_session", **describe(), **settings, **shapes, "arms": table}
    print(json.dumps(report))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({**report, "rows": rows}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_script(main)
