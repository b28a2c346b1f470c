"""The run directory may be moved while the run goes on, whose processes write by its path.

A link in the old place leads them, and commands that are given that path, to the new one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from ncclops.exhausted import reason
from ncclops.record.tail import GrowthWatch


class MoveWatch:
    """Watches the run directory ``path`` in a thread, and those above it; ``say`` gets a line."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._links: dict[Path, Path] = {}  # ours, and where they lead
        self._directory = -1

    def start(self) -> None:
        """Watch from now on, as long as the process runs. Where that cannot be, nothing happens."""
        try:
            self._directory = os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            watch = GrowthWatch()
            for each in (self._path, *self._path.parents):
                if os.access(each, os.R_OK):  # the kernel would watch no other
                    watch.add(each, moves=True)
            follow = threading.Thread(target=self._run, args=(watch,), daemon=True)
            follow.name = "ncclops-moves"
            follow.start()
        except (OSError, RuntimeError):
            return

    def _run(self, watch: GrowthWatch) -> None:
        while True:
            watch.wait()
            try:
                self.look()
            except OSError as error:
                self._say(f"the run directory was moved, and cannot be followed: {reason(error)}")
                return

    def look(self) -> None:
        """Put a link in the old place if the directory has left it. Raises ``OSError``."""
        if self._is_at(self._path):
            return
        moved_to = Path(f"/proc/self/fd/{self._directory}").readlink()
        if not self._is_at(moved_to):
            return  # it was removed
        try:
            for link, target in self._links.items():
                if link.is_symlink() and link.readlink() == target and not link.exists():
                    link.unlink()  # it has been moved once more
            # The highest directory that was moved: others below it may be of the same job.
            place, target = self._path, moved_to
            while place.name == target.name and not os.path.lexists(place.parent):
                place, target = place.parent, target.parent
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(target)
        except OSError as error:
            self._say(
                f"the run directory was moved to {moved_to}, and {self._path} cannot be made a link"
                f" to it ({reason(error)}): what the run records from now on does not get there"
            )
            return
        self._links[place] = target
        self._say(
            f"the run directory was moved to {moved_to}: the run goes on by {self._path}, where a"
            " link leads to it from now on"
        )

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(self._directory), path.stat())
        except OSError:
            return False
