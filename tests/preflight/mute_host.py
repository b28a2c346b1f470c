"""A host that comes, accepts connections, and then says nothing more; until it is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

import msgspec

from ncclops.preflight.edges import machine
from ncclops.preflight.edges.meeting import Meeting, Where


async def main(store: str, count: str, rank: str) -> None:
    facts = await machine.read_facts(os.environ, rank=int(rank), name=None)
    assert facts.place is not None
    listening = [socket.create_server((facts.place.address, 0)) for _ in range(4)]
    ports = tuple(each.getsockname()[1] for each in listening)
    host, _, port = store.rpartition(":")
    where = Where(host=host, port=int(port), count=int(count), least=int(count), rank=int(rank))
    meeting = await Meeting.join(where, 40.0)
    await meeting.say("facts", msgspec.structs.replace(facts, ports=(0, *ports)))
    signal.pause()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
