"""A host with fake GPUs, as a test sees it: what it sets, and what it reads."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.fakegpu.place import Place

# Before torch's watchdog ends a process it waits for a dump, and looks up the symbols of its stack
# in a library of 460 MB.
QUICK = {
    "TORCH_DISABLE_ADDR2LINE": "1",
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
}


@dataclass(frozen=True)
class Event:
    """A line of the log. ``fields`` are the texts behind ``name=``."""

    rank: int
    pid: int
    name: str
    fields: dict[str, str]


class Host:
    """The GPUs that the processes of a test see.

    ``environment`` makes a process use them, be it a rank of a job or a command line. ``set`` says
    which faults there are from now on and in what state the GPUs are, in the lines of README.md.
    """

    def __init__(self, place: Place, directory: Path, meeting: Path) -> None:
        self._control = directory / "fakegpu-control"
        self._log = directory / "fakegpu-log"
        self.environment = {
            "LD_LIBRARY_PATH": str(place.libraries),
            "FAKEGPU_CONTROL": str(self._control),
            "FAKEGPU_LOG": str(self._log),
            "FAKEGPU_MEETING": str(meeting),
        }

    def set(self, *lines: str) -> None:
        """Replace all faults and states; without ``lines``, all is well again."""
        # A file with the same size may be written twice within one tick of the file system's clock;
        # a new file has another number.
        with tempfile.NamedTemporaryFile(
            "w", dir=self._control.parent, prefix="control-", delete=False
        ) as draft:
            draft.write("".join(f"{line}\n" for line in lines))
        Path(draft.name).replace(self._control)

    def events(self, name: str, rank: int | None = None) -> list[Event]:
        """What has been logged under ``name``, by ``rank``."""
        if not self._log.exists():
            return []
        events = [_event(line) for line in self._log.read_text().splitlines()]
        return [e for e in events if e.name == name and rank in (None, e.rank)]

    def wait_for(self, name: str, count: int = 1) -> list[Event]:
        """Until ``count`` events have been logged under ``name``."""
        until(lambda: len(self.events(name)) >= count, f"{count} events {name!r}")
        return self.events(name)


@contextmanager
def fake_host(place: Place, directory: Path) -> Iterator[Host]:
    """A host whose files are in ``directory``."""
    # In memory, as NCCL's own shared memory is.
    meeting = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="fakegpu-"))
    try:
        yield Host(place, directory, meeting)
    finally:
        shutil.rmtree(meeting)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for ``condition``; fails after a minute."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, f"{what}: not within a minute"
        time.sleep(0.01)


def _event(line: str) -> Event:
    fields = dict(re.findall(r"([\w-]+)=(\S*)", line))
    name = line.split()[3]
    return Event(int(fields.pop("rank")), int(fields.pop("pid")), name, fields)
