"""The standard streams of a worker, which are files of the run: a full disk ends no training.

With a terminal or a pipe, as other launchers have them, printing would not fail. So a line that the
disk does not take is lost, like those that C code prints.
"""

from __future__ import annotations

import errno
import io
import sys
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_FAILED = (errno.EIO, errno.ESTALE, errno.ENOTCONN)  # the last two: a server's, or its client's


class _LogFile(io.FileIO):
    def write(self, data: Any) -> int:
        """See ``FileIO.write``; what a full or broken disk does not take counts as written."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _FULL + _FAILED:
                raise
            return memoryview(data).nbytes


def keep_printing() -> None:
    """Replace ``sys.stdout`` and ``sys.stderr`` by streams on the same files that do not fail so.

    Written at once, as with ``python -u``. Only before anything else holds the present ones.
    """
    for name in ("stdout", "stderr"):
        before = getattr(sys, name)
        file = _LogFile(before.fileno(), "w", closefd=False)
        file.name = before.name
        stream = io.TextIOWrapper(
            file,  # unbuffered, as Python's own with -u
            encoding=before.encoding,
            errors=before.errors,
            write_through=True,
        )
        vars(stream)["mode"] = before.mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
