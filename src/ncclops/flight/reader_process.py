"""The process that opens dumps: limits on memory, one request a line, one answer each.

Dumps come from elsewhere. A pickle can need gigabytes or hours by a few bytes, inside C code that
nothing in the same process can interrupt; so it is read here, where the kernel enforces limits and
the parent can give up.
"""

from __future__ import annotations

import gc
import json
import pickle
import resource
import stat
import struct
import sys
import time
from pathlib import Path
from typing import Any

from ncclops.flight.decode import MOST_BYTES, NotADump, Unreadable, unpacked
from ncclops.flight.parse import parse

# The largest file that is accepted becomes about ten times as large as Python objects.
MOST_MEMORY_BYTES = 3 << 30
# CPU time for a dump: a recorder's are read with 7 MiB/s and more. A pickle of a few bytes can need
# any time, by values that hold themselves twice.
_LEAST_S = 2
_BYTES_A_SECOND = 1 << 20
ANSWER = struct.Struct("!Q")


def main() -> None:
    """Answer requests ``{"path", "rank", "cpu_s"}`` on stdin until it closes."""
    _limit_memory()
    # Millions of small containers, none of them in cycles.
    gc.disable()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer = pickle.dumps(_answer(**request), protocol=5)
        sys.stdout.buffer.write(ANSWER.pack(len(answer)) + answer)
        sys.stdout.buffer.flush()


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MOST_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MOST_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_cpu(seconds: int) -> None:
    """Have the kernel end this process if it needs that much more CPU time."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most = int(time.process_time()) + 1 + seconds
    resource.setrlimit(
        resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(hard, most), hard)
    )


def _answer(path: str, rank: int | None, cpu_s: int) -> tuple[str, Any]:
    _limit_cpu(cpu_s)
    try:
        data = unpacked(_read(Path(path)))
        _limit_cpu(min(cpu_s, _LEAST_S + len(data) // _BYTES_A_SECOND))
        return "record", parse(data, rank=rank, file=path)
    except NotADump as error:
        return "other", str(error)
    except Unreadable as error:
        return "bad", str(error)
    except MemoryError:
        return "bad", "needs more memory to read than any dump"
    except RecursionError:
        return "bad", "nested deeper than any dump"


def _read(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise NotADump("not a regular file")
        if status.st_size > MOST_BYTES:
            raise Unreadable(f"larger than {MOST_BYTES >> 20} MiB, which no recorder writes")
        return path.read_bytes()
    except OSError as error:
        raise Unreadable(f"cannot be opened: {error.strerror}") from None


if __name__ == "__main__":
    main()
