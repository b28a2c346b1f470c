"""Which live process of this user, on this host, runs in the directory of a path.

A run goes on after its directory was removed or moved, and writes by paths: a new run at the same
path would get its records. So a run keeps a Unix socket in the abstract name space, whose name is
made of the path: it ends with its processes, and is not in the directory.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from pathlib import Path


def claim(path: Path) -> int | None:
    """A descriptor that holds ``path`` as long as it is open; None where another has it."""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.bind(_address(path))
        held.listen()
    except OSError:
        held.close()
        return None
    return held.detach()


def holder(path: Path) -> int | None:
    """The pid of another process of this user that holds ``path``, where there is one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)  # its queue may be full: nobody takes connections
        try:
            client.connect(_address(path))
            credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        except OSError:
            return None
    pid, uid, _ = struct.unpack("iII", credentials)
    # Anybody on the host can take the name.
    return pid if uid == os.geteuid() and pid != os.getpid() else None


def _address(path: Path) -> str:
    # Containers that share the host's network share these names, and have paths of their own.
    mounts = Path("/proc/self/ns/mnt").stat().st_ino
    digest = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:40]
    return f"\0ncclops-{os.geteuid()}-{mounts}-{digest}"
