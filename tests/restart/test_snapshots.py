"""What is handed in to take snapshots of ranks: when it is called, and that it can do no harm."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import ncclops.restart

from .conftest import Job

# What the restart core may import of this package; everything else has to be handed in.
OWN = (
    "ncclops.flight_recorders",
    "ncclops.host.memory_cgroup",
    "ncclops.host.nvml",
    "ncclops.restart",
    "ncclops.versions",
)


def calls(job: Job, rank: int) -> list[dict[str, Any]]:
    return job.events("hook", rank)


@pytest.mark.parametrize("registered", [False, True], ids=["parameter", "registered"])
def test_a_hook_is_called_at_each_stage_of_an_iteration(job: Job, registered: bool) -> None:
    codes = job.start(2, "hooked", registered=registered).wait()
    assert codes == {0: 0, 1: 3}
    incident = str(job.directory / "incidents" / "0")
    healthy = {event["call"]: event for event in calls(job, 0)}
    order = ["made", "outside_view", "iteration_begins", "take"]
    assert [event["call"] for event in calls(job, 0)][:4] == order
    assert healthy["take"]["directory"] == incident
    assert healthy["take"]["thread"] == "ncclops-monitor"
    assert healthy["take"]["groups_are_there"], "nothing is aborted before the snapshot"
    assert healthy["record_lost"]["lost"] == 1
    assert healthy["record_lost"]["written"], "after incident.json"
    assert [event["call"] for event in calls(job, 0)][-1] == "close"
    left = {event["call"]: event for event in calls(job, 1)}
    assert left["function_left"]["error"] == "SystemExit"
    assert "record_lost" not in left
    assert left.keys() >= {"made", "take", "close"}


@pytest.mark.parametrize(
    "broken",
    ["made", "outside_view", "iteration_begins", "take", "function_left", "record_lost", "close"],
)
def test_a_broken_hook_does_not_keep_ranks_from_restarting(job: Job, broken: str) -> None:
    codes = job.start(2, "hooked", registered=False, raises=broken).wait()
    assert codes == {0: 0, 1: 3}
    assert (job.directory / "incidents" / "0" / "incident.json").exists()
    assert any(event["call"] == broken for event in calls(job, 0) + calls(job, 1))
    job.expect_no_orphans()


def test_the_restart_core_imports_nothing_else_of_this_package() -> None:
    folder = Path(ncclops.restart.__file__).parent
    found = {}
    for path in sorted(folder.rglob("*.py")):
        for name in imported(ast.parse(path.read_text()), path):
            if name.startswith("ncclops.") and not name.startswith(OWN):
                found[path.name] = name
    assert found == {}


def imported(tree: ast.AST, path: Path) -> list[str]:
    """The modules that a file names in its imports, those inside functions included."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names
