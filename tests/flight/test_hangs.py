"""Each scripted hang: the right rank, the right kind, the right line of the user's script."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclops.flight import analyze
from ncclops.flight.report import FlightReport
from tests.flight.conftest import JOBS

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
    "gather_shape": "rank-died",
    "other_dtype": "rank-died",
    "holding_the_gil": "rank-died",
    "monitored": "none",
}


def line_of(scenario: str) -> int:
    """The line marked ``# HERE`` in the scenario's function, or for it."""
    begin = next(n for n, line in enumerate(SCRIPT) if line.startswith(f"def {scenario}("))
    marked = [n for n, line in enumerate(SCRIPT) if line.endswith(f"# HERE {scenario}")]
    marked += [n for n, line in enumerate(SCRIPT) if n > begin and line.endswith("# HERE")]
    return marked[0] + 1


def check(report: FlightReport, scenario: str, world: int, kind: str) -> None:
    _, odd, _ = EXPECTED[scenario]
    expected = (world - 2,) if odd is None else odd
    verdict = report.to_json()["verdict"]
    assert verdict["kind"] == kind, verdict["sentence"]
    assert tuple(verdict["culprits"]) == (expected if kind != "none" else ()), verdict["sentence"]
    assert report.is_bad == (kind != "none")


@pytest.mark.parametrize(("scenario", "world"), JOBS)
def test_an_incident_names_rank_kind_and_line(hangs: Path, scenario: str, world: int) -> None:
    """A run's incident, as collected in the worker: dumps, stacks, groups."""
    report = analyze(hangs / f"{scenario}-{world}")
    kind, _, knows_line = EXPECTED[scenario]
    check(report, scenario, world, kind)
    if knows_line:
        frame = report.to_json()["verdict"]["frame"]
        assert frame is not None
        assert frame["file"].endswith("hang_script.py")
        assert frame["line"] == line_of(scenario), report.sentence


@pytest.mark.parametrize(("scenario", "world"), JOBS)
def test_a_recorder_that_is_dumped_after_the_abort_shows_the_same(
    hangs: Path, scenario: str, world: int
) -> None:
    """Its groups are gone by then, and what was pending has ended."""
    kind, _, knows_line = EXPECTED[scenario]
    early, late = (analyze(hangs / f"{scenario}-{world}" / where) for where in (".", "late"))
    check(late, scenario, world, kind)
    assert late.sentence == early.sentence
    verdict = late.to_json()["verdict"]
    assert not knows_line or verdict["frame"]["line"] == line_of(scenario)


@pytest.mark.parametrize("form", ["pickle", "json"])
@pytest.mark.parametrize(("scenario", "world"), [job for job in JOBS if job[1] == 4])
def test_bare_dumps_name_rank_and_kind(hangs: Path, scenario: str, world: int, form: str) -> None:
    """torch's own files alone: no stacks, and no record of which rank is in which group."""
    kind = WITHOUT_STACKS.get(scenario, EXPECTED[scenario][0])
    check(analyze(hangs / f"{scenario}-{world}" / form), scenario, world, kind)


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
