"""When restarts in place give up, and what they ask for instead."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclops.decision.retrying import Escalated, respawned_for
from ncclops.record.variables import RESPAWNED_FOR
from ncclops.restart.attribution import ExceededTimeout, Fault, FaultKind, Raised
from ncclops.restart.exception import Escalation, RestartAbort
from ncclops.restart.incident import Incident
from ncclops.worker.escalation import Repetition, SmallestWorld, as_exception
from tests.conftest import CompletedText
from tests.launch.conftest import Run

Ncclops = Callable[..., CompletedText]
Script = Callable[..., Path]
OnlyRun = Callable[[], Run]

STARTED = 1_000_000.0
LATER = STARTED + 3600


def incident(
    summary: str,
    *,
    kind: FaultKind = FaultKind.EXCEPTION,
    line: int = 7,
    at: float = LATER,
    iteration: int = 1,
    escalation: Escalation | None = None,
) -> Incident:
    """One rank's exception at ``line``, or its hang."""
    raised = text = None
    if kind is not FaultKind.SOFT_TIMEOUT:
        name = summary.partition(":")[0].rpartition(".")[2]
        raised = Raised(name, (), "train.py", line, "step")
        text = f'Traceback:\n  File "train.py", line {line}, in step\n{summary}'
    fault = Fault(
        kind=kind, initial_rank=3, rank=3, iteration=iteration, at=at, summary=summary,
        traceback=text, raised=raised, escalation=escalation,
    )  # fmt: skip
    return Incident(
        iteration=iteration, cause=kind.value, summary=summary, first_faulty_rank=3,
        faulty_ranks=(3,), ranks_lost=(), exception=summary if raised else None, traceback=text,
        faults=(fault,), world_size_before=4, world_size=4, initial_rank=0, rank_before=0, rank=0,
        at=at, phases_ms={}, raised=raised, escalation=escalation,
    )  # fmt: skip


def after(
    *incidents: tuple[Incident, int | None], respawned_for: str | None = None
) -> Escalation | None:
    """What follows from the last of ``incidents``; each comes with the highest step so far."""
    repetition = Repetition(STARTED, respawned_for)
    for index, (happened, step) in enumerate(incidents):
        assert repetition.escalation is None, f"escalated before incident {index}"
        repetition.count(happened, step)
    return repetition.escalation


BROKEN = incident("RuntimeError: broken pipe in the loader")


def test_the_same_failure_three_times_without_a_new_step_asks_for_new_processes() -> None:
    escalation = after((BROKEN, 10), (BROKEN, 10), (BROKEN, 10))
    assert escalation is not None
    assert escalation.to == "respawn"
    assert "3 times in a row" in escalation.reason
    assert "train.py" in escalation.reason


@pytest.mark.parametrize(
    "history",
    [
        [(BROKEN, 10), (BROKEN, 10), (BROKEN, 11)],
        [(BROKEN, 10), (incident("RuntimeError: another"), 10), (BROKEN, 10)],
        [(BROKEN, 10), (incident(BROKEN.summary, line=8), 10), (BROKEN, 10)],
        [(BROKEN, None), (BROKEN, None)],
    ],
)
def test_progress_or_another_failure_counts_anew(
    history: list[tuple[Incident, int | None]],
) -> None:
    assert after(*history) is None


def blocked(rank: int) -> Fault:
    """A rank that was ended since it waited in NCCL for a communicator that did not come up."""
    return Fault(
        kind=FaultKind.DIED, initial_rank=rank, rank=rank, iteration=1, at=LATER,
        summary=f"rank {rank}: its process groups were aborted", gone=True, due_to_peer=True,
        timeout=ExceededTimeout("abort", 8.0, 8.5, "main-thread"),
    )  # fmt: skip


