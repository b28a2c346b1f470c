"""The socket between a rank and the harness: whole messages, each a pickled dictionary.

A message that is longer than a packet may be is put into a file, and the file's name is sent.
Standard library only.
"""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

# The kernel takes packets of some 200 KB at most.
_LONGEST = 100_000


class Channel:
    """One end. ``send`` may be called from any thread; ``receive`` from one at a time."""

    def __init__(self, end: socket.socket, directory: Path) -> None:
        self._end = end
        self._directory = directory
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """For ``select``."""
        return self._end.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send ``message``. Raises ``OSError`` when the other end is closed."""
        data = pickle.dumps(message)
        if len(data) > _LONGEST:
            number, name = tempfile.mkstemp(dir=self._directory, prefix="message-")
            with os.fdopen(number, "wb") as file:
                file.write(data)
            data = pickle.dumps({"op": "file", "name": name})
        with self._lock:
            self._end.send(data)

    def receive(self) -> dict[str, Any]:
        """The next message. Raises ``EOFError`` when the other end is closed."""
        try:
            data = self._end.recv(2 * _LONGEST)
        except ConnectionResetError:
            # The other end had closed with something unread, which is said once and before what
            # it has sent: of a rank that was killed, that is how it ended.
            data = self._end.recv(2 * _LONGEST)
        if not data:
            raise EOFError
        message: dict[str, Any] = pickle.loads(data)
        if message["op"] == "file":
            path = Path(message["name"])
            message = pickle.loads(path.read_bytes())
            path.unlink()
        return message

    def close(self) -> None:
        """Close this end."""
        self._end.close()
