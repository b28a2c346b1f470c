"""What this host is called, as it is written into records and shown."""

from __future__ import annotations

import socket

from ncclops.plain_text import plain_line

MOST_CHARS = 255  # of a name in DNS; Linux allows 64


def host_name() -> str:
    """This host's name, clean; the same text in every process of it."""
    return clean(socket.gethostname())


def with_port(host: str, port: int) -> str:
    """``host:port``; an IPv6 address is in brackets, as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def clean(name: str) -> str:
    """A host's ``name`` as one line.

    Kernels take any bytes for a name, line breaks and escape sequences included. What acts on
    a terminal, or is no UTF-8, is spelled out.
    """
    return plain_line(name, MOST_CHARS)
