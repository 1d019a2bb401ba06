"""Worker processes for `processing`: a hostile request harms only its process, within kernel limits."""

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

from pebble import ProcessExpired, ProcessPool

from spec_stack.http.errors import BadRequestError
from spec_stack.serve.config import ServeConfig
from spec_stack.serve.processing import ProcessedRequest, RequestProcessor

if TYPE_CHECKING:
    from spec_stack.api.generator import SpecStackGenerator

# Preloaded by the fork server, so that workers start in milliseconds.
_PRELOADED = ("spec_stack.serve.process_pool", "llguidance")
_MAX_WORKERS = 4
# Requests per worker, which bounds its caches.
_MAX_TASKS = 500
# CPU seconds per byte of a body, and wall seconds per CPU second: other processes may keep the CPU busy.
_S_PER_BYTE, _WALL_FACTOR = 5e-6, 6.0
# Between two looks at whether the pool still runs.
_CHECK_S = 1.0


class RequestPool:
    """Worker processes for one generator's tokenizer; servers may share it. Raises ValueError if the operating system
    cannot fork."""

    def __init__(self, generator: SpecStackGenerator) -> None:
        if "forkserver" not in multiprocessing.get_all_start_methods():
            raise ValueError("serve needs an operating system with fork: Linux, macOS, or WSL on Windows")
        pair = generator.pair
        # Pickled once for all workers.
        self._settings = pickle.dumps((pair.tokenizer, pair.end_ids, pair.vocab_size))
        self._lock = threading.Lock()
        self._pool = self._open()

    def start(self) -> None:
        """Start the workers, if need be again; they load the tokenizer in the background."""
        with self._lock:
            # Reading `active` starts a new pool.
            if not self._pool.active:
                self.stop()
                self._pool = self._open()

    def stop(self) -> None:
        """Kill the workers."""
        self._pool.stop()
        self._pool.join()

    async def process(self, path: str, body: bytes, config: ServeConfig) -> ProcessedRequest:
        """Process a request in a worker. Raises BadRequestError, also for exceeded limits."""
        cpu_s = config.prepare_s + _S_PER_BYTE * len(body)
        # API keys stay in the server process.
        work = (path, body, replace(config, api_keys=()), cpu_s)
        try:
            for _ in range(2):
                await asyncio.to_thread(self.start)
                # An idle worker's death breaks the pool.
                with suppress(BrokenProcessPool):
                    pool = self._pool
                    return await result_of(pool, schedule(pool, work, _WALL_FACTOR * cpu_s))
        except (ProcessExpired, TimeoutError) as error:
            raise BadRequestError(
                f"the request takes more than {cpu_s:.1f} s of work or {config.max_prepare_bytes >> 20} MiB of memory "
                "to render, tokenize and compile"
            ) from error
        raise RuntimeError("the worker processes end before they have started")

    def _open(self) -> ProcessPool:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOADED))
        num_workers = min(_MAX_WORKERS, max(2, os.cpu_count() or 1))
        return ProcessPool(num_workers, _MAX_TASKS, _start_worker, (self._settings,), context)


def schedule(pool: ProcessPool, work: tuple[object, ...], timeout_s: float) -> Future[ProcessedRequest]:
    """Give the pool a request. Raises BrokenProcessPool if it broke or was stopped since it was last looked at."""
    try:
        future: Future[ProcessedRequest] = pool.schedule(_process, work, timeout=timeout_s)
    except RuntimeError as error:
        raise BrokenProcessPool("the pool no longer takes tasks") from error
    return future


async def result_of(pool: ProcessPool, future: Future[ProcessedRequest]) -> ProcessedRequest:
    """The result of a task. Raises BrokenProcessPool for one that the pool took as it broke, which it never ends."""
    waiting = asyncio.wrap_future(future)
    try:
        while not waiting.done():
            is_active = pool.active
            await asyncio.wait([waiting], timeout=_CHECK_S)
            if not is_active and not waiting.done():
                raise BrokenProcessPool("the pool broke as it took the task")
        return waiting.result()
    finally:
        waiting.cancel()


_processor: RequestProcessor


def _start_worker(settings: bytes) -> None:
    """Load the tokenizer and warm up the grammar compiler (seconds for a large vocabulary)."""
    global _processor
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _processor = RequestProcessor(*pickle.loads(settings))


def _process(path: str, body: bytes, config: ServeConfig, cpu_s: float) -> ProcessedRequest:
    with _limited(cpu_s, config.max_prepare_bytes):
        try:
            return _processor.process(path, body, config)
        except BaseException as error:
            if _is_out_of_memory(error):
                # Left-over memory would count against later requests.
                os._exit(1)
            raise


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or a cause of it, is a failed allocation."""
    while isinstance(error, Exception):
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            return True
        error = error.__cause__
    # A panic of Rust code is no Exception.
    return error is not None


@contextmanager
def _limited(cpu_s: float, max_bytes: int) -> Iterator[None]:
    """Set kernel limits: CPU time ends this process, memory above the limit is refused."""
    import resource  # not on Windows

    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    # Only Linux enforces this limit and reports memory use.
    with suppress(OSError, ValueError), open("/proc/self/statm", encoding="ascii") as statm:
        in_use = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (in_use + max_bytes, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
        signal.setitimer(signal.ITIMER_PROF, 0)
