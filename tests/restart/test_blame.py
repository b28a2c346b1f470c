"""An incident names the rank that began it, not the one on which it showed first."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path
from typing import Any

import pytest

from ncclops.restart._endings import judge_exit
from ncclops.restart._interrupt.handled import is_handled
from ncclops.restart.attribution import (
    ExceededTimeout,
    Fault,
    FaultKind,
    find_cause,
    with_hidden_cause,
)
from ncclops.restart.exception import RankShouldRestart

from .conftest import Job, lanes, lanes_with
from .test_faults import causes


@pytest.mark.slow
@lanes("nccl", extended=("gloo",))
@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("skips a step", "returned-early"),
        ("skips a step and keeps its groups", "returned-early"),
        ("cleans up", "exception"),
        ("sleeps", "soft-timeout"),
        ("waits for a lock", "soft-timeout"),
        ("holds the GIL", "soft-timeout"),
        ("stops pinging", "soft-timeout"),
    ],
)
def test_the_rank_that_began_is_the_cause(job: Job, how: str, cause: str) -> None:
    assert set(job.start(3, "blame_programs:beginning", how=how).wait().values()) == {0}
    assert causes(job) == {(cause, 1)}
    job.expect_no_orphans()


@pytest.mark.slow
@lanes_with("how", ["a message", "the end of its groups"], ["nccl", "mixed"])
def test_a_rank_whose_gpu_waits_is_not_the_cause(job: Job, how: str) -> None:
    assert set(job.start(3, "blame_programs:waiting_on_the_device", how=how).wait().values()) == {0}
    assert causes(job) == {("soft-timeout", 1)}


@pytest.mark.slow
@pytest.mark.parametrize("fails", [True, False], ids=["late", "by another rank"])
def test_a_rank_that_waited_is_not_the_cause_when_its_timeout_is_recorded(
    job: Job, fails: bool
) -> None:
    """Late, when it waits no more; by another rank, which does not see that it waits."""
    assert set(job.start(3, "blame_programs:reporting_late", fails=fails).wait().values()) == {0}
    assert causes(job) == {("returned-early", 1)}


def test_a_rank_that_polls_is_not_faulty(job: Job) -> None:
    assert set(job.start(2, "blame_programs:polling").wait().values()) == {0}
    assert {tuple(e["faulty_ranks"]) for e in job.events("incident")} == {(1,)}


@pytest.mark.slow
def test_what_a_rank_has_outlived_is_not_what_ends_it_later(job: Job) -> None:
    assert job.start(2, "blame_programs:outliving").wait() == {0: 0, 1: -9}
    job.wait_for("terminated", rank=1)
    (last,) = [e for e in job.events("incident", rank=0) if e["iteration"] == 1]
    assert (last["cause"], last["first_faulty_rank"]) == ("died", 1)
    assert last["timeout"] is None
    assert "timeout" not in last["summary"]


def landing_in(place: str) -> BaseException:
    """An interruption that comes while a ValueError is dealt with, or passes through."""
    try:
        try:
            if place == "finally":
                try:
                    raise ValueError("own")
                finally:
                    raise RankShouldRestart
            elif place == "except that raises":
                try:
                    raise ValueError("own")
                except ValueError:
                    if place:
                        raise RankShouldRestart  # noqa: B904 - as it comes, from outside
                    raise
            elif place == "finally in except":
                try:
                    raise ValueError("own")
                except ValueError:
                    try:
                        pass
                    finally:
                        interrupt()
            else:
                try:
                    raise ValueError("own")
                except ValueError:
                    interrupt()
        except KeyError:
            pass
    except BaseException as error:  # noqa: BLE001 - whatever it was
        return error
    raise AssertionError


def interrupt() -> None:
    raise RankShouldRestart


@pytest.mark.parametrize("interrupted", [True, False])
def test_what_clean_up_raises_on_top_of_an_interruption_does_not_hide_what_the_rank_raised(
    *, interrupted: bool
) -> None:
    """Such as a signal handler that raises again: what is on top comes from the restart."""
    try:
        try:
            raise landing_in("finally")
        finally:
            raise RuntimeError("clean-up failed")
    except RuntimeError as error:
        judged, kind = judge_exit(error, interrupted)
    assert kind is FaultKind.EXCEPTION
    assert str(judged) == ("own" if interrupted else "clean-up failed")


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("except", None),
        ("finally", FaultKind.EXCEPTION),
        ("except that raises", FaultKind.EXCEPTION),
        ("finally in except", FaultKind.EXCEPTION),
    ],
)
def test_where_an_interruption_lands_says_whether_the_rank_failed(
    place: str, kind: FaultKind | None
) -> None:
    assert judge_exit(landing_in(place), interrupted=True)[1] is kind


RETRY = """
for last in (False,):
    try:
        raise ValueError("own")
    except ValueError as error:
