"""A pair that says what a recorded one said, on a clock that counts what the real one takes.

The decode loop, policies, proposers and gates that run over it are the library's own. A request is greedy, so the
target writes the recorded text whatever is proposed, and only the seconds differ between policies; what a policy
itself takes to compute is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from spec_stack.controller.base import Policy, StepRecord
from spec_stack.controller.ngram import NgramPolicy
from spec_stack.decode import proposer as drafting
from spec_stack.decode.clock import Clock
from spec_stack.decode.loop import decode
from spec_stack.decode.proposer import DecodeRequest, Proposer
from spec_stack.decode.sampler import Sampler
from spec_stack.decode.stopping import StopChecker
from spec_stack.types import Proposal, Selection

Row = tuple[float, float, int]


@dataclass(frozen=True)
class Text:
    """A recorded text, its ids renumbered from 0 so that logits stay short.

    Parameters
    ----------
    task : str
        Its category.
    prompt_ids, text_ids : list of int
        What the target prefilled, and wrote.
    draft_kv_rows : list of (float, float, int)
        At every place of the text the draft's entropy in bits, confidence and likeliest token.
    tails : dict
        By place, [entropies, confidences] of what the draft puts behind its own wrong token there.
    wrong_id, end_id : int
        Two ids that stand nowhere: what the draft puts behind a wrong token, and what the target puts behind the text.
    """

    task: str
    prompt_ids: list[int]
    text_ids: list[int]
    draft_kv_rows: list[Row]
    tails: dict[int, list[list[float]]]
    wrong_id: int
    end_id: int

    @classmethod
    def parse(cls, row: dict[str, Any]) -> Text:
        """Read a recorded text."""
        numbers: dict[int, int] = {}

        def renumbered(ids: Sequence[int]) -> list[int]:
            return [numbers.setdefault(each, len(numbers)) for each in ids]

        prompt_ids, text_ids, drafted = (renumbered(row[name]) for name in ("prompt", "text", "draft"))
        return cls(
            task=row["task"],
            prompt_ids=prompt_ids,
            text_ids=text_ids,
            draft_kv_rows=list(zip(row["ent"], row["conf"], drafted, strict=True)),
            tails={int(place): tail for place, tail in row["tails"].items()},
            wrong_id=len(numbers),
            end_id=len(numbers) + 1,
        )

    @property
    def is_right(self) -> list[bool]:
        """By place, whether the draft's token is the target's."""
        return [row[2] == token_id for row, token_id in zip(self.draft_kv_rows, self.text_ids, strict=True)]


@dataclass(frozen=True)
class Costs:
    """Seconds of a pair's forwards.

    Parameters
    ----------
    verify_s : dict of int to float
        Of the target, by the tokens that it is fed; between and beyond them it is a line.
    drafted_s : float
        Of the draft, for one or two tokens.
    read_s : float
        Of the draft, for every token more.
    prefill_s : float
        Of the target, for a token of the prompt.
    """

    verify_s: dict[int, float]
    drafted_s: float
    read_s: float
    prefill_s: float

    def target(self, num_tokens: int) -> float:
        """Seconds of a forward of the target."""
        sizes = sorted(self.verify_s)
        seconds = [self.verify_s[size] for size in sizes]
        if num_tokens > sizes[-1] and len(sizes) > 1:
            slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
            return seconds[-1] + slope * (num_tokens - sizes[-1])
        return float(np.interp(num_tokens, sizes, seconds))

    def draft(self, num_tokens: int) -> float:
        """Seconds of a forward of the draft."""
        return self.drafted_s + self.read_s * max(num_tokens - 2, 0)


@dataclass
class Now:
    """The time, in seconds."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


