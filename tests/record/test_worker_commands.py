"""The agent's commands to workers: one type for each, and what is none is passed over."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclops.record import worker_commands
from ncclops.record.worker_commands import (
    AbortCommand,
    RestartCommand,
    TightenCommand,
    WorkerCommand,
)

LIMIT = st.timedeltas(timedelta(0), timedelta(days=365))
LIMITS = st.none() | LIMIT
COMMANDS = st.one_of(
    st.builds(AbortCommand),
    st.builds(
        RestartCommand,
        reason=st.text(st.characters(codec="utf-8")),
        hung=st.none() | st.integers(0, 2**31),
    ),
    st.builds(TightenCommand, process_group=LIMIT, soft=LIMITS, hard=LIMITS),
)


@given(COMMANDS)
def test_a_command_is_read_as_it_was_written(command: WorkerCommand) -> None:
    assert worker_commands.decode(worker_commands.encode(command)) == command


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"null",
        b"[" * 100_000,
        b'{"command": "dance"}',
        b'{"command": "restart"}',
        b'{"command": "restart", "reason": "x", "hung": "3"}',
        b'{"command": "tighten", "process_group": 60, "soft": "soon", "hard": null}',
        b'{"reason": "x"}',
        b"\xff",
    ],
)
def test_what_is_no_command_is_none(message: bytes) -> None:
    assert worker_commands.decode(message) is None


def test_fields_of_another_version_are_passed_over() -> None:
    message = b'{"command": "restart", "reason": "x", "urgent": true}'
    assert worker_commands.decode(message) == RestartCommand(reason="x")
