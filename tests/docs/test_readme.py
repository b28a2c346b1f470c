"""README's blocks that start a job, and those that look at one, say what is shown."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, REPOSITORY, clean_environ
from tests.docs.shown import first_that_differs, run_block
from tests.docs.test_outputs import SHOWN

_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Takes four hosts; tests/cluster starts such jobs.
_NOT_HERE = {
    "ncclops launch --nnodes 4:5 --rdzv-backend c10d --rdzv-endpoint n01:29500 train.py",
}
SCRIPTS = {
    "train.py": """\
import os
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(20):
    if (dist.get_rank(), dist.get_world_size(), step) == (0, 3, 5):
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
""",
    "broken.py": """\
import torch.distributed as dist

dist.init_process_group("gloo")
config = {"learning_rate": 0.1} if dist.get_rank() == 0 else {}
print(config["learning_rate"])
dist.barrier()
""",
    # Rank 1 waits before a step for as long as there is a file, and raises the first time after it.
    "toy.py": """\
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ncclops import receipt

dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(100_000):
    if (rank, step) == (1, 20):
        while Path("hold").exists():
            time.sleep(0.2)
        if not Path("raised").exists():
            Path("raised").touch()
            raise RuntimeError(f"boom at {step}")
    dist.all_reduce(torch.ones(1))
    receipt.step(step)
    time.sleep(0.05)
""",
}


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each command of README that another test does not run, with the lines shown of its output."""
    elsewhere = {each.command for each in SHOWN if each.page == "README.md"} | _NOT_HERE
    for block in _BLOCK.finditer((REPOSITORY / "README.md").read_text()):
        for part in re.split(r"^\$ ", block[1], flags=re.MULTILINE)[1:]:
            command, *output = part.rstrip("\n").split("\n")
            if command not in elsewhere:
                yield command, output


def test_what_is_run_is_all_there_is() -> None:
    names = [command.split()[1] for command, _ in commands()]
    launches = ["launch"] * 3
    looks = ["status", "stacks", "runs", "stop", "incident"]
    assert names == [*launches, *looks, "launch"]


@pytest.mark.slow
def test_each_command_says_what_is_shown(tmp_path: Path) -> None:
    (tmp_path / "docs" / "examples").mkdir(parents=True)
    shutil.copy(REPOSITORY / "docs/examples/train_ddp.py", tmp_path / "docs/examples")
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = clean_environ({"PATH": path, "COLUMNS": "120", "XDG_CONFIG_HOME": str(tmp_path)})

    def run(command: str) -> str:
        done = run_block(command, tmp_path, environ)
        assert done.returncode == (1 if "broken.py" in command else 0), f"{command}\n{done.stdout}"
        # The names that README has for these.
        printed = done.stdout.replace(str(tmp_path), "/home/me")
        return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "n01", printed)

    def compare(command: str, shown: list[str]) -> None:
        printed = run(command)
        missing = first_that_differs(shown, printed)
        assert missing is None, f"{command}\n{missing}\n---\n{printed}"

    def wait_for(command: str, says: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while says not in (printed := run(command)):
            assert time.monotonic() < deadline, printed
            time.sleep(0.2)

    steps = list(commands())
    first_look = next(n for n, (command, _) in enumerate(steps) if command == "ncclops status")
    incident = next(n for n, (command, _) in enumerate(steps) if "incident" in command)
    for command, shown in [*steps[:first_look], *steps[incident + 1 :]]:
        compare(command, shown)
    with under_way(tmp_path, environ, wait_for):
        for command, shown in steps[first_look : incident + 1]:
            if "ncclops stop" in command:
                (tmp_path / "hold").unlink()
                wait_for("ncclops status", "1 restart in place")
            compare(command, shown)


@contextmanager
def under_way(
    directory: Path, environ: dict[str, str], wait_for: Callable[[str, str], None]
) -> Iterator[None]:
    """A job of two ranks in its twentieth step, of which rank 1 waits."""
    (directory / "hold").touch()
    command = ["launch", "--profile", "local-cpu", "--nproc-per-node", "2", "toy.py"]
    with (directory / "toy.out").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "ncclops", *command],
            cwd=directory,
            env=environ,
            stdout=output,
            stderr=output,
        )
        try:
            wait_for("ncclops status", "\nstep 19, ")
            yield
            assert process.wait(LIMIT_S) == 0, (directory / "toy.out").read_text()
        finally:
            process.terminate()
            process.wait(LIMIT_S)
