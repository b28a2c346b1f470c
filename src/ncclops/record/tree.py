"""What lies below a directory, however deep: ``os.walk`` and ``rglob`` of Python 3.11 recurse."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def walk(top: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Each directory below ``top``, itself first, with the names of its directories and the rest.

    Of the list of directories may be taken out, or sorted, what is gone to next. Links are not
    followed, they belong to the rest; what cannot be read is left out.
    """
    waiting = [str(top)]
    while waiting:
        folder = waiting.pop()
        folders: list[str] = []
        rest: list[str] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    (folders if entry.is_dir(follow_symlinks=False) else rest).append(entry.name)
        except OSError:
            continue
        yield Path(folder), folders, rest
        waiting += [f"{folder}/{name}" for name in reversed(folders)]
