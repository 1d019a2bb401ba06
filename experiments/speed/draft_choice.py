"""What a draft over part of a long prompt gets right, by how the part is chosen and how often it is chosen anew.

The answer is given, so that it can do what greedy answers of a small model seldom do: "go on" is the text's own
continuation, "quote" a passage of the text once more, "topics" four passages from four places, one behind the other.
A token is right where the draft's likeliest is the target's, which has seen all; both are fed the given answer,
the draft in steps of --gamma tokens, of which it takes back what stands behind its first wrong one. Also the tokens
that it is fed for one of the answer, and its CPU seconds, choosing and reading included. Arms as in decode_collapse,
with the slots chosen anew every so many tokens, at most 64 of them brought back; "64, 8, 32" is every 64, every 8 where
the last step was half wrong, and 32.
Brackets: 95 % of bootstrap samples over the texts' differences to "once".

Prints tables, ends in one JSON line.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from time import process_time
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.common.environment import describe
from experiments.common.pair_arguments import add_pair_arguments, load_generator
from experiments.common.report import add_out_argument, print_report
from experiments.common.script import run_script
from experiments.speed.decode_collapse import documents
from experiments.speed.draft_arms import NEVER, window_slots
from spec_stack import PrefillConfig, SpecStackGenerator
from spec_stack.decode.propose import propose
from spec_stack.decode.sampler import Sampler
from spec_stack.engine.pair import ModelPair
from spec_stack.engine.slotted_draft import SlottedDraft
from spec_stack.hf.model import CachedModel
from spec_stack.prefill.draft_slots import MOST_RESTORED, RENEW_EVERY, RENEW_WHERE_WRONG, choose_slots
from spec_stack.prefill.scoring import score_prompt

ANSWER = 192
KINDS = ("go on", "quote", "topics")


def answer_of(whole: list[int], kind: str) -> list[int]:
    """The given answer to all of a text but its last ANSWER tokens."""
    size = len(whole) - ANSWER
    if kind == "go on":
        return whole[size:]
    num = {"quote": 1, "topics": 4}[kind]
    starts = [size * (5 + 3 * at * 7 % 13) // 22 for at in range(num)]
    return [token for start in starts for token in whole[start : start + ANSWER // num]]


def targets_own(generator: SpecStackGenerator, prompt: list[int], answer: list[int]) -> list[int]:
    """The target's likeliest token at every place of the answer."""
    target = generator.pair.open_target(PrefillConfig.prefill_chunk)
    ids = [*prompt, *answer[:-1]]
    return [int(token) for token in target.forward(ids, range(len(ids)), len(answer)).argmax(-1)]


Open = Callable[[ModelPair, list[int], PrefillConfig], Any]


def _slotted(
    choose: Any,
    renew: tuple[int, int, int],
    pair: ModelPair,
    prompt: list[int],
    config: PrefillConfig,
) -> SlottedDraft:
    draft = pair.open_index(config.prefill_chunk)
    return SlottedDraft(draft, config.draft_slots, choose, renew[:2], renew[2])


def _full(pair: ModelPair, prompt: list[int], config: PrefillConfig) -> CachedModel:
    return pair.open_index(config.prefill_chunk)


def _by_attention(pair: ModelPair, prompt: list[int], config: PrefillConfig) -> CachedModel:
    draft = pair.open_index(config.prefill_chunk)
    look_ahead = partial(propose, draft, sampler=Sampler(), end_ids=())
    scoring = PrefillConfig(keep_rate=config.draft_slots / len(prompt))
    score_prompt(draft, prompt, look_ahead, scoring, (), None, None, pair.pieces(prompt))
    return draft


_SOONER = ((8, 64), (16, 64), (8, 32), (16, 32))
CHOSEN = f"{RENEW_EVERY}, {RENEW_WHERE_WRONG}, {MOST_RESTORED}"
"""The arm of the library's own slots."""


