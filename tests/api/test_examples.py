"""The page of the Python API holds: its examples run and are well typed, wrong uses are refused."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from inspect import isclass, isfunction
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, clean_environ

PAGE = (REPOSITORY / "docs" / "api.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
WRONG = Path(__file__).parent / "typing_programs" / "wrong.py"
# With a cold cache mypy reads the whole package first.
LIMIT_S = 170

# What we promise: names that stay, with the meaning that docs/api.md gives them.
PROMISED = {
    "ncclops": ["__version__"],
    "ncclops.launch": [
        "LaunchRequest", "LaunchedRun", "Prepared", "RunVerdict", "launch", "prepare",
        "read_verdict", "start",
    ],
    "ncclops.env": [
        "Action", "Change", "Overrides", "Plan", "PlanContext", "compute_plan", "has_rdma",
        "installed_nccl", "installed_torch", "plan_environment",
    ],
    "ncclops.classify": [
        "Classification", "Evidence", "Report", "Scanner", "Signature", "SignatureSet", "Verdict",
        "classify", "classify_bytes", "classify_paths", "load_signatures",
    ],
    "ncclops.receipt": [
        "check", "compile_warmup", "end", "on_stop", "peak_memory", "phase", "step", "stop",
    ],
    "ncclops.diagnose": ["Diagnosis", "diagnose"],
    "ncclops.testing": [
        "CORE_PLACES", "DeadlineExceeded", "Fault", "FaultDidNotStrike", "FaultKind",
        "HarnessError", "InjectedFault", "Interpreter", "Job", "JobFactory", "JobResult",
        "LeftBehind", "Note", "RankFailed", "RankResult", "Strike", "note", "place",
    ],
    "ncclops.flight": ["Finding", "FlightFinding", "FlightReport", "Report", "analyze", "judge"],
}  # fmt: skip


@pytest.mark.parametrize("package", PROMISED)
def test_the_public_names_are_the_promised_ones(package: str) -> None:
    module = import_module(package)
    assert sorted(module.__all__) == sorted(PROMISED[package])
    for name in module.__all__:
        value = getattr(module, name)
        if isclass(value) or isfunction(value):
            assert value.__doc__, f"{package}.{name}"


@pytest.mark.slow
def test_every_example_of_the_page_runs(project: Path) -> None:
    assert len(EXAMPLES) == PAGE.count("```python")
    for example in EXAMPLES:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", example],
            cwd=project,
            env=clean_environ(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{example}\n{done.stdout}\n{done.stderr}"


def complaints(programs: list[Path]) -> set[tuple[str, int, str]]:
    """File, line and code of each of mypy's errors."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-warn-unreachable", *map(str, programs)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert not done.stderr, done.stderr
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    found = [re.search(r"(\w+)\.py:(\d+): error: .*\[([\w-]+)\]$", line) for line in errors]
    assert all(found), done.stdout
    return {(each[1], int(each[2]), each[3]) for each in found if each}


@pytest.mark.slow
@pytest.mark.extended
def test_a_type_checker_accepts_the_examples_and_refuses_wrong_uses(tmp_path: Path) -> None:
    right = [tmp_path / f"example_{number}.py" for number in range(len(EXAMPLES))]
    for path, example in zip(right, EXAMPLES, strict=True):
        path.write_text(example)
    expected = {
        ("wrong", number, code)
        for number, line in enumerate(WRONG.read_text().splitlines(), 1)
        if (mark := re.search(r"# E: (.+)$", line))
        for code in mark[1].split(", ")
    }
    assert complaints([*right, WRONG]) == expected


@pytest.mark.slow
@pytest.mark.extended
def test_the_callback_for_lightning_is_one_to_a_type_checker(tmp_path: Path) -> None:
    """Also where the same is installed under its older name, of which the classes are others."""
    for package in ("lightning/pytorch", "pytorch_lightning"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.pyi").write_text("class Callback: ...\n")
    (tmp_path / "lightning" / "__init__.pyi").touch()
    program = tmp_path / "program.py"
    program.write_text(
        "from lightning.pytorch import Callback\n"
        "from ncclops.integrations.lightning import ReceiptCallback\n"
        "callback: Callback = ReceiptCallback()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", "--cache-dir", tmp_path, program],
        cwd=tmp_path,
        env=clean_environ({"MYPYPATH": f"{REPOSITORY / 'src'}:{tmp_path}"}),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
