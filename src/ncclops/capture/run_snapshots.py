"""Snapshots of all ranks of a run, requested from outside: by ``stacks``, and by the agent.

A rank that answers takes its own snapshot. For one that does not (its GIL is held, it is stopped,
it has ended) what can be read without it is recorded. Neither affects the other ranks.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from ncclops.capture.rank_snapshot import gpu_view
from ncclops.capture.signal_stacks import STACKS_NAME, StackDumper, dump_stacks
from ncclops.host import process_view
from ncclops.host_name import host_name
from ncclops.plain_text import plain_line
from ncclops.record import control_address, documents, snapshot_files, snapshot_server_record
from ncclops.record.documents import write_document, write_whole
from ncclops.record.paths import RunPaths
from ncclops.record.snapshot_server_record import SnapshotServerRecord
from ncclops.stacks.ownership import import_under_way, out_of_script, user_frame
from ncclops.stacks.parsing import main_thread, parse

DEFAULT_LIMIT = timedelta(seconds=5)
# Share of the limit after which a rank's stacks are taken without its help. A thread runs within
# milliseconds, on an overloaded machine within a second or two.
_PATIENCE = 0.5
_DUMP_WITHIN_S = 1.0
_PY_SPY_WITHIN_S = 20.0  # it reads the symbols of all of torch
_AT_ONCE = 32
_MOST_ANSWER_BYTES = 64 << 10
_MOST_CHARS = 400  # of what a rank answers
_REFUSED = b'{"ok": false, "reason": "refused (another user?)"}'
_NO_SERVER = "it has not started its snapshot server yet, or does not run Python under ncclops"

Native = Literal["all", "silent", "none"]


@dataclass(frozen=True)
class Collected:
    """What became of each rank: ``answered``, ``silent`` (seen without its help), or ``missing``.

    ``reasons`` says why the latter two did not answer.
    """

    directory: Path
    answered: tuple[int, ...]
    silent: tuple[int, ...]
    missing: tuple[int, ...]
    reasons: Mapping[int, str]


def collect_run(
    run: Path,
    ranks: Iterable[int],
    out: Path,
    limit: timedelta = DEFAULT_LIMIT,
    *,
    native: Native = "none",
) -> Collected:
    """Take snapshots of ``ranks`` (initial) of the run in ``run`` into ``out``/rank<r>/.

    Only processes of this machine can be asked; for others the reason says so. ``native`` stacks
    are read by py-spy, if it is installed, which halts the process for a second or so: of all
    ranks, of those that are silent anyway, or of none. Blocks for ``limit`` at most, up to 20 s
    longer where py-spy is at work. Any thread may call it.
    Raises ``OSError`` when ``out`` cannot be written.
    """
    wanted = list(ranks)
    out.mkdir(parents=True, exist_ok=True)
    limit_s = limit.total_seconds()

    def one(rank: int) -> str | None:
        return _collect(run, rank, out, limit_s, native)

    with ThreadPoolExecutor(max_workers=min(_AT_ONCE, len(wanted) or 1)) as pool:
        why = dict(zip(wanted, pool.map(one, wanted), strict=True))
    reasons = {rank: reason for rank, reason in why.items() if reason is not None}
    seen = {
        rank
        for rank in reasons
        if (snapshot_files.rank_dir(out, rank) / snapshot_files.STACKS).exists()
    }
    return Collected(
        directory=out,
        answered=tuple(rank for rank in wanted if rank not in reasons),
        silent=tuple(rank for rank in reasons if rank in seen),
        missing=tuple(rank for rank in reasons if rank not in seen),
        reasons=reasons,
    )


def is_running(server: SnapshotServerRecord) -> bool:
    """Whether the process on this machine has not ended; its number may be another one's by now."""
    try:
        if server.boot_id not in ("", process_view.boot_id()):
            return False
    except OSError:
        return False
    return process_view.is_same_process(server.pid, server.started_ticks)


def describe_place(run: Path, rank: int, limit: timedelta = DEFAULT_LIMIT) -> str:
    """Where a rank of this machine is in its script, as the end of a sentence: `` is at
    /home/me/train.py:12 in load``, or why that is not known. Blocks for ``limit`` at most.
    """
    with tempfile.TemporaryDirectory(prefix="ncclops-") as out:
        reason = _collect(run, rank, Path(out), limit.total_seconds(), "none")
        try:
            text = (snapshot_files.rank_dir(Path(out), rank) / snapshot_files.STACKS).read_text()
        except OSError:
            return f": {reason or 'it has written no stack'}"
    stack = main_thread(parse(text))
    frames = () if stack is None else stack.frames
    if waits := next(filter(None, map(out_of_script, frames)), None):
        return f" is {waits}"
    frame = user_frame(frames)
    if frame is None:
        return " is not in its script yet"
    imports = import_under_way(frames)
    return f" is at {frame}" + (f", in {imports}" if imports else "")


def _collect(run: Path, rank: int, out: Path, limit_s: float, native: Native) -> str | None:
    """One rank's snapshot; why it did not answer, None if it did."""
    directory = snapshot_files.rank_dir(out, rank)
    server = snapshot_server_record.read(RunPaths(run).rank(rank).snapshot_server)
    if server is None:
        return _left_out(directory, _NO_SERVER)
    if server.host != host_name():
        return _left_out(directory, f"it runs on {server.host}: ask there")
    if not is_running(server):
        return _left_out(directory, f"its process ({server.pid}) has ended", ended=True)
    view = _seen_from_outside(server)
    if _has_called_exec(server):
        write_document(
            directory / snapshot_files.PROCESS, view | {"other_program": view.get("name")}
        )
        return _left_out(directory, "another program runs in its process (exec)")
    write_document(directory / snapshot_files.PROCESS, view)
    reason = _ask(server, directory, limit_s * _PATIENCE)
    if reason is not None:
        _do_without(server, view, directory, reason)
    if native == "all" or (native == "silent" and reason is not None):
        _add_native_stacks(server.pid, directory, needed=native == "all")
    return reason


