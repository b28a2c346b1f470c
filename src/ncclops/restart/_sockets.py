"""Looking at this process's sockets from outside of whoever owns them. Standard library only."""

from __future__ import annotations

import os
import socket


def duplicate_socket(fd: int) -> socket.socket | None:
    """A handle of our own on the socket ``fd``; ``None`` when it is no socket, or closed by now.

    It keeps referring to the same socket even if the number is reused meanwhile.
    """
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
