"""A rank's snapshot of itself: taken in memory at once, written when there is time.

Taking it is what has to happen before groups are aborted, and what a restart waits for. What an
abort does not change may be taken later: the flight recorder, where all groups are Gloo's. Reading
its dump and writing files is left for later in any case.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ncclops import flight_recorders
from ncclops.capture import flight_recorder, process_groups, python_stacks
from ncclops.host_name import host_name
from ncclops.record import snapshot_files
from ncclops.record.documents import write_document

# Of the recorders that are not the first to hold anything.
_FILES = {
    flight_recorders.SECOND_OF_NCCL: snapshot_files.FLIGHT_NCCL2,
    flight_recorders.GLOO: snapshot_files.FLIGHT_GLOO,
}
_LOGS = ("stdout.log", "stderr.log")
# A recorder with as little in it is dumped at once; that takes a millisecond or two.
_FEW_RECORDS = 200
# Of the ring, new operations that a later dump waits for at most: the newest of before stay in it.
_NEW_RECORDS = 0.25


@dataclass(frozen=True)
class Identity:
    """Which rank this process is (by its initial rank), and where its logs are, if anywhere."""

    rank: int
    rank_dir: Path | None
    host: str = field(default_factory=host_name)
    pid: int = field(default_factory=os.getpid)

    def stamp(self, at: float, source: str) -> dict[str, Any]:
        """What each file of a snapshot begins with; ``at`` is wall time in seconds."""
        return {
            "rank": self.rank,
            "host": self.host,
            "pid": self.pid,
            "taken_at": at,
            "source": source,
        }


class RankSnapshot:
    """What there is to be seen of this process at the moment; see :meth:`take`."""

    def __init__(self, who: Identity, since_ns: int) -> None:
        self.who = who
        self.at = time.time()
        self.left_by: BaseException | None = None  # what the main thread left the script with
        self.stacks = python_stacks.OwnStacks("")
        self.groups: list[dict[str, Any]] = []
        self.dumps: list[flight_recorder.RawDump] = []
        self.logs: dict[str, int] = {}
        self.gpu: dict[str, Any] | None = None
        self.failures: list[tuple[str, list[str]]] = []  # what could not be had: why, which files
        self._since_ns = since_ns
        self._mark: flight_recorder.RecorderMark | None = (
            None  # of a recorder that is still to be dumped
        )

    def take(self, limit_s: float) -> None:
        """Look at everything; what is not there after ``limit_s`` is reported as missing.

        The GPU may be read in another thread meanwhile (:meth:`read_gpu`).
        """
        self._look()
        self._dump_within(limit_s)

    def take_before_abort(self, limit_s: float) -> None:
        """As :meth:`take`, but for what can be had after an abort by :meth:`take_rest`."""
        self._look()
        self._mark = _mark_to_dump_later()
        if self._mark is None:
            self._dump_within(limit_s)

    def take_rest(self, limit_s: float) -> None:
        """What :meth:`take_before_abort` has left for later."""
        if self._mark is not None:
            self._dump_within(limit_s, self._mark)
            self._mark = None

    @property
    def is_urgent(self) -> bool:
        """Whether the rest has to be taken soon, as new operations push the old ones out."""
        if self._mark is None:
            return False
        now = _mark()
        most = self._mark.recorded + _NEW_RECORDS * flight_recorder.ring_size()
        return now is None or now.recorded > most

    def _look(self) -> None:
        self.stacks = python_stacks.render_own(left_by=self.left_by)
        self.groups = process_groups.groups()
        self.logs = _log_sizes(self.who.rank_dir)

    def _dump_within(
        self, limit_s: float, mark: flight_recorder.RecorderMark | None = None
    ) -> None:
        # In a thread: on a GPU the dump asks the driver about each operation.
        thread = threading.Thread(target=self._dump, args=(mark,), name="ncclops-dump", daemon=True)
        thread.start()
        thread.join(limit_s)
        if thread.is_alive():
            reason = f"the flight recorder did not answer within {limit_s:g} s"
            self.failures.append((reason, [snapshot_files.FLIGHT]))

    def _dump(self, mark: flight_recorder.RecorderMark | None) -> None:
        try:
            self.dumps = flight_recorder.dump(mark)
        except Exception as error:  # noqa: BLE001 - torch's, of whatever release
            reason = f"the flight recorder failed: {type(error).__name__}: {error}"
            self.failures.append((reason, [snapshot_files.FLIGHT]))

    def read_gpu(self) -> None:
        """Ask NVML about this rank's GPU."""
        self.gpu = gpu_view(os.environ)

    def write(self, directory: Path) -> None:
        """Write the files below ``directory``. Raises ``OSError`` on a disk that is full."""
        stamp = self.who.stamp
        text = f"# rank {self.who.rank} on {self.who.host}, pid {self.who.pid}\n{self.stacks.text}"
        snapshot_files.write_stacks(directory, text, self.stacks.left_by)
        self._write_dumps(directory)
        write_document(directory / snapshot_files.GROUPS, self.groups)
        if self.logs:
            write_document(directory / snapshot_files.LOGS, self.logs)
        if self.gpu is not None:
            write_document(directory / snapshot_files.GPU, stamp(self.at, "nvml") | self.gpu)
        for reason, files in self.failures:
            snapshot_files.add_missing(directory, reason, files)

    def _write_dumps(self, directory: Path) -> None:
        read = [(raw.recorder, raw.read(self._since_ns)) for raw in self.dumps]
        held = [(recorder, dump) for recorder, dump in read if dump["entries"]]
        for _, dump in held:
            process_groups.add_status(self.groups, dump)
        if not held:
            snapshot_files.add_missing(directory, _why_empty(read), [snapshot_files.FLIGHT])
        for n, (recorder, dump) in enumerate(held):
            name = _FILES[recorder] if n else snapshot_files.FLIGHT
            document = self.who.stamp(self.at, flight_recorder.SOURCES[recorder]) | {"dump": dump}
            write_document(directory / name, document, indent=None)  # it may be megabytes


