"""Pass a draft over prompts with known evidence, once each: every selection rule is then judged without another pass.

How it is used: `look(pair, index, encoded)` gives what the scoring queries of the prompt, and those of a look-ahead,
attended to; `kept_positions` and `Ranked` say what a rule keeps of it. The script keeps looks on disk, for measurements
of answers: resumable, `--limit` and `--minutes` bound a call.

    python -m experiments.real.captures --data DATA --target TARGET --draft DRAFT --out FOLDER --num-tokens 2048
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic, process_time
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from experiments.common.script import run_script
from experiments.real.evidence_prompts import EvidencePrompt, gold_turns, make_prompts
from spec_stack import PrefillConfig
from spec_stack.calibrate.judged import open_prompt
from spec_stack.calibrate.prompts import Prompt, encode_evidence
from spec_stack.config import ScoringQueries
from spec_stack.decode.propose import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.loading import load_tokenizer
from spec_stack.hf.model import CachedModel
from spec_stack.prefill.alignment import Span
from spec_stack.prefill.attention import CapturedAttention
from spec_stack.prefill.importance import Segment
from spec_stack.prefill.registry import make_rule, needs_attention
from spec_stack.prefill.rule import Evidence
from spec_stack.prefill.scoring import look_at
from spec_stack.prefill.selection import select
from spec_stack.prefill.units import Units, make_units
from spec_stack.tokenizers.pieces import Pieces
from spec_stack.types import Proposal

Looks = Mapping[ScoringQueries, CapturedAttention]
Importance = Callable[[CapturedAttention, PrefillConfig], torch.Tensor]


@dataclass(frozen=True)
class Encoded:
    """A prompt in the target's tokens: what is protected of it, where the evidence is, and the text of every token."""

    token_ids: list[int]
    protected: Sequence[Span]
    spans: Sequence[Span]
    pieces: list[str]


def encode(tokenizer: Any, prompt: EvidencePrompt) -> Encoded:
    """Render a prompt's messages, and find its parts among the tokens: the evidence, then the hops' answers."""
    messages = [{"role": role, "content": content} for role, content in prompt.messages]
    spans = [*prompt.spans, *(span for hop in prompt.hops for span in hop)]
    made = encode_evidence(tokenizer, messages, prompt.document, spans)
    return Encoded(made.token_ids, made.protected, made.spans, Pieces(tokenizer).of(made.token_ids))


def look(pair: ModelPair, index: CachedModel, encoded: Encoded) -> Looks:
    """Pass the draft over what a prompt does not share with the one before it in the index, by default and as the paper
    has it."""
    tokenization, problem = pair.tokenize_for_draft(encoded.token_ids)
    if problem:
        raise ValueError(f"the draft cannot score prompts: {problem}")
    draft = open_prompt(pair, index, Prompt(encoded.token_ids, (), encoded.protected, tokenization))

    def look_ahead(committed_ids: Sequence[int], num_tokens: int) -> Proposal:
        return propose(draft, committed_ids, num_tokens, Sampler(), pair.end_ids)

    looks: dict[ScoringQueries, CapturedAttention] = {}
    for config in (PrefillConfig(), PrefillConfig.full_look_ahead()):
        looks[config.scoring_queries], _ = look_at(
            draft,
            encoded.token_ids,
            look_ahead,
            config,
            tokenization,
            pieces=encoded.pieces,
            protected=encoded.protected,
        )
    return looks


def write(path: Path, looks: Looks) -> None:
    """Keep what a draft captured, whole or not at all."""
    tensors: dict[str, torch.Tensor] = {}
    told: dict[str, Any] = {}
    for name, attention in looks.items():
        told[name] = {
            "num_in_place": attention.num_in_place,
            "ranges": attention.ranges,
            "segments": [asdict(segment) for segment in attention.segments],
            "opening": attention.opening,
            "scaling": {index: layer[2] for index, layer in attention.layers.items()},
        }
        for index, (queries, keys, *_) in attention.layers.items():
            tensors[f"{name}.{index}"] = queries.contiguous()
            # The same of all looks.
            tensors.setdefault(f"keys.{index}", keys.contiguous())
    save_file(tensors, path.with_suffix(".part"), {"told": json.dumps(told)})
    path.with_suffix(".part").rename(path)


