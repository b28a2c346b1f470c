"""An agent that a file system holds: it is waited for, but not once the run is to end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, clean_environ

pytestmark = pytest.mark.slow

# Opening a pipe that nobody writes to, as a file of a server that has gone.
HELD = """
import asyncio, os, sys
from datetime import timedelta
from ncclops.agent import supervisor

async def hang(pulse):
    pulse.follow(asyncio.get_running_loop())
    print(os.getpid(), flush=True)
    open(sys.argv[1])

def agent(pulse):
    asyncio.run(hang(pulse))
    return 0

sys.exit(supervisor.hold(agent, silent=timedelta(seconds=1)))
"""


@pytest.fixture
def held(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    os.mkfifo(tmp_path / "pipe")
    process = subprocess.Popen(
        [sys.executable, "-c", HELD, str(tmp_path / "pipe")],
        env=clean_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.kill()


def agent_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return os.pidfd_open(int(process.stdout.readline()))


def has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], LIMIT_S)[0])


def test_a_signal_ends_a_run_whose_agent_does_not_answer(held: subprocess.Popen[str]) -> None:
    agent = agent_of(held)
    held.send_signal(signal.SIGTERM)
    _, said = held.communicate(timeout=LIMIT_S)
    assert held.returncode == 128 + signal.SIGTERM
    assert said.count("\n") == 1 and "has not answered for 1s" in said
    assert has_ended(agent)


def test_an_agent_that_does_not_answer_ends_after_its_supervisor(
    held: subprocess.Popen[str],
) -> None:
    agent = agent_of(held)
    held.kill()
    assert has_ended(agent)


@pytest.mark.parametrize(
    ("raised", "told", "traced"),
    [
        ("MemoryError()", "Cannot allocate memory (no memory: ", 0),
        ("KeyError(3)", "KeyError(3)", 1),
    ],
)
def test_an_agent_that_cannot_begin_is_lost_with_what_it_raised(
    raised: str, told: str, traced: int
) -> None:
    """As where there is no memory for the modules that it is made of."""
    program = (
        "import sys; from ncclops.agent import supervisor\n"
        f"def agent(pulse): raise {raised}\n"
        "sys.exit(supervisor.hold(agent, lost=print))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 1
    assert done.stdout.startswith(told) and done.stdout.count("\n") == 1
    assert done.stderr.count("Traceback") == traced


def test_an_agent_that_is_stopped_is_told_of_and_can_go_on() -> None:
    program = (
        "import os, signal, sys; from ncclops.agent import supervisor\n"
        "def agent(pulse): os.kill(os.getpid(), signal.SIGSTOP); return 7\n"
        "sys.exit(supervisor.hold(agent))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], env=clean_environ(), stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert said.startswith("ncclops: the agent was stopped by SIGSTOP: workers run on")
        command = said[said.index("`kill -CONT ") + 1 :].split("`")[0]
        subprocess.run(command.split(), check=True)
        assert process.wait(LIMIT_S) == 7
