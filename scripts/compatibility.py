"""Run the core's tests under several versions of Python and torch; print the table of those.

The table is in docs/restart-versions.md.

    python scripts/compatibility.py [--python 3.12] [--torch 2.5.1] [--pair 3.12:2.14.1] ...
                                    [--faults] [--directory DIR] [--result FILE] [--table]

Each ``--python`` is combined with the torch of constraints.txt and runs all of tests/restart and
tests/testing; each ``--torch`` with the Python of this process and runs the drop-in and fault
tests; ``--pair`` runs all. With ``--faults`` all of them run the drop-in and fault tests. Without
any of them: Python 3.11 to 3.14, torch 2.5.1 and the newest.

A Python is found as ``python3.X`` on the PATH (``3.13t``: a free-threading build), or named by its
path. One that is not there, and a torch that the package index does not offer for it, make a row
"not run". For a free-threading build only what the core needs is installed, as not all other
dependencies offer wheels for one. An environment is made
once in ``--directory`` (by default below the temporary directory; several GB where torch is a CUDA
build) and used again. Results gather in ``--result``, a file of lines in JSON, so that runs on
several days or machines make one table, which ``--table`` prints without running anything. What
pytest prints is in ``DIR/NAME.log``, as it comes. Tests that fail are repeated, alone and one after
the other; the row says how many of them passed then. Exits with 1 if a test failed again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ALL = ("tests/restart", "tests/testing")
FAULTS = (
    "tests/restart/test_dropin.py",
    "tests/restart/test_dropin_api.py",
    "tests/restart/test_faults.py",
    "tests/restart/test_faults_places.py",
    "tests/restart/test_faults_interruption.py",
    "tests/restart/test_torch_internals.py",
    "tests/restart/test_torch_state.py",
)
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# mypy checks the package under the oldest Python alone
PARALLEL = ("-n", "2", "--dist", "loadfile", "--ignore=tests/restart/test_typing.py")
# A wheel of 1 GB and 3 GB of libraries over a slow line; and the whole of tests/restart.
INSTALLED_WITHIN_S = 3600
RUN_WITHIN_S = 3600
_VERSIONS = (
    "import platform, sysconfig, torch; "
    "build = 't' if sysconfig.get_config_var('Py_GIL_DISABLED') else ''; "
    "print(platform.python_version() + build, torch.__version__)"
)
# What ncclops.restart needs beside torch, what the command line of the tests' conftest needs, and
# the test runner.
_CORE = (
    *("psutil", "nvidia-ml-py", "numpy"),
    *("typer<0.29", "rich", "pydantic"),
    *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "hatchling", "editables"),
)
_FAILURE = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+(?:\[.*?\])?)(?= - |$)", re.MULTILINE)
# More failures than this have one cause: they are not repeated, and the table names the first.
_REPEATED = 20
_NAMED = 5


@dataclass(frozen=True)
class Combination:
    """What is run: a Python, by version or path, with a torch; ``None``: the newest."""

    python: str
    torch: str | None
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """What came of it. ``why`` is there where nothing was run."""

    python: str
    torch: str
    tests: str
    passed: int = 0
    failed: int = 0
    failures: tuple[str, ...] = ()
    repeated: int = 0  # how many of the passed ones did so only when repeated
    why: str = ""
    at: str = ""


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", action="append", default=[])
    parser.add_argument("--torch", action="append", default=[])
    parser.add_argument("--pair", action="append", default=[], metavar="PYTHON:TORCH")
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    directory = given.directory or Path(tempfile.gettempdir()) / "ncclops-compatibility"
    result = given.result or directory / "results.jsonl"
    rows: list[Row] = []
    if not given.table:
        for combination in combinations(given.python, given.torch, given.pair, given.faults):
            row = run(combination, directory)
            print(f"{row.python} {row.torch}: {outcome(row)}", file=sys.stderr, flush=True)
            rows.append(row)
            directory.mkdir(parents=True, exist_ok=True)
            with result.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    print(table(recorded(result)))
    sys.exit(any(row.failed for row in rows))


def combinations(
    pythons: list[str], torches: list[str], pairs: list[str], faults_only: bool
) -> list[Combination]:
    """What the options ask for."""
    if not (pythons or torches or pairs):
        pythons, torches = list(PYTHONS), ["2.5.1", "newest"]
    found = [Combination(python, pinned_torch(), ALL) for python in pythons]
    for pair in pairs:
        python, _, torch = pair.rpartition(":")
        found.append(Combination(python, None if torch == "newest" else torch, ALL))
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    for torch in torches:
        found.append(Combination(own, None if torch == "newest" else torch, FAULTS))
    return [replace(one, tests=FAULTS) for one in found] if faults_only else found


def pinned_torch() -> str:
    """The version in constraints.txt."""
    match = re.search(r"^torch==(\S+)", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    if match is None:
        raise SystemExit("compatibility: constraints.txt pins no torch (a line torch==VERSION)")
    return match[1]


def run(combination: Combination, directory: Path) -> Row:
    """Make the environment and run the tests in it."""
    what = "all" if combination.tests == ALL else "drop-in and faults"
    asked = (combination.python, combination.torch or "newest", what)
    interpreter = shutil.which(combination.python) or shutil.which(f"python{combination.python}")
    if interpreter is None or not works(interpreter):
        return Row(*asked, why=f"no python{combination.python} on the PATH")
    number = Path(combination.python).name.removeprefix("python")
    name = f"python{number}-torch{combination.torch or 'newest'}"
    python = directory / name / "bin" / "python"
    problem = install(interpreter, python, combination.torch)
    if problem is not None:
        return Row(*asked, why=problem)
    version, torch = output(python, _VERSIONS).split()
    log = directory / f"{name}.log"
    ran = pytest(python, (*PARALLEL, *combination.tests), log)
    if ran is None:
        return Row(version, torch, what, why=f"pytest did not come to its end, see {log}")
    passed, failures = ran
    again = pytest(python, failures, log) if 0 < len(failures) <= _REPEATED else None
    repeated, failures = again or (0, failures)
    today = date.today().isoformat()
    count = len(failures)
    return Row(version, torch, what, passed + repeated, count, failures, repeated, at=today)


def works(interpreter: str) -> bool:
    """A shim of a version manager is on the PATH whether its version is there or not."""
    return subprocess.run([interpreter, "-c", ""], capture_output=True).returncode == 0


def install(interpreter: str, python: Path, torch: str | None) -> str | None:
    """Make the environment of ``python`` unless it is there; what went wrong."""
    complete = python.parent.parent / "complete"
    if complete.exists():
        return None
    wanted = "torch" if torch is None else f"torch=={torch}"
    pip = [str(python), "-m", "pip", "install", "-q"]
    steps = [[interpreter, "-m", "venv", "--clear", str(python.parent.parent)]]
    if has_gil(interpreter):
        steps.append([*pip, wanted, "-e", f"{REPOSITORY}[dev]"])
    else:
        steps.append([*pip, "--only-binary=:all:", wanted, *_CORE])
        steps.append([*pip, "--no-deps", "--no-build-isolation", "-e", str(REPOSITORY)])
    for step in steps:
        try:
            done = subprocess.run(step, capture_output=True, text=True, timeout=INSTALLED_WITHIN_S)
        except subprocess.TimeoutExpired:
            return f"not installed within {INSTALLED_WITHIN_S} s"
        if done.returncode:
            errors = re.findall(r"\w*(?:Error|ERROR): .*", done.stderr)
            return errors[-1] if errors else f"pip said: {done.stderr.strip()[-200:]!r}"
    complete.touch()
    return None


def has_gil(interpreter: str) -> bool:
    """Whether it is the usual build."""
    code = "import sysconfig; print(sysconfig.get_config_var('Py_GIL_DISABLED') or 0)"
    return output(Path(interpreter), code) == "0"


def output(python: Path, code: str) -> str:
    """What ``code`` prints."""
    command = [str(python), "-W", "ignore", "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def pytest(python: Path, what: tuple[str, ...], log: Path) -> tuple[int, tuple[str, ...]] | None:
    """How many tests have passed, and those that have not; None if it did not come to its end.

    What it prints is added to ``log``.
    """
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *what]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    if not has_gil(str(python)):
        environ["PYTHON_GIL"] = "0"  # or an extension, such as triton, would turn it on
    with log.open("a+") as file:
        start = file.seek(0, os.SEEK_END)
        try:
            done = subprocess.run(
                command,
                cwd=REPOSITORY,
                env=environ,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=RUN_WITHIN_S,
            )
        except subprocess.TimeoutExpired:
            return None
        file.seek(start)
        report = file.read()
    if done.returncode not in (0, 1):  # all have run, and passed or not
        return None
    passed = re.search(r"(\d+) passed", report.splitlines()[-1])
    return int(passed[1]) if passed else 0, tuple(_FAILURE.findall(report))


def recorded(path: Path) -> list[Row]:
    """The newest row of each combination; those not run only where none of them has been."""
    rows: dict[tuple[str, str, str], Row] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            fields = json.loads(line)
            row = Row(**{**fields, "failures": tuple(fields["failures"])})
            rows[row.python, row.torch, row.tests] = row
    run = [row for row in rows.values() if not row.why]
    return sorted(
        (row for row in rows.values() if not row.why or not any(is_of(one, row) for one in run)),
        key=lambda row: (numbers(row.python), numbers(row.torch)),
    )


def is_of(row: Row, asked: Row) -> bool:
    """Whether ``row`` is the outcome of what ``asked`` was not run for."""
    torch_is = asked.torch in ("newest", row.torch.partition("+")[0])
    return torch_is and row.tests == asked.tests and row.python.startswith(asked.python)


def numbers(text: str) -> list[int]:
    """To sort by."""
    return [int(number) for number in re.findall(r"\d+", text)]


def outcome(row: Row) -> str:
    """In words."""
    if row.why:
        return f"not run: {row.why}"
    names = ", ".join(row.failures[:_NAMED]) + (", …" if len(row.failures) > _NAMED else "")
    repeated = f" ({row.repeated} when repeated alone)" if row.repeated else ""
    failed = f", {row.failed} fail ({names})" if row.failed else ""
    return f"{row.passed} pass{repeated}{failed}, {row.at}"


def table(rows: list[Row]) -> str:
    """As docs/restart-versions.md has it."""
    lines = ["| Python | torch | run | result |", "|---|---|---|---|"]
    lines += [f"| {row.python} | {row.torch} | {row.tests} | {outcome(row)} |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