def _left_out(directory: Path, reason: str, *, ended: bool = False) -> str:
    lacking = [name for name in snapshot_files.COMPLETE if not (directory / name).exists()]
    snapshot_files.add_missing(directory, reason, lacking, ended=ended)
    return reason


def _has_called_exec(server: SnapshotServerRecord) -> bool:
    """Whether neither the server's thread is there nor its memory file: an exec takes both, the
    end of an interpreter its threads alone, and a script may close what it has not opened."""
    root = Path(f"/proc/{server.pid}")
    if not server.tid or not root.exists() or (root / "task" / str(server.tid)).exists():
        return False
    try:
        return STACKS_NAME not in str((root / "fd" / str(server.stacks_fd)).readlink())
    except FileNotFoundError:
        return True
    except OSError:  # it is another user's
        return False


def _seen_from_outside(server: SnapshotServerRecord) -> dict[str, Any]:
    stamp: dict[str, Any] = {"rank": server.rank, "host": server.host, "pid": server.pid}
    stamp |= {"taken_at": time.time(), "source": "outside"}
    return stamp | (process_view.view(server.pid) or {"state": None, "state_name": "gone"})


def _ask(server: SnapshotServerRecord, directory: Path, patience_s: float) -> str | None:
    """Have the snapshot server write; the reason if it did not."""
    request = json.dumps({"directory": str(directory.resolve())}).encode() + b"\n"
    deadline = time.monotonic() + patience_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(patience_s)
            connection.connect("\0" + server.address)
            if (user := control_address.user_of_peer(connection)) != os.geteuid():
                # It cannot write into a directory of ours, nor may we write into one of its own.
                return f"it is user {user}'s, and was looked at from outside: ask as that user"
            connection.sendall(request)
            answer = documents.parse(_line(connection, deadline) or _REFUSED)
    except TimeoutError:
        why = "the GIL is held, it is stopped, or it is ending"
        return f"no Python thread of it ran for {patience_s:g} s: {why}"
    except (OSError, ValueError) as error:
        return f"it cannot be asked from here ({plain_line(str(error), _MOST_CHARS)})"
    if not isinstance(answer, dict):
        answer = {}
    if answer.get("ok") is True:
        return None
    said = plain_line(str(answer.get("reason")), _MOST_CHARS)
    return f"it failed to take its snapshot: {said}"


def _line(connection: socket.socket, deadline: float) -> bytes:
    """What comes until a line ends, by ``deadline`` (monotonic): a script may answer in its place.

    Raises ``TimeoutError``, and ``OSError`` where it is too long.
    """
    line = b""
    while not line.endswith(b"\n"):
        if (left_s := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        if not (part := connection.recv(_MOST_ANSWER_BYTES)):
            break
        line += part
        if len(line) > _MOST_ANSWER_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return line


def _do_without(
    server: SnapshotServerRecord, view: dict[str, Any], directory: Path, reason: str
) -> None:
    stopped = view["state"] in ("T", "t")  # it would take the signal only when it goes on
    text = None if stopped else dump_stacks(_dumper_of(server), _DUMP_WITHIN_S)
    if text is not None:
        head = f"# rank {server.rank} on {server.host}, pid {server.pid}, by signal\n"
        snapshot_files.write_stacks(directory, head + text)
    stamp = {name: view[name] for name in ("rank", "host", "pid", "taken_at")}
    gpu = stamp | {"source": "nvml"} | gpu_view(server.device)
    write_document(directory / snapshot_files.GPU, gpu)
    have = {path.name for path in directory.iterdir()}
    snapshot_files.add_missing(directory, reason, sorted(set(snapshot_files.COMPLETE) - have))


def _dumper_of(server: SnapshotServerRecord) -> StackDumper:
    return StackDumper(server.pid, server.tid, server.signal, server.stacks_fd, server.main_thread)


def _add_native_stacks(pid: int, directory: Path, *, needed: bool) -> None:
    """py-spy's view with native frames. It halts the process while it looks."""
    py_spy = shutil.which("py-spy", path=_path_with_our_own())
    if py_spy is None:
        if needed:
            snapshot_files.add_missing(
                directory, "py-spy is not installed", [snapshot_files.NATIVE]
            )
        return
    try:
        done = subprocess.run(
            [py_spy, "dump", "--native", "--pid", str(pid)],
            capture_output=True,
            timeout=_PY_SPY_WITHIN_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        snapshot_files.add_missing(directory, f"py-spy failed: {error}", [snapshot_files.NATIVE])
        return
    if done.returncode == 0 and done.stdout:
        write_whole(directory / snapshot_files.NATIVE, done.stdout)
    else:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["it says nothing"]
        snapshot_files.add_missing(directory, f"py-spy failed: {said[0]}", [snapshot_files.NATIVE])


def _path_with_our_own() -> str:
    """Where commands are, and those installed beside this Python, activated or not."""
    import sys

    return os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
