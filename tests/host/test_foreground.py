"""Whether a command has the terminal, as far as the kernel says it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from ncclops.host.process_view import is_in_foreground
from tests.conftest import LIMIT_S, clean_environ

ASKS = """
import os, sys
from ncclops.host.process_view import is_in_foreground
before = is_in_foreground(os.getpid())
if os.fork() == 0:
    os.setpgid(0, 0)  # as a shell does for a command with &
    print(before, is_in_foreground(os.getpid()), flush=True)
    os._exit(0)
os.wait()
"""


def test_without_a_process_there_is_no_foreground() -> None:
    assert not is_in_foreground(1 << 30)


@pytest.mark.slow
def test_a_shell_gives_the_terminal_to_one_command() -> None:
    command = [sys.executable, "-c", ASKS]
    alone = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        start_new_session=True,
        check=True,
        env=clean_environ(),
    )
    assert alone.stdout == "False False\n"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, command, clean_environ())
    shown = b""
    while b"\n" not in shown:
        shown += os.read(terminal, 1 << 10)
    os.waitpid(pid, 0)
    os.close(terminal)
    assert shown == b"True False\r\n"