def test_ranks_that_waited_for_a_communicator_come_back_in_new_processes() -> None:
    failed = incident("DistBackendError: NCCL error in: c10d/NCCLUtils.cpp:92, unhandled")
    both = dataclasses.replace(
        failed, faults=(*failed.faults, blocked(0), blocked(2)), ranks_lost=(0, 2)
    )
    assert after((failed, 10)) is None, "where none was lost, a restart in place may help"
    escalation = after((both, 10))
    assert escalation is not None
    assert escalation.to == "respawn"
    assert escalation.reason.startswith("ranks 0, 2 waited in NCCL")
    assert escalation.failure == (failed.summary, "train.py:7, in step")
    assert escalation.failed_start


def test_a_communicator_that_does_not_come_up_at_the_start_is_a_failed_start() -> None:
    failed = "DistBackendError: NCCL error in: /p/csrc/distributed/c10d/{}, unhandled system error"
    made, ran = (
        after((incident(failed.format(where), at=STARTED + 10, iteration=0), None))
        for where in ("NCCLUtils.cpp:92", "ProcessGroupNCCL.cpp:3866")
    )
    assert made is not None
    assert "a failure to start" in made.reason
    assert made.failed_start
    assert ran is None


@pytest.mark.parametrize(
    ("minimum", "left", "enough"),
    [(1, 1, True), (6, 6, True), (6, 5, False), (0, 8, True), (0, 7, False)],
)
def test_a_profile_says_with_how_many_ranks_a_job_may_train_on(
    minimum: int, left: int, *, enough: bool
) -> None:
    escalation = SmallestWorld(minimum, at_start=8).judge(left)
    assert (escalation is None) == enough
    if escalation is not None:
        assert escalation.to == "respawn"
        assert f"{left} of 8 ranks are left" in escalation.reason


def test_a_hang_that_comes_back_is_a_failure_too() -> None:
    hang = incident("rank 3: no progress", kind=FaultKind.SOFT_TIMEOUT)
    assert after((hang, 4), (hang, 5)) is None
    escalation = after((hang, 4), (hang, 4), (hang, 4))
    assert escalation is not None
    assert escalation.to == "respawn"


def test_a_failure_that_repeats_in_new_processes_stops_the_job_at_once() -> None:
    first = after((BROKEN, 10), (BROKEN, 10), (BROKEN, 10))
    assert first is not None
    assert first.failure is not None
    passed_on = respawned_for(Escalated(to="respawn", reason=first.reason, failure=first.failure))[
        RESPAWNED_FOR
    ]
    second = after((BROKEN, None), respawned_for=passed_on)
    assert second is not None
    assert second.to == "stop"
    assert after((incident("OSError: another"), None), respawned_for=passed_on) is None


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "torch.AcceleratorError: CUDA error: device-side assert triggered CUDA kernel errors might"
        " be asynchronously reported at some other API call",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "HealthCheckError: health check failed: CUDA error: unspecified launch failure",
        "RuntimeError: NCCL Error 1: unhandled cuda error: Cuda failure 700 'an illegal memory"
        " access was encountered'",
    ],
)
def test_a_corrupted_cuda_context_needs_new_processes(text: str) -> None:
    escalation = after((incident(text), 10))
    assert escalation is not None
    assert escalation.to == "respawn"
    assert "CUDA context of rank 3" in escalation.reason


@pytest.mark.parametrize(
    "text",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "RuntimeError: CUDA error: invalid device ordinal",
        "ValueError: misaligned address in the index file",
    ],
)
def test_other_errors_leave_the_context_usable(text: str) -> None:
    assert after((incident(text), 10)) is None


@pytest.mark.parametrize(
    ("summary", "way"),
    [
        ("KeyError: 'learning_rate'", "stop"),
        ("RuntimeError: ncclRemoteError: remote process exited", "respawn"),
    ],
)
def test_early_failures_are_final_in_place(summary: str, way: str) -> None:
    escalation = after((incident(summary, at=STARTED + 5, iteration=0), None))
    assert escalation is not None
    assert escalation.to == way
    assert after((incident(summary), 10)) is None, "hours later it is worth another try"


