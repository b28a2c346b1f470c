"""The Python that ranks run: the one of pytest, or that of another environment."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Of these the other environment has its own.
_INSTALLED = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True)
class Interpreter:
    """A Python to run ranks with, for instance one whose torch is another build.

    ``executable`` is the interpreter of an environment, with the same release of Python as this
    process and with what ``ncclops`` needs. ``environment`` is set in each rank and in what it
    starts; ``env=`` of a job goes before it.
    """

    executable: Path = field(default_factory=lambda: Path(sys.executable))
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_this_one(self) -> bool:
        """Whether it is the interpreter of this process."""
        return self.executable == Path(sys.executable)

    def path(self, path: Sequence[str]) -> list[str]:
        """What of ``path``, this process's places of modules, ranks look through.

        For another interpreter: programs under test, but neither installed packages nor Python's
        own modules, of which it has its own.
        """
        if self.is_this_one:
            return list(path)
        library = Path(sysconfig.get_path("stdlib"))
        return [
            place
            for place in path
            if not _INSTALLED & set(Path(place).parts)
            and not Path(place).is_relative_to(library)
            and Path(place).suffix != ".zip"
        ]
