"""Who finds the dropped line that a follow-up asks about: attention of different queries, or the question's words.

Documents with 90 facts, another one asked for in every turn (as in `follow_ups`, part facts), and questions about
nothing in particular over an 8K document. A vote finds a line when a chunk that has it whole, margins included, is
among the chunks that come back: the 16 best that have the least that is asked. No server: the draft by Transformers,
its last layer, which has the calibrated heads of the embedded one. Prints a line per vote, ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.common.environment import describe
from experiments.common.script import run_script
from experiments.serving.follow_ups import Arm, Script, Talk
from spec_stack.config import PrefillConfig, SessionConfig
from spec_stack.hf.loading import resolve_pair
from spec_stack.prefill.importance import token_importance
from spec_stack.prefill.recall import pair_scores
from spec_stack.prefill.units import Chunks

LOOK_AHEAD, MOST_ASKING = PrefillConfig.look_ahead, 32
SIZE, MARGIN, MOST = PrefillConfig.chunk_size, SessionConfig.restore_margin, SessionConfig.max_restored_chunks


class Draft:
    """A Llama, asked in its last layer."""

    def __init__(self, folder: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self._queries: list[torch.Tensor] = []
        self._model.model.layers[-1].self_attn.q_proj.register_forward_hook(self._note)

    def _note(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        self._queries.append(output[0])

    def read(self, ids: Sequence[int], start: int) -> dict[str, torch.Tensor]:
        """By who asks, the mean importance (num_chunks,) of the chunks of the text before `start`, over its mean."""
        self._queries.clear()
        model, num_tokens = self._model, len(ids)
        with torch.no_grad():
            output = model(torch.tensor([list(ids)]), use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            for _ in range(LOOK_AHEAD):
                output = model(output.logits[:, -1].argmax(-1)[None], past_key_values=cache, use_cache=True)
        keys = cache.layers[-1].keys[0, :, :start]
        head_dim = keys.shape[-1]
        asked = torch.cat(self._queries)[:, None].unflatten(-1, (-1, head_dim)).squeeze(1)
        places = torch.arange(len(asked))[None]
        cos, sin = model.model.rotary_emb(asked[None], places)
        half = head_dim // 2
        turned = torch.cat([-asked[..., half:], asked[..., :half]], dim=-1)
        asked = (asked * cos[0][:, None] + turned * sin[0][:, None]).transpose(0, 1)
        first = max(start, num_tokens - MOST_ASKING)
        spans = {
            "the last token": (num_tokens - 1, num_tokens),
            "the look-ahead": (num_tokens - 1, None),
            "the question": (first, num_tokens),
        }
        votes = {}
        for who, (at, stop) in spans.items():
            importance = token_importance([(asked[:, at:stop], keys, head_dim**-0.5)], PrefillConfig.pool_kernel)
            votes[who] = Chunks(len(importance), SIZE).means(importance) / importance.mean()
        return votes


def all_votes(draft: Draft, ids: Sequence[int], start: int) -> dict[str, torch.Tensor]:
    words = pair_scores(ids, max(start, len(ids) - MOST_ASKING), Chunks(start, SIZE))
    return {**draft.read(ids, start), "words side by side": words}


def coming_back(votes: torch.Tensor, least: float) -> list[int]:
    best = torch.argsort(votes, descending=True, stable=True)[:MOST].tolist()
    return [chunk for chunk in best if votes[chunk] >= least]


def conversation(script: Script, first: Sequence[int]) -> Talk:
    """One that asks nobody."""
    return Talk(Arm(None, {}), script.tokenizer, first)  # type: ignore[arg-type]


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    pair = resolve_pair(options.target, options.draft)
    script, draft = Script(AutoTokenizer.from_pretrained(pair[0])), Draft(pair[1])
    found: dict[tuple[str, float], list[bool]] = {}
    num_back: dict[tuple[str, float], dict[str, list[int]]] = {}

    def note(ids: Sequence[int], start: int, kind: str, line: tuple[int, int] | None) -> None:
        for who, votes in all_votes(draft, ids, start).items():
            for least in (1.0,) if who == "words side by side" else options.thresholds:
                back = coming_back(votes, least)
                num_back.setdefault((who, least), {}).setdefault(kind, []).append(len(back))
                if line is not None:
                    whole = [at for at in back if at * SIZE - MARGIN <= line[0] and line[1] <= (at + 1) * SIZE + MARGIN]
                    found.setdefault((who, least), []).append(bool(whole))

    for number in range(options.documents):
        document, facts = script.facts(5000 + number)
        first = script.chat(f"{document}\n\n{facts[0][1]}")
        talk = conversation(script, first)
        for turn in range(1, options.turns + 1):
            start = talk.go_on(facts[turn][1], facts[turn - 1][0])
            note(talk.history, start, "facts", script.span(first, facts[turn][0]))
    for number in range(2):
        talk = conversation(script, script.document(8000, number))
        for turn in range(options.turns):
            start = talk.go_on(f"And what does part {turn} of it say?", " The answer is 12345.")
            note(talk.history, start, "general", None)
    return [
        {
            "vote": who,
            "least": least,
            "found": sum(hits),
            "asked": len(hits),
            "chunks_back": {kind: round(mean(counts), 1) for kind, counts in num_back[who, least].items()},
        }
        for (who, least), hits in found.items()
    ]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=12, help="with facts in them (default %(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="(default %(default)s)")
    parser.add_argument("--thresholds", type=float, nargs="+", default=[1.5, 2, 4, 8], help="(default 1.5 2 4 8)")
    parser.add_argument("--target", help="model folder or name (default: the embedded pair's)")
    parser.add_argument("--draft", help="model folder or name (default: the embedded pair's)")
    parser.add_argument("--out", type=Path, help="also write the JSON line here")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_args(argv)
    votes = run(options)
    for vote in votes:
        print(f"{vote['vote']:20} from {vote['least']:4}  {vote['found']:3} of {vote['asked']}  {vote['chunks_back']}")
    line = json.dumps({"experiment": "recall_votes", **describe(), "votes": votes})
    if options.out:
        options.out.write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    run_script(main)
