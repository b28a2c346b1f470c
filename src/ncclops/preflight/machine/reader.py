"""The process that reads a machine: one request a line, one answer a line, both JSON.

A driver that does not answer holds the thread that asks it, beyond the reach of signals; so this
is a process of its own, which its parent gives up when it is late. ``python -m`` this module ROOT.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from ncclops.host import prctl
from ncclops.host.gpus import Gpus
from ncclops.host.software import find_software, torch_constants
from ncclops.preflight.machine import gpu_reader, host_reader, kernel_log_reader, nic_reader

READY = b"ready\n"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the machine: ``kind`` names a method of ``Reader``, ``argument`` is what of it."""

    kind: str
    argument: str = ""
    options: Mapping[str, float] = {}

    @property
    def name(self) -> str:
        """What a part is called where it is late: ``gpu 3``, ``space /scratch``."""
        return f"{self.kind} {self.argument}".strip()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """``value`` as the reading's type in JSON, or ``error``: why it could not be read."""

    value: Any = None
    error: str | None = None


class Reader:
    """Answers requests about what is below ``root``."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def answer(self, request: Request) -> Answer:
        """What was read, or one line that says why nothing was."""
        try:
            return Answer(value=getattr(self, request.kind)(request))
        except Exception as error:  # noqa: BLE001 - the boundary of the process; reported
            return Answer(error=f"{type(error).__name__}: {error}")

    def host(self, _: Request) -> Any:
        """Limits, mounts, settings, processes."""
        return host_reader.read_host(self._root)

    def name(self, _: Request) -> Any:
        """The host's name and its addresses."""
        return host_reader.read_name(self._root)

    def space(self, request: Request) -> Any:
        """The file system of a path."""
        return host_reader.read_space(request.argument)

    def software(self, _: Request) -> Any:
        """What is installed, beside what NVML says; and the CUDA that torch was built for."""
        installed = find_software(Gpus(), os.environ, self._root)
        return {"software": installed, "cuda": torch_constants().get("cuda")}

    def log(self, _: Request) -> Any:
        """The kernel log."""
        return kernel_log_reader.read_log(self._root)

    def nics(self, _: Request) -> Any:
        """The names of the RDMA devices."""
        return nic_reader.devices(self._root)

    def nic(self, request: Request) -> Any:
        """One of them."""
        index = request.options.get("gid_index")
        return nic_reader.read_device(
            self._root, request.argument, None if index is None else int(index)
        )

    def counters(self, request: Request) -> Any:
        """Its counters, with the moment on the machine's own clock."""
        return {
            "at": time.monotonic(),
            "files": nic_reader.read_counters(self._root, request.argument),
        }

    def driver(self, _: Request) -> Any:
        """NVML as a whole."""
        return self._nvml.driver()

    def gpu(self, request: Request) -> Any:
        """One GPU."""
        return self._nvml.gpu(
            int(request.argument),
            int(request.options.get("samples", 1)),
            request.options.get("pause_s", 0.0),
        )

    @cached_property
    def _nvml(self) -> gpu_reader.Session:
        return gpu_reader.Session(self._root)


def main() -> None:
    """Answer until standard input closes."""
    root, parent = Path(sys.argv[1]), int(sys.argv[2])
    with suppress(OSError):
        prctl.die_with_parent(parent, signal.SIGKILL)
    answers = os.dup(1)
    os.dup2(2, 1)  # what a driver's library prints is no answer
    os.write(answers, READY)
    reader = Reader(root)
    for line in sys.stdin.buffer:
        answer = reader.answer(msgspec.json.decode(line, type=Request))
        left = memoryview(msgspec.json.encode(answer) + b"\n")
        while left:
            left = left[os.write(answers, left) :]


if __name__ == "__main__":
    main()