def arms(config: PrefillConfig) -> dict[str, Open]:
    sinks = config.keep_first * config.chunk_size
    words = partial(choose_slots, chunk_size=config.chunk_size, num_sinks=sinks)
    return {
        "full": _full,
        "window": partial(_slotted, partial(window_slots, num_sinks=sinks), (32, 32, 64)),
        "attention": _by_attention,
        "once": partial(_slotted, words, (*NEVER, 64)),
        **{f"every {every}": partial(_slotted, words, (every, every, 64)) for every in (8, 32)},
        **{f"64, {every}, {most}": partial(_slotted, words, (64, every, most)) for every, most in _SOONER},
        CHOSEN: partial(_slotted, words, (RENEW_EVERY, RENEW_WHERE_WRONG, MOST_RESTORED)),
    }


def right(draft: Any, prompt: list[int], answer: list[int], own: list[int], gamma: int) -> list[bool]:
    """Token by token, whether the draft's likeliest is the target's."""
    found: list[bool] = []
    text = list(prompt)
    for at, token in enumerate(answer):
        unread = text[draft.next_position :]
        start = draft.next_position
        logits = draft.forward(unread, range(start, start + len(unread)), num_logits=1)
        found.append(int(logits[0].argmax()) == own[at])
        text.append(token)
        if at % gamma == gamma - 1:
            num_right = ([*found[-gamma:], False]).index(False)
            draft.rollback(max(0, gamma - 1 - num_right))
    return found


def interval(differences: Sequence[float]) -> list[float]:
    """95 % of bootstrap samples of the mean."""
    rng, values = np.random.default_rng(0), np.asarray(differences)
    means = values[rng.integers(len(values), size=(2000, len(values)))].mean(1)
    return [float(each) for each in np.quantile(means, [0.025, 0.975])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair_arguments(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4000, 8000], help="(%(default)s)")
    parser.add_argument("--texts", type=int, default=6, help="per length (%(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="(%(default)s)")
    parser.add_argument("--arms", nargs="+", help="of those; once is always among them (default: all)")
    parser.add_argument("--gamma", type=int, default=4, help="(%(default)s)")
    add_out_argument(parser)
    arguments = parser.parse_args()
    generator, config = load_generator(arguments), PrefillConfig()
    chosen = {name: arm for name, arm in arms(config).items() if name in (*(arguments.arms or arms(config)), "once")}
    result: dict[str, Any] = {}
    for length in arguments.lengths:
        texts = documents(generator.pair, length + ANSWER, arguments.texts, "go on")
        for kind in arguments.kinds:
            shares: dict[str, list[float]] = {}
            seconds: dict[str, float] = {}
            fed: dict[str, int] = {}
            for whole in tqdm(texts, desc=f"{length} {kind}", leave=False):
                prompt, answer = whole[:length], answer_of(whole, kind)
                own = targets_own(generator, prompt, answer)
                for name, open_draft in chosen.items():
                    started = process_time()
                    draft = open_draft(generator.pair, prompt, config)
                    draft.rollback(max(0, draft.next_position - len(prompt) + 1))
                    pieces: list[int] = []
                    draft.on_piece = lambda num_tokens, share, pieces=pieces: share < 1 or pieces.append(num_tokens)
                    found = right(draft, prompt, answer, own, arguments.gamma)
                    fed[name] = fed.get(name, 0) + sum(pieces)
                    seconds[name] = seconds.get(name, 0.0) + process_time() - started
                    shares.setdefault(name, []).append(sum(found) / len(found))
            rows = {
                name: {
                    "right": float(np.mean(own_shares)),
                    "over_once": interval(np.subtract(own_shares, shares["once"])),
                    "fed": fed[name] / (ANSWER * len(texts)),
                    "draft_ms": 1e3 * seconds[name] / (ANSWER * len(texts)),
                }
                for name, own_shares in shares.items()
            }
            result[f"{length} {kind}"] = rows
            print(f"{length} tokens, {kind}, {len(texts)} texts")
            for name, row in rows.items():
                low, high = row["over_once"]
                print(
                    f"  {name:12s}{row['right']:7.3f}  [{low:+.3f}, {high:+.3f}] over once{row['fed']:8.2f} fed"
                    f"{row['draft_ms']:8.2f} ms"
                )
    print_report({"experiment": "draft_choice", **describe(), "result": result}, arguments.out)


if __name__ == "__main__":
    run_script(main)
