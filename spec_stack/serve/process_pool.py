"""Worker processes for `processing`: a hostile request can harm its own process only, and the kernel limits that."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from pebble import ProcessExpired, ProcessPool

from spec_stack.hf.structured import Grammars, structured_problem
from spec_stack.serve.config import ServeConfig
from spec_stack.serve.processing import ProcessedRequest, RequestProcessor
from spec_stack.serve.protocol import BadRequestError

if TYPE_CHECKING:
    from spec_stack.api.generator import SpecStackGenerator

# The fork server imports these once, so that a new worker starts in milliseconds.
_PRELOADED = ("spec_stack.serve.process_pool", "xgrammar")
_MAX_WORKERS = 4
# Requests after which a worker is replaced, with whatever it has cached.
_MAX_TASKS = 500
# Processor seconds per byte of a body, seconds for each processor second, and seconds left to the kernel.
_S_PER_BYTE, _WALL_FACTOR, _GRACE_S = 5e-6, 6.0, 5.0


class RequestPool:
    """The worker processes for one generator's tokenizer. Servers may share it.

    Raises
    ------
    ValueError
        Where the operating system cannot fork.
    """

    def __init__(self, generator: SpecStackGenerator) -> None:
        if "forkserver" not in multiprocessing.get_all_start_methods():
            raise ValueError("serve needs an operating system with fork: Linux, macOS, or WSL on Windows")
        pair = generator.pair
        # Pickled once, and not for every worker that is started.
        self._settings = pickle.dumps((pair.tokenizer, pair.end_ids, pair.vocab_size))
        self._lock = threading.Lock()
        self._pool = self._open()

    def start(self) -> None:
        """Start the workers, which load the tokenizer while this returns."""
        with self._lock:
            # Reading it starts a pool that is new.
            _ = self._pool.active

    def stop(self) -> None:
        """End the workers, whatever they do."""
        self._pool.stop()
        self._pool.join()

    def submit(self, path: str, body: bytes, config: ServeConfig) -> Future[ProcessedRequest]:
        """Have a worker process a request; workers that died are replaced."""
        with self._lock:
            if not self._pool.active:
                self.stop()
                self._pool = self._open()
            # The kernel is faster; this is for a process that it cannot end.
            timeout = _WALL_FACTOR * _cpu_s(config, len(body)) + _GRACE_S
            future: Future[ProcessedRequest] = self._pool.schedule(_process, (path, body, config), timeout=timeout)
            return future

    def _open(self) -> ProcessPool:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOADED))
        num_workers = min(_MAX_WORKERS, max(2, os.cpu_count() or 1))
        return ProcessPool(num_workers, _MAX_TASKS, _start_worker, (self._settings,), context)


class PooledProcessor:
    """Processes the requests of one server in a pool, those of a client one after the other."""

    def __init__(self, pool: RequestPool, config: ServeConfig) -> None:
        # The API keys stay in the server's process.
        self._pool, self._config = pool, replace(config, api_keys=())
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def process(self, client: str, path: str, body: bytes) -> ProcessedRequest:
        """Process a client's request. Raises BadRequestError, also where it exceeded the limits."""
        turn = self._turns.setdefault(client, asyncio.Lock())
        try:
            async with turn:
                return await self._submit(path, body)
        except (ProcessExpired, TimeoutError) as error:
            raise BadRequestError(
                f"the request takes more than {_cpu_s(self._config, len(body)):.1f} s of work or "
                f"{self._config.max_prepare_bytes >> 20} MiB of memory to render, tokenize and compile"
            ) from error

    async def _submit(self, path: str, body: bytes) -> ProcessedRequest:
        for _ in range(2):
            future = await asyncio.to_thread(self._pool.submit, path, body, self._config)
            # An idle worker that died breaks the pool, which the next submission opens anew.
            with suppress(BrokenProcessPool):
                return await asyncio.wrap_future(future)
        raise RuntimeError("the worker processes end before they have started")


def _cpu_s(config: ServeConfig, num_bytes: int) -> float:
    """Processor seconds that a body of so many bytes may take."""
    return config.prepare_s + _S_PER_BYTE * num_bytes


_processor: RequestProcessor | None = None


def _start_worker(settings: bytes) -> None:
    """Load the tokenizer, and compile what every grammar needs: seconds for a large vocabulary."""
    global _processor
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer, end_ids, vocab_size = pickle.loads(settings)
    grammars = Grammars(tokenizer, vocab_size)
    if structured_problem() is None and tokenizer is not None and end_ids:
        # A tokenizer that xgrammar does not support is reported to the requests that need it.
        with suppress(ValueError):
            grammars.warm_up(end_ids)
    _processor = RequestProcessor(tokenizer, end_ids, vocab_size, grammars)


def _process(path: str, body: bytes, config: ServeConfig) -> ProcessedRequest:
    """Process a request in this worker process."""
    if _processor is None:
        raise RuntimeError("the worker process was not started")
    with _limited(_cpu_s(config, len(body)), config.max_prepare_bytes):
        try:
            return _processor.process(path, body, config)
        except MemoryError:
            # What is left in this process would count against later requests.
            os._exit(1)
        finally:
            _processor.clear()


@contextmanager
def _limited(cpu_s: float, max_bytes: int) -> Iterator[None]:
    """Have the kernel kill this process at the time limit, and refuse it memory over the limit."""
    import resource  # not on Windows

    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    # Where other processes keep the processor busy.
    signal.setitimer(signal.ITIMER_REAL, _WALL_FACTOR * cpu_s)
    # Linux alone enforces this limit, and says how much is in use.
    with suppress(OSError, ValueError), open("/proc/self/statm", encoding="ascii") as statm:
        in_use = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (in_use + max_bytes, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
