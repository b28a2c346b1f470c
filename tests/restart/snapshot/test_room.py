"""A snapshot that does not fit into the host's memory ends no process: training goes on without."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
from torch import distributed as dist

from ncclops.restart.snapshot import Snapshots
from ncclops.restart.snapshot._errors import NoRoom
from ncclops.restart.snapshot._room import available_bytes, check

MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    return tmp_path


def make_group(root: Path, name: str, limit: str, used: int, inactive: int = 0) -> None:
    group = root / "sys/fs/cgroup" / name
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\nfile 7\n")


def test_the_tightest_control_group_decides(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/job_1/step_0\n")
    make_group(root, "job_1/step_0", "max", 30 * MIB)
    make_group(root, "job_1", str(64 * MIB), 40 * MIB, inactive=8 * MIB)
    assert available_bytes(root) == 32 * MIB


def test_a_container_has_its_limit_at_the_top(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/\n")
    make_group(root, "", str(64 * MIB), 70 * MIB)
    assert available_bytes(root) == 0


def test_the_first_version_of_control_groups_has_limits_too(root: Path) -> None:
    """As below Kubernetes on older systems: the path is the host's, and the limit at the top."""
    (root / "proc/self/cgroup").write_text("9:memory:/kubepods/pod1/c1\n1:name=systemd:/x\n0::/\n")
    memory = root / "sys/fs/cgroup/memory"
    memory.mkdir()
    (memory / "memory.limit_in_bytes").write_text(f"{64 * MIB}\n")
    (memory / "memory.usage_in_bytes").write_text(f"{40 * MIB}\n")
    (memory / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {8 * MIB}\n")
    assert available_bytes(root) == 32 * MIB
    (memory / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert available_bytes(root) > 32 * MIB


def test_without_control_groups_it_is_the_host_s(root: Path) -> None:
    assert 0 < available_bytes(root) <= psutil.virtual_memory().total


def test_all_ranks_of_the_host_take_theirs() -> None:
    check(10 * MIB, 80 * MIB, 8)
    with pytest.raises(NoRoom, match="for each of the 8 ranks of this host"):
        check(10 * MIB, 80 * MIB - 1, 8)


def test_training_goes_on_where_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    snapshots = Snapshots({"value": torch.zeros(4)}, every=1, store=store, name="no-room")
    snapshots.restore()
    assert snapshots.take(1) and snapshots.wait()
    monkeypatch.setattr("ncclops.restart.snapshot._copying.available_bytes", lambda: 8)
    assert [snapshots.take(step) for step in (2, 3)] == [False, False]
    (line,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert line.startswith(
        "no more snapshots until the next restart: snapshot 1 of this iteration:"
    )
    assert "it takes" in line
    held = snapshots._now.memory.own()  # type: ignore[union-attr]
    assert [each.label.step for each in held if each.label is not None] == [1]
