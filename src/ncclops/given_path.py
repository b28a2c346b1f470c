"""A path that a caller of the Python API gives, whom no type checker may have seen."""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path
from reprlib import repr as short_repr

from ncclops.errors import UsageError


def given_path(given: str | PathLike[str], wanted: str) -> Path:
    """``given`` as a path. Raises ``UsageError``, which says what is ``wanted``, for all else."""
    path: object = fspath(given) if isinstance(given, PathLike) else given
    if not isinstance(path, str):
        raise UsageError(f"{short_repr(given)}: give the path of {wanted}")
    return Path(path)
