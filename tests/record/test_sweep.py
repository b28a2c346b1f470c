"""What killed processes have left in shared memory is swept for their user alone."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ncclops.agent import leftovers
from ncclops.control import client, launcher
from ncclops.host.process_identity import ProcessIdentity, current, is_alive
from ncclops.record import control_address, runs, shared_page
from ncclops.record.paths import RunPaths
from ncclops.record.progress import ProgressPage, read
from ncclops.record.run_record import RUN, Launcher, RunRecord
from tests.conftest import LIMIT_S

pytestmark = pytest.mark.slow

# A launcher that is at the same time its agent and its worker; it ends with its input.
RUN_PROGRAM = """
import sys
import time
from pathlib import Path
from ncclops.control import launcher
from ncclops.record import control_address
from ncclops.record.paths import RunPaths
from ncclops.record.progress import ProgressPage, STEP
from ncclops.record.run_record import RUN, RunRecord
from ncclops.record.stop_point import StopPage
run = Path(sys.argv[1])
paths = RunPaths(run)
RUN.write(paths.run, RunRecord(launcher=launcher.current()))
paths.events.touch()
listener = control_address.listen_unix(run)
stop, page = StopPage.create(run), ProgressPage.create(paths.rank(0).progress)
page.numbers[STEP] = 42
print("ready", flush=True)
sys.stdin.read()
"""


class Killed:
    """A run whose processes get SIGKILL from :meth:`kill`."""

    def __init__(self, run: Path) -> None:
        self.paths = RunPaths(run)
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN_PROGRAM, str(run)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        self.links = [self.paths.stop_page, self.paths.rank(0).progress]
        self.pages = [link.readlink() for link in self.links]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=LIMIT_S)


@pytest.fixture
def run(starts_processes: None, tmp_path: Path) -> Iterator[Killed]:
    made = Killed(tmp_path / "run")
    yield made
    made.kill()
    for page in made.pages:
        page.unlink(missing_ok=True)


def test_a_killed_run_is_swept_and_what_its_ranks_have_said_is_kept(run: Killed) -> None:
    leftovers.sweep()
    assert all(page.exists() for page in run.pages), "it runs"
    assert runs.is_live(run.paths.root)
    run.kill()
    assert all(page.exists() for page in run.pages)
    leftovers.sweep()
    assert not any(page.exists() for page in run.pages)
    seen = read(run.paths.rank(0).progress)
    assert seen is not None and seen.step == 41
    assert not run.paths.socket.exists() and not run.paths.token.exists()
    assert client.status_of(run.paths.root).phase == "lost"


def test_pages_of_a_killed_run_that_has_moved_are_freed(run: Killed) -> None:
    moved = run.paths.root.with_name("moved")
    shutil.move(run.paths.root, moved)
    leftovers.sweep()
    assert all(page.exists() for page in run.pages), "it runs"
    run.kill()
    leftovers.sweep()
    assert not any(page.exists() for page in run.pages)


def test_the_page_of_a_worker_that_has_ended_stays_while_its_run_goes_on(
    run: Killed, tmp_path: Path
) -> None:
    """And as long as it is not known here whether that does."""
    path = run.paths.rank(1).progress
    page = ProgressPage.create(path)
    del page
    leftovers.sweep()
    assert path.is_symlink()
    run.kill()
    RUN.write(run.paths.run, RunRecord())
    leftovers.sweep()
    assert path.is_symlink()
    shared_page.settle_all(run.paths.root)


def test_what_other_users_have_put_there_is_left_alone(
    starts_processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs a second user")
    monkeypatch.setattr(shared_page, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(control_address, "_SHARED_MEMORY", tmp_path)
    mine = f"ncclops-{os.getuid()}-"
    kept = tmp_path / "kept"
    content = bytes(1024) + b"/nowhere/control/stop"
    kept.write_bytes(content.ljust(shared_page.SIZE_BYTES, b"\0"))
    (tmp_path / f"{mine}1").symlink_to(kept)
    (tmp_path / f"{mine}2").write_bytes(kept.read_bytes())
    os.chown(tmp_path / f"{mine}2", 12345, 12345)
    os.mkfifo(tmp_path / f"{mine}3")
    (tmp_path / f"{mine}4").write_bytes(kept.read_bytes())
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(tmp_path / f"{mine}5.sock"))
    with socket.socket(socket.AF_UNIX) as ours:
        ours.bind(str(tmp_path / f"{mine}6.sock"))
    os.chown(tmp_path / f"{mine}5.sock", 12345, 12345)
    for number in (5, 6):
        os.utime(tmp_path / f"{mine}{number}.sock", (0, 0))
    for number in range(10, 20):
        (tmp_path / f"{mine}{number}").write_bytes(kept.read_bytes())
    unseen = bytes(1024) + b"/" + b"x" * 300 + b"/control/stop"  # as on a server that has gone
    (tmp_path / f"{mine}1x").write_bytes(unseen.ljust(shared_page.SIZE_BYTES, b"\0"))
    leftovers.sweep()
    assert {path.name.removeprefix(mine) for path in tmp_path.glob(f"{mine}1?")} == {"1x"}
    (tmp_path / f"{mine}1x").unlink()
    left = sorted(path.name.removeprefix(mine) for path in tmp_path.iterdir())
    assert left == ["1", "2", "3", "5.sock", "kept"]


def test_a_link_in_the_way_of_a_page_that_is_settled_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("all I have")
    path = RunPaths(tmp_path / "run").stop_page
    shared_page.create(path).close()
    path.with_name("stop.settled").symlink_to(precious)
    shared_page.settle(path)
    assert precious.read_text() == "all I have"
    assert path.stat().st_size == shared_page.SIZE_BYTES and not path.is_symlink()


def test_a_process_is_known_by_more_than_its_number(starts_processes: None) -> None:
    with subprocess.Popen(["sleep", "300"]) as other:
        own = current()
        fields = vars(own)
        assert is_alive(own)
        reused = ProcessIdentity(**fields | {"pid": other.pid})
        assert is_alive(reused) is False, "the number belongs to another process now"
        assert is_alive(ProcessIdentity(**fields | {"boot_id": "before"})) is False
        assert is_alive(ProcessIdentity(**fields | {"pid_namespace": 1})) is None
        assert is_alive(ProcessIdentity(**fields | {"host": "elsewhere"})) is None
        other.send_signal(signal.SIGKILL)
    recorded = launcher.current()
    assert recorded == Launcher(**fields)


def test_segments_that_nccl_has_left_are_swept_but_none_that_may_be_in_use() -> None:
    hour_ago = time.time() - 3700
    old, new, mapped = (
        Path(f"/dev/shm/nccl-sweep-{os.getpid()}-{kind}") for kind in ("old", "new", "mapped")
    )
    try:
        for path in (old, new, mapped):
            path.write_bytes(bytes(4096))
            if path is not new:
                os.utime(path, (hour_ago, hour_ago))
        with mapped.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            leftovers.sweep_nccl_segments()
        assert [path.exists() for path in (old, new, mapped)] == [False, True, True]
    finally:
        for path in (old, new, mapped):
            path.unlink(missing_ok=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_segments_of_another_user_are_left_alone() -> None:
    others = Path(f"/dev/shm/nccl-sweep-{os.getpid()}-other")
    others.write_bytes(bytes(4096))
    try:
        os.utime(others, (0, 0))
        os.chown(others, 65534, 65534)
        leftovers.sweep_nccl_segments()
        assert others.exists()
    finally:
        others.unlink(missing_ok=True)
