"""A machine read with deadlines: no driver, disk or file can hold the process that asks.

Each stream of requests has a reader process (``reader``). A request that is not answered in time is
late: its process is killed and left behind, as one that waits inside a driver does not end, and
what is still to be asked is asked by processes of its own, side by side, so that a machine with
eight dead GPUs takes as long as one with a single one.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import msgspec

from ncclops.host.software import Software
from ncclops.preflight.machine.reader import READY, Answer, Request
from ncclops.preflight.readings import (
    Driver,
    Files,
    Gpu,
    Host,
    KernelLog,
    Name,
    Nic,
    Node,
    Space,
)

# nvidia-smi takes a second or two on a healthy node of eight GPUs without persistence mode; a GPU
# that has not answered after 15 s is given up by Primus' node_smoke as well.
LIMIT = timedelta(seconds=15)
WINDOW = timedelta(seconds=2)
# Of a GPU's throttling: what lasts this long is no moment.
_SAMPLES, _PAUSE_S = 3, 0.2
_MOST_GPUS = 64
# Until an interpreter runs, which on a loaded machine is no fault of a driver.
_START_S = 60.0
_KILL_S = 2.0

T = TypeVar("T")


class _Late(Exception):
    """The reader has not answered in time, or has ended."""


class _Process:
    """One reader process."""

    def __init__(self, root: Path, environ: Mapping[str, str]) -> None:
        module = "ncclops.preflight.machine.reader"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(root), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environ),
        )
        self._is_ready = False

    def ask(self, request: Request, limit_s: float) -> Answer:
        """The answer. Raises ``_Late``."""
        assert self._process.stdin is not None
        if not self._is_ready:
            self._is_ready = self._line(_START_S) == READY
        try:
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise _Late from error
        return msgspec.json.decode(self._line(limit_s), type=Answer)

    def _line(self, limit_s: float) -> bytes:
        assert self._process.stdout is not None
        end, received = time.monotonic() + limit_s, b""
        output = self._process.stdout.fileno()
        while not received.endswith(b"\n"):
            ready, _, _ = select.select([output], [], [], max(0.0, end - time.monotonic()))
            part = os.read(output, 1 << 20) if ready else b""
            if not part:
                raise _Late
            received += part
        return received

    def end(self) -> None:
        """End it; one that waits inside a driver is not waited for."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)


class Machine:
    """The machine below ``root``, for the length of a ``with`` block."""

    def __init__(self, root: Path, environ: Mapping[str, str], limit: timedelta = LIMIT) -> None:
        self._root, self._limit_s = root, limit.total_seconds()
        package = str(Path(__file__).parents[3])
        paths = [package, *filter(None, [environ.get("PYTHONPATH")])]
        self._environ = {**environ, "PYTHONPATH": os.pathsep.join(paths)}
        self.late: dict[str, float] = {}
        self.broken: dict[str, str] = {}

    def ask(self, requests: Sequence[Request]) -> list[Answer | None]:
        """The answers in the order of ``requests``; None for a part that is late or broken."""
        answers: list[Answer | None] = []
        process = _Process(self._root, self._environ)
        try:
            for request in requests:
                answers.append(self._one(process, request))
                if request.name in self.late:
                    break
        finally:
            process.end()
        left = requests[len(answers) :]
        if left:
            with ThreadPoolExecutor(len(left)) as threads:
                answers += threads.map(self._alone, left)
        return answers

    def _alone(self, request: Request) -> Answer | None:
        process = _Process(self._root, self._environ)
        try:
            return self._one(process, request)
        finally:
            process.end()

    def _one(self, process: _Process, request: Request) -> Answer | None:
        try:
            answer = process.ask(request, self._limit_s)
        except _Late:
            self.late[request.name] = self._limit_s
            return None
        if answer.error is not None:
            self.broken[request.name] = answer.error
            return None
        return answer


