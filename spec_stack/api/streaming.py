"""Adapters of a stream: transformers' streamers and async code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence

import torch
from transformers.generation.streamers import BaseStreamer

from spec_stack.types import StepOutput


def feed(streamer: BaseStreamer, prompt_ids: Sequence[int], outputs: Iterator[StepOutput]) -> Generator[StepOutput]:
    """Yield the steps, each after it was put into the streamer. The streamer gets the prompt first, as from
    `model.generate`, and `end` is always called."""
    try:
        streamer.put(torch.tensor([list(prompt_ids)]))
        for output in outputs:
            if output.token_ids:
                streamer.put(torch.tensor(output.token_ids))
            yield output
    finally:
        # The reader of a TextIteratorStreamer waits in another thread, also after an error.
        streamer.end()


async def in_thread(items: Generator[StepOutput]) -> AsyncGenerator[StepOutput]:
    """The items, each made in a thread; a cancelled loop closes the generator."""
    is_over = False

    def step() -> StepOutput | None:
        """The next item. A future cannot carry StopIteration."""
        try:
            return next(items, None)
        finally:
            if is_over:
                items.close()

    try:
        while (item := await asyncio.to_thread(step)) is not None:
            yield item
    finally:
        # A cancelled `await` does not stop the running step: this tells it to end, and it closes the generator.
        is_over = True
        items.close()