def _mark_to_dump_later() -> flight_recorder.RecorderMark | None:
    """None where the recorder has to be dumped before an abort, or where that costs nothing."""
    mark = _mark() if process_groups.are_all_gloo() else None
    if mark is None or mark.recorded <= _FEW_RECORDS or mark.is_ambiguous:
        return None
    return mark


def _mark() -> flight_recorder.RecorderMark | None:
    """None where there is none to be had: then the dump says what is wrong."""
    try:
        return flight_recorder.mark()
    except Exception:  # noqa: BLE001 - torch's, of whatever release
        return None


def _why_empty(read: list[tuple[str, dict[str, Any]]]) -> str:
    if not read:
        return "no flight recorder: torch.distributed is not loaded, or its release has none"
    return (
        "the flight recorder is empty: no collective in this iteration, or the recorder is off "
        "(TORCH_FR_BUFFER_SIZE, up to torch 2.7 TORCH_NCCL_TRACE_BUFFER_SIZE)"
    )


def _log_sizes(rank_dir: Path | None) -> dict[str, int]:
    sizes = {}
    for name in _LOGS if rank_dir is not None else ():
        try:
            sizes[name] = (Path(rank_dir or "") / name).stat().st_size
        except OSError:
            continue
    return sizes


_DRIVER = Path("/dev/nvidiactl")


def prepare() -> None:
    """Import in advance what a snapshot needs: at a fault it would hold the interpreter's lock."""
    if _DRIVER.exists():  # spares a CPU job the imports
        for name in ("ncclops.host.gpu_readings", "pynvml"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def gpu_view(environ: Mapping[str, str]) -> dict[str, Any]:
    """What gpu.json holds of the GPU of the process with ``environ``."""
    if not _DRIVER.exists():
        return {"available": False, "reason": "no NVIDIA driver on this node"}
    from ncclops.host import gpu_readings

    device = gpu_readings.visible_device(int(environ.get("LOCAL_RANK", "0")), environ)
    if device is None:
        return {"available": False, "reason": "CUDA_VISIBLE_DEVICES leaves this rank no GPU"}
    health = gpu_readings.read_gpu(device)
    if not health.available:
        return {"available": False, "reason": f"NVML does not answer for GPU {device}"}
    return {"available": True, **health.to_json(), "complaints": health.complaints()}
