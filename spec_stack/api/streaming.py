"""Adapters of a stream: transformers' streamers and async code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from transformers.generation.streamers import BaseStreamer

from spec_stack.types import StepOutput

Parameters = ParamSpec("Parameters")
Item = TypeVar("Item")


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


def awaitable(function: Callable[Parameters, Generator[Item]]) -> Callable[Parameters, AsyncGenerator[Item]]:
    """Wrap a generator function as an asynchronous generator function. Arguments are checked at the call. Steps run in
    a thread; a cancelled loop closes the generator."""

    @wraps(function)
    def begin(*args: Parameters.args, **kwargs: Parameters.kwargs) -> AsyncGenerator[Item]:
        return _in_thread(function(*args, **kwargs))

    return begin


async def _in_thread(items: Generator[Item]) -> AsyncGenerator[Item]:
    is_over = False

    def step() -> Item | None:
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
