"""Messages between the server and the processes that prepare requests for it: pickles, with their length ahead."""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

LENGTH = struct.Struct("<Q")
READY = b"r"


@dataclass(frozen=True)
class Failed:
    """A body brought out a mistake of the server's; its traceback is for the log."""

    traceback: str


def packed(message: object) -> bytes:
    """Return a message as it goes over the channel."""
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(content)) + content


def send(channel: socket.socket, message: object) -> None:
    """Write a message."""
    channel.sendall(packed(message))


def receive(channel: socket.socket) -> Any:
    """Read a message. Raises EOFError where the other side has closed."""
    (length,) = LENGTH.unpack(_read(channel, LENGTH.size))
    return pickle.loads(_read(channel, length))


def _read(channel: socket.socket, num_bytes: int) -> bytes:
    content = bytearray()
    while len(content) < num_bytes:
        piece = channel.recv(min(1 << 20, num_bytes - len(content)))
        if not piece:
            raise EOFError
        content += piece
    return bytes(content)
