"""Each scripted hang: the right rank, the right kind, the right line of the user's script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from ncclops.flight import analyze
from ncclops.flight.report import FlightReport
from ncclops.record.snapshot_files import FLIGHT
from tests.flight.conftest import EXTENDED, JOBS

pytestmark = pytest.mark.slow

SCRIPT = (Path(__file__).parent / "hang_script.py").read_text().splitlines()
# Kind, culprits (None: the odd rank), and whether the culprit's own line can be known at all.
EXPECTED: dict[str, tuple[str, tuple[int, ...] | None, bool]] = {
    "sleeping": ("never-arrived", None, True),
    "two_sleeping": ("never-arrived", (1, 2), True),
    "other_shape": ("shape-mismatch", None, True),
    "larger_shape": ("shape-mismatch", None, True),
    "gather_shape": ("shape-mismatch", None, True),
    # Gloo ends the odd rank: what is left is how many bytes it had room for.
    "other_dtype": ("shape-mismatch", None, True),
    "larger_dtype": ("dtype-mismatch", None, True),
    "other_op": ("op-mismatch", None, True),
    "other_order": ("order-mismatch", None, True),
    "two_groups": ("cross-group-deadlock", None, True),
    "circle_of_pairs": ("cross-group-deadlock", (0, 1, 2, 3), True),
    "two_groups_again": ("cross-group-deadlock", None, True),
    "circle_of_pairs_again": ("cross-group-deadlock", (0, 1, 2, 3), True),
    "other_device": ("cross-group-deadlock", None, True),
    "sleeping_on_cpu": ("never-arrived", None, True),
    "killed_inside": ("rank-died", None, False),
    "holding_the_gil": ("never-arrived", None, True),
    "data_loader": ("never-arrived", None, True),
    "data_loader_workers": ("never-arrived", None, True),
    "missing_barrier": ("never-arrived", None, True),
    "monitored": ("never-arrived", None, True),
    "one_step_more": ("order-mismatch", None, True),
    "one_step_less": ("never-arrived", None, True),
    "raised_and_cleans_up": ("never-arrived", None, True),
    "subgroup_shape": ("shape-mismatch", None, True),
    "chain": ("never-arrived", (0,), True),
    "receives_nothing": ("never-arrived", None, True),
    "asynchronous": ("never-arrived", None, True),
    "merely_late": ("none", (), False),
    "healthy": ("none", (), False),
}
# Without stacks, what no rank recorded cannot be known: a rank that died or held its interpreter
# left nothing, and Gloo records no monitored barriers.
WITHOUT_STACKS = {
    "gloo": {
        "gather_shape": "rank-died",
        "other_dtype": "rank-died",
        "holding_the_gil": "rank-died",
        "monitored": "none",
    },
    # The killed rank had begun its collective, which ended; one that waits for a communicator to
    # come up has recorded nothing of it.
    "nccl": {
        "holding_the_gil": "rank-died",
        "killed_inside": "none",
        "chain": "none",
        "two_groups": "none",
        "circle_of_pairs": "none",
    },
    # torch's file is NCCL's recorder alone.
    "mixed": {"sleeping_on_cpu": "none", "other_device": "never-arrived"},
}
ON_ALL = [(lane, *job) for lane, jobs in JOBS.items() for job in jobs]
on_all = pytest.mark.parametrize(
    ("lane", "scenario", "world"),
    [pytest.param(*job, marks=pytest.mark.extended if job in EXTENDED else ()) for job in ON_ALL],
)


def line_of(scenario: str) -> int:
    """The line marked ``# HERE`` in the scenario's function, or for it."""
    begin = next(n for n, line in enumerate(SCRIPT) if line.startswith(f"def {scenario}("))
    marked = [n for n, line in enumerate(SCRIPT) if line.endswith(f"# HERE {scenario}")]
    marked += [n for n, line in enumerate(SCRIPT) if n > begin and line.endswith("# HERE")]
    return marked[0] + 1


def kind_of(scenario: str, lane: str) -> str:
    if (lane, scenario) == ("nccl", "other_dtype"):
        return "dtype-mismatch"  # the odd rank stays, as the others do
    return EXPECTED[scenario][0]


def check(report: FlightReport, scenario: str, world: int, kind: str) -> None:
    _, odd, _ = EXPECTED[scenario]
    expected = (world - 2,) if odd is None else odd
    verdict = report.to_json()["verdict"]
    assert verdict["kind"] == kind, verdict["sentence"]
    assert tuple(verdict["culprits"]) == (expected if kind != "none" else ()), verdict["sentence"]
    assert report.is_bad == (kind != "none")


