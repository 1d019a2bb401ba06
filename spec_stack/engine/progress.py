"""Prefill progress, and a stream that can be closed during its prefill."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Literal

from spec_stack.types import StepOutput

PrefillPhase = Literal["scoring", "prefill", "prompts"]
OnProgress = Callable[[int, int, PrefillPhase], object]
"""Told (num_done, num_total, phase): "scoring" is the draft's pass and "prefill" the target's, in tokens; "prompts" are
those of a list."""


# Least seconds between reports within a chunk; a close takes effect at every layer.
_REPORT_EVERY_S = 0.5


class RequestCancelled(BaseException):
    """Ends a prefill between two layers. A BaseException, like GeneratorExit: scoring must not treat it as a
    failure.
    """

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error


class Progress:
    """Follows a request's prefill: reports every chunk to the caller, and cancels on request."""

    def __init__(self, tell: OnProgress | None = None) -> None:
        self._tell = tell
        self._phase: PrefillPhase | None = None
        self._num_done = self._num_total = 0
        self._told_at = 0.0
        self.is_cancelled = False

    @contextmanager
    def watch(self, model: Any, phase: PrefillPhase, num_total: int) -> Iterator[None]:
        """Report the model's forwards in the block as one phase of num_total tokens; model: has `on_piece`."""
        model.on_piece = self.advance
        try:
            self._phase, self._num_done, self._num_total = phase, 0, num_total
            self._report(phase, 0)
            yield
        finally:
            model.on_piece, self._phase = None, None

    def advance(self, num_tokens: int, share: float = 1.0) -> None:
        """Report that this share of a piece's layers is done. A look-ahead's tokens do not count."""
        if self._phase is None or self._num_done >= self._num_total:
            return
        if share < 1:
            num_done = min(self._num_done + int(num_tokens * share), self._num_total - 1)
            if self.is_cancelled or (num_done > self._num_done and perf_counter() - self._told_at >= _REPORT_EVERY_S):
                self._report(self._phase, num_done)
        else:
            self._num_done = min(self._num_done + num_tokens, self._num_total)
            self._report(self._phase, self._num_done)

    def cancel(self) -> None:
        """End the prefill at its next layer, and the stream at its next step. From any thread."""
        self.is_cancelled = True

    def _report(self, phase: PrefillPhase, num_done: int) -> None:
        if self._tell is not None:
            try:
                self._tell(num_done, self._num_total, phase)
            except Exception as error:
                raise RequestCancelled(error) from error
        self._told_at = perf_counter()
        if self.is_cancelled:
            raise RequestCancelled


class Stream(Generator[StepOutput, None, None]):
    """The steps of a request. `close` may be called from any thread: a prefill ends before its next layer."""

    def __init__(self, steps: Generator[StepOutput, None, None], progress: Progress) -> None:
        self._steps, self._progress = steps, progress

    def send(self, value: None) -> StepOutput:
        if self._progress.is_cancelled:
            self._steps.close()
            raise StopIteration
        try:
            return self._steps.send(value)
        except RequestCancelled as cancelled:
            if cancelled.error is not None:
                raise cancelled.error from None
            raise StopIteration from None

    def throw(self, *error: Any) -> StepOutput:
        return self._steps.throw(*error)

    def close(self) -> None:
        """End the request."""
        self._progress.cancel()
        # A running request sees it at its next layer or step.
        if not getattr(self._steps, "gi_running", False):
            self._steps.close()
