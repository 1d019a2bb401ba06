"""Ports of loopback for servers that other processes start."""

from __future__ import annotations

import os
import socket

# Under the range that Linux gives to clients and to whoever binds port 0, so that nobody gets one by chance.
FIRST, NUM_PORTS = 20_000, 12_000


def free_port() -> int:
    """A port that nobody listens on, another one at nearly every call, in every process."""
    while True:
        port = FIRST + int.from_bytes(os.urandom(4)) % NUM_PORTS
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
