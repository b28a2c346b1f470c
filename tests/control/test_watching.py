"""`ncclops status --watch` on a real terminal: keys, growing files, sizes, and every way out."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from ncclops.record.paths import RunPaths
from tests.control.conftest import Agent, event, write_events
from tests.on_a_terminal import OnTerminal

pytestmark = pytest.mark.slow

Start = Callable[..., OnTerminal]


@pytest.fixture
def watching(agent: Agent, tmp_path: Path) -> Iterator[Start]:
    """``watching(...)``: the screen of ``agent``'s run; ended after the test."""
    started: list[OnTerminal] = []

    def start(*command: str, environ: Mapping[str, str] | None = None) -> OnTerminal:
        arguments = command or ("status", "--watch")
        started.append(OnTerminal(tmp_path, *arguments, environ=environ))
        return started[-1]

    yield start
    for each in started:
        with suppress(OSError):  # it has ended, as the test has seen
            each.kill()


def test_a_person_looks_around(agent: Agent, watching: Start) -> None:
    """One session: ranks, a log that grows, another size, an incident, the end of the run."""
    paths = RunPaths(agent.run)
    paths.rank(1).root.mkdir(parents=True)
    paths.rank(1).stdout_log.write_text("first line\n\r 10%|#\r 20%|##")
    seen = watching()
    seen.until_shown("starting", "> ", "a-run · 2 ranks", "j k rank")
    seen.type("jl")
    seen.until_shown("rank 1: stdout.log", "first line", " 20%|##")
    assert "10%" not in seen.text
    with paths.rank(1).stdout_log.open("a") as log:
        log.write("\r100%|####\nand more\n")
    seen.until_shown("100%|####", "and more")
    seen.type("q")
    seen.until_shown("> ", "j k rank")
    seen.resize(40, 10)
    seen.until(lambda it: max(it.rows) == 10 and all(len(row) <= 40 for row in it.rows.values()))
    seen.type("i")
    seen.until_shown("this run has no incidents")
    seen.type("s")
    seen.until_shown("no worker of", "is alive on")
    seen.type("\x1b[A\x1bq")  # an arrow, then Escape and the way out
    code = seen.ended()
    assert (code, seen.other) == (0, False)
    assert b"starting after" in seen.said  # the last state stays on the terminal


def test_the_end_of_a_run_is_shown_until_somebody_has_seen_it(
    agent: Agent, watching: Start
) -> None:
    seen = watching(environ={"NO_COLOR": "1"})
    seen.until_shown("starting")
    now = time.time()
    write_events(agent.run, [event("fault", now, 1, cause="ValueError: x", kind="exception")])
    seen.until_shown("restarting", "last fault", "exception: ValueError: x")
    verdict = {"outcome": "failed", "exit_code": 1, "reason": "rank 1 exited with code 1"}
    write_events(agent.run, [event("verdict", now + 1, **verdict)])
    RunPaths(agent.run).verdict.write_text(json.dumps({"schema": "ncclops.verdict/1", **verdict}))
    seen.until_shown("failed · exit code 1", "rank 1 exited with code 1")
    seen.type("t")
    seen.until_shown("the last hour", "rank 1: ValueError: x", "failed: rank 1 exited")
    seen.type("qq")
    assert seen.ended() == 0
    assert b"failed (rank 1 exited with code 1)" in seen.said


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_the_terminal_as_it_was(signum: signal.Signals, watching: Start) -> None:
    shell = watching("bash", "--norc", "--noprofile", "-i")
    shell.type(f"{_command()}; echo code $?\n")
    shell.until_shown("starting")
    assert not shell.echoes()
    if signum is signal.SIGINT:
        shell.type("\x03")
    else:
        os.kill(_child_of(shell.pid), signum)
    shell.until(lambda it: not it.other, "the first screen")
    code = b"code 143" if signum is signal.SIGTERM else b"code 0"
    shell.until(lambda it: code in it.said, "the exit code")
    shell.type("echo a$((1 + 1))b\n")
    shell.until(lambda it: b"a2b\r\n" in it.said, "the shell")


def test_ctrl_z_gives_the_shell_back_and_fg_goes_on(watching: Start) -> None:
    shell = watching("bash", "--norc", "--noprofile", "-i")
    shell.type(_command() + "\n")
    shell.until_shown("starting")
    shell.type("\x1a")
    shell.until(lambda it: not it.other and b"Stopped" in it.said, "the shell's word")
    shell.type("echo a$((1 + 1))b\n")
    shell.until(lambda it: b"a2b\r\n" in it.said, "the shell")
    shell.type("fg\n")
    shell.until_shown("starting", "j k rank")
    shell.type("q")
    shell.until(lambda it: not it.other and b"starting after" in it.said, "the way out")


def test_a_terminal_that_is_gone_ends_it(watching: Start) -> None:
    seen = watching()
    seen.until_shown("starting")
    seen.hang_up()
    status = os.waitstatus_to_exitcode(os.waitpid(seen.pid, 0)[1])
    assert status in (0, -signal.SIGHUP)


def test_a_terminal_that_cannot_be_drawn_on_gets_the_table_again_and_again(
    watching: Start,
) -> None:
    seen = watching(environ={"TERM": "dumb"})
    seen.until(lambda it: it.said.count(b"starting after") > 1, "a second table")
    seen.type("\x03")
    assert seen.ended() == 0


def _command() -> str:
    return f"{sys.executable} -m ncclops status --watch"


def _child_of(pid: int) -> int:
    (child,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return child
