"""Exit codes of `launch` by the kind of end: the sets, changes to them, and what is refused."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from ncclops.errors import (
    NcclopsError,
    NetworkRefused,
    NodeUnfit,
    NotNeeded,
    PreflightRefused,
    ProfileError,
    UsageError,
)
from ncclops.exit_codes import DEFAULT, SETS, ExitCodes, NextAction, action_after, with_changes

SCHEDULER = SETS["scheduler"]


def test_the_default_is_what_scripts_have_relied_on() -> None:
    codes = asdict(DEFAULT)
    assert codes == {
        **dict.fromkeys(("retry", "replace_node", "fix", "unknown"), 1),
        **dict.fromkeys(("unfit_node", "refused"), 3),
        "no_receipt": 4,
    }


def test_a_schedulers_codes_tell_the_kinds_apart_and_the_gravest_is_the_highest() -> None:
    actions: tuple[NextAction, ...] = ("unknown", "retry", "replace-node", "fix")
    assert [SCHEDULER.of(action) for action in actions] == [1, 75, 76, 78]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("scheduler", SCHEDULER),
        ("default", DEFAULT),
        ("retry=138", ExitCodes(retry=138)),
        ("scheduler, replace-node=99,no_receipt=5", ExitCodes(
            retry=75, replace_node=99, fix=78, unfit_node=76, no_receipt=5)),
    ],
)  # fmt: skip
def test_a_set_and_changes_to_it(text: str, expected: ExitCodes) -> None:
    assert with_changes(text, DEFAULT) == expected


def test_changes_alone_leave_the_profiles_codes() -> None:
    assert with_changes("fix=93", SCHEDULER) == ExitCodes(
        retry=75, replace_node=76, fix=93, unfit_node=76
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slurm", "--exit-codes slurm: give default or scheduler, or KIND=CODE, where KIND is one"),
        ("", "--exit-codes : give default"),
        ("retry=0", "--exit-codes retry=0: a code is a number from 1 to 255"),
        ("retry=256", "a code is a number from 1 to 255"),
        ("retry=-1", "a code is a number from 1 to 255"),
        ("retry=²", "a code is a number from 1 to 255"),
        ("fix=78,scheduler", "--exit-codes scheduler: give default"),
        ("schedular", "no_receipt; did you mean scheduler?"),
        ("mend=3", "KIND is one of retry, replace_node, fix, unknown, unfit_node, refused, no_rec"),
    ],
)
def test_what_is_no_code_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match="--exit-codes") as refused:
        with_changes(text, DEFAULT)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("error", "action", "code", "scheduled"),
    [
        (NodeUnfit("the GPU is lost"), "replace-node", 3, 76),
        (PreflightRefused("the nodes differ"), "unknown", 3, 3),
        (NetworkRefused("--require-network: Socket"), "unknown", 3, 3),
        (NcclopsError("1 of 4 nodes did not come"), "retry", 1, 75),
        (UsageError("no such script"), "fix", 2, 2),
        (ProfileError("no such profile"), "fix", 2, 2),
        (NotNeeded("the job has ended"), "retry", 0, 0),
    ],
)
def test_a_job_that_could_not_start(
    error: NcclopsError, action: str, code: int, scheduled: int
) -> None:
    assert action_after(error) == action
    assert (DEFAULT.of_error(error), SCHEDULER.of_error(error)) == (code, scheduled)
