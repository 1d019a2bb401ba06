"""The process that forks one for each body: there it is parsed, rendered, tokenized and its grammar compiled.

It holds the tokenizer and has one thread, so a fork is safe and takes milliseconds. What a body does to its own process
ends with that: the kernel kills it when its processor time or its time is up, and it cannot have more memory than it
was allowed. Run by `preparation.Nursery` as `python -m spec_stack.serve.nursery FD`.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
import traceback
from contextlib import suppress

from spec_stack.hf.answer_format import AnswerFormat
from spec_stack.hf.structured import Grammars, structured_problem
from spec_stack.serve.channel import READY, Failed, receive, send
from spec_stack.serve.config import PreparationLimits
from spec_stack.serve.preparing import Preparing, Refused, Settings


def main() -> None:
    """Fork for every channel that comes in, until the server closes its end."""
    # Ctrl-C goes to the whole group; the server says when this ends, by closing. Children that end leave nothing.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    preparing = _prepare(receive(control))
    # What every child would otherwise copy, page by page, when it collects.
    gc.freeze()
    control.sendall(READY)
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        channel = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            control.close()
            _answer(channel, preparing)
        channel.close()


def _prepare(settings: Settings) -> Preparing:
    grammars = Grammars(settings.tokenizer, settings.vocab_size)
    if structured_problem() is None and settings.tokenizer is not None and settings.end_ids:
        # Takes seconds for a large vocabulary, so no child should have to.
        grammars.warm_up(settings.end_ids)
    return Preparing(settings, grammars, AnswerFormat.learn(settings.tokenizer))


def _answer(channel: socket.socket, preparing: Preparing) -> None:
    """Prepare the one body that comes through a channel, under its limits, and end this process."""
    try:
        limits, path, body, server = receive(channel)
        _limit(limits, len(body))
        reply: object
        try:
            reply = preparing.prepare(path, body, server)
        except Refused as refusal:
            reply = refusal
        except MemoryError:
            reply = None
        except Exception:
            reply = Failed(traceback.format_exc())
        send(channel, reply)
    except (OSError, EOFError):
        # The server has gone, or no longer waits.
        pass
    finally:
        os._exit(0)


def _limit(limits: PreparationLimits, num_bytes: int) -> None:
    """Have the kernel end this process when it has taken too long, or asks for too much memory."""
    cpu_s = limits.cpu_s(num_bytes)
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    # Of a process that does not get the processor.
    signal.setitimer(signal.ITIMER_REAL, limits.wall_s(num_bytes))
    # Linux alone says how much is held, and keeps to such a limit.
    with suppress(OSError), open("/proc/self/statm", encoding="ascii") as statm:
        held = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (held + limits.max_bytes,) * 2)


if __name__ == "__main__":
    main()
