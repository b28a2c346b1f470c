"""A directory deeper than Python recurses, and than a path may be long."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def deep_tree(top: Path, depth: int, *, log: bytes = b"") -> Iterator[Path]:
    """``depth`` directories in each other below ``top``; the last one holds ``log`` as ``x.log``.

    Taken away at the end: pytest, too, would recurse.
    """
    top.mkdir()
    try:
        folder = os.open(top, os.O_RDONLY)
        for _ in range(depth):
            os.mkdir("a", dir_fd=folder)
            inner = os.open("a", os.O_RDONLY, dir_fd=folder)
            os.close(folder)
            folder = inner
        with open(
            "x.log", "wb", opener=lambda name, flags: os.open(name, flags, dir_fd=folder)
        ) as f:
            f.write(log)
        os.close(folder)
        yield top
    finally:
        while (below := top / "a" / "a").exists():
            below.rename(top / "b")
            (top / "a").rmdir()
            (top / "b").rename(top / "a")
