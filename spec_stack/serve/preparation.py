"""The server's side of preparing bodies in processes of their own (`nursery`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from spec_stack.serve.channel import LENGTH, READY, Failed, packed, send
from spec_stack.serve.config import PreparationLimits, ServeConfig
from spec_stack.serve.preparing import Prepared, Refused, Settings

logger = logging.getLogger(__name__)

# For a nursery to begin: it imports libraries and reads a tokenizer, on a machine that may be busy.
_START_S = 120.0
# Where this package lies, which need not be where others look for one.
_HOME = Path(__file__).resolve().parents[2]


class Nursery:
    """The process that forks others. Servers may share one.

    Parameters
    ----------
    settings : Settings
        What prompts are encoded with.

    Raises
    ------
    ValueError
        Where processes cannot be forked.
    """

    def __init__(self, settings: Settings) -> None:
        if not hasattr(os, "fork"):
            raise ValueError("serve needs an operating system with fork: Linux, macOS, or WSL on Windows")
        self._settings = settings
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_ready = False

    def start(self) -> None:
        """Begin; `open` waits until it has begun."""
        with self._lock:
            if self._process is None:
                self._begin()

    def open(self) -> socket.socket:
        """Return the end of a channel to a new process; the nursery is begun anew where it has ended.

        Raises
        ------
        RuntimeError
            Where it cannot begin.
        """
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._begin()
            try:
                socket.send_fds(self._began(), [b"c"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise RuntimeError("the process that prepares requests has ended, or did not begin") from error
        return ours

    def stop(self) -> None:
        """End it, also while somebody waits for it; what it forked ends by itself."""
        if self._process is not None:
            self._process.kill()
        with self._lock:
            self._end()

    def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join(filter(None, [str(_HOME), os.environ.get("PYTHONPATH")])),
                # Threads would not survive a fork, and what they hold would stay locked.
                "TOKENIZERS_PARALLELISM": "false",
                "OMP_NUM_THREADS": "1",
            }
            self._process = subprocess.Popen(
                [sys.executable, "-m", "spec_stack.serve.nursery", str(theirs.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._control, self._is_ready = ours, False
        threading.Thread(target=self._settle, args=(ours,), name="spec-stack-nursery", daemon=True).start()

    def _settle(self, control: socket.socket) -> None:
        """Hand over the tokenizer, which takes as long as the process needs to begin."""
        with contextlib.suppress(OSError):
            send(control, self._settings)

    def _began(self) -> socket.socket:
        """Wait until it has begun, and return its control. Raises OSError where it has not."""
        control = self._control
        if control is None:
            raise BrokenPipeError
        if not self._is_ready:
            control.settimeout(_START_S)
            if control.recv(1) != READY:
                raise BrokenPipeError("it ended before it had begun")
            control.settimeout(None)
            self._is_ready = True
        return control

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._control = None


class Preparer:
    """Has bodies prepared, few at a time, and each client's one after the other.

    Parameters
    ----------
    nursery : Nursery
        Forks.
    config : ServeConfig
        What this server takes. Its keys stay here.
    """

    def __init__(self, nursery: Nursery, config: ServeConfig) -> None:
        self._nursery, self._config = nursery, replace(config, api_keys=())
        self._limits = PreparationLimits(config.prepare_s, config.max_prepare_bytes)
        self._slots = asyncio.Semaphore(max(2, os.cpu_count() or 1))
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def prepare(self, client: str, path: str, body: bytes) -> Prepared:
        """Return what a body asks for, everything of which but the sampling has been checked.

        Parameters
        ----------
        client : str
            Whose it is: one who sends much waits for himself.
        path : str
            What it was sent to.
        body : bytes
            As it came.

        Raises
        ------
        Refused
            For what the client can change, and where it took too much time or memory.
        RuntimeError
            For a mistake of the server's, which the log has.
        """
        turn = self._turns[client]
        try:
            async with turn, self._slots:
                reply = await self._ask(path, body)
        finally:
            if not turn.locked():
                self._turns.pop(client, None)
        if isinstance(reply, Refused):
            raise reply
        if isinstance(reply, Failed):
            logger.error("a request could not be prepared\n%s", reply.traceback)
            raise RuntimeError("a request could not be prepared")
        if reply is None:
            raise Refused(
                f"the request takes more than {self._limits.cpu_s(len(body)):.1f} s of work or "
                f"{self._limits.max_bytes >> 20} MiB of memory to render, tokenize and compile"
            )
        prepared: Prepared = reply
        return prepared

    async def _ask(self, path: str, body: bytes) -> Any:
        """Return what the process says; None where it was ended."""
        channel = await asyncio.to_thread(self._nursery.open)
        with channel:
            channel.setblocking(False)
            try:
                # The process ends itself; this is for one that cannot even do that.
                async with asyncio.timeout(self._limits.wall_s(len(body)) + 5):
                    return await _exchange(channel, packed((self._limits, path, body, self._config)))
            except (OSError, EOFError, TimeoutError):
                return None


async def _exchange(channel: socket.socket, message: bytes) -> Any:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(channel, message)
    reply = bytearray()
    while piece := await loop.sock_recv(channel, 1 << 20):
        reply += piece
    if len(reply) < LENGTH.size or len(reply) != LENGTH.size + LENGTH.unpack_from(reply)[0]:
        raise EOFError
    return pickle.loads(memoryview(reply)[LENGTH.size :])
