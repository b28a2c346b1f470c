"""``python mute_name_server.py FILE``: takes queries at 127.0.0.1:53, and answers none.

The names that are asked for go to FILE, one to a line.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path


def name_in(query: bytes) -> str:
    """The name of a query (RFC 1035): labels, each after its length, from the 13th byte on."""
    labels, place = [], 12
    while length := query[place]:
        labels.append(query[place + 1 : place + 1 + length].decode())
        place += 1 + length
    return ".".join(labels)


def main(path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server, path.open("w") as queries:
        server.bind(("127.0.0.1", 53))
        while True:
            queries.write(name_in(server.recv(512)) + "\n")
            queries.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