def test_what_one_rank_asks_for_the_others_follow() -> None:
    """The rank that leaves has it in its exception, as a value; the text of it says nothing."""
    own = Escalation("respawn", "open files grew by 300", ("a", "b"))
    error = as_exception(own)
    assert isinstance(error, RestartAbort)
    assert error.escalation == own
    left = incident("x.RestartAbort: reworded", kind=FaultKind.LEFT, escalation=error.escalation)
    assert after((left, 10)) == own


def test_a_sentence_about_an_escalation_is_none() -> None:
    text = "x.RestartAbort: escalation to respawn: open files grew by 300"
    assert after((incident(text, kind=FaultKind.LEFT), 10)) is None


def test_a_mistake_is_one_of_pythons_own_exceptions() -> None:
    """A library's own lookup error may pass: a key that another host has not written yet."""
    early = {"at": STARTED + 5, "iteration": 0}
    for name in ("KeyError", "ModuleNotFoundError", "IndentationError"):
        mistake = after((incident(f"{name}: x", **early), None))  # type: ignore[arg-type]
        assert mistake is not None
        assert mistake.to == "stop"
    assert after((incident("store.KeyMissing: x", **early), None)) is None  # type: ignore[arg-type]


class TestRuns:
    def test_new_processes_help_where_a_restart_in_place_does_not(
        self, ncclops: Ncclops, script: Script, only_run: OnlyRun
    ) -> None:
        """The module keeps what spoils each iteration; only one of the ranks fails by itself."""
        source = (
            "import os, sys, torch.distributed as dist\n"
            "dist.init_process_group('gloo')\n"
            "spoiled = getattr(dist, 'spoiled', os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n"
            "dist.spoiled = spoiled\n"
            "print('started', flush=True)\n"
            "if spoiled and os.environ['LOCAL_RANK'] == '1':\n"
            "    raise RuntimeError('spoiled')\n"
            "dist.barrier()\n"
        )
        done = ncclops("launch", "--nproc-per-node", "2", script(source))
        assert done.returncode == 0, done.stderr
        run = only_run()
        assert run.stdout(0) == "started\n" * 4
        (escalation,) = run.named("escalation")
        assert escalation["to"] == "respawn"
        assert "3 times in a row" in escalation["reason"]
        (retry,) = run.named("retry")
        assert "spoiled" in retry["reason"]
        assert run.verdict["attempts"] == 2
        names = [event["event"] for event in run.events]
        assert names.index("escalation") < names.index("retry")

    def test_what_piles_up_over_restarts_ends_in_new_processes(
        self, ncclops: Ncclops, script: Script, only_run: OnlyRun, tmp_path: Path
    ) -> None:
        """Rank 0 loses twenty files an iteration; rank 1 follows it out."""
        profile = tmp_path / "tight.toml"
        profile.write_text(
            'description = "A small budget."\nextends = "local-cpu"\n[growth]\nfds = 30\n'
        )
        source = (
            "import os, torch.distributed as dist\n"
            "dist.init_process_group('gloo')\n"
            "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
            "    kept = dist.__dict__.setdefault('kept', [])\n"
            "    if os.environ['LOCAL_RANK'] == '0':\n"
            "        kept += [open(os.devnull) for _ in range(20)]\n"
            "        raise RuntimeError(f'failure {len(kept)}')\n"
            "dist.barrier()\n"
        )
        options = ["--profile", str(profile), "--nproc-per-node", "2"]
        done = ncclops("launch", *options, script(source))
        assert done.returncode == 0, done.stderr
        run = only_run()
        growth = run.named("resource-growth")
        assert all(event["rank"] == 0 for event in growth if event["grown"].get("fds", 0) >= 20)
        assert any(event["exceeded"] for event in growth)
        (escalation,) = run.named("escalation")
        assert (escalation["to"], escalation["rank"]) == ("respawn", 0)
        assert re.search(r"open files grew by (3|4)\d over", escalation["reason"])
        assert run.verdict["attempts"] == 2
        assert len(run.named("restart")) == 4, "three failures, and rank 0 leaving"
