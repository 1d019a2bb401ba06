"""The draft's confidence and entropy per drafted token, kept on its device in buffers of fixed size. No SGLang here.

SGLang's draft makes a step's first token while it catches up with the step before, or with the prompt, and the others
one by one. So what is known of a step is in two buffers, both of which a captured CUDA graph may write at every replay:

    first (rows of the request pool, 2)    of the token that each request's next step begins with
    later (gamma, batch, 2)                of the tokens after it, by their place in the step that runs

A value is (confidence, entropy in bits), of the unwarped distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from spec_stack.controller.base import DraftSignals
from spec_stack.sglang.guards import harmless

_LN_2 = math.log(2)


def measure(logits: torch.Tensor, out: torch.Tensor) -> None:
    """Write confidence and entropy of logits (n, vocab) into out (n, 2). Shapes alone decide what runs, so a CUDA graph
    can hold it; nothing is read back."""
    probs = torch.softmax(logits.float(), dim=-1)
    out[:, 0].copy_(probs.amax(dim=-1))
    # entr(0) is 0, where a product with the logarithm is not a number: some logits are -inf.
    out[:, 1].copy_(torch.special.entr(probs).sum(dim=-1) / _LN_2)


class DraftSignalBuffers:
    """Fills the buffers while the draft runs, by a forward hook on what makes its logits; gives them out step by step.

    The worker says what runs by the context managers below; logits of anything else (the scoring of a prompt) are left
    alone. A row of `first` is NaN where the draft's catching up was not seen, so nothing is known of that token then.
    """

    def __init__(self, max_gamma: int, num_rows: int, device: torch.device | str) -> None:
        """num_rows: of the request pool, which bounds the batch too."""
        self.first = torch.full((num_rows, 2), math.nan, device=device)
        self.later = torch.full((max_gamma, num_rows, 2), math.nan, device=device)
        self._caught_up = torch.full((num_rows, 2), math.nan, device=device)
        self._place: int | None = None
        self._captures_catching_up = False
        self._seen: Any = None
        self._sees_catching_up = False

    def watch(self, logits_processor: torch.nn.Module) -> None:
        """Have every output of the draft's logits pass by here."""
        logits_processor.register_forward_hook(self._look)

    def _look(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        with harmless("measuring the draft's signals", "none are known of the step"):
            if self._place is not None:
                place, self._place = self._place, self._place + 1
                self._measure(output, self.later[place])
            elif self._sees_catching_up:
                self._seen = output
            elif self._captures_catching_up:
                self._measure(output, self._caught_up)

    def _measure(self, output: Any, buffer: torch.Tensor) -> None:
        # A captured batch may be padded beyond the pool's rows.
        logits = output.next_token_logits[: buffer.shape[0]]
        measure(logits, buffer[: logits.shape[0]])

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """A step's tokens from the second on are drafted, or a graph that will draft them is captured."""
        self._place = 1
        try:
            yield
        finally:
            self._place = None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Graphs of the draft are captured: that of catching up, and, inside of `drafting`, that of drafting."""
        self._captures_catching_up = True
        try:
            yield
        finally:
            self._captures_catching_up = False

    @contextmanager
    def catching_up(self, rows: torch.Tensor, has_graph: bool) -> Iterator[None]:
        """The draft catches up and makes the first token of the next step of the requests in these rows of the pool.

        has_graph: a captured graph may do it, in which no hook is called; it has written what it was captured with.
        """
        self._seen, self._sees_catching_up = None, True
        try:
            yield
        finally:
            self._sees_catching_up = False
        output, self._seen = self._seen, None
        with harmless("measuring the draft's signals", "none are known of the next step's first token"):
            self._note_first(output, rows, has_graph)

    def _note_first(self, output: Any, rows: torch.Tensor, has_graph: bool) -> None:
        if output is None:
            if has_graph:
                self.first[rows] = self._caught_up[: rows.shape[0]]
            return
        # SGLang has put the logits of each request's last token there by now.
        logits = output.next_token_logits
        if logits.shape[0] == rows.shape[0]:
            values = torch.empty((rows.shape[0], 2), device=self.first.device)
            measure(logits, values)
            self.first[rows] = values

    def take_first(self, rows: torch.Tensor) -> torch.Tensor:
        """(n, 2) of the first token of the step that begins; each is given out once."""
        values = self.first[rows]
        self.first.index_fill_(0, rows, math.nan)
        return values

    def of_step(self, first: torch.Tensor, gamma: int, rows: torch.Tensor) -> torch.Tensor:
        """On its way to the host: (n, gamma + 1, 2), the step's tokens and the one that the next step begins with.

        The copy goes with the stream that the step ran on, so it is there when the step's result is: nobody waits.
        """
        num_requests = rows.shape[0]
        proposed = [first[None], self.later[1:gamma, :num_requests]] if gamma else []
        values = torch.cat([*proposed, self.first[rows][None]]).transpose(0, 1).contiguous()
        if values.device.type == "cpu":
            return values
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def as_signals(values: torch.Tensor) -> list[tuple[DraftSignals, DraftSignals | None]]:
    """Per request, those of its proposal and of its next step's first token, of what `of_step` gave.

    A proposal with a value that is not finite has none, and so has a next token: a draft's broken logits say nothing.
    """
    found = []
    # By NumPy, which hands out lists several times as fast.
    for confidence, entropy in values.transpose(1, 2).numpy().tolist():
        proposed = _signals(entropy[:-1], confidence[:-1])
        found.append((proposed or DraftSignals(), _signals(entropy[-1:], confidence[-1:])))
    return found


def _signals(entropy: list[float], confidence: list[float]) -> DraftSignals | None:
    # One that is not finite makes the sum so.
    return DraftSignals(entropy, confidence) if math.isfinite(sum(entropy) + sum(confidence)) else None


def end_chains(next_tokens: torch.Tensor, caps: Sequence[int]) -> None:
    """Let no request's proposal be accepted beyond its own cap. Mutates next_tokens (n, gamma + 1).

    SGLang's verification walks a proposal by these pointers, -1 for its end, greedy or drawing: a chain that ends early
    is a shorter proposal, whose last token is followed by one of the target's own. Decoding stays lossless.
    """
    for row, cap in enumerate(caps):
        if cap < next_tokens.shape[1] - 1:
            next_tokens[row, cap].fill_(-1)
