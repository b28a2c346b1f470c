"""What each command may do on a damaged file: its answer, or one line and exit code 2.

As a program this runs commands for the tests, each in a process forked from one that has imported
them all. Its argument is the table of commands: ``DIRECTORY`` on a line of standard input, a JSON
list of complaints on one of its output.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import resource
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from tests.conftest import REPOSITORY, clean_environ

# With the exit codes of docs/contracts.md that say: the command did its work.
COMMANDS: dict[tuple[str, ...], tuple[int, ...]] = {
    ("status", "run"): (0,),
    ("runs", "run"): (0,),
    ("diagnose", "run"): (0,),
    ("incident", "run"): (0,),
    ("stacks", "run"): (0,),
    ("receipt", "check", "run"): (0, 1),
    ("receipt", "compare", "run", "run"): (0,),
    ("flight", "analyze", "run"): (0, 1),
    ("classify", "run"): (0,),
    ("report", "run", "-o", "page.html"): (0,),
    ("bundle", "run", "-o", "run.tar.gz"): (0,),
    ("env", "compare", "run", "here"): (0,),
}
# What people hand over, each in a file of its own.
HANDED_OVER: dict[tuple[str, ...], tuple[int, ...]] = {
    ("env", "lint", "job.sh"): (0, 1),
    ("env", "lint", "job.yaml"): (0, 1),
    ("env", "lint", "job.env"): (0, 1),
    ("env", "lint", "nccl.conf"): (0, 1),
    ("env", "lint", "Dockerfile"): (0, 1),
    ("env", "lint", "job.py"): (0, 1),
    ("profile", "show", "./site.toml"): (0,),
    ("profile", "validate", "./site.toml"): (0,),
    ("classify", "train.log"): (0,),
    ("classify", "--signatures", "signatures", "train.log"): (0,),
    ("receipt", "check", "train.log"): (0, 1),
    ("receipt", "check", "receipt.jsonl"): (0, 1),
    ("flight", "analyze", "flight_0.json"): (0, 1),
}
_TABLES = {"run": COMMANDS, "handed-over": HANDED_OVER}
_IMPORTED = (
    *("bundle", "capture", "classify", "cli", "control", "diagnose", "env", "flight", "goodput"),
    *("health", "host", "profiles", "receipts", "record", "redaction", "report", "stacks"),
    "status",
)
_LIMIT_S = 60
_MEMORY = 2 << 30
# A linted file of 300 kB may have 15,000 findings.
_MOST_OUTPUT = 4 << 20


class Commands:
    """Runs all commands of a table on a directory, which holds a ``run`` or what is handed over.

    Use as a context.
    """

    def __init__(self, table: str = "run") -> None:
        self._table = table

    def __enter__(self) -> Commands:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile.commands", self._table],
            cwd=REPOSITORY,
            env=clean_environ({"PYTHONHASHSEED": "0"}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def complaints(self, directory: Path) -> list[str]:
        """What they did wrong on ``directory``, a text each."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{directory}\n")
        self._process.stdin.flush()
        found: list[str] = json.loads(self._process.stdout.readline())
        return found

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()


def _complaint(arguments: tuple[str, ...], codes: tuple[int, ...], directory: Path) -> str | None:
    name = " ".join(arguments)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            _run(arguments, directory, out.fileno(), err.fileno())
        code = _exit_code(child)
        out_bytes = out.seek(0, os.SEEK_END)
        err.seek(0)
        said = err.read().decode(errors="replace")
    if code is None:
        return f"{name}: no answer within {_LIMIT_S} s"
    if "Traceback" in said or code not in (*codes, 2):
        return f"{name}: exit code {code}: {said[-3000:]}"
    if max(out_bytes, len(said)) > _MOST_OUTPUT:
        return f"{name}: {out_bytes} bytes on stdout, {len(said)} on stderr"
    errors = [line for line in said.splitlines() if line.startswith("ncclops: error: ")]
    if len(errors) != (code == 2):
        return f"{name}: exit code {code} with {said[:2000]!r}"
    return None


def _run(arguments: tuple[str, ...], directory: Path, out: int, err: int) -> NoReturn:
    from ncclops.cli import run

    code = 1
    try:
        os.setsid()
        os.chdir(directory)
        os.dup2(out, 1)
        os.dup2(err, 2)
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        sys.stdout = open(1, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
        code = run(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _exit_code(child: int) -> int | None:
    ended = os.pidfd_open(child)
    try:
        in_time, _, _ = select.select([ended], [], [], _LIMIT_S)
        if not in_time:
            os.killpg(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    finally:
        os.close(ended)
    return os.waitstatus_to_exitcode(status) if in_time else None


def _serve() -> None:
    # What commands import when they run, too: each process would, for most of its time.
    for name in _IMPORTED:
        package = importlib.import_module(f"ncclops.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    for line in sys.stdin:
        directory = Path(line.rstrip("\n"))
        table = _TABLES[sys.argv[1]].items()
        found = [_complaint(arguments, codes, directory) for arguments, codes in table]
        print(json.dumps([each for each in found if each is not None]), flush=True)


if __name__ == "__main__":
    _serve()
