"""Messages to and between guardians. Standard library only.

Between guardians one JSON object a line over TCP; between a guardian and its main process one a
packet, over a socket pair.
"""

from __future__ import annotations

import json
import socket
from typing import Any

Message = dict[str, Any]

# A report with a full traceback stays far below; anything longer is not one of us.
_LONGEST_LINE = 1 << 20


class Peer:
    """One connection to another guardian; never blocks."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.trusted = False
        self._received = b""
        self._unsent = b""

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Queue ``message``, send what the socket takes. A broken connection shows on receive."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send more of what is queued."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self.sock.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._unsent = b""

    def receive(self) -> list[Message] | None:
        """The messages that have arrived; ``None`` when the other side is gone."""
        try:
            data = self.sock.recv(65536)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        if not data or len(self._received) + len(data) > _LONGEST_LINE:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        return [message for line in lines if (message := _parse(line)) is not None]

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()


def receive_packet(sock: socket.socket) -> bytes | None:
    """The next packet of a socket pair that does not block.

    ``None`` if none waits, empty when the other end is gone and all it has sent was read.
    """
    for _ in range(2):
        try:
            return sock.recv(_LONGEST_LINE)
        except (BlockingIOError, InterruptedError):
            return None
        except ConnectionResetError:
            # The other end went without reading what we had sent. Linux says so, once, before it
            # hands out what that end had still to say.
            continue
        except OSError:
            break
    return b""


def _parse(line: bytes) -> Message | None:
    # The port is open to the network: a stray connection may send anything.
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and "op" in message else None
