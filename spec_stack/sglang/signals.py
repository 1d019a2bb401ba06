"""The draft's confidence and entropy (bits, unwarped) per drafted token, in fixed device buffers. No SGLang import.

`first` (pool rows, 2): the next step's first token; `later` (gamma, batch, 2): the others. CUDA graphs may write both.
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
    """Write confidence and entropy of logits (n, vocab) into out (n, 2). Capturable in a CUDA graph; nothing is read
    back.
    """
    probs = torch.softmax(logits.float(), dim=-1)
    out[:, 0].copy_(probs.amax(dim=-1))
    # entr(0) is 0, where a product with the logarithm is not a number: some logits are -inf.
    out[:, 1].copy_(torch.special.entr(probs).sum(dim=-1) / _LN_2)


class DraftSignalBuffers:
    """Fills the buffers by a forward hook on the draft's logits processor, and returns them step by step.

    Logits outside the context managers below (the scoring of a prompt) are ignored. A row of `first` is NaN where the
    draft's catching up was not captured.
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
        """Hook the draft's logits processor."""
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
        """A step's tokens from the second on are drafted, or a graph that drafts them is captured."""
        self._place = 1
        try:
            yield
        finally:
            self._place = None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Graphs of the draft are captured: of catching up, and, inside of `drafting`, of drafting."""
        self._captures_catching_up = True
        try:
            yield
        finally:
            self._captures_catching_up = False

    @contextmanager
    def catching_up(self, rows: torch.Tensor, has_graph: bool) -> Iterator[None]:
        """The draft catches up and makes the first token of the next step for these rows of the pool.

        has_graph: a captured graph may do it, in which no hook is called; it writes what it was captured with.
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
        """(n, 2) of the first token of the step that begins; each is returned once."""
        values = self.first[rows]
        self.first.index_fill_(0, rows, math.nan)
        return values

    def of_step(self, first: torch.Tensor, gamma: int, rows: torch.Tensor) -> torch.Tensor:
        """Copy to the host, asynchronously: (n, gamma + 1, 2), the step's tokens and the next step's first one.

        The copy is on the step's stream, so it completes with the step's result, without a synchronisation.
        """
        num_requests = rows.shape[0]
        proposed = [first[None], self.later[1:gamma, :num_requests]] if gamma else []
        values = torch.cat([*proposed, self.first[rows][None]]).transpose(0, 1).contiguous()
        if values.device.type == "cpu":
            return values
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def as_signals(values: torch.Tensor) -> list[tuple[DraftSignals, DraftSignals | None]]:
    """Per request, the signals of its proposal and of its next step's first token, from `of_step`.

    Signals with a non-finite value are dropped: broken logits carry no information.
    """
    found = []
    # By NumPy, which makes lists several times as fast.
    for confidence, entropy in values.transpose(1, 2).numpy().tolist():
        proposed = _signals(entropy[:-1], confidence[:-1])
        found.append((proposed or DraftSignals(), _signals(entropy[-1:], confidence[-1:])))
    return found


def _signals(entropy: list[float], confidence: list[float]) -> DraftSignals | None:
    # A non-finite value makes the sum non-finite.
    return DraftSignals(entropy, confidence) if math.isfinite(sum(entropy) + sum(confidence)) else None


def end_chains(next_tokens: torch.Tensor, caps: Sequence[int]) -> None:
    """Let no request's proposal be accepted beyond its own cap. Mutates next_tokens (n, gamma + 1).

    SGLang's verification follows these pointers, -1 for the end, greedy or sampling: a shortened chain is a shorter
    proposal, followed by a token of the target's own. Decoding stays lossless.
    """
    for row, cap in enumerate(caps):
        if cap < next_tokens.shape[1] - 1:
            next_tokens[row, cap].fill_(-1)
