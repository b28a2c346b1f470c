"""A short all_reduce between the GPUs of this node, in processes with a deadline."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from tempfile import TemporaryFile
from typing import IO, Protocol

from ncclops.preflight.readings import Collective, Gpu

# torch's import, NCCL's start and all sizes take some 20 s; on a busy machine more.
LIMIT = timedelta(seconds=120)
ONE_GPU = "it takes two GPUs"
_PROBE = "ncclops.worker.collective_probe"
_NO_GPUS, _NO_MEMORY = 9, 10  # its exit codes
_MET = "ncclops: all ranks are here"  # what it says once that is so
ELSEWHERE = "another rank failed"  # what one says that is ended for that
_LINE = re.compile(r"NCCL DIAG (.*)")
_RANK = re.compile(r"^\[rank\d+\]:")  # before each line of a traceback
_EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception)(?::|$)")
_MOST_LINES, _LONGEST = 64, 250
_REAP_S = 5.0


def why_not(gpus: Sequence[Gpu]) -> str | None:
    """Why there is nothing to measure between ``gpus``, or nobody may; None if there is."""
    if any(gpu.lost is not None for gpu in gpus):
        return "a GPU does not answer"
    if any(gpu.mig for gpu in gpus):
        return "MIG is on"
    if any(gpu.processes for gpu in gpus):
        return "somebody uses the GPUs"
    return None


def measure(
    gpus: Sequence[Gpu], environ: Mapping[str, str], limit: timedelta = LIMIT
) -> Collective:
    """Run an all_reduce over those GPUs that ``environ`` shows. Takes up to ``limit``.

    NCCL's own diagnostics are on (2.31 and newer print them). Any thread; starts a process that
    forks one for each GPU, in a session of their own, and leaves none.
    """
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    count = len(gpus) if shown is None else len([each for each in shown.split(",") if each])
    if (why := why_not(gpus)) is not None:
        return Collective(gpus=count, unknown=why)
    if count < 2:
        return Collective(gpus=count, unknown=ONE_GPU)
    with TemporaryFile() as output, TemporaryFile() as errors:
        return _measure(count, environ, limit, output, errors)


class Meeting(Protocol):
    """Where the ranks of two nodes meet, and whether those of this one come ``first``."""

    @property
    def first(self) -> bool: ...
    @property
    def address(self) -> str: ...
    @property
    def port(self) -> int: ...


def measure_pair(
    ranks: int,
    environ: Mapping[str, str],
    meeting: Meeting,
    backend: str = "nccl",
    limit: timedelta = LIMIT,
) -> Collective:
    """Likewise, over ``ranks`` of this node and as many of another, which does the same: each has a
    GPU where the ``backend`` is ``nccl``, none where it is ``gloo``."""
    with TemporaryFile() as output, TemporaryFile() as errors:
        return _measure(ranks, environ, limit, output, errors, meeting, backend)


def _measure(
    count: int,
    environ: Mapping[str, str],
    limit: timedelta,
    output: IO[bytes],
    errors: IO[bytes],
    meeting: Meeting | None = None,
    backend: str = "nccl",
) -> Collective:
    started = _start(count, environ, output, errors, meeting, backend)
    whole = count if meeting is None else 2 * count
    code: int | None = None
    try:
        with suppress(subprocess.TimeoutExpired):
            code = started.wait(limit.total_seconds())
    finally:
        _end(started)
    printed, complaints = _text(output), _text(errors)
    lines = tuple(_LINE.findall(printed))[:_MOST_LINES]
    if meeting is not None and _MET not in complaints and code != 0:
        return Collective(gpus=whole, unknown="the other node's ranks did not come")
    if code is None:
        why = f"no end within {limit.total_seconds():.0f} s"
        return Collective(gpus=whole, problem=why, diagnostics=lines)
    if code in (_NO_GPUS, _NO_MEMORY) or "No module named 'torch" in complaints:
        return Collective(gpus=whole, unknown=_last(complaints), diagnostics=lines)
    if code != 0:
        why = _last(complaints) or f"a rank ended with {code}"
        return Collective(gpus=whole, problem=why, diagnostics=lines)
    with suppress(ValueError, KeyError, TypeError):
        found = json.loads(next(each for each in printed.splitlines() if each.startswith("{")))
        return Collective(
            gpus=whole,
            bytes=int(found["bytes"]),
            seconds=float(found["seconds"]),
            right=bool(found["right"]),
            diagnostics=lines,
        )
    return Collective(gpus=whole, unknown="its ranks have said nothing", diagnostics=lines)


def _start(
    count: int,
    environ: Mapping[str, str],
    output: IO[bytes],
    errors: IO[bytes],
    meeting: Meeting | None,
    backend: str,
) -> subprocess.Popen[bytes]:
    if meeting is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address, port = "127.0.0.1", free.getsockname()[1]
        size, before = count, 0
    else:
        address, port = meeting.address, meeting.port
        size, before = 2 * count, 0 if meeting.first else count
    place = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # what it says of a lost store is a consequence
    given = {"NCCL_RUN_DIAGNOSTICS": "1", **quiet, **environ, **place}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _PROBE, backend, str(os.getpid()), str(count), str(before)],
        env={**os.environ, **given},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        start_new_session=True,
    )


def _end(started: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # the driver holds it: the kernel reaps it later
        started.wait(_REAP_S)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(1 << 20).decode(errors="replace")


def _last(text: str) -> str:
    """What was complained of: the first exception, with the last line; else that alone."""
    stripped = (_RANK.sub("", line).strip() for line in text.splitlines())
    lines = [line for line in stripped if line]
    error = next((line for line in lines if _EXCEPTION.match(line)), "")
    last = lines[-1] if lines else ""
    said = f"{error[:_LONGEST]}; {last}" if error and error != last else last
    return said[: 2 * _LONGEST]
