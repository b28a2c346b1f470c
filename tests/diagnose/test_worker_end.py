"""How a rank ended, and what the kernel tells of it: in words, and for the class."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclops.diagnose.incident_events import worker_end
from ncclops.diagnose.log_evidence import classify_rank
from ncclops.host.oom_kills import OomKills
from ncclops.record.events import WorkerExitedEvent


def told(root: Path) -> str | None:
    """What ``OomKills`` says where the counter has risen."""
    for path, text in {
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.events": "oom_kill 0\n",
        "sys/fs/cgroup/job/memory.max": f"{2**31}\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    kills = OomKills(root)
    (root / "sys/fs/cgroup/job/memory.events").write_text("oom_kill 1\n")
    return kills.risen()


@pytest.mark.parametrize("known", [True, False])
def test_the_oom_killer_is_named_where_the_kernel_tells_of_it(tmp_path: Path, known: bool) -> None:
    """It was "nothing says by whom", with the cgroup's counter at hand."""
    why = told(tmp_path) if known else None
    event = WorkerExitedEvent(rank=1, ts=5.0, signal="SIGKILL", why=why)
    end = worker_end([event], 1, not_before=0.0)
    assert end is not None
    assert str(end) == ("SIGKILL" if why is None else f"SIGKILL, {why}")
    found = classify_rank(tmp_path, tmp_path / "incidents/0", 1, said=None, end=end)
    assert found is not None
    assert found["class"] == "host-oom"
    assert ("nothing says by whom" in found["summary"]) is not known
    assert (found["signature"] == "oom-killer") is known
