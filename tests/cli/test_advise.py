"""`ncclops advise` as people and scripts call it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ncclops.advisories import advisories
from ncclops.advisories.cases import of_run
from ncclops.env.snapshot import take
from ncclops.host import gpus
from ncclops.host.software import Software
from ncclops.launch import command
from ncclops.launch.request import LaunchRequest
from ncclops.record.environment_record import ENVIRONMENT
from ncclops.record.paths import RunPaths
from ncclops.record.run_record import RUN, NodesPlanned, RunRecord
from tests.conftest import CompletedText

Ncclops = Callable[..., CompletedText]

SEGFAULT = "nccl-2.28-restart-in-place-segfault"
IB = "nccl-2.29.7-ib-hang"
STACK = {"torch": "2.11.0", "driver": "580.95.05", "gpu": "8 × NVIDIA H200"}
SOFTWARE = Software(
    torch="2.11.0",
    nccl="2.28.7",
    nccl_from="wheel",
    gpus=("NVIDIA H200",) * 8,
    cpu="x86_64",
    plugin_known=True,
    fabric_manager_known=True,
    rdma=("InfiniBand",),
)


@pytest.fixture
def ncclops(ncclops_in_process: Ncclops) -> Ncclops:
    """Commands that only read need no process of their own."""
    return ncclops_in_process


def write_run(path: Path, environ: dict[str, str] | None = None, **fields: Any) -> Path:
    paths = RunPaths(path)
    paths.rank(0).environment.parent.mkdir(parents=True)
    paths.events.touch()
    given: dict[str, Any] = {"nodes": NodesPlanned(count=2, rank=0), "world_size": 16} | fields
    RUN.write(paths.run, RunRecord(restart="in-process", **given))
    if environ is not None:
        ENVIRONMENT.write(paths.rank(0).environment, take(environ, label="rank 0"))
    return path


def answers(done: CompletedText) -> dict[str, tuple[str, list[str]]]:
    document = json.loads(done.stdout)
    assert document["schema"] == "ncclops.advise/1"
    return {each["id"]: (each["state"], each["if"]) for each in document["advisories"]}


def test_a_run_is_judged_by_what_it_recorded(ncclops: Ncclops, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"A": "b"}, software=asdict(SOFTWARE))
    case = of_run(run)
    assert (case.software, case.nodes, case.ranks) == (SOFTWARE, 2, 16)
    found = answers(ncclops("advise", run, "--json"))
    assert found[SEGFAULT] == ("concerns", [])
    assert IB not in found
    assert len(answers(ncclops("advise", run, "--json", "--all"))) == len(advisories())
    assert ncclops("advise", run).returncode == 0
    assert ncclops("advise", run, "--exit-code").returncode == 1
    text = ncclops("advise", run).stdout
    assert "concern run run:" in text
    assert "fixed in: nccl 2.28.9" in text


def test_a_runs_variables_count(ncclops: Ncclops, tmp_path: Path) -> None:
    software = asdict(SOFTWARE) | {"nccl": "2.29.7"}
    for name, environ, expected in (
        ("plain", {}, "concerns"),
        ("way-round", {"NCCL_PXN_DISABLE": "1"}, None),
        ("unknown", None, "cannot-tell"),
    ):
        run = write_run(tmp_path / name, environ, software=software)
        assert answers(ncclops("advise", run, "--json")).get(IB, (None, []))[0] == expected


def test_an_older_run_has_its_stack_line_alone(ncclops: Ncclops, tmp_path: Path) -> None:
    run = write_run(tmp_path / "old", {}, stack=STACK | {"nccl": "2.29.7"})
    assert answers(ncclops("advise", run, "--json"))[IB] == (
        "cannot-tell",
        ["there is an InfiniBand device"],
    )
    without = write_run(tmp_path / "cpu", {}, stack={"torch": "2.13.0", "nccl": "2.29.7"})
    assert answers(ncclops("advise", without, "--json")) == {}


def test_mistakes_are_one_line(ncclops: Ncclops, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", software={"gpus": 7})
    for arguments, said in (
        (("advise", run), "is damaged (software:"),
        (("advise", tmp_path / "none"), "none"),
        (("advise", "--explain", "nccl-2.25.1"), "did you mean nccl-2.25.1-abort-hangs?"),
        (("advise", run, "--nnodes", "2"), "a run has its own"),
        (("advise", "--restart", "proces"), "did you mean process?"),
    ):
        done = ncclops(*arguments)
        assert done.returncode == 2
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
        assert done.stdout == ""


def test_an_entry_is_explained_whomever_it_concerns(ncclops: Ncclops) -> None:
    text = ncclops("advise", "--explain", SEGFAULT).stdout
    assert SEGFAULT in text
    assert "way round:" in text
    assert "https://" in text


def with_gpus(monkeypatch: pytest.MonkeyPatch, nccl: str) -> None:
    """A node whose driver and NCCL are those of ``nccl``; only the machine's own edges differ."""
    found = gpus.Gpus(("NVIDIA H200",) * 2, "580.95.05")
    monkeypatch.setattr("ncclops.launch.command.find_gpus", lambda: found)
    monkeypatch.setattr("ncclops.advisories.cases.find_gpus", lambda _environ: found)
    monkeypatch.setattr("ncclops.host.software.installed_nccl", lambda: nccl)
    monkeypatch.setattr("ncclops.launch.stack._git_commit", lambda _directory: None)


def test_a_launch_says_the_worst_and_records_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_gpus(monkeypatch, "2.25.1")
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    request = LaunchRequest(target=script, profile="single-node-h200")
    prepared = command.prepare(request)
    (line,) = (each for each in prepared.remarks if "known issue" in each)
    assert "ncclCommAbort hangs in NCCL 2.25.1" in line
    document = prepared.to_json()
    assert [each["id"] for each in document["advisories"]] == [
        "nccl-2.25.1-abort-hangs",
        "nccl-accept-interrupted",
    ]
    assert document["software"]["nccl"] == "2.25.1"
    with_gpus(monkeypatch, "2.30.7")
    prepared = command.prepare(request)
    assert not any("known issue" in each for each in prepared.remarks)
    assert prepared.to_json()["advisories"] == []


def test_this_machine_is_judged_for_the_job_that_is_named(
    ncclops: Ncclops, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, "2.28.7")
    assert answers(ncclops("advise", "--json"))[SEGFAULT][0] == "cannot-tell"
    in_place = ncclops("advise", "--json", "--restart", "in-process", "--nnodes", "2")
    assert answers(in_place)[SEGFAULT][0] == "concerns"
    assert SEGFAULT not in answers(ncclops("advise", "--json", "--restart", "process"))
