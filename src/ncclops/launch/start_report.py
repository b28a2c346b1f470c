"""How a launcher reports to the program that started it: one line of JSON through a pipe.

The launcher is a separate process: it reports which run has begun, or the error why none has. If
the pipe closes without a line, the launcher died before that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncclops import errors

# The descriptor of the pipe. Taken out of the environment when it is read: no worker has it.
VARIABLE = "NCCLOPS_START_REPORT_FD"

_ERRORS: dict[str, type[errors.NcclopsError]] = {
    each.__name__: each
    for each in (
        errors.NcclopsError,
        errors.UsageError,
        errors.ProfileError,
        errors.PreflightRefused,
    )
}


@dataclass
class StartReport:
    """The launcher's end of the pipe; without one (None) nothing is reported."""

    fd: int | None

    def began(self, run_dir: Path) -> None:
        """The run is recorded in ``run_dir``; its agent is about to start."""
        self._write({"run_dir": str(run_dir)})

    def refused(self, error: errors.NcclopsError) -> None:
        """There is no run, because of ``error``."""
        kind = next(each.__name__ for each in type(error).__mro__ if each.__name__ in _ERRORS)
        self._write({"error": kind, "lines": list(error.lines)})

    def _write(self, document: dict[str, Any]) -> None:
        if self.fd is None:
            return
        fd, self.fd = self.fd, None
        try:
            os.write(fd, json.dumps(document).encode() + b"\n")
        except BrokenPipeError:
            return  # the program that asked has ended; the run goes on without it
        finally:
            os.close(fd)  # before the agent is forked: it would keep the pipe open


@contextmanager
def reporting(environ: MutableMapping[str, str]) -> Iterator[StartReport]:
    """Report errors of the block as ``refused``, where ``environ`` says that a program listens."""
    text = environ.pop(VARIABLE, "")
    report = StartReport(int(text) if text.isdecimal() else None)
    try:
        yield report
    except errors.NcclopsError as error:
        report.refused(error)
        raise


def read_report(line: bytes) -> Path:
    """The run directory of a report. Raises the error that it has instead."""
    document = json.loads(line)
    if "run_dir" in document:
        return Path(document["run_dir"])
    raise _ERRORS[document["error"]](*document["lines"])
