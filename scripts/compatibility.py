"""Run the core's tests under several versions of Python and torch; print the table of restart.md.

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
several days or machines make one table, which ``--table`` prints without running anything. Exits
with 1 if a test failed.
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
WITHOUT = "--ignore=tests/restart/test_typing.py"
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
    *("typer<0.29", "rich"),
    *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "hatchling"),
)
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?)")


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
    report = pytest(python, combination.tests)
    (directory / f"{name}.log").write_text(report)
    counts = dict.fromkeys(("passed", "failed", "error"), 0)
    for number, kind in _COUNT.findall(report.splitlines()[-1]) if report else ():
        counts[kind.removesuffix("s") if kind.startswith("error") else kind] = int(number)
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", report, re.MULTILINE)
    failed = counts["failed"] + counts["error"]
    if not counts["passed"] and not failed:
        return Row(version, torch, what, why=f"pytest said: {report.strip()[-200:]!r}")
    today = date.today().isoformat()
    return Row(version, torch, what, counts["passed"], failed, tuple(failures), at=today)


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
            return (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
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


def pytest(python: Path, tests: tuple[str, ...]) -> str:
    """What pytest prints."""
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2"]
    command += ["--dist", "loadfile", "--tb=short", WITHOUT, *tests]
    try:
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_WITHIN_S,
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout


def recorded(path: Path) -> list[Row]:
    """The newest row of each combination."""
    rows: dict[tuple[str, str, str], Row] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            fields = json.loads(line)
            row = Row(**{**fields, "failures": tuple(fields["failures"])})
            rows[row.python, row.torch, row.tests] = row
    return list(rows.values())


def outcome(row: Row) -> str:
    """In words."""
    if row.why:
        return f"not run: {row.why}"
    names = f" ({', '.join(row.failures)})" if row.failures else ""
    return f"{row.passed} pass" + (f", {row.failed} fail{names}" if row.failed else "")


def table(rows: list[Row]) -> str:
    """As docs/restart.md has it."""
    lines = ["| Python | torch | run | result |", "|---|---|---|---|"]
    lines += [f"| {row.python} | {row.torch} | {row.tests} | {outcome(row)} |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
