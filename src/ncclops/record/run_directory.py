"""A run directory being written: made, claimed, and filled with events and documents."""

from __future__ import annotations

import errno
import os
import secrets
import sys
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec

from ncclops.errors import UsageError
from ncclops.exhausted import reason
from ncclops.record import answer, event_log, path_claim
from ncclops.record.events import Event, EventsLostEvent
from ncclops.record.line_writer import LineWriter
from ncclops.record.paths import DEFAULT_PARENT, VERDICT_FILE, RunPaths
from ncclops.record.run_record import RUN, RunRecord, is_of_another
from ncclops.record.verdict_record import VERDICT, VerdictRecord

_FLUSH_LIMIT_S = 5.0
_VERDICT_LIMIT_S = 10.0
# A verdict is some kB; with the evidence of long lines and thousands of ranks it is larger.
_RESERVED_BYTES = 1 << 20
_RESERVED_DESCRIPTORS = 2
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DirectoryTaken(UsageError):
    """``path`` holds a run already."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} already holds a run, and records are never overwritten:"
            " give --run-dir another path or remove it"
        )
        self.path = path


def _holds_records(paths: RunPaths) -> bool:
    """Whether there is something of a run whose events are gone; or somebody else has put it there,
    to have what a job prints appended to another file of its user."""
    logs = (paths.agent_log, paths.store_log, paths.fork_server_log)
    places = (paths.run, *logs, paths.ranks, paths.incidents)
    if any(each.is_symlink() or each.exists() for each in places):
        return True
    # A file in its place is only in the way: the run goes on without.
    return paths.control.is_symlink() or paths.control.is_dir()


class RunDirectory:
    """The files of one run. Create with :meth:`create`, which makes the directory."""

    def __init__(self, path: Path, run_id: str, node: str, reserve: int | None = None) -> None:
        self.path = path
        self.paths = RunPaths(path)
        self.run_id = run_id
        self.node = node
        self.verdict_problem: str | None = None
        self._reserve = reserve  # a descriptor
        self._spare = answer.Descriptors(_RESERVED_DESCRIPTORS)
        self._complained = False
        self._say: Callable[[str], None] = _say
        self._writer: LineWriter | None = None
        self._listeners: list[Callable[[Event], None]] = []
        if (claim := path_claim.claim(path)) is not None:
            weakref.finalize(self, os.close, claim)

    @classmethod
    def create(
        cls, *, exact: Path | None, parent: Path | None, node: str, several: bool = False
    ) -> RunDirectory:
        """Make ``exact``, or a fresh directory of its own below ``parent`` (default ``runs``).

        With ``several`` nodes, which may all be given the same directory of a shared file system,
        the first one to come takes it, and each of the others ``exact``/nodes/``node``.

        Raises ``UsageError`` when it cannot be made or written, or a run is under way there whose
        directory has gone, and ``DirectoryTaken`` where it already holds a run: of all that want
        the same one, the first gets it.
        """
        run_id = f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        wanted = exact if exact is not None else (parent or DEFAULT_PARENT) / run_id
        if any(each < " " for each in str(wanted)):  # it could not be shown as one line
            raise UsageError(
                f"the run directory {wanted} has a control character in its name: give another one"
                " with --run-dir or --log-dir"
            )
        try:
            _refuse_one_in_use(wanted)
            wanted.mkdir(parents=True, exist_ok=exact is not None)
            if several and not _claim(wanted, node):
                if RunPaths(wanted).verdict.exists():  # of a job before this one
                    raise DirectoryTaken(wanted)
                wanted = RunPaths(wanted).of_node(node)
                _refuse_one_in_use(wanted)
                wanted.mkdir(parents=True, exist_ok=True)
            paths = RunPaths(wanted.resolve())
            reserve = _reserve(paths.root)
            if _holds_records(paths):
                raise DirectoryTaken(wanted)
            try:
                paths.events.touch(exist_ok=False)
            except FileExistsError:
                raise DirectoryTaken(wanted) from None
            return cls(paths.root, run_id, node, reserve)
        except OSError as error:
            raise UsageError(
                f"cannot write the run directory {wanted} ({error.strerror}):"
                " give --run-dir a path that can be written"
            ) from error

    def shown(self, path: Path | None = None) -> str:
        """``path`` (default the directory) as a person would type it from here."""
        absolute = path or self.path
        try:
            return (
                os.path.relpath(absolute) if absolute.is_relative_to(Path.cwd()) else str(absolute)
            )
        except OSError:  # the current directory is gone
            return str(absolute)

    def write_in_background(self, say: Callable[[str], None]) -> None:
        """From now on :meth:`add` waits for no disk; ``say`` gets the line about a full one."""
        self._say = say
        self._writer = LineWriter(self.paths.events, partial(self._complain, self.paths.events))

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Have ``listener``, which must not raise, called with each event from now on.

        By who adds it, in any thread.
        """
        self._listeners.append(listener)

    def flush(self) -> None:
        """Wait until what was added is in the file, as long as a disk that works takes at most.

        Where events were lost, the next one that can be written counts them. A disk that is full is
        told as well where all events are there: what workers print is written by them.
        """
        self._tell_if_full()
        if self._writer is None or not self._writer.flush(_FLUSH_LIMIT_S):
            return
        lost, self._writer.dropped = self._writer.dropped, 0
        if lost:
            self.add(EventsLostEvent(count=lost))
            self._writer.flush(_FLUSH_LIMIT_S)
            if self._writer.dropped:
                self._writer.dropped = lost  # that event as well

    def _tell_if_full(self) -> None:
        with suppress(OSError):
            room = os.statvfs(self.path)
            if room.f_bavail == 0 < room.f_blocks:  # some file systems do not count
                self._complain(self.path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def add(self, event: Event) -> None:
        """Append ``event``, of now unless it has a time.

        A full disk ends the record and not the run; a message says so once.
        """
        for listener in self._listeners:
            listener(event)
        if self._writer is not None:
            self._writer.add(event_log.encode(event, self.node))
            return
        try:
            event_log.append(self.paths.events, event, self.node)
        except OSError as error:
            self._complain(self.paths.events, error)

    def _complain(self, path: Path, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            self._say(f"cannot write {self.shown(path)}: {reason(error)}")

    def write_run(self, record: RunRecord) -> None:
        """Write what is started, under this run's id. Raises ``OSError``."""
        RUN.write(self.paths.run, msgspec.structs.replace(record, run_id=self.run_id))

    def give_back(self) -> None:
        """Leave the directory to the next launch: what is started could not be written."""
        for path in (self.paths.run, self.paths.events):  # by its events it is taken
            with suppress(OSError):
                path.unlink()

    def write_verdict(self, verdict: VerdictRecord) -> None:
        """Write the verdict, or set ``verdict_problem`` to what is in the way.

        What was reserved for it is given back first: a disk that has become full takes it. One that
        hangs is waited for for ten seconds. A directory that has gone is made again: its path is
        claimed for as long as the run goes on, and schedulers read the verdict.
        """

        def write() -> None:
            if is_of_another(self.paths.run, self.run_id):
                raise OSError("another run has its directory by now")
            if self._reserve is not None:
                os.ftruncate(self._reserve, 0)  # the supervisor has it open as well
            try:
                VERDICT.write(self.paths.verdict, verdict)
            except OSError as error:
                if error.errno not in _FULL or self._reserve is None:
                    raise
                _name(self._reserve, self.paths.verdict, VERDICT.encode(verdict))

        self._spare.give()
        try:
            answer.within(_VERDICT_LIMIT_S, write)
        except OSError as error:
            self.verdict_problem = error.strerror or str(error)


def _refuse_one_in_use(wanted: Path) -> None:
    if not RunPaths(wanted).holds_run() and (pid := path_claim.holder(wanted)) is not None:
        raise UsageError(
            f"{wanted} is used by a run under way, launched as process {pid}, whose directory was"
            " removed or moved, and which goes on writing there: give --run-dir another path, or"
            f" end that run first (`kill {pid}`)"
        )


def _reserve(directory: Path) -> int:
    """Room for the verdict, in a file without a name, which goes with those who have it open.

    Raises ``OSError`` where there is no room.
    """
    fd = _open_nameless(directory)
    try:
        os.posix_fallocate(fd, 0, _RESERVED_BYTES)
    except OSError as error:  # a file system may not know how to
        if error.errno in _FULL:
            os.close(fd)
            raise
    return fd


def _name(fd: int, path: Path, data: bytes) -> None:
    """Make the nameless file a file with ``data`` at ``path``: no inode is left for another one."""
    os.pwrite(fd, data, 0)
    os.fchmod(fd, 0o644)
    draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:  # with a descriptor, because Python follows links with linkat(2) alone
        os.link(f"/proc/self/fd/{fd}", draft.name, dst_dir_fd=directory, follow_symlinks=True)
    finally:
        os.close(directory)
    draft.replace(path)


def _open_nameless(directory: Path) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    fd, name = tempfile.mkstemp(prefix=f".{VERDICT_FILE}.", dir=directory)
    Path(name).unlink()
    return fd


def _say(line: str) -> None:
    sys.stderr.write(f"ncclops: {line}\n")


def _claim(directory: Path, node: str) -> bool:
    """Whether ``directory`` is ours from now on, and not another node's.

    Raises ``DirectoryTaken`` where it holds a run on one node.
    """
    paths = RunPaths(directory)
    if paths.holds_run() and not paths.owner.exists():
        raise DirectoryTaken(directory)
    try:
        with RunPaths(directory).owner.open("x") as claim:
            claim.write(f"{node}\n")
    except FileExistsError:
        return False
    return True
