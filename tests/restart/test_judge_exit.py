"""What an exception that leaves the function means for its rank, before and after another fault."""

from __future__ import annotations

import asyncio

import pytest

from ncclops.restart._endings import follows_from_abort, judge_exit
from ncclops.restart.attribution import FaultKind
from ncclops.restart.exception import RankShouldRestart, RestartAbort


def during(earlier: BaseException, later: BaseException) -> BaseException:
    """``later``, raised while ``earlier`` was handled."""
    try:
        try:
            raise earlier
        finally:
            raise later
    except BaseException as error:  # noqa: BLE001 - whatever was given
        return error


def group(*errors: BaseException) -> BaseException:
    return BaseExceptionGroup("unhandled errors in a TaskGroup", list(errors))


RESTART = RankShouldRestart

ALONE = [
    (ValueError(), FaultKind.EXCEPTION),
    (ExceptionGroup("group", [ValueError()]), FaultKind.EXCEPTION),
    (RESTART(), FaultKind.REQUESTED),
    (group(RESTART(), ValueError()), FaultKind.REQUESTED),
    (SystemExit(3), FaultKind.LEFT),
    (RestartAbort("enough"), FaultKind.LEFT),
    (asyncio.CancelledError(), FaultKind.LEFT),
    (during(ValueError(), RESTART()), FaultKind.REQUESTED),
]
INTERRUPTED = [
    (RESTART(), None),
    (during(RESTART(), RESTART()), None),
    (during(GeneratorExit(), RESTART()), None),
    (during(asyncio.CancelledError(), RESTART()), None),
    (during(RESTART(), asyncio.CancelledError()), None),
    (group(RESTART()), None),
    (group(group(RESTART()), asyncio.CancelledError()), None),
    (during(ValueError(), RESTART()), FaultKind.EXCEPTION),
    (during(during(ValueError(), RESTART()), RESTART()), FaultKind.EXCEPTION),
    (during(SystemExit(3), RESTART()), FaultKind.LEFT),
    (during(RestartAbort("enough"), RESTART()), FaultKind.LEFT),
    (during(RESTART(), SystemExit(3)), FaultKind.LEFT),
    (ValueError(), FaultKind.EXCEPTION),
    (SystemExit(3), FaultKind.LEFT),
    (KeyboardInterrupt(), FaultKind.LEFT),
    (asyncio.CancelledError(), FaultKind.LEFT),
]


@pytest.mark.parametrize(("error", "kind"), ALONE, ids=repr)
def test_an_exception_before_any_other_fault(error: BaseException, kind: FaultKind | None) -> None:
    assert judge_exit(error, interrupted=False) == (error, kind)


@pytest.mark.parametrize(("error", "kind"), INTERRUPTED, ids=repr)
def test_an_exception_after_another_ranks_fault(
    error: BaseException, kind: FaultKind | None
) -> None:
    assert judge_exit(error, interrupted=True)[1] is kind


def test_what_the_function_had_raised_itself_is_recorded() -> None:
    own = ValueError("of this rank")
    assert judge_exit(during(own, RESTART()), interrupted=True)[0] is own


ABORTED = [
    ValueError("Default process group has not been initialized, please make sure to call"),
    ValueError("Invalid process group specified"),
    RuntimeError("NCCL error in: /pg.cpp:4332, internal error - please report\nncclInternalError"),
    RuntimeError("NCCL GroupEnd failed: internal error - please report this issue"),
    during(RuntimeError("Connection closed by peer [127.0.0.1]:1"), RuntimeError("step 7 failed")),
    during(RESTART(), ValueError("in the clean-up")),
]


@pytest.mark.parametrize("error", ABORTED, ids=repr)
def test_what_an_abort_does_to_a_rank_that_uses_its_groups(error: BaseException) -> None:
    assert follows_from_abort(error)


def test_an_error_that_has_nothing_to_do_with_groups_does_not_follow_from_an_abort() -> None:
    assert not follows_from_abort(during(KeyError("group"), ValueError("the loss is not finite")))
    assert not follows_from_abort(RuntimeError("NCCL error in: /pg.cpp:4332, invalid argument"))
    assert not follows_from_abort(RuntimeError("NCCL GroupEnd failed: invalid argument"))


def test_an_interruption_says_what_it_is() -> None:
    assert str(RankShouldRestart()) == "all ranks start again: let this exception pass"
    assert str(RankShouldRestart("bad batch")) == "bad batch"
