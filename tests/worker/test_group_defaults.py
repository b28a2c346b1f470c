"""Process groups get the profile's timeout where the script names none, and only there."""

from __future__ import annotations

import os
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest

from ncclops.profiles import Growth, Restarts
from ncclops.timeouts.handed_over import to_variable
from ncclops.timeouts.settle import settle
from tests.lanes import IN_SCRIPT, LaneProcess, lanes

pytestmark = pytest.mark.slow

SCRIPT = """
from datetime import timedelta
import inspect
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group, _world

def timeout_s(group):
    return group._get_backend(device or torch.device("cpu")).options._timeout.total_seconds()

dist.init_process_group(**lane, store=dist.HashStore(), rank=0, world_size=1)
print("world", timeout_s(_get_default_group()))
print("by default", timeout_s(dist.new_group([0])))
print("None", timeout_s(dist.new_group([0], None)))
print("by name", timeout_s(dist.new_group([0], timeout=timedelta(seconds=30))))
print("by place", timeout_s(dist.new_group([0], timedelta(seconds=40))))
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cuda" if device else "cpu", (1, 1), mesh_dim_names=("a", "b"))
print("mesh", timeout_s(mesh.get_group("a")))
dist.destroy_process_group()
dist.init_process_group(lane["backend"], None, timedelta(seconds=50), 1, 0, dist.HashStore())
print("own", timeout_s(_get_default_group()))
print("source", "timeout" in inspect.getsource(dist.new_group))
print("exported", dist.init_process_group is dist.distributed_c10d.init_process_group)
dist.destroy_process_group()
"""

LIMITS = to_variable(settle({"process_group": timedelta(hours=2)}), Growth(), Restarts())


@lanes("gloo", "nccl")
def test_the_script_keeps_what_it_names_and_gets_the_rest(
    tmp_path: Path, lane_process: LaneProcess
) -> None:
    script = tmp_path / "script.py"
    script.write_text(IN_SCRIPT + SCRIPT)
    done = subprocess.run(
        [lane_process.python, "-m", "ncclops.worker", str(script)],
        env={**os.environ, **lane_process.environment, "LOCAL_RANK": "0", "NCCLOPS_LIMITS": LIMITS},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "world 7200.0",
        "by default 7200.0",
        "None 7200.0",
        "by name 30.0",
        "by place 40.0",
        "mesh 7200.0",
        "own 50.0",
        "source True",
        "exported True",
    ]
