"""The bytes that two hosts exchange over one connection.

::

    here  -> there   MARK, uid of this host, round trips, bytes of data
    there -> here    MARK, its uid
    here <-> there   one byte each way, for each round trip
    here  -> there   the data      there -> here   one byte: all of it has arrived
    there -> here    as much data

The data is larger than a packet of any size, and what precedes and acknowledges it fits into the
smallest: so an exchange that stops at the data says that large packets are lost, and which way.
"""

from __future__ import annotations

import struct

MARK = b"ncclops-edge/1\n"
UID_BYTES = 16
_REQUEST = struct.Struct(f"!{UID_BYTES}sHI")
REQUEST_BYTES = len(MARK) + _REQUEST.size
REPLY_BYTES = len(MARK) + UID_BYTES
ARRIVED = b"+"
PING = b"."
# Seven packets of 9,000 bytes, the largest in use.
DATA_BYTES = 64 * 1024
MOST_BYTES = 16 * 1024 * 1024
MOST_PINGS = 100


def request(uid: str, pings: int, data_bytes: int) -> bytes:
    """What a connection begins with. ``uid`` is 32 hexadecimal digits."""
    return MARK + _REQUEST.pack(bytes.fromhex(uid), pings, data_bytes)


def read_request(data: bytes) -> tuple[str, int, int] | None:
    """Uid, round trips and bytes of data; None where it is no request of ours."""
    if not data.startswith(MARK):
        return None
    uid, pings, size = _REQUEST.unpack(data[len(MARK) :])
    if size > MOST_BYTES or pings > MOST_PINGS:
        return None
    return uid.hex(), pings, size


def reply(uid: str) -> bytes:
    """How the other host says who it is."""
    return MARK + bytes.fromhex(uid)


def read_reply(data: bytes) -> str | None:
    """The uid of who answered; None where that is no host of ours."""
    return data[len(MARK) :].hex() if data.startswith(MARK) else None
