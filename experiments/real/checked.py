"""Does the draft's check tell the prompts whose answer pruning loses? Signals of the draft beside the target's loss.

Prompts of eleven kinds with known answers, three multi-hop sets, agents' turns and summaries, in turn (`prompts`); all
from a seed of their own. Of each: the share of the attention of the draft's greedy answer that falls on what keep rates
drop; the target's greedy answer under the whole prompt, its loss there and under the same kept tokens, and the target's
own answer to them. Kept tokens stand at their original positions.

Lost is an answer that is right when dense and wrong when pruned; where no answer is known, or the dense one is not
right, a loss over `LOST_NATS` a token. The target reads the highest rate only where the one before drops `SURE` or more
of the draft's attention: no threshold from there on keeps more. A row a prompt; a run goes on where it ended.
The agents' texts are those of fetch_texts.py.

    python -m experiments.real.checked --data DATA --texts TEXTS --target TARGET --draft DRAFT --rows ROWS.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from time import process_time
from typing import Any

import torch

from experiments.common import script
from experiments.common.environment import note_pair
from experiments.real.answers import is_right
from experiments.real.checked_report import RATES, summary
from experiments.real.evidence_prompts import SHAPES, Measure, make_prompts, multi_hop
from experiments.real.judging.agents import loops, newest
from experiments.real.judging.documents import Texts
from experiments.real.scoring import add_scorer_arguments, calibrated, measure_with
from spec_stack import PrefillConfig
from spec_stack.bench.rows import Row, Rows
from spec_stack.engine.pair import ModelPair
from spec_stack.hf.loading import load_tokenizer
from spec_stack.hf.model import CachedModel
from spec_stack.hf.prompt import encode_messages
from spec_stack.prefill.check import dropped_attention
from spec_stack.prefill.rule import ScoringInputs
from spec_stack.prefill.scoring import gather_inputs, run_draft
from spec_stack.prefill.selection import select
from spec_stack.types import Proposal

ARM = "checked"
SEED, ANSWERED = 65, 32
SURE = 0.1
_SUMMARIES = (
    ("qmsum", "{document}\n\nSummarize the whole meeting above in a few sentences."),
    ("multi_news", "You are given several news passages.\n\nNews:\n{document}\n\nWrite a summary of all the news."),
)


@dataclass(frozen=True)
class CheckedPrompt:
    """A prompt. answers: what a right answer holds; empty where it is not known."""

    name: str
    kind: str
    messages: Sequence[Any]
    answers: Sequence[str] = ()


def prompts(data: Path, texts: Path, num_tokens: int, measure: Measure) -> Iterator[CheckedPrompt]:
    """The kinds in turn, one prompt of each after the other; facts in all shapes of `SHAPES`."""
    sources = [*_facts(data, num_tokens, measure), *_multi_hop(data), _agents(texts, num_tokens, measure)]
    sources += [_summaries(data, *each, num_tokens, measure) for each in _SUMMARIES]
    while sources:
        for source in list(sources):
            found = next(source, None)
            if found is None:
                sources.remove(source)
            else:
                yield found


def _facts(data: Path, num_tokens: int, measure: Measure) -> list[Iterator[CheckedPrompt]]:
    made = [
        replace(prompt, shape=[*SHAPES][at % len(SHAPES)] if prompt.kind == "fact" else "bare", other=prompt.question)
        for at, prompt in enumerate(make_prompts(data, num_tokens, 24, measure, SEED))
    ]

    def of(kind: str) -> Iterator[CheckedPrompt]:
        for prompt in made:
            if prompt.kind == kind:
                messages = [{"role": role, "content": content} for role, content in prompt.messages]
                yield CheckedPrompt(f"{prompt.name}/{prompt.shape}", kind, messages, prompt.answers)

    return [of(kind) for kind in dict.fromkeys(prompt.kind for prompt in made)]


def _multi_hop(data: Path) -> list[Iterator[CheckedPrompt]]:
    def of(name: str) -> Iterator[CheckedPrompt]:
        for prompt in multi_hop(data / "multihop" / f"{name}.jsonl", 24):
            messages = [
                {"role": role, "content": content} for role, content in replace(prompt, shape="briefly").messages
            ]
            yield CheckedPrompt(f"{name}/{prompt.name}", name, messages, prompt.answers)

    return [of(name) for name in ("hotpotqa", "2wikimultihopqa", "musique")]


def _agents(texts: Path, num_tokens: int, measure: Measure) -> Iterator[CheckedPrompt]:
    for make in (loops, newest):
        for prompt in islice(make(Texts(texts, SEED), 3, num_tokens, measure), 12):
            yield CheckedPrompt(prompt.name, "agents", prompt.messages)


def _summaries(data: Path, name: str, wording: str, num_tokens: int, measure: Measure) -> Iterator[CheckedPrompt]:
    folder = {"qmsum": "qmsum/val.jsonl", "multi_news": "longbench/multi_news.jsonl"}[name]
    for at, line in enumerate((data / folder).read_text(encoding="utf-8").splitlines()[:24]):
        record = json.loads(line)
        if name == "qmsum":
            lines = [f"{turn['speaker']}: {turn['content']}" for turn in record["meeting_transcripts"]]
        else:
            lines = record["context"].replace("NEWLINE_CHAR", "\n").split("\n")
        document, total = [], 0
        for each in lines:
            total += measure(each) + 1
            if total > num_tokens:
                break
            document.append(each)
        if total > num_tokens // 2:
            yield CheckedPrompt(
                f"{name}/{at}", name, [{"role": "user", "content": wording.format(document="\n".join(document))}]
            )


class Bench:
    """Both models of a pair, over one prompt after the other."""

    def __init__(self, pair: ModelPair, config: PrefillConfig) -> None:
        self._pair, self._config = pair, config

    def row(self, prompt: CheckedPrompt) -> Row:
        """All that is measured of a prompt, with the processor seconds of its parts."""
        pair, chunk = self._pair, self._config.prefill_chunk
        encoded = encode_messages(pair.tokenizer, prompt.messages)
        text, ids = pair.reader.with_pieces(pair.read(encoded)), encoded.token_ids
        row: Row = {"kind": prompt.kind, "num_tokens": len(ids), "answers": list(prompt.answers)}
        tokenization, problem = pair.tokenize_for_draft(ids)
        if problem:
            raise ValueError(problem)
        draft, clock = pair.draft_in_target_vocab(pair.new_draft_cache(chunk), tokenization), _Clock()
        inputs, _ = gather_inputs(draft, ScoringInputs(text), lambda *_: Proposal(), self._config, tokenization)
        row["scoring_s"] = clock.lap()
        answering = self._config.answering
        attention, _ = run_draft(draft, inputs, pair.greedy_look_ahead(draft), answering, tokenization)
        inputs = replace(inputs, answer_attention=attention.importance(answering))
        row["look_ahead_s"] = clock.lap()
        target = pair.open_target(chunk)
        rows = [target.forward(ids, range(len(ids)), 1)[-1]]
        row["dense_s"] = clock.lap()
        dense, own = self._answer(target, rows)
        row["dense"], row["own"] = pair.tokenizer.decode(dense, skip_special_tokens=True), own
        row["is_right"] = bool(prompt.answers) and is_right(row["dense"], prompt.answers)
        dropped = SURE
        for rate in RATES:
            kept = select(inputs, replace(self._config, keep_rate=rate)).positions
            token_ids = [ids[at] for at in kept]
            told: Row = {"num_kept": len(kept), "dropped": round(dropped_attention(inputs, kept, self._config), 4)}
            if rate < RATES[-1] or dropped >= SURE:
                answers = prompt.answers if row["is_right"] else ()
                told |= self._pruned(answers, token_ids, kept, len(ids), dense)
            dropped, row[str(rate)] = told["dropped"], told
        return row

    def _answer(self, model: CachedModel, rows: list[torch.Tensor]) -> tuple[list[int], list[float]]:
        """A model's greedy answer, and the log-probability of its tokens. rows: the first logits; others are added."""
        answer = [int(rows[0].argmax())]
        while len(answer) < ANSWERED and answer[-1] not in self._pair.end_ids:
            rows.append(model.forward(answer[-1:], [model.next_position], 1)[-1])
            answer.append(int(rows[-1].argmax()))
        return answer, _logprobs(rows, answer)

    def _pruned(
        self, answers: Sequence[str], token_ids: Sequence[int], kept: Sequence[int], end: int, dense: Sequence[int]
    ) -> Row:
        """The target under the kept tokens: the loss of its dense answer, and its own one."""
        target, clock = self._pair.open_target(self._config.prefill_chunk), _Clock()
        first = target.forward(token_ids, kept, 1)[-1]
        sparse_s, rows = clock.lap(), [first]
        if len(dense) > 1:
            rows += [*target.forward(dense[:-1], range(end, end + len(dense) - 1), len(dense) - 1)]
        is_same = [int(row.argmax()) for row in rows] == list(dense)
        own = list(dense)
        if not is_same:
            target.rollback(len(dense) - 1)
            own, _ = self._answer(target, [first])
        text = self._pair.tokenizer.decode(own, skip_special_tokens=True)
        return {
            "sparse_s": sparse_s,
            "logprobs": _logprobs(rows, dense),
            "is_same": is_same,
            "answer": text,
            "is_right": bool(answers) and is_right(text, answers),
        }


