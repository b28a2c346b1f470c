"""Code written for the other wrapper runs: real jobs of programs that follow its guides."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import free_port

from .conftest import Job

RETRY = "no further restart: state.iteration=2 reached max_iterations=2"


def start(job: Job, ranks: int, program: str, **parameters: Any) -> dict[int, int]:
    module = "dropin_annotations" if program == "annotated" else "dropin_programs"
    return job.start(ranks, f"{module}:{program}", **parameters).wait()


def returned(job: Job) -> dict[int, Any]:
    return {event["rank"]: event["value"] for event in job.events("returned")}


def test_every_parameter_and_the_order_of_the_callbacks(job: Job) -> None:
    assert set(start(job, 2, "everything").values()) == {0}
    assert set(returned(job).values()) == {"4 steps in iteration 1"}
    for rank in (0, 1):
        calls = [(e["name"], e["iteration"]) for e in job.events("callback", rank)]
        assert calls == [
            ("initialize", 0),
            ("health_check", 0),
            ("abort", 0),
            ("finalize", 0),
            ("health_check", 0),
            ("initialize", 1),
            ("health_check", 1),
            ("completion", 1),
        ]
        own = {e["error"] for e in job.events("callback", rank) if e["error"]}
        assert own == ({"RuntimeError('example fault')"} if rank == 1 else set())
        assert len(job.events("finalizing", rank)) == 1
        assert (job.directory / f"monitor-{rank}.log").exists()
    job.expect_no_orphans()


def test_the_call_wrapper_is_injected_however_it_is_annotated(job: Job) -> None:
    assert set(start(job, 2, "annotated").values()) == {0}
    assert returned(job) == {0: [11, 21, 31], 1: [11, 21, 31]}


def test_older_names_work_and_say_what_to_write_instead(job: Job) -> None:
    assert start(job, 3, "older_names") == {0: -9, 1: 0, 2: 0}
    expect_the_reserve_to_take_over(job)
    about = " | ".join(job.events("warned", 2)[0]["about"])
    for name in ("FilterGroupedByKey", "key_or_fn", "WorldSizeDivisibleBy", "MaxActiveWorldSize"):
        assert name in about
    assert "rank_filter=" in about


def test_a_composition_of_filters_and_an_assignment(job: Job) -> None:
    assert start(job, 3, "divisible") == {0: -9, 1: 0, 2: 0}
    expect_the_reserve_to_take_over(job)
    now = {e["rank"]: e["now"] for e in job.events("entered") if e["iteration"] == 1}
    assert now == {1: "1", 2: "0"}, "FillGaps moves the last rank into the gap"


def test_a_tree_with_reserves_and_a_filter(job: Job) -> None:
    assert start(job, 3, "tree") == {0: -9, 1: 0, 2: 0}
    expect_the_reserve_to_take_over(job)


def expect_the_reserve_to_take_over(job: Job) -> None:
    assert {e["rank"] for e in job.events("entered") if e["iteration"] == 0} == {0, 1}
    assert {e["rank"] for e in job.events("entered") if e["iteration"] == 1} == {1, 2}
    assert returned(job) == {1: "world of 2", 2: "world of 2"}
    job.expect_no_orphans()


@pytest.mark.parametrize(
    ("limit", "codes", "ending"), [(5, {0: 0, 1: 0}, "finalized"), (2, {0: 1, 1: 1}, "aborted")]
)
def test_nested_restarter_lines_on_one_rank(
    job: Job, limit: int, codes: dict[int, int], ending: str
) -> None:
    assert start(job, 2, "nested", limit=limit) == codes
    lines = (job.directory / "nested-0").read_text().splitlines()
    said = [line.split("name=[InProcess] ")[1] for line in lines]
    starting, completed = "state=handling stage=starting", "state=handling stage=completed"
    restarts = [starting, completed, starting]
    if limit == 5:
        assert said == ["state=initialize", *restarts, completed, f"state={ending}"]
    else:  # the controller gives up at the start of the third iteration
        assert said[:4] == ["state=initialize", *restarts]
        assert said[-1] == f"state={ending}"
        assert {e["chain"][0] for e in job.events("raised")} == {f"RestartAbort: {RETRY}"}
    assert (job.directory / "nested-1").read_text() == ""


def test_a_threaded_finalize_that_is_late_takes_its_rank_out(job: Job) -> None:
    assert start(job, 2, "late_finalize") == {0: 0, 1: 1}
    assert returned(job) == {0: "world of 1"}
    assert "TimeoutError" in job.events("raised", 1)[0]["error"]


def test_a_rank_that_faults_too_often_is_taken_out(job: Job) -> None:
    assert start(job, 3, "counted_faults") == {0: 0, 1: 1, 2: 0}
    assert returned(job) == dict.fromkeys((0, 2), "iteration 2, world of 2")
    assert "FaultCounterExceeded" in job.events("raised", 1)[0]["error"]


def test_a_rank_whose_key_cannot_be_had_leaves_and_the_others_go_on(job: Job) -> None:
    assert start(job, 3, "failing_key") == {0: 0, 1: 1, 2: 0}
    assert returned(job) == dict.fromkeys((0, 2), "world of 2")
    assert "no host name" in job.events("raised", 1)[0]["error"]


def test_debug_says_where_a_base_exception_was_swallowed(job: Job) -> None:
    assert set(start(job, 2, "swallowing").values()) == {0}
    assert returned(job) == {0: 1, 1: 1}
    reports = [
        line
        for line in (job.directory / "log-0").read_text().splitlines()
        if "DEBUG" in line and "was suppressed" in line
    ]
    assert reports
    assert "dropin_programs.py" in reports[0]
    assert "swallowing.<locals>.work" in reports[0]


def test_calls_stand_by_themselves_and_a_rank_may_abort(job: Job) -> None:
    assert set(start(job, 2, "abort_by_user").values()) == {0}
    assert returned(job) == {
        0: ["world of 2", "world of 1"],
        1: ["world of 2", "no more of this"],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", ["torchrun", pytest.param("mp.spawn", marks=pytest.mark.extended)]
)
def test_the_example_script_under_the_usual_launchers(launcher: str) -> None:
    script = str(Path(__file__).with_name("dropin_example.py"))
    python = [sys.executable, "-W", "ignore"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    command = [*python, *(torchrun if launcher == "torchrun" else [script, str(free_port())])]
    job = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert job.returncode == 0, job.stderr
    # Gloo of torch 2.7 and 2.8 prints there as well, in the middle of a line too.
    printed = re.findall(r"rank \d of \d: \d+", job.stdout)
    assert sorted(printed) == ["rank 0 of 2: 1", "rank 1 of 2: 1"]
    assert ("started by torchrun" in job.stderr) == (launcher == "torchrun")