"""


@pytest.mark.parametrize(
    ("clause", "kind"),
    [
        ("interrupt()", None),
        ("if last:\n raise\ninterrupt()", None),
        ("with open('/dev/null'):\n interrupt()", None),
        ("if not last:\n interrupt()\n continue\nraise", None),
        ("interrupt()\nraise", FaultKind.EXCEPTION),
        ("if not last:\n interrupt()\n raise", FaultKind.EXCEPTION),
        ("for _ in 'a':\n interrupt()\n break\nraise error", FaultKind.EXCEPTION),
        ("if interrupt():\n raise\nelse:\n raise error", FaultKind.EXCEPTION),
    ],
)
def test_an_exception_is_dealt_with_unless_it_is_raised_again(
    clause: str, kind: FaultKind | None, tmp_path: Path
) -> None:
    """As far as can be seen from where the interruption lands."""
    program = tmp_path / "retry.py"
    program.write_text(RETRY + textwrap.indent(clause, "        "))
    with pytest.raises(RankShouldRestart) as caught:
        exec(compile(program.read_text(), program, "exec"), {"interrupt": interrupt})
    assert judge_exit(caught.value, interrupted=True)[1] is kind


def test_an_exception_whose_source_is_unknown_counts_as_the_ranks_own() -> None:
    space: dict[str, object] = {"RankShouldRestart": RankShouldRestart}
    program = "try:\n raise ValueError\nexcept ValueError:\n raise RankShouldRestart"
    with pytest.raises(RankShouldRestart) as caught:
        exec(program, space)
    assert caught.value.__context__ is not None
    assert not is_handled(caught.value.__context__, caught.value)


def test_an_error_that_a_library_has_made_of_a_lost_connection_is_a_symptom() -> None:
    def wrapped() -> Exception:
        try:
            try:
                raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")
            except RuntimeError as error:
                raise ValueError("a step failed") from error
        except ValueError as error:
            return error

    fault = Fault.of_exception(wrapped(), FaultKind.EXCEPTION, initial_rank=0, rank=0, iteration=0)
    assert fault.is_symptom
    assert Fault.from_json(fault.to_json()).is_symptom


def fault(kind: FaultKind, rank: int, summary: str = "", **more: Any) -> Fault:
    return Fault(kind, rank, rank, 0, 0.0, summary, **more)


BLOCKED = fault(
    FaultKind.DIED, 0, gone=True, due_to_peer=True,
    timeout=ExceededTimeout("abort", 8.0, 8.3, "main-thread"),
)  # fmt: skip
FAILED = fault(FaultKind.EXCEPTION, 1, "NCCL error in: NCCLUtils.cpp:92, unhandled system error")
WAITS = fault(FaultKind.SOFT_TIMEOUT, 2, due_to_peer=True)


@pytest.mark.parametrize(
    ("faults", "cause"),
    [
        ([BLOCKED, FAILED], FAILED),
        ([BLOCKED, fault(FaultKind.DIED, 1)], 1),
        ([BLOCKED, WAITS], WAITS),
        ([BLOCKED], BLOCKED),
    ],
)
def test_a_rank_that_was_ended_while_it_waited_in_nccl_is_not_the_cause(
    faults: list[Fault], cause: Fault | int
) -> None:
    found = find_cause(faults)
    assert found.initial_rank == cause if isinstance(cause, int) else found is cause


def test_a_rank_that_was_silent_and_ended_at_the_hard_timeout_is() -> None:
    silent = dataclasses.replace(
        BLOCKED, due_to_peer=False, timeout=ExceededTimeout("hard", 90.0, 90.2, "python")
    )
    assert find_cause([FAILED, silent]) is silent


def test_of_a_monitored_barrier_the_rank_that_says_who_did_not_come_is_heard_first() -> None:
    """Rank 0 waits for the others, which are cut off when it fails, and may be recorded before."""
    faults = [
        Fault(FaultKind.EXCEPTION, rank, rank, 0, 1.0, f"RuntimeError: {said}", due_to_peer=True)
        for rank, said in (
            (2, "Rank 2 successfully reached monitoredBarrier, but received errors"),
            (0, "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 5000 ms"),
        )
    ]
    assert find_cause(faults) is faults[1]


def test_a_rank_whose_communicator_failed_is_not_the_cause_of_what_another_raised() -> None:
    """Seen with NCCL 2.28.9: groups that are destroyed in a clean-up are an error elsewhere."""
    error = fault(FaultKind.NCCL_ERROR, 2)
    raised = fault(FaultKind.EXCEPTION, 1, secondary=True)
    assert find_cause([error, raised]) is raised


@pytest.mark.parametrize(
    ("kind", "cause"), [(FaultKind.RETURNED_EARLY, 1), (FaultKind.SOFT_TIMEOUT, 2)]
)
def test_an_error_of_nccl_comes_from_who_left_and_not_from_who_is_silent(
    kind: FaultKind, cause: int
) -> None:
    error = fault(FaultKind.NCCL_ERROR, 2)
    assert find_cause(with_hidden_cause([error], fault(kind, 1))).initial_rank == cause