class _Clock:
    """Processor seconds since the last lap."""

    def __init__(self) -> None:
        self._at = process_time()

    def lap(self) -> float:
        last, self._at = self._at, process_time()
        return round(self._at - last, 3)


def _logprobs(rows: Sequence[torch.Tensor], answer: Sequence[int]) -> list[float]:
    return [round(float(row.float().log_softmax(-1)[token]), 4) for row, token in zip(rows, answer, strict=True)]


def main() -> None:
    parser = script.make_parser(__doc__)
    add_scorer_arguments(parser)
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--texts", type=Path, required=True, help="folder of fetch_texts.py")
    parser.add_argument("--num-tokens", type=int, default=2048, help="length of the prompts, about (%(default)s)")
    parser.add_argument("--most-tokens", type=int, default=1 << 20, help="longer prompts are left out (none)")
    script.add_row_arguments(parser)
    arguments = parser.parse_args()
    note_pair(str(arguments.target), str(arguments.draft))
    torch.set_num_threads(arguments.threads)
    rows = Rows(arguments.rows, arguments.minutes)
    measure: Callable[[str], int] = measure_with(load_tokenizer(str(arguments.target)))
    every = list(islice(prompts(arguments.data, arguments.texts, arguments.num_tokens, measure), arguments.limit))
    left = [prompt for prompt in every if rows.left(prompt.name, {ARM: None})]
    if left:
        precision = arguments.precision
        pair = ModelPair.load(arguments.target, arguments.draft, precision=precision, draft_precision=precision)
        config = PrefillConfig() if arguments.calibration is None else calibrated(arguments.calibration)
        bench = Bench(pair, config)
        for prompt in left:
            if not rows.has_time:
                break
            if len(encode_messages(pair.tokenizer, prompt.messages).token_ids) > arguments.most_tokens:
                continue
            row = rows.add(prompt.name, ARM, bench.row(prompt))
            told = [f"{row[str(rate)]['dropped']:.2f}" for rate in RATES]
            print(prompt.name, row["num_tokens"], row["is_right"], told, row["dense_s"], flush=True)
    report = {"num_left": rows.num_left([each.name for each in every], [ARM])}
    script.print_report("checked", {**report, **summary([*rows.of_arm(ARM).values()])}, arguments.out)


if __name__ == "__main__":
    script.run(main)
