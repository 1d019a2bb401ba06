"""Keeps on disk what a draft captured of a prompt, so that another rule over it costs milliseconds, not a pass.

One dense pass a prompt: the queries of its last tokens and of a look-ahead, and the keys of all layers. Resumable: what
has a file is left alone. `--limit` and `--seconds` bound a call, so that others may use the machine between two.

    python -m experiments.real.captures --data DATA --target TARGET --draft DRAFT --out FOLDER --num-tokens 2048
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, process_time
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from experiments.common.script import run_script
from experiments.real.evidence_prompts import EvidencePrompt, gold_turns, make_prompts
from spec_stack import PrefillConfig
from spec_stack.decode.propose import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.hf.architectures import text_config
from spec_stack.hf.attention import install
from spec_stack.hf.loading import end_token_ids, load_tokenizer
from spec_stack.hf.model import CachedModel
from spec_stack.hf.prepack import can_prepack, prepack
from spec_stack.prefill.attention import CapturedAttention
from spec_stack.prefill.rule import Evidence
from spec_stack.tokenizers.pieces import Pieces
from spec_stack.tokenizers.translated_draft import TranslatedDraft
from spec_stack.tokenizers.translation import Translation
from spec_stack.tokenizers.vocabulary import compare

_LOOK_AHEAD = PrefillConfig.look_ahead


@dataclass(frozen=True)
class Encoded:
    """A prompt in the target's tokens: where its question and its evidence are, and the text of every token."""

    token_ids: list[int]
    question: tuple[int, int]
    spans: list[tuple[int, int]]
    pieces: list[str]


def encode(tokenizer: Any, prompt: EvidencePrompt) -> Encoded:
    """Render a prompt as a user message, and find its parts among the tokens."""
    content = f"{prompt.document}\n\n{prompt.question}"
    messages = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    base = text.index(content.strip()) - (len(content) - len(content.lstrip()))

    def tokens(start: int, stop: int) -> tuple[int, int]:
        inside = [
            at for at, (low, high) in enumerate(encoded.offset_mapping) if low < stop + base and high > start + base
        ]
        return inside[0], inside[-1] + 1

    asked = tokens(len(prompt.document) + 2, len(content))
    ids = list(encoded.input_ids)
    return Encoded(ids, asked, [tokens(*span) for span in prompt.spans], Pieces(tokenizer).of(ids))


class Draft:
    """A draft by itself, in bf16, for prompts in a target's tokens."""

    def __init__(self, target: Path, draft: Path) -> None:
        self.tokenizer, own = load_tokenizer(str(target)), load_tokenizer(str(draft))
        self.model: Any = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.bfloat16, attn_implementation="sdpa")
        self.model.eval()
        install(self.model)
        if can_prepack(self.model.device, torch.bfloat16):
            prepack(self.model)
        num_target = json.loads((target / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        self._num_target = int(num_target)
        vocabulary = compare(self.tokenizer, own, self._num_target, text_config(self.model.config).vocab_size)
        self.translation = Translation(self.tokenizer, own, vocabulary) if vocabulary.relation == "other" else None

    def capture(self, token_ids: Sequence[int], window: int | None = None) -> dict[str, torch.Tensor]:
        """Pass once over a prompt; queries and keys by layer, and of another tokenizer the ranges."""
        tokenization = None if self.translation is None else self.translation.tokenize(token_ids)
        draft: Any = CachedModel(self.model, 8192, self._num_target if tokenization is None else None)
        if self.translation is not None and tokenization is not None:
            draft = TranslatedDraft(draft, self.translation, tokenization)
        start = len(token_ids) - _LOOK_AHEAD - 1
        draft.prefill(token_ids[:start], range(start), window, PrefillConfig.draft_sinks)
        with draft.capture() as captured:
            draft.prefill(token_ids[start:-1], range(start, len(token_ids) - 1))
            num_before = next(iter(captured.values())).queries[0].shape[1]
            proposal = propose(draft, token_ids, _LOOK_AHEAD, Sampler(), end_token_ids(self.model))
            num_asking = num_before + next(iter(captured.values())).queries[1].shape[1]
            draft.forward(proposal.token_ids[-1:], [draft.next_position], 1)
        num_draft_tokens = len(token_ids) if tokenization is None else len(tokenization.token_ids)
        found = {"num_asking": torch.tensor(num_asking)}
        if tokenization is not None:
            found["ranges"] = torch.tensor(tokenization.ranges)
        for index, layer in captured.items():
            found[f"{index}.queries"] = torch.cat(layer.queries, dim=1).contiguous()
            found[f"{index}.keys"] = layer.keys[:, :num_draft_tokens].contiguous()
            found[f"{index}.scaling"] = torch.tensor(layer.scaling)
        return found


def read(path: Path) -> tuple[CapturedAttention, CapturedAttention]:
    """Return what the prompt's own last tokens attended to, and what its last one and the look-ahead did."""
    found = load_file(path)
    layers = sorted({int(name.split(".")[0]) for name in found if name.endswith(".keys")})
    num_asking = int(found["num_asking"])
    ranges = [(start, stop) for start, stop in found["ranges"].tolist()] if "ranges" in found else None

    def chosen(asking: slice, num_inside: int) -> CapturedAttention:
        parts = {
            index: (
                found[f"{index}.queries"][:, asking],
                found[f"{index}.keys"],
                float(found[f"{index}.scaling"]),
                None,
            )
            for index in layers
        }
        return CapturedAttention(parts, num_inside, ranges)

    return chosen(slice(num_asking), num_asking), chosen(slice(num_asking - 1, None), 1)


def evidence_of(encoded: Encoded, attention: CapturedAttention | None) -> Evidence:
    """Return what a rule is shown of a captured prompt."""
    return Evidence(encoded.token_ids, attention, encoded.question, encoded.pieces)


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
    parser.add_argument("--seconds", type=float, default=480, help="time after which no prompt is begun (%(default)s)")
    arguments = parser.parse_args()
    began, done = monotonic(), 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    draft: Draft | None = None
    for prompt in prompts_of(arguments, load_tokenizer(str(arguments.target))):
        path = file_of(arguments.out, prompt)
        if path.exists():
            continue
        if done == arguments.limit or monotonic() - began > arguments.seconds:
            print("stopped; call again for the rest", flush=True)
            return
        draft = draft or Draft(arguments.target, arguments.draft)
        encoded, started = encode(draft.tokenizer, prompt), process_time()
        found = draft.capture(encoded.token_ids, arguments.window)
        save_file(found, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        done += 1
        print(f"{prompt.name:30s} {len(encoded.token_ids)} tokens {process_time() - started:.1f} CPU s", flush=True)
    print("all captured", flush=True)


if __name__ == "__main__":
    run_script(main)
