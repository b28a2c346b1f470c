"""The environment in which a worker starts: later words go before earlier ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ncclops.agent.hosted_store import StoreAddress
from ncclops.agent.layout import Layout, Nodes
from ncclops.agent.rendezvous_result import Place
from ncclops.agent.worker_starts import WorkerStarts
from ncclops.record.paths import RunPaths


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    layout = Layout(nodes=Nodes(count=2, rank=1), nproc=2)
    placed = {"A": "place", "B": "place"}
    place = Place(number=3, layout=layout, store=StoreAddress("node-a", 29500), environ=placed)
    job = SimpleNamespace(
        environ_of=lambda rank: {"A": "plan", "C": f"plan of {rank}", "RANK": "17"},
        retry=SimpleNamespace(granted=5),
        job_id="job",
        run=SimpleNamespace(paths=RunPaths(tmp_path)),
    )
    unused = cast(Any, None)
    starts = WorkerStarts(cast(Any, job), place, {"B": "retry"}, unused, unused, unused)
    return starts.environ(3)


def test_a_retry_goes_before_the_place_and_the_place_before_the_plan(
    environ: dict[str, str],
) -> None:
    assert (environ["A"], environ["B"], environ["C"]) == ("place", "retry", "plan of 3")


def test_who_a_worker_is_nobody_else_says(environ: dict[str, str], tmp_path: Path) -> None:
    assert (environ["RANK"], environ["LOCAL_RANK"], environ["WORLD_SIZE"]) == ("3", "1", "4")
    assert environ["TORCHELASTIC_ERROR_FILE"] == str(RunPaths(tmp_path).rank(3).error(3))