class SimulatedTarget:
    """Writes the recorded text; as `decode` takes a target."""

    num_to_recompute = 0

    def __init__(self, text: Text, costs: Costs, now: Now) -> None:
        self._ids = text.prompt_ids + text.text_ids
        self._end_id, self._costs, self._now = text.end_id, costs, now
        self.next_position = 0

    @property
    def num_cached(self) -> int:
        return self.next_position

    def forward(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> torch.Tensor:
        is_prefill = self.next_position == 0
        size = len(token_ids)
        self._now.seconds += self._costs.prefill_s * size if is_prefill else self._costs.target(size)
        self.next_position = positions[-1] + 1
        rows = torch.zeros(num_logits, self._end_id + 1)
        for row, position in zip(rows, positions[len(positions) - num_logits :], strict=True):
            row[self._ids[position + 1] if position + 1 < len(self._ids) else self._end_id] = 1
        return rows

    def rollback(self, num_tokens: int) -> None:
        self.next_position -= num_tokens


class SimulatedDraft:
    """Says what the recorded draft said; behind a wrong token, what it went on with there. Gives rows of `Row`."""

    def __init__(self, text: Text, costs: Costs, now: Now) -> None:
        self._text, self._costs, self._now = text, costs, now
        self._ids = text.prompt_ids + text.text_ids
        self._fed: list[int] = []

    @property
    def next_position(self) -> int:
        return len(self._fed)

    @property
    def num_cached(self) -> int:
        return len(self._fed)

    def draft_lag(self, num_tokens: int) -> int:
        return num_tokens - len(self._fed)

    def forward(self, token_ids: Sequence[int], positions: Sequence[int], num_logits: int) -> Any:
        self._now.seconds += self._costs.draft(len(token_ids))
        self._fed += token_ids
        return [self._row()]

    def _row(self) -> Row:
        text, start = self._text, len(self._text.prompt_ids)
        fed, size = self._fed[start:], len(text.text_ids)
        wrong = next((at for at, token_id in enumerate(fed) if at >= size or token_id != text.text_ids[at]), None)
        if wrong is None:
            return text.draft_kv_rows[len(fed)] if len(fed) < size else (1.0, 0.8, text.wrong_id)
        if wrong in text.tails:
            entropies, confidences = text.tails[wrong]
            depth = min(len(fed) - wrong - 1, len(entropies) - 1)
            return entropies[depth], confidences[depth], text.wrong_id
        entropy, confidence, _ = text.draft_kv_rows[min(wrong, size - 1)]
        return entropy, confidence, text.wrong_id

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            del self._fed[-num_tokens:]


@dataclass(frozen=True)
class Run:
    """One text under one policy. decode_s: seconds after the first token, the draft's reading of the prompt
    included. steps: without the prefill's."""

    task: str
    decode_s: float
    steps: list[StepRecord]


@contextmanager
def recorded_rows() -> Iterator[None]:
    """Inside the block a draft's rows are what they would be summed up as."""
    measured = drafting.entropy_and_confidence
    drafting.entropy_and_confidence = lambda row: row  # type: ignore[assignment, return-value]
    try:
        yield
    finally:
        drafting.entropy_and_confidence = measured


def run_text(text: Text, policy: Policy, proposer: str, gate: NgramPolicy, costs: Costs) -> Run:
    """Decode a text. The policy and the gate learn."""
    now = Now()
    target, draft = SimulatedTarget(text, costs, now), SimulatedDraft(text, costs, now)
    request = DecodeRequest(
        prompt_ids=text.prompt_ids,
        sampler=Sampler(),
        stopper=StopChecker(len(text.text_ids), {text.end_id}),
        end_ids={text.end_id},
        proposer=proposer,
        precision="bf16",
        task=text.task,
        clock=Clock(now),
    )
    whole, proposals = (
        Selection(text.prompt_ids, range(len(text.prompt_ids)), len(text.prompt_ids)),
        Proposer(request, draft, gate),
    )
    steps, first_s = [], 0.0
    with recorded_rows():
        for output in decode(request, target, whole, Proposal(), policy, proposals):
            if output.record.is_prefill:
                first_s = now.seconds
            else:
                steps.append(output.record)
    return Run(text.task, now.seconds - first_s, steps)


def run_texts(
    texts: Sequence[Text], make: Callable[[], Policy], proposer: str, costs: Costs, is_fresh: bool = False
) -> list[Run]:
    """Decode texts one after the other with one policy and one gate, or with new ones each."""
    runs, policy, gate = [], make(), NgramPolicy()
    for text in texts:
        if is_fresh:
            policy, gate = make(), NgramPolicy()
        runs.append(run_text(text, policy, proposer, gate, costs))
    return runs


def oracle_s(text: Text, costs: Costs, max_gamma: int = 16) -> float:
    """The least seconds in which a draft whose right tokens are known can have a text decoded."""
    right, size = text.is_right, len(text.text_ids)
    least = [0.0] * (size + max_gamma + 2)
    for place in range(size - 1, 0, -1):
        choices = []
        for gamma in range(max_gamma + 1):
            if gamma and (place + gamma > size or not right[place + gamma - 1]):
                break
            seconds = costs.target(gamma + 1) + gamma * costs.drafted_s
            choices.append(seconds + least[min(place + gamma + 1, size)])
        least[place] = min(choices)
    return least[1]
