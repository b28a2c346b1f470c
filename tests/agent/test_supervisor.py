"""Which signals reach the agent."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest

from tests.conftest import LIMIT_S, clean_environ, full_pipe

pytestmark = pytest.mark.slow

# The agent has what the supervisor blocks before it forks.
WAITS = """
import signal, sys
from ncclops.agent import supervisor

def agent(pulse):
    print("waits", flush=True)
    return int(signal.sigwait({signal.SIGTERM}))

sys.exit(supervisor.hold(agent))
"""


@contextmanager
def waiting(*command: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A supervisor whose agent waits for signals, and its stdout; it is killed in the end."""
    with subprocess.Popen(
        command, env=clean_environ(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "waits\n"
            yield process, process.stdout
        finally:
            process.kill()


def test_sigterm_reaches_the_agent_where_a_shell_has_it_ignored() -> None:
    """As in a batch script that traps it for itself: `trap '' TERM`."""
    shell = ["sh", "-c", "trap '' TERM; exec \"$@\"", "sh"]
    with waiting(*shell, sys.executable, "-c", WAITS) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == signal.SIGTERM


# Of several signals that have come, that with the lowest number is taken first.
IS_ASKED_TWICE = """
import signal, sys
from ncclops.agent import supervisor

supervisor.SAME_REQUEST_S = 1e6

def agent(pulse):
    print("waits", flush=True)
    taken = {signal.SIGHUP, signal.SIGINT, signal.SIGUSR1}
    for _ in range(2):
        print(signal.Signals(signal.sigwait(taken)).name, flush=True)
    return pulse.forwarded

sys.exit(supervisor.hold(agent))
"""


@pytest.mark.parametrize("again", [signal.SIGHUP, signal.SIGINT])
def test_signals_that_come_at_once_are_one_request(again: signal.Signals) -> None:
    """GNU `timeout` signals the launcher, and then its group; a script's trap sends another one."""
    with waiting(sys.executable, "-c", IS_ASKED_TWICE) as (process, stdout):
        process.send_signal(signal.SIGHUP)
        assert stdout.readline() == "SIGHUP\n"
        process.send_signal(again)
        process.send_signal(signal.SIGUSR1)
        assert stdout.readline() == "SIGUSR1\n"
        assert process.wait(LIMIT_S) == 1


# Which the supervisor says.
IS_KILLED = """
import os, signal, sys
from ncclops.agent import supervisor

def agent(pulse):
    os.kill(os.getpid(), signal.SIGKILL)

sys.exit(supervisor.hold(agent))
"""


def test_a_pipe_that_nobody_reads_does_not_keep_it_from_ending() -> None:
    with (
        full_pipe() as stderr,
        subprocess.Popen(
            [sys.executable, "-c", IS_KILLED], env=clean_environ(), stderr=stderr
        ) as process,
    ):
        try:
            assert process.wait(LIMIT_S) == 1
        finally:
            process.kill()
