"""Logits processors and stopping criteria of batch rows, which are generated one after the other: each row has its own
copies, and sees its padding at its batch index among copies of itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import LogitsProcessor, PrefixConstrainedLogitsProcessor

from spec_stack.hf.processors import Called, CannotCopyError, Processor, copy_processor, name_of

Criterion = Callable[[torch.Tensor, Any], Any]


def for_rows(given: Sequence[Called], num_rows: int) -> list[list[Called]]:
    """Processors or criteria per row: the originals for the first row, copies for the others."""
    return [list(given), *([_copy(each) for each in given] for _ in range(num_rows - 1))]


def _copy(given: Called) -> Called:
    try:
        return copy_processor(given)
    except CannotCopyError as error:
        raise ValueError(
            f"every row of a batch needs its own {name_of(given)}, which cannot be copied ({error}): call generate "
            "with one row, or give it a method copy(), or a true attribute `stateless` where it keeps nothing"
        ) from error


@dataclass(frozen=True)
class Place:
    """A row's batch index, the batch size num_rows, and its left padding (n,)."""

    index: int
    num_rows: int
    padding: torch.Tensor

    def processors(self, processors: Sequence[Processor]) -> list[Processor]:
        """The processors adapted to an unpadded single row."""
        return [self._processor(processor) for processor in processors]

    def _processor(self, processor: Processor) -> Processor:
        place = self
        if isinstance(processor, PrefixConstrainedLogitsProcessor):
            # The function may allow nothing for other rows, which is an error. Its beams are the rows of one prompt.
            function = _AskedAbout(processor._prefix_allowed_tokens_fn, self.index // processor._num_beams)
            place, processor = Place(0, 1, self.padding), PrefixConstrainedLogitsProcessor(function, 1)
        is_seen_whole = place.num_rows == 1 and not len(place.padding)
        return processor if is_seen_whole else RowProcessor(processor, place)

    def is_over(self, criteria: Sequence[Criterion], sequence: torch.Tensor) -> bool:
        """Whether a criterion stops the padded sequence (n,); all criteria are called."""
        rows = sequence.expand(self.num_rows, -1)
        return any([self._holds(criterion, criterion(rows, None)) for criterion in criteria])

    def _holds(self, criterion: Criterion, verdict: Any) -> bool:
        if self.num_rows == 1:
            return bool(torch.as_tensor(verdict).all())
        if not isinstance(verdict, torch.Tensor) or verdict.shape != (self.num_rows,):
            raise ValueError(
                f"the stopping criterion {name_of(criterion)} must return a tensor of {self.num_rows} bools, one for "
                f"each row, got {verdict!r}; or call generate with one row"
            )
        return bool(verdict[self.index])


@dataclass(frozen=True)
class _AskedAbout:
    """A `prefix_allowed_tokens_fn` that is called for one row only."""

    function: Callable[[int, torch.Tensor], list[int]]
    index: int

    def __call__(self, batch_id: int, input_ids: torch.Tensor) -> list[int]:
        return self.function(self.index, input_ids)


class RowProcessor(LogitsProcessor):  # type: ignore[misc]
    """A processor that gets a single row and sees it at its batch index."""

    def __init__(self, processor: Processor, place: Place) -> None:
        self._processor, self._place = processor, place
        self.__qualname__ = name_of(processor)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = self._place
        whole = torch.cat([place.padding.to(input_ids.device)[None], input_ids], dim=1)
        shaped = self._processor(whole.repeat(place.num_rows, 1), scores.repeat(place.num_rows, 1))
        return shaped[place.index : place.index + 1]

    def copy(self) -> RowProcessor:
        """A copy around a copied processor. Raises CannotCopyError as `copy_processor`."""
        return RowProcessor(copy_processor(self._processor), self._place)