def read_node(
    root: Path,
    environ: Mapping[str, str],
    *,
    spaces: Sequence[str] = (),
    devices: Sequence[str] | None = None,
    gpus: bool = True,
    window: timedelta = WINDOW,
    limit: timedelta = LIMIT,
    gid_index: int | None = None,
) -> Node:
    """All that checks look at. Takes ``window`` and a second; at most some ``3 * limit``.

    ``environ`` is that of the reader processes. ``spaces`` are paths whose file systems matter.
    ``devices``: only these RDMA devices are asked. Starts threads and processes, all of which have
    ended when it returns, but for those that a driver holds.
    """
    machine = Machine(root, environ, limit)
    with ThreadPoolExecutor(5) as threads:
        host = threads.submit(_host, machine)
        installed = threads.submit(_software, machine) if root == Path("/") else None
        disks = threads.submit(_spaces, machine, spaces)
        graphics = threads.submit(_gpus, machine) if gpus else None
        nics = threads.submit(_nics, machine, devices, window.total_seconds(), gid_index)
        system, name, log = host.result()
        software, torch_cuda = (None, None) if installed is None else installed.result()
        driver, found = graphics.result() if graphics is not None else (Driver(), ())
        return Node(
            time=time.time(),
            host=system,
            name=name,
            log=log,
            driver=driver,
            gpus=found,
            nics=nics.result(),
            spaces=disks.result(),
            late=machine.late,
            broken=machine.broken,
            real=root == Path("/"),
            software=software,
            torch_cuda=torch_cuda,
        )


def _host(machine: Machine) -> tuple[Host, Name, KernelLog]:
    host, name, log = machine.ask([Request(kind="host"), Request(kind="name"), Request(kind="log")])
    return (
        _as(host, Host) or Host(),
        _as(name, Name) or Name(),
        _as(log, KernelLog) or KernelLog(),
    )


def _software(machine: Machine) -> tuple[Software | None, str | None]:
    (answer,) = machine.ask([Request(kind="software")])
    if answer is None:
        return None, None
    return msgspec.convert(answer.value["software"], Software), answer.value["cuda"]


def _spaces(machine: Machine, paths: Sequence[str]) -> tuple[Space, ...]:
    if not paths:
        return ()
    answers = machine.ask([Request(kind="space", argument=path) for path in paths])
    return tuple(space for each in answers if (space := _as(each, Space)) is not None)


def _gpus(machine: Machine) -> tuple[Driver, tuple[Gpu, ...]]:
    (first,) = machine.ask([Request(kind="driver")])
    driver = _as(first, Driver)
    if driver is None:
        return Driver(problem="NVML does not answer"), ()
    options = {"samples": _SAMPLES, "pause_s": _PAUSE_S}
    numbers = range(min(driver.count or 0, _MOST_GPUS))
    asked = [Request(kind="gpu", argument=str(number), options=options) for number in numbers]
    if not asked:
        return driver, ()
    found = [_as(answer, Gpu) for answer in machine.ask(asked)]
    return driver, tuple(gpu for gpu in found if gpu is not None)


def _nics(
    machine: Machine, wanted: Sequence[str] | None, window_s: float, gid_index: int | None
) -> tuple[Nic, ...]:
    (first,) = machine.ask([Request(kind="nics")])
    present = _as(first, list[str]) or []
    names = [name for name in present if wanted is None or name in wanted]
    if not names:
        return ()
    options = {} if gid_index is None else {"gid_index": float(gid_index)}
    details = machine.ask([Request(kind="nic", argument=name, options=options) for name in names])
    known = [name for name, answer in zip(names, details, strict=True) if answer is not None]
    counters = [Request(kind="counters", argument=name) for name in known]
    first_samples = machine.ask(counters) if known else []
    time.sleep(window_s)  # counters are rates only over time
    second_samples = machine.ask(counters) if known else []
    samples = {
        name: [each.value for each in pair if each is not None]
        for name, *pair in zip(known, first_samples, second_samples, strict=True)
    }
    found = []
    for name, answer in zip(names, details, strict=True):
        taken = samples.get(name, [])
        between = taken[1]["at"] - taken[0]["at"] if len(taken) == 2 else 0.0
        found.append(
            Nic(
                device=name,
                files=_as(answer, Files) or Files(),
                samples=tuple(msgspec.convert(each["files"], Files) for each in taken),
                window_s=between,
            )
        )
    return tuple(found)


def _as(answer: Answer | None, kind: type[T]) -> T | None:
    return None if answer is None else msgspec.convert(answer.value, kind)
