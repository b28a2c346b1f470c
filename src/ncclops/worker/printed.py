"""What this process has printed since its script was started last.

NCCL prints the warning that explains an error, and of the error's own text it is no part.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ncclops.classify import in_place
from ncclops.record.paths import RunPaths
from ncclops.record.regular_file import open_regular
from ncclops.record.variables import RUN_DIR
from ncclops.restart.raised import described

_MOST_BYTES = 8000


class Printed:
    """The output of this rank, which the agent has in files. Outside `launch` there is none."""

    def __init__(self) -> None:
        run_dir, rank = os.environ.get(RUN_DIR), os.environ.get("RANK", "")
        self._begins: dict[Path, int] = {}
        if run_dir is not None and rank.isdecimal():
            paths = RunPaths(Path(run_dir)).rank(int(rank))
            self._begins = dict.fromkeys((paths.stdout_log, paths.stderr_log), 0)

    def begin(self) -> None:
        """The script starts (again): what was printed before does not count."""
        for path in self._begins:
            self._begins[path] = 0
            with suppress(OSError):  # it is not there, or its file system has failed
                self._begins[path] = path.stat().st_size

    def explain(self, error: Exception | SystemExit) -> None:
        """Add the printed line to ``error`` that shows that it is final, if only that shows it."""
        text = "".join(described(error).format())
        found = in_place.judge(text)
        if found.is_final or (found.is_script_s and isinstance(error, Exception)):
            return  # a script that ends itself may have printed why
        known = in_place.judge(text, self._read())
        if known.is_final:
            with suppress(Exception):  # a class of a library's may refuse it
                error.add_note(known.proof)

    def _read(self) -> str:
        return "\n".join(_tail(path, begin) for path, begin in self._begins.items())


def _tail(path: Path, begin: int) -> str:
    try:
        with open_regular(path) as file:
            file.seek(max(begin, path.stat().st_size - _MOST_BYTES // 2))
            return file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