def read(path: Path) -> Looks:
    """Return what `write` kept."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        told = json.loads(file.metadata()["told"])
    return {
        name: CapturedAttention(
            {
                int(index): (tensors[f"{name}.{index}"], tensors[f"keys.{index}"], scaling, None)
                for index, scaling in each["scaling"].items()
            },
            each["num_in_place"],
            each["ranges"] and [(start, stop) for start, stop in each["ranges"]],
            segments=tuple(
                Segment(tuple(segment["rows"]), tuple(segment["span"]), segment["is_question"])
                for segment in each["segments"]
            ),
            opening=each["opening"],
        )
        for name, each in told.items()
    }


def evidence_of(encoded: Encoded, looks: Looks, config: PrefillConfig) -> Evidence:
    """What a rule scores by."""
    attention = looks[config.scoring_queries] if needs_attention(config.scorer) else None
    return Evidence(encoded.token_ids, attention, encoded.protected, encoded.pieces)


def kept_positions(
    encoded: Encoded, looks: Looks, config: PrefillConfig, importance: Importance = CapturedAttention.importance
) -> Sequence[int]:
    """The tokens of a prompt that a rule keeps; `importance` computes that of a look."""
    evidence = evidence_of(encoded, looks, config)
    if evidence.attention is not None:
        evidence = replace(evidence, importance=importance(evidence.attention, config))
    return select(evidence, config, encoded.protected).positions


@dataclass(frozen=True)
class Ranked:
    """A prompt's units with scores, of which any share can be kept."""

    encoded: Encoded
    config: PrefillConfig
    units: Units
    scores: torch.Tensor

    @classmethod
    def by_rule(cls, encoded: Encoded, looks: Looks, config: PrefillConfig) -> Ranked:
        units = make_units(len(encoded.token_ids), encoded.pieces, config)
        scores = make_rule(config.scorer).score(evidence_of(encoded, looks, config), units, config)
        return cls(encoded, config, units, scores)

    @classmethod
    def by_chance(cls, encoded: Encoded, seed: int) -> Ranked:
        """Lines in random order."""
        units = make_units(len(encoded.token_ids), encoded.pieces, config := PrefillConfig())
        return cls(encoded, config, units, torch.rand(len(units), generator=torch.Generator().manual_seed(seed)))

    def kept(self, keep_rate: float) -> set[int]:
        """The tokens that are kept at such a share."""
        protected = {at for start, stop in self.encoded.protected for at in range(start, stop)}
        return self.units.chosen(self.scores, self.config, keep_rate, protected) | protected


def measure_with(tokenizer: Any) -> Callable[[str], int]:
    """Counts the tokens of a text."""
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def prompts_of(arguments: argparse.Namespace, tokenizer: Any) -> Iterator[EvidencePrompt]:
    """The prompts that the arguments ask for, always the same and in the same order."""
    measure = measure_with(tokenizer)
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
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
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
    precision = arguments.precision
    pair = ModelPair.load(
        arguments.target, arguments.draft, precision=precision, draft_precision=precision, target_weights=False
    )
    index = pair.open_index(PrefillConfig.prefill_chunk)
    for done, prompt in enumerate(left):
        if done == arguments.limit or monotonic() - began > 60 * arguments.minutes:
            print("stopped; call again for the rest", flush=True)
            return
        encoded, started = encode(pair.tokenizer, prompt), process_time()
        write(file_of(arguments.out, prompt), look(pair, index, encoded))
        print(f"{prompt.name:30s} {len(encoded.token_ids)} tokens {process_time() - started:.1f} CPU s", flush=True)
    print("all captured", flush=True)


if __name__ == "__main__":
    run_script(main)
