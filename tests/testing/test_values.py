"""Faults, results and the names of functions, as values."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from typing import Any

import pytest

from ncclops.errors import UsageError
from ncclops.testing import CORE_PLACES, Fault, FaultKind, RankFailed, note, place
from ncclops.testing._target import Target
from ncclops.testing.results import JobResult, RankResult, Strike


@pytest.mark.parametrize(
    ("fault", "takes"),
    [
        (Fault.exception(1, "step"), set()),
        (Fault.exception(1, "finalize"), {1}),
        (Fault.hang(1, "abort"), set()),
        (Fault.hang(1, "restart_health_check"), {1}),
        (Fault.kill(1, "step"), {1}),
        (Fault.exit(1, "step"), {1}),
        (Fault.stop(1, "initialize"), {1}),
        (Fault.gil_hang(1, "step"), {1}),
        (Fault.lost_host(1, "step", ranks=[2, 3]), {1, 2, 3}),
        (Fault.lost_connection(1, "barrier"), set()),
        (Fault.cut_off(1, "step"), {1}),
    ],
    ids=str,
)
def test_a_fault_says_which_ranks_it_takes(fault: Fault, takes: set[int]) -> None:
    assert fault.takes == takes
    assert str(fault).startswith(f"{fault.kind} on rank 1 at ")


@pytest.mark.parametrize(
    ("values", "says"),
    [({"error": "boom"}, "error='boom' is no exception"), ({"error": OSError}, "is no exception")],
    ids=str,
)
def test_an_error_that_cannot_be_raised_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Fault.exception(0, "step", **values)


def test_a_duration_without_a_unit_is_refused() -> None:
    with pytest.raises(UsageError, match=r"duration=2: give a timedelta"):
        Fault.paused_store(0, "step", duration=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rank", "at", "n"), [(-1, "step", 1), (0, "", 1), (0, "step", 0)])
def test_a_fault_that_cannot_strike_is_refused(rank: int, at: str, n: int) -> None:
    with pytest.raises(UsageError, match="passings from 1"):
        Fault.kill(rank, at, n)


def test_faults_travel_to_ranks() -> None:
    fault = Fault.exception(0, "step", error=OSError(28, "disk full"))
    again = pickle.loads(pickle.dumps(fault))
    assert again.kind is FaultKind.EXCEPTION
    assert repr(again.error) == repr(fault.error)


def test_places_and_notes_do_nothing_outside_of_a_job() -> None:
    assert "initialize" in CORE_PLACES
    place("step")
    note("loss", value=1.0)


# --- results ----------------------------------------------------------------------------------


def rank(number: int, value: object = None, code: int = 0) -> RankResult:
    pickled = pickle.dumps(value) if value is not None else None
    return RankResult(number, code, Path(f"log-{number}"), pickled, error=None)


def job(*ranks: RankResult, strikes: tuple[Strike, ...] = ()) -> JobResult:
    return JobResult({each.rank: each for each in ranks}, strikes, ())


def test_the_value_is_what_all_ranks_returned_alike() -> None:
    result = job(rank(0, 7), rank(1, code=-9), rank(2, 7))
    assert (result.value, result.values) == (7, {0: 7, 2: 7})
    assert result.lost == {1}


def test_values_that_differ_are_no_value() -> None:
    with pytest.raises(RankFailed, match=r"different values: \{0: 7, 1: 8\}"):
        job(rank(0, 7), rank(1, 8)).value  # noqa: B018 - raises


def test_a_job_without_a_value_says_how_its_ranks_ended() -> None:
    with pytest.raises(RankFailed, match=r"rank 0: signal 9, rank 1: exit code 3"):
        job(rank(0, code=-9), rank(1, code=3)).value  # noqa: B018 - raises


def test_only_what_has_struck_counts_as_taken() -> None:
    struck = Strike(Fault.lost_host(1, "step", ranks=[2]), 0.0)
    assert job(rank(0, 1), rank(1, code=-9), strikes=(struck,)).taken == {1, 2}
    assert job(rank(0, 1)).taken == frozenset()


# --- functions by name ------------------------------------------------------------------------


def plain() -> str:
    return "plain"


def decorate(function: object) -> object:
    return functools.wraps(plain)(lambda: "renamed")


renamed = decorate(plain)


def test_a_function_is_found_by_its_name() -> None:
    target = Target.of(plain)
    assert (target.name, target.file) == ("plain", __file__)


def test_a_function_under_another_name_than_its_own_is_found_by_that() -> None:
    assert Target.of(renamed).name == "renamed"  # type: ignore[arg-type]


def test_a_local_function_is_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match="top level of a module"):
        Target.of(lambda: None)


def test_a_function_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "somewhere.py"
    path.write_text("class Place:\n    @staticmethod\n    def work(): return __name__\n")
    assert Target.of(f"{path}:Place.work").load()() == "somewhere"


@pytest.mark.parametrize("text", ["train", "train:", ":train", "no/such/file.py:train"])
def test_a_spelling_that_names_nothing_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"module:name|no file"):
        Target.of(text)
