"""`--attach-stdin RANK`: one rank has the terminal, so that debuggers work as under torchrun."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, CompletedText
from tests.launch.conftest import Background, Run

pytestmark = pytest.mark.slow

Script = Callable[[str], Path]
Start = Callable[..., Background]
Ncclops = Callable[..., CompletedText]

# Far shorter than the time that the other rank is made to wait.
IMPATIENT = """
description = "For tests: ranks that wait hang soon."
kind = "lane"
nodes = "any"
extends = "local-cpu"
[watch]
hang = "2s"
quiet = "2s"
[timeouts]
process_group = "6s"
"""


def take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Session:
    """A command in a terminal of its own, as a person has it."""

    def __init__(self, start: Start, *arguments: str | Path) -> None:
        self.master, self.slave = pty.openpty()
        self.before = termios.tcgetattr(self.slave)
        self.shown = b""
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), self.slave)
        self.process = start(
            *arguments, **streams, start_new_session=True, preexec_fn=take_terminal
        )

    def until(self, text: bytes) -> bytes:
        """Wait for ``text``; what was shown up to it, from the last time on."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self.shown:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self.master], [], [], max(0.0, left))
            assert ready, f"no {text!r} in {self.shown.decode()}"
            self.shown += os.read(self.master, 1 << 16)
        before, _, self.shown = self.shown.partition(text)
        return before

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def end(self) -> int:
        """Read on until the command has ended; its exit code."""
        deadline = time.monotonic() + LIMIT_S
        while (code := self.process.poll()) is None:
            assert time.monotonic() < deadline, self.shown.decode()
            if select.select([self.master], [], [], 0.1)[0]:
                self.shown += os.read(self.master, 1 << 16)
        while select.select([self.master], [], [], 0.2)[0]:
            self.shown += os.read(self.master, 1 << 16)
        return code


@pytest.fixture
def session(background: Start) -> Iterator[Callable[..., Session]]:
    sessions: list[Session] = []

    def begin(*arguments: str | Path) -> Session:
        sessions.append(Session(background, *arguments))
        return sessions[-1]

    yield begin
    for each in sessions:
        os.close(each.master)
        os.close(each.slave)


def launch(*options: str) -> tuple[str, ...]:
    return (
        "launch",
        "--profile",
        "local-cpu",
        "--nproc-per-node",
        "2",
        "--run-dir",
        "run",
        *options,
    )


def test_a_breakpoint_has_the_terminal_line_editing_and_all_the_time(
    session: Callable[..., Session], script: Script, tmp_path: Path
) -> None:
    """Also once the script has started again in place. Nothing is found to hang meanwhile."""
    source = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, answer = dist.get_rank(), 41
if rank == 1:
    breakpoint()
dist.barrier()
if rank == 1 and not os.path.exists("once"):
    open("once", "w").close()
    raise RuntimeError("once")
dist.barrier()
print(f"answer {answer}\\n", end="", flush=True)  # in one piece: rank 0 prints as well
"""
    profile = tmp_path / "impatient.toml"
    profile.write_text(IMPATIENT)
    here = session(
        *("launch", "--profile", profile, "--nproc-per-node", "2", "--run-dir", "run"),
        *("--attach-stdin", "1", script(source)),
    )
    here.until(b"(Pdb) ")
    here.type(b"p answer + 2\x7f1\n")  # with a mistake that is taken back
    assert b"42" in here.until(b"\n(Pdb) ").splitlines()[-1]
    here.type(b"\x1b[A\n")  # the line before, which readline remembers
    assert b"42" in here.until(b"\n(Pdb) ").splitlines()[-1]
    time.sleep(10)  # a person thinks: beyond what rank 0 is given in a collective
    here.type(b"c\n")
    here.until(b"(Pdb) ")
    here.type(b"answer = 7\n")
    here.until(b"(Pdb) ")
    here.type(b"c\n")
    here.until(b"answer 7\r\n")
    assert here.end() == 0, here.shown.decode()
    run = Run(tmp_path / "run")
    assert [fault["rank"] for fault in run.named("fault")] == [1]
    assert run.named("hang") == []
    assert "answer 7\n" in run.stdout(1)
    assert termios.tcgetattr(here.slave) == here.before


@pytest.mark.extended
def test_ctrl_c_at_the_prompt_ends_the_run_at_once(
    session: Callable[..., Session], script: Script, tmp_path: Path
) -> None:
    """torch's own breakpoint, which opens /dev/stdin; the grace time would be 15 s."""
    source = (
        "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.breakpoint(0)\n"
    )
    here = session(*launch("--attach-stdin", "0", "--restart", "none"), script(source))
    here.until(b"(Pdb) ")
    here.type(b"up\n")
    here.until(b"(Pdb) ")
    here.type(b"p dist.get_world_size()\n")
    assert here.until(b"\n(Pdb) ").splitlines()[-1].strip() == b"2"
    here.type(b"\x03")
    assert here.end() == 130
    run = Run(tmp_path / "run")
    assert run.named("stop-forced")[0]["reason"] == "a rank waits for input"
    assert termios.tcgetattr(here.slave) == here.before


def test_without_a_terminal_standard_input_is_passed_on_to_each_start(
    background: Start, script: Script, tmp_path: Path
) -> None:
    source = """
import os, sys
if os.environ["RANK"] == "0": assert sys.stdin.read() == ""
else:
    print("read", input("name? "), flush=True)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0": sys.exit(1)
"""
    launcher = background(
        *launch("--attach-stdin", "1", "--restart", "process", "--max-restarts", "1"),
        script(source),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert launcher.stdin is not None and launcher.stdout is not None
    with launcher.stdin as typed, launcher.stdout as output:
        typed.write(b"one\n")
        typed.flush()
        shown = b""
        while b"read one" not in shown:
            more = os.read(output.fileno(), 1 << 16)
            assert more, shown
            shown += more
        typed.write(b"two\n")
        typed.flush()
        assert launcher.wait(LIMIT_S) == 0
    assert Run(tmp_path / "run").stdout(1) == "name? read one\nname? read two\n"
    assert shown.startswith(b"name? read one"), "as it was written"
