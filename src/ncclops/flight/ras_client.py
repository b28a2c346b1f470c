"""Queries NCCL's RAS service, where that is safe.

Each process of a job since NCCL 2.24 listens on localhost:28028 and answers for the whole job. The
protocol is lines of text; ``set format json`` exists since 2.28.7. A query is not free of risk:

- up to 2.26: a crash when a report is made while communicators are created (NVIDIA/nccl 1669, 1718)
- up to 2.29.1: memory is corrupted when a report has missing ranks (NVIDIA/nccl 1762, fixed in
  2.29.2), and that is exactly when one wants to query it
- 2.29.2 on: an open report of a crash while communicators are created (NVIDIA/nccl 2346); a job
  that hangs creates none

So it is queried only on request, and only if its release is known and not in the first two.
"""

from __future__ import annotations

import re
import socket
from datetime import timedelta
from typing import Any

from ncclops.durations import format_duration
from ncclops.whole_numbers import MOST_PORT, whole_number

SAFE_SINCE = (2, 29, 2)
MOST_BYTES = 64 << 20
# The service waits this long for peers that do not answer (its own default), and we for it.
_PEERS_S = 5
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


class RasError(Exception):
    """The service cannot or must not be queried, or its answer is not understood; one line."""


def why_not(version: str) -> str | None:
    """Why a job with this NCCL must not be queried; None if it may."""
    found = _VERSION.match(version)
    if found is None:
        return "NCCL's version is not known from the dumps, and some releases crash when asked"
    number = tuple(int(part or 0) for part in found.groups())
    if number < SAFE_SINCE:
        return (
            f"NCCL {version} can crash the job when asked while ranks are missing "
            "(NVIDIA/nccl 1762, fixed in 2.29.2)"
        )
    return None


def ask(address: str, patience: timedelta = timedelta(seconds=30)) -> str:
    """The service's verbose status, as JSON if it can. Blocks for up to ``patience``.

    Tries twice: of the processes on a node any may answer, and a stopped one never does. Raises
    :class:`RasError`.
    """
    host, _, port = address.rpartition(":")
    number = whole_number(port, MOST_PORT)
    if number is None:
        raise RasError(f"{address[:80]!r} is no HOST:PORT")
    problem: Exception | None = None
    for _ in range(2):
        try:
            return _ask_once(host.strip("[]") or "localhost", number, patience / 2)
        except (OSError, RasError) as error:
            problem = error
    raise RasError(f"no answer from {address} within {format_duration(patience)}: {problem}")


def _ask_once(host: str, port: int, patience: timedelta) -> str:
    with socket.create_connection((host, port), timeout=patience.total_seconds()) as connection:
        stream = connection.makefile("rwb")
        greeting = _command(stream, "client protocol 2")
        if not greeting.upper().startswith("SERVER PROTOCOL"):
            raise RasError(f"it is not NCCL's service: it said {greeting[:60]!r}")
        _command(stream, f"timeout {_PEERS_S}")
        _command(stream, "set format json")  # refused by releases that only have text
        stream.write(b"verbose status\n")
        stream.flush()
        answer: bytes = stream.read(MOST_BYTES)
        return answer.decode(errors="replace")


def _command(stream: Any, line: str) -> str:
    stream.write(line.encode() + b"\n")
    stream.flush()
    answer: bytes = stream.readline(4096)
    if not answer:
        raise RasError("it closed the connection")
    return answer.decode(errors="replace").strip()
