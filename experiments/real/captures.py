"""Keeps on disk what a draft captured of a prompt, so that another rule over it costs milliseconds, not a pass.

One dense pass a prompt: the queries of its last tokens and of a look-ahead, and the keys of all layers. Resumable: what
has a file is left alone. `--limit` and `--minutes` bound a call, so that others may use the machine between two.

    python -m experiments.real.captures --data DATA --target TARGET --draft DRAFT --out FOLDER --num-tokens 2048
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, process_time
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from experiments.common.script import run_script
from experiments.real.evidence_prompts import EvidencePrompt, gold_turns, make_prompts
from spec_stack import PrefillConfig
from spec_stack.calibrate.judged import attend, by_asker
from spec_stack.calibrate.needles import Haystack, Span
from spec_stack.calibrate.prompts import encode_haystack
from spec_stack.config import ScoringQueries
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.loading import load_tokenizer
from spec_stack.prefill.attention import CapturedAttention
from spec_stack.prefill.registry import needs_attention
from spec_stack.prefill.rule import Evidence
from spec_stack.prefill.selection import select
from spec_stack.tokenizers.pieces import Pieces

Looks = Mapping[ScoringQueries, CapturedAttention]
Importance = Callable[[CapturedAttention, PrefillConfig], torch.Tensor]


@dataclass(frozen=True)
class Encoded:
    """A prompt in the target's tokens: where the user's turn and the evidence are, and the text of every token."""

    token_ids: list[int]
    turn: Span | None
    spans: Sequence[Span]
    pieces: list[str]


def encode(tokenizer: Any, prompt: EvidencePrompt) -> Encoded:
    """Render a prompt as a user message, and find its parts among the tokens."""
    hidden = Haystack(prompt.kind, prompt.document, prompt.question, "", prompt.spans)
    made = encode_haystack(tokenizer, hidden)
    return Encoded(made.token_ids, made.turn, made.spans, Pieces(tokenizer).of(made.token_ids))


def write(path: Path, attention: CapturedAttention) -> None:
    """Keep what a draft captured, whole or not at all."""
    found = {"num_asking": torch.tensor(attention.num_asking)}
    if attention.ranges is not None:
        found["ranges"] = torch.tensor(attention.ranges)
    for index, (queries, keys, scaling, _) in attention.layers.items():
        found[f"{index}.queries"] = queries.contiguous()
        found[f"{index}.keys"] = keys.contiguous()
        found[f"{index}.scaling"] = torch.tensor(scaling)
    save_file(found, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def read(path: Path) -> Looks:
    """Return what `write` kept, by who asks."""
    found = load_file(path)
    layers = {
        index: (found[f"{index}.queries"], found[f"{index}.keys"], float(found[f"{index}.scaling"]), None)
        for index in sorted({int(name.split(".")[0]) for name in found if name.endswith(".keys")})
    }
    ranges = [(start, stop) for start, stop in found["ranges"].tolist()] if "ranges" in found else None
    return by_asker(CapturedAttention(layers, int(found["num_asking"]), ranges))


def kept_positions(
    encoded: Encoded, looks: Looks, config: PrefillConfig, importance: Importance = CapturedAttention.importance
) -> Sequence[int]:
    """Return the tokens of a captured prompt that a rule keeps. It is told where the user's turn is, as on every route.

    Parameters
    ----------
    encoded
        The prompt.
    looks
        As `read` gives them.
    config
        The rule.
    importance
        Computes a look's importance.
    """
    attention = looks[config.scoring_queries] if needs_attention(config.scorer) else None
    evidence = Evidence(encoded.token_ids, attention, encoded.turn, encoded.pieces)
    if attention is not None:
        evidence = replace(evidence, importance=importance(attention, config))
    return select(evidence, config).positions


def prompts_of(arguments: argparse.Namespace, tokenizer: Any) -> Iterator[EvidencePrompt]:
    """The prompts that the arguments ask for, always the same and in the same order."""

    def measure(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    if arguments.qmsum:
        yield from stretches(gold_turns(arguments.data), arguments.num_tokens, measure)
    else:
        yield from make_prompts(arguments.data, arguments.num_tokens, arguments.per_kind, measure, arguments.seed)


def stretches(prompts: Iterator[EvidencePrompt], num_tokens: int, measure: Any) -> Iterator[EvidencePrompt]:
    """The part of each meeting around its evidence, as long as asked for; evidence of over a quarter of it is passed
    over."""
    for number, prompt in enumerate(prompts):
        low, high = prompt.spans[0][0], prompt.spans[-1][1]
        if measure(prompt.document[low:high]) > num_tokens // 4:
            continue
        lines = prompt.document.split("\n")
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line) + 1)
        first = next(at for at, start in enumerate(starts) if start >= low)
        last = next(at for at, start in enumerate(starts) if start >= high)
        total = sum(measure(line + "\n") for line in lines[first:last])
        turn = number
        while total < num_tokens and (first > 0 or last < len(lines)):
            turn += 1
            if (turn % 3 and first > 0) or last == len(lines):
                first -= 1
                total += measure(lines[first] + "\n")
            else:
                total += measure(lines[last] + "\n")
                last += 1
        begin = starts[first]
        spans = tuple((start - begin, stop - begin) for start, stop in prompt.spans)
        yield EvidencePrompt(
            prompt.name, prompt.kind, prompt.source, "\n".join(lines[first:last]), prompt.question, spans
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--target", type=Path, required=True, help="folder whose tokenizer the prompts are in")
    parser.add_argument("--num-tokens", type=int, default=2048, help="length of the prompts, about (%(default)s)")
    parser.add_argument("--per-kind", type=int, default=9, help="prompts of each kind (%(default)s)")
    parser.add_argument("--seed", type=int, default=29, help="what the prompts are drawn by (%(default)s)")
    parser.add_argument("--qmsum", action="store_true", help="queries of QMSum with gold turns in place of the kinds")
    parser.add_argument("--limit", type=int, default=10**9, help="most prompts of a call")


def file_of(folder: Path, prompt: EvidencePrompt) -> Path:
    return folder / f"{prompt.name.replace('/', '-').replace(', ', '_').replace(' ', '_')}.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--draft", type=Path, required=True, help="folder of the draft")
    parser.add_argument("--out", type=Path, required=True, help="folder for the captures")
    parser.add_argument("--window", type=int, help="window that the draft prefills with; none by default")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no prompt after so many")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (%(default)s)")
    arguments = parser.parse_args()
    began = monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    every = prompts_of(arguments, load_tokenizer(str(arguments.target)))
    left = [prompt for prompt in every if not file_of(arguments.out, prompt).exists()]
    if not left:
        print("all captured", flush=True)
        return
    pair = ModelPair.load(
        arguments.target, arguments.draft, precision="bf16", draft_precision="bf16", target_weights=False
    )
    for done, prompt in enumerate(left):
        if done == arguments.limit or monotonic() - began > 60 * arguments.minutes:
            print("stopped; call again for the rest", flush=True)
            return
        encoded, started = encode(pair.tokenizer, prompt), process_time()
        tokenization, problem = pair.tokenize_for_draft(encoded.token_ids)
        if problem:
            raise ValueError(f"the draft cannot score prompts: {problem}")
        write(file_of(arguments.out, prompt), attend(pair, encoded.token_ids, tokenization, window=arguments.window))
        print(f"{prompt.name:30s} {len(encoded.token_ids)} tokens {process_time() - started:.1f} CPU s", flush=True)
    print("all captured", flush=True)


if __name__ == "__main__":
    run_script(main)
