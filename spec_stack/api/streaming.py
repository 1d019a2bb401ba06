"""Hand a stream's tokens on as they come: to transformers' streamers, and to code that awaits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

from spec_stack.types import StepOutput

Parameters = ParamSpec("Parameters")
Item = TypeVar("Item")


class Streamer(Protocol):
    """transformers' `BaseStreamer`: `TextStreamer`, `TextIteratorStreamer` and others are such."""

    def put(self, value: torch.Tensor) -> None:
        """Take token ids (n,) or (1, n): the prompt first, then the new ones."""
        ...

    def end(self) -> None:
        """Nothing comes any more."""
        ...


def feed(streamer: Streamer, prompt_ids: Sequence[int], outputs: Iterator[StepOutput]) -> Generator[StepOutput]:
    """The steps as they are, each shown to a streamer before it is handed on.

    Parameters
    ----------
    streamer : Streamer
        Is put the prompt first, as `model.generate` does, and told of the end whatever ends the steps.
    prompt_ids : sequence of int
        The prompt.
    outputs : iterator of StepOutput
        The steps.
    """
    try:
        streamer.put(torch.tensor([list(prompt_ids)]))
        for output in outputs:
            if output.token_ids:
                streamer.put(torch.tensor(output.token_ids))
            yield output
    finally:
        # A TextIteratorStreamer's reader waits for it in another thread, also after an error.
        streamer.end()


def awaitable(function: Callable[Parameters, Generator[Item]]) -> Callable[Parameters, AsyncGenerator[Item]]:
    """Make of a function that gives a generator one that gives an asynchronous generator.

    The call is made, and refused, at once. The steps are made in a thread; a cancelled loop closes the generator.
    """

    @wraps(function)
    def begin(*args: Parameters.args, **kwargs: Parameters.kwargs) -> AsyncGenerator[Item]:
        return _in_thread(function(*args, **kwargs))

    return begin


def awaitable_result(function: Callable[Parameters, Item]) -> Callable[Parameters, Coroutine[Any, Any, Item]]:
    """Make of a function one that is awaited: it runs in a thread, while the event loop goes on.

    A call whose await is cancelled runs to its end; `awaitable` streams can be closed.
    """

    @wraps(function)
    async def begin(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Item:
        return await asyncio.to_thread(function, *args, **kwargs)

    return begin


async def _in_thread(items: Generator[Item]) -> AsyncGenerator[Item]:
    loop = asyncio.get_running_loop()
    with_thread = ThreadPoolExecutor(1, thread_name_prefix="spec-stack-stream")
    try:
        while True:
            found = await loop.run_in_executor(with_thread, _next, items)
            if not found:
                return
            yield found[0]
    finally:
        # In the same thread, so that it waits for a step that is still being made, which a cancelled `await` leaves.
        with_thread.submit(items.close)
        with_thread.shutdown(wait=False)


def _next(items: Iterator[Item]) -> tuple[Item, ...]:
    """The next item, or nothing: a StopIteration cannot be raised into a future."""
    for item in items:
        return (item,)
    return ()
