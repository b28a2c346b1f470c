"""Waits until the job's store can be reached, and says so while it cannot."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta

from ncclops.cluster.rendezvous_config import RendezvousConfig
from ncclops.durations import format_duration
from ncclops.errors import NcclopsError
from ncclops.host import interfaces

# No event says when another host begins to listen, so this is how often we try.
_RETRY = timedelta(seconds=1)
_ANSWERS_WITHIN_S = 5.0
_SAY_AFTER_S = 2.0  # nodes seldom come at the same moment
_SAY_EVERY_S = 30.0


async def wait_for_store(
    rendezvous: RendezvousConfig,
    *,
    pause: Callable[[timedelta], Awaitable[bool]],
    note: Callable[[str], None],
) -> None:
    """Return when ``rendezvous``'s store accepts connections.

    ``pause`` waits for a moment and returns True when this is to stop. Raises ``NcclopsError``
    then, and after the time that the nodes have to come.
    """
    began = time.monotonic()
    deadline, say_at = began + rendezvous.pace.join.total_seconds(), began + _SAY_AFTER_S
    while (why := await _why_silent(rendezvous.host, rendezvous.port)) is not None:
        if time.monotonic() > deadline:
            if not interfaces.resolve(rendezvous.host):
                raise NcclopsError(
                    f"this host knows no address of {rendezvous.host}, where the nodes are to meet:"
                    " name one that it can reach, or its address"
                )
            raise NcclopsError(
                f"no store answered at {rendezvous.address} within"
                f" {format_duration(rendezvous.pace.join)}: is node 0 (or `ncclops store serve`)"
                " running there, and may this host reach that port?"
            )
        if time.monotonic() > say_at:
            say_at = time.monotonic() + _SAY_EVERY_S
            note(f"waiting for the store at {rendezvous.address}: {why}")
        if await pause(_RETRY):
            raise NcclopsError(f"stopped while waiting for the store at {rendezvous.address}")


async def _why_silent(host: str, port: int) -> str | None:
    """Why nothing answers there; None where something does."""
    try:
        async with asyncio.timeout(_ANSWERS_WITHIN_S):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
    except (socket.gaierror, UnicodeError):  # the second of a name that cannot be one
        return f"this host knows no address of {host}"
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return str(error) if error.errno is None else os.strerror(error.errno)
    return None
