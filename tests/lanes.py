"""The lanes that tests run on: Gloo, NCCL on fake GPUs, and groups that have both."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ncclops.env import Overrides, PlanContext, compute_plan
from ncclops.profiles import load_profiles
from tests.fakegpu.host import Host
from tests.fakegpu.place import Place


@dataclass(frozen=True)
class Lane:
    """The backend of a job's groups. ``eager``: communicators are made with the default group."""

    backend: str
    eager: bool = False

    @property
    def needs_gpus(self) -> bool:
        return "nccl" in self.backend

    @property
    def profile(self) -> str:
        """The profile of `ncclops launch` for it."""
        return "single-node-h200" if self.needs_gpus else "local-cpu"


GLOO = Lane("gloo")
LANES = {
    "gloo": GLOO,
    "gloo by device": Lane("cpu:gloo"),
    "gloo twice": Lane("cpu:gloo,cuda:gloo"),
    "nccl": Lane("nccl"),
    "nccl-eager": Lane("nccl", eager=True),
    "mixed": Lane("cpu:gloo,cuda:nccl"),
}

# The first lines of a script that runs on each lane: `dist.init_process_group(**lane)`, and tensors
# with `device=device`.
IN_SCRIPT = """
import os, torch
device, lane = None, {"backend": os.environ.get("TEST_BACKEND", "gloo")}
if "nccl" in lane["backend"]:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    lane["device_id"] = device if "TEST_EAGER" in os.environ else None
"""


def lanes(
    *names: str, marks: tuple[pytest.MarkDecorator, ...] = (), extended: tuple[str, ...] = ()
) -> pytest.MarkDecorator:
    """The test runs once on each of these lanes, with the same program.

    Those that need GPUs get ``marks``; those that are ``extended`` run with ``--extended`` only.
    """
    each = [
        pytest.param(LANES[name], marks=marks if LANES[name].needs_gpus else (), id=name)
        for name in names
    ]
    each += [pytest.param(LANES[name], marks=pytest.mark.extended, id=name) for name in extended]
    return pytest.mark.parametrize("lane", each, indirect=True)


def profile_environment(directory: Path) -> dict[str, str]:
    """What a profile of the main lane sets for torch where ranks restart in place."""
    context = PlanContext(restart="in-process", torch="2.13.0")
    plan = compute_plan(load_profiles(["single-node-h200"]), {}, Overrides(), context)
    places = {"run_dir": str(directory), "rank_dir": str(directory)}
    of_torch = ("TORCH_NCCL_", "TORCH_FR_", "PYTORCH_")
    return {k: v for k, v in plan.apply({}, places).items() if k.startswith(of_torch)}


@pytest.fixture
def lane(request: pytest.FixtureRequest) -> Lane:
    """Gloo, unless the test is marked with ``lanes``, or names one of ``LANES``."""
    asked = getattr(request, "param", GLOO)
    return LANES[asked] if isinstance(asked, str) else asked


@dataclass(frozen=True)
class LaneProcess:
    """How a command is run on the lane: with which interpreter, and in which environment."""

    python: str | Path = sys.executable
    environment: dict[str, str] = field(default_factory=dict)


@pytest.fixture
def lane_process(lane: Lane, request: pytest.FixtureRequest) -> LaneProcess:
    """For scripts that begin with ``IN_SCRIPT``."""
    environment = {"TEST_BACKEND": lane.backend} | ({"TEST_EAGER": "1"} if lane.eager else {})
    if not lane.needs_gpus:
        return LaneProcess(environment=environment)
    place: Place = request.getfixturevalue("fake_gpu_place")
    host: Host = request.getfixturevalue("host")
    return LaneProcess(place.python, host.environment | environment)