@pytest.fixture
def jobs(request: pytest.FixtureRequest, lane: str) -> Path:
    """The directory of all jobs on ``lane``."""
    if lane == "gloo":
        return cast(Path, request.getfixturevalue("hangs"))
    return cast(Path, request.getfixturevalue("gpu_hangs")) / lane


@on_all
def test_an_incident_names_rank_kind_and_line(
    jobs: Path, lane: str, scenario: str, world: int
) -> None:
    """A run's incident, as collected in the worker: dumps, stacks, groups."""
    report = analyze(jobs / f"{scenario}-{world}")
    check(report, scenario, world, kind_of(scenario, lane))
    if EXPECTED[scenario][2]:
        frame = report.to_json()["verdict"]["frame"]
        assert frame is not None
        assert frame["file"].endswith("hang_script.py")
        assert frame["line"] == line_of(scenario), report.sentence


@on_all
def test_a_recorder_that_is_dumped_after_the_abort_shows_the_same(
    jobs: Path, lane: str, scenario: str, world: int
) -> None:
    """Its groups are gone by then, and what was pending has ended. NCCL's is dumped before."""
    early, late = (analyze(jobs / f"{scenario}-{world}" / where) for where in (".", "late"))
    check(late, scenario, world, kind_of(scenario, lane))
    assert late.sentence == early.sentence
    verdict = late.to_json()["verdict"]
    assert not EXPECTED[scenario][2] or verdict["frame"]["line"] == line_of(scenario)


@pytest.mark.parametrize("form", ["pickle", "json"])
@pytest.mark.parametrize(("lane", "scenario", "world"), [job for job in ON_ALL if job[2] == 4])
def test_bare_dumps_name_rank_and_kind(
    jobs: Path, lane: str, scenario: str, world: int, form: str
) -> None:
    """torch's own files alone: no stacks, and no record of which rank is in which group."""
    kind = WITHOUT_STACKS[lane].get(scenario, kind_of(scenario, lane))
    check(analyze(jobs / f"{scenario}-{world}" / form), scenario, world, kind)


def test_a_group_over_two_devices_is_named_with_the_backend(gpu_hangs: Path) -> None:
    """Which is all that the two sides differ in: each counts its own operations."""
    said = analyze(gpu_hangs / "mixed" / "other_device-4").sentence
    assert "of group default_pg (0-3) over nccl" in said
    assert "of group default_pg (0-3) over gloo" in said


def test_nccls_recorder_has_the_states_and_sizes_of_operations(gpu_hangs: Path) -> None:
    """Of two steps that all made, and of one in which rank 2 is missing."""
    folder = gpu_hangs / "nccl" / "sleeping-4" / "incidents" / "0"
    dumps = [json.loads((folder / f"rank{rank}" / FLIGHT).read_text()) for rank in (0, 2)]
    waiting, culprit = (dump["dump"]["entries"] for dump in dumps)
    step = [
        ("nccl:all_reduce", [[4]]),
        ("nccl:broadcast", [[16]]),
        ("nccl:all_reduce_barrier", [[1]]),
    ]
    assert [(e["profiling_name"], e["input_sizes"]) for e in waiting] == step * 3
    assert [e["state"] for e in waiting] == ["completed"] * 6 + ["scheduled"] * 3
    assert [e["retired"] for e in waiting] == [True] * 6 + [False] * 3
    assert [e["state"] for e in culprit] == ["completed"] * 6


def test_both_sides_have_the_users_frames(hangs: Path) -> None:
    """The waiting side says where it entered, the culprit where it is."""
    finding = analyze(hangs / "sleeping-4").findings[0]
    waiting, culprit = finding.sides
    assert (waiting.role, waiting.ranks) == ("waiting", (0, 1, 3))
    assert waiting.frame is not None and SCRIPT[waiting.frame.line - 1].endswith("# STEP")
    assert (culprit.role, culprit.ranks) == ("culprit", (2,))
    assert all("/torch/" not in frame.file for side in finding.sides for frame in side.frames)


def test_a_data_loader_is_called_one(hangs: Path) -> None:
    """Whether the dataset is read in the main process or in workers."""
    for scenario in ("data_loader", "data_loader_workers"):
        assert analyze(hangs / f"{scenario}-4").sentence.endswith("(its data loader)")


def test_a_deadlock_names_its_circle(hangs: Path) -> None:
    """Each rank of the circle waits for the next, through four groups."""
    finding = analyze(hangs / "circle_of_pairs-4").findings[0]
    assert finding.circle == (0, 1, 2, 3)
