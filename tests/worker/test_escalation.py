"""When restarts in place give up, and what they ask for instead."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclops.decision.retrying import Escalated, respawned_for
from ncclops.record.variables import RESPAWNED_FOR, RUN_DIR
from ncclops.restart.attribution import ExceededTimeout, Fault, FaultKind
from ncclops.restart.exception import Escalation, RestartAbort
from ncclops.restart.incident import Incident
from ncclops.restart.raised import Raised
from ncclops.worker import in_process
from ncclops.worker.escalation import Repetition, SmallestWorld, as_exception, is_replaceable
from tests.conftest import CompletedText
from tests.lanes import IN_SCRIPT, lanes
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
    if kind in (FaultKind.EXCEPTION, FaultKind.NCCL_ERROR):
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
    *incidents: tuple[Incident, int | None],
    respawned_for: str | None = None,
    starting_up: bool | None = None,
) -> Escalation | None:
    """What follows from the last of ``incidents``; each comes with the highest step so far."""
    repetition = Repetition(STARTED, respawned_for)
    for index, (happened, step) in enumerate(incidents):
        assert repetition.escalation is None, f"escalated before incident {index}"
        numbered = len(incidents) > 1 and happened.iteration == 1
        this = dataclasses.replace(happened, iteration=index) if numbered else happened
        repetition.count(this, step, starting_up=starting_up)
    return repetition.escalation


BROKEN = incident("RuntimeError: broken pipe in the loader")
MEMORY = incident("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
HANG = incident("rank 3: no progress", kind=FaultKind.SOFT_TIMEOUT)
FOUND_HUNG = incident("rank 3 hangs: step counter", kind=FaultKind.HUNG)


def test_what_cannot_be_judged_is_not_started_over_for_ever() -> None:
    (fault,) = BROKEN.faults
    damaged = dataclasses.replace(fault, traceback=7)  # type: ignore[arg-type]
    escalation = after((dataclasses.replace(BROKEN, faults=(damaged,)), 10))
    assert escalation is not None
    assert (escalation.to, escalation.failure) == (
        "respawn",
        (BROKEN.summary, "train.py:7, in step"),
    )
    assert "is not known (TypeError)" in escalation.reason


def test_the_script_s_own_error_ends_the_job_when_it_comes_again_without_a_new_step() -> None:
    assert after((BROKEN, 10)) is None
    escalation = after((BROKEN, 10), (BROKEN, 10))
    assert escalation is not None
    assert escalation.to == "stop"
    assert "2 times at the same place without a new step" in escalation.reason
    assert "train.py" in escalation.reason


def test_a_rank_that_ends_before_its_peers_again_and_again_ends_the_job() -> None:
    early = Fault.of_early_return(3, 3, 1)
    one = incident(early.summary, kind=FaultKind.RETURNED_EARLY)
    one = dataclasses.replace(one, exception=None, raised=None, traceback=None, faults=(early,))
    assert after((one, 10), (one, 20)) is None
    escalation = after((one, 10), (one, 10))
    assert escalation is not None
    assert escalation.to == "stop"
    assert (
        escalation.reason == f"{one.summary} (rank 3): 2 times at the same place without a new step"
    )


@pytest.mark.parametrize("summary", [BROKEN.summary, "KeyError: 'SET_ONCE'"])
def test_what_did_not_fail_in_the_first_run_may_have_to_do_with_the_processes(summary: str) -> None:
    """A library refuses to be started twice in one process, or something is set at an import."""
    again = incident(summary, line=2, at=STARTED + 60)
    asked = after((MEMORY, 10), (again, 10), *[(again, 10)] * (summary == BROKEN.summary))
    assert asked is not None
    assert (asked.to, asked.failure) == ("respawn", (summary, "train.py:2, in step"))
    for earlier in (asked.failure, ("another", "elsewhere")):
        repetition = Repetition(STARTED, json.dumps(earlier))
        for iteration in range(2):
            repetition.count(dataclasses.replace(again, iteration=iteration), 10)
        assert repetition.escalation is not None
        assert repetition.escalation.to == "stop"


def test_an_error_that_new_processes_may_mend_has_three_tries_in_place() -> None:
    escalation = after((MEMORY, 10), (MEMORY, 10), (MEMORY, 10))
    assert escalation is not None
    assert escalation.to == "respawn"
    assert "3 times" in escalation.reason
    assert not escalation.failed_start


def test_numbers_in_a_message_make_no_other_failure() -> None:
    first, second = (incident(f"RuntimeError: bad batch {n} at 0x7f{n}") for n in (17, 18))
    escalation = after((first, 10), (second, 10))
    assert escalation is not None
    assert escalation.to == "stop"


def test_another_failure_in_between_is_no_progress() -> None:
    escalation = after((BROKEN, 10), (MEMORY, 10), (BROKEN, 10))
    assert escalation is not None
    assert escalation.to == "stop"


@pytest.mark.parametrize(
    "history",
    [
        pytest.param([(BROKEN, 10), (BROKEN, 11), (BROKEN, 12)], id="a new step"),
        pytest.param([(BROKEN, 10), (incident("RuntimeError: another"), 10)], id="another error"),
        pytest.param([(BROKEN, 10), (incident(BROKEN.summary, line=8), 10)], id="another line"),
        pytest.param(
            [(incident(BROKEN.summary, at=LATER * n), None) for n in (1, 2, 3)],
            id="steps are not known, and it ran for long",
        ),
    ],
)
def test_progress_or_another_failure_counts_anew(
    history: list[tuple[Incident, int | None]],
) -> None:
    assert after(*history) is None


@pytest.mark.parametrize(
    ("summary", "kind", "updates", "ends"),
    [
        (BROKEN.summary, FaultKind.EXCEPTION, (9000, 7000, 8000, 600), None),
        # From one checkpoint to one batch of data, again and again.
        (BROKEN.summary, FaultKind.EXCEPTION, (9000, 700, 700), "stop"),
        (MEMORY.summary, FaultKind.EXCEPTION, (9000, 700, 700, 700), "respawn"),
        (HANG.summary, FaultKind.HUNG, (90, 70, 80), "respawn"),
    ],
)
def test_updates_begin_anew_with_each_start_from_a_checkpoint(
    summary: str, kind: FaultKind, updates: tuple[int, ...], ends: str | None
) -> None:
    """A script that reports no steps, and has run for long before each of its failures."""
    repetition = Repetition(STARTED, None)
    for iteration, count in enumerate(updates):
        assert repetition.escalation is None
        happened = incident(
            summary, kind=kind, at=STARTED + 3600 * (iteration + 1), iteration=iteration
        )
        repetition.count(happened, None, updates=count)
    asked = repetition.escalation
    assert (asked.to if asked else None) == ends


@pytest.mark.parametrize(
    ("unfinished", "reason"),
    [({3}, "all ranks but rank 3 had finished"), (set(), None), (None, None)],
)
def test_no_rank_that_had_finished_starts_again_without_one_that_had_not(
    unfinished: set[int] | None, reason: str | None
) -> None:
    repetition = Repetition(STARTED, None)
    asked = repetition.count(incident("the process died"), 10, unfinished=unfinished)
    assert asked == (None if reason is None else Escalation("respawn", reason))


def test_errors_that_all_differ_do_not_go_on_for_ever() -> None:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    errors = [(incident(f"RuntimeError: {word}"), 10) for word in words]
    assert after(*errors[:-1]) is None
    escalation = after(*errors)
    assert escalation is not None
    assert escalation.to == "respawn"
    assert "8 failures without a new step" in escalation.reason


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: Backend nccl does not support allgather_into_tensor_coalesced",
        "torch.distributed.DistBackendError: NCCL error in: /p/c10d/NCCLUtils.cpp:94, internal"
        " error, NCCL version 2.28.3 Last error: Failed to initialize any NET plugin",
        "torch.distributed.DistBackendError: NCCL error in: /p/c10d/NCCLUtils.cpp:92, invalid"
        " usage, NCCL version 2.29.7 ncclInvalidUsage: This usually reflects invalid usage",
    ],
)
@pytest.mark.parametrize("iteration", [0, 1])
def test_what_no_new_start_changes_stops_at_once(text: str, iteration: int) -> None:
    """Also where ranks were lost that waited for the communicator, and at the start of a run."""
    final = incident(text, iteration=iteration, at=STARTED + 5)
    both = dataclasses.replace(final, faults=(*final.faults, blocked(0)), ranks_lost=(0,))
    for happened in (final, both):
        escalation = after((happened, None), starting_up=True)
        assert escalation is not None
        assert escalation.to == "stop"
        assert "which no new start changes" in escalation.reason
        assert escalation.failure == (text, "train.py:7, in step")


def test_a_consequence_on_another_rank_is_not_taken_for_final() -> None:
    """A rank may meet its aborted communicator in many ways."""
    text = "RuntimeError: NCCL error: invalid usage, ncclInvalidUsage"
    victim = dataclasses.replace(incident(text).faults[0], initial_rank=1, secondary=True)
    assert after((dataclasses.replace(BROKEN, faults=(*BROKEN.faults, victim)), 10)) is None


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
    assert escalation.reason.endswith(f", and had to be ended after rank 3: {failed.summary}")
    assert escalation.failure == (failed.summary, "train.py:7, in step")
    assert escalation.failed_start
    second = after((both, 10), respawned_for=json.dumps(escalation.failure))
    assert second is not None
    assert second.to == "stop", "new processes have not helped"


def test_ranks_that_waited_in_gloo_come_back_unless_new_processes_have_their_places() -> None:
    """Whatever else happened: nothing failed to start."""
    limit = ExceededTimeout("abort", 1.0, 5.2, "main-thread", "Gloo")
    waited = dataclasses.replace(blocked(0), timeout=limit)
    killed = dataclasses.replace(blocked(1), timeout=None, due_to_peer=False)
    lost = dataclasses.replace(
        BROKEN, cause="died", faults=(killed, waited), ranks_lost=(0, 1), first_faulty_rank=1
    )
    escalation = after((lost, 10))
    assert escalation is not None
    assert escalation.reason.startswith("rank 0 waited in Gloo for ranks that were gone")
    assert (escalation.to, escalation.passing, escalation.failed_start) == ("respawn", True, False)
    assert after((dataclasses.replace(lost, ranks_returned=(0, 1)), 10)) is None


def test_a_rank_that_waited_is_replaced_where_another_has_raised_and_is_there_to_judge_it() -> None:
    """Otherwise all begin anew: the communicator may not come up again, or nobody may be left."""
    raised = incident("OSError: of the data").faults[0]
    assert is_replaceable("Gloo", None)
    assert is_replaceable("NCCL", raised)
    assert not is_replaceable("NCCL", None)
    start = incident("DistBackendError: NCCL error in: c10d/NCCLUtils.cpp:92, unhandled").faults[0]
    for fault in (
        start,
        blocked(0),
        dataclasses.replace(raised, gone=True),
        dataclasses.replace(raised, secondary=True),
        incident("rank 3 does not move", kind=FaultKind.SOFT_TIMEOUT).faults[0],
    ):
        assert not is_replaceable("NCCL", fault)


def test_an_error_that_found_ranks_in_nccl_has_new_processes_again_but_not_on_the_same_rank() -> (
    None
):
    """It may come for the same reason, and then they have not helped, or just in the same place."""
    found = dataclasses.replace(BROKEN, faults=(*BROKEN.faults, blocked(0)), ranks_lost=(0,))
    escalation = after((found, 10))
    assert escalation is not None
    assert (escalation.to, escalation.passing, escalation.failed_start) == ("respawn", True, False)
    passed_on = json.dumps(escalation.failure)
    again = after((found, None), respawned_for=passed_on)
    assert again is not None
    assert again.to == "stop"
    assert after((BROKEN, None), respawned_for=passed_on) is None, "now it found no rank there"
    elsewhere = dataclasses.replace(found, first_faulty_rank=2)
    on_another = after((elsewhere, None), respawned_for=passed_on)
    assert on_another is not None
    assert (on_another.to, on_another.passing) == ("respawn", True)


def test_a_mistake_in_the_script_is_one_also_where_it_found_ranks_in_nccl() -> None:
    mistake = incident("KeyError: 'lr'", at=STARTED + 5, iteration=0)
    escalation = after((dataclasses.replace(mistake, faults=(*mistake.faults, blocked(0))), None))
    assert escalation is not None
    assert escalation.to == "stop"


NOT_MADE = "DistBackendError: NCCL error in: /p/csrc/distributed/c10d/{}, unhandled system error"


def test_a_communicator_that_does_not_come_up_at_the_start_is_a_failed_start() -> None:
    made, ran = (
        after((incident(NOT_MADE.format(where), at=STARTED + 10, iteration=0), None))
        for where in ("NCCLUtils.cpp:92", "ProcessGroupNCCL.cpp:3866")
    )
    assert made is not None
    assert "a failure to start" in made.reason
    assert made.failed_start
    assert ran is None


@pytest.mark.parametrize("at", [STARTED + 10, LATER])
def test_start_up_lasts_until_the_recorder_knows_of_a_collective(at: float) -> None:
    """And not for some minutes; without a recorder these have to do."""
    failed = incident(NOT_MADE.format("NCCLUtils.cpp:92"), at=at, iteration=0)
    starting, running = (after((failed, None), starting_up=known) for known in (True, False))
    assert starting is not None
    assert (starting.to, starting.failed_start) == ("respawn", True)
    assert running is None
    assert (after((failed, None)) is not None) == (at < LATER)


def test_a_start_that_keeps_failing_after_restarts_ends_in_lazy_processes() -> None:
    failed = incident(NOT_MADE.format("NCCLUtils.cpp:92"), iteration=3)
    assert after((failed, None), (failed, None), starting_up=True) is None
    escalation = after(*[(failed, None)] * 3, starting_up=True)
    assert escalation is not None
    assert (escalation.to, escalation.failed_start) == ("respawn", True)


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


@pytest.mark.parametrize("found_by", [(HANG,) * 3, (FOUND_HUNG,) * 3, (HANG, FOUND_HUNG, HANG)])
def test_a_hang_that_comes_back_ends_whoever_finds_it(found_by: tuple[Incident, ...]) -> None:
    assert after(*zip(found_by, (4, 5, 6), strict=True)) is None
    assert after(*zip(found_by[:2], (4, 4), strict=True)) is None
    escalation = after(*zip(found_by, (4, 4, 4), strict=True))
    assert escalation is not None
    assert escalation.to == "respawn"
    assert escalation.failure == ("a hang", "rank 3")
    again = after((FOUND_HUNG, None), respawned_for=json.dumps(escalation.failure))
    assert again is not None
    assert again.to == "stop"


def test_a_rank_that_always_waits_at_its_end_is_not_started_again_for_ever() -> None:
    ended = incident("waited too long to complete", kind=FaultKind.COMPLETION_TIMEOUT)
    assert after((ended, 10), (ended, 11), (ended, 12)) is None
    escalation = after((ended, 10), (ended, 10), (ended, 10))
    assert escalation is not None
    assert escalation.to == "respawn"
    again = after((ended, 10), respawned_for=json.dumps(escalation.failure))
    assert again is not None
    assert again.to == "stop"


def test_a_failure_that_repeats_in_new_processes_stops_the_job_at_once() -> None:
    first = after((MEMORY, 10), (MEMORY, 10), (MEMORY, 10))
    assert first is not None
    assert first.failure is not None
    passed_on = respawned_for(Escalated(to="respawn", reason=first.reason, failure=first.failure))[
        RESPAWNED_FOR
    ]
    second = after((MEMORY, None), respawned_for=passed_on)
    assert second is not None
    assert second.to == "stop"
    assert after((incident("OSError: another"), None), respawned_for=passed_on) is None


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "torch.AcceleratorError: CUDA error: device-side assert triggered CUDA kernel errors might"
        " be asynchronously reported at some other API call",
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
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "RuntimeError: NCCL Error 1: unhandled cuda error: Cuda failure 214 'uncorrectable ECC"
        " error encountered'",
    ],
)
def test_new_processes_would_meet_a_broken_gpu_again(text: str) -> None:
    assert after((incident(text), 10)) is None


def test_the_gpu_is_named_of_which_the_context_is_corrupted() -> None:
    left = incident("the CUDA context is lost", kind=FaultKind.HEALTH_CHECK).faults[0]
    left = dataclasses.replace(left, device="GPU 3 (GPU-5) on n7")
    raised = incident("RuntimeError: CUDA error: device-side assert triggered")
    escalation = after((dataclasses.replace(raised, faults=(*raised.faults, left)), 10))
    assert escalation is not None
    assert escalation.reason.endswith(
        "corrupted: device-side assert triggered, on GPU 3 (GPU-5) on n7"
    )


def test_a_rank_that_has_lost_its_gpu_costs_no_other_its_process() -> None:
    """Whatever CUDA says of the loss."""
    raised = incident("RuntimeError: CUDA error: unspecified launch failure")
    left = dataclasses.replace(
        raised.faults[0], kind=FaultKind.HEALTH_CHECK, raised=Raised("GpuUnusable"), gone=True
    )
    assert after((dataclasses.replace(raised, faults=(*raised.faults, left)), 10)) is None


@pytest.mark.parametrize(
    "text",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "RuntimeError: CUDA error: out of memory",
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
    @lanes("nccl", extended=("gloo",))
    def test_new_processes_help_where_a_restart_in_place_does_not(
        self, ncclops: Ncclops, script: Script, only_run: OnlyRun
    ) -> None:
        """The module keeps what spoils each iteration; only one of the ranks fails by itself."""
        source = (
            "import torch.distributed as dist\n"
            "dist.init_process_group(**lane)\n"
            "dist.barrier()  # a rank that waits for a communicator is restarted at once\n"
            "spoiled = getattr(dist, 'spoiled', os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n"
            "dist.spoiled = spoiled\n"
            "print('started', flush=True)\n"
            "if spoiled and os.environ['LOCAL_RANK'] == '1':\n"
            "    raise RuntimeError('CUDA out of memory: spoiled')\n"
            "dist.barrier()\n"
            "dist.destroy_process_group()  # else torch's watchdog may crash at the end\n"
        )
        done = ncclops("launch", "--nproc-per-node", "2", script(IN_SCRIPT + source))
        assert done.returncode == 0, done.stderr
        run = only_run()
        assert run.stdout(0) == "started\n" * 4
        (escalation,) = run.named("escalation")
        assert escalation["to"] == "respawn"
        assert "3 times at the same place" in escalation["reason"]
        (retry,) = run.named("retry")
        assert "spoiled" in retry["reason"]
        assert run.verdict["attempts"] == 2
        names = [event["event"] for event in run.events]
        assert names.index("escalation") < names.index("retry")

    @pytest.mark.extended
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
            "        raise RuntimeError('failure' + ' again' * len(kept))\n"
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

    @pytest.mark.parametrize(
        "end",
        [
            "raise RuntimeError('NCCL error in: /p/c10d/NCCLUtils.cpp:94, internal error - please"
            " report this issue to the NCCL developers, NCCL version 2.28.3')",
            pytest.param("sys.exit(3)", marks=pytest.mark.extended),
        ],
        ids=["an exception", "an exit"],
    )
    @pytest.mark.extended
    def test_a_final_error_enters_the_script_once(
        self, ncclops: Ncclops, script: Script, only_run: OnlyRun, end: str
    ) -> None:
        """Rank 1 alone meets it, and what it ends with does not name the cause: a warning does."""
        source = (
            "import os, sys, time\n"
            "print('started', flush=True)\n"
            "if os.environ['RANK'] == '0':\n"
            "    time.sleep(600)\n"
            "sys.stderr.write('n1:4:4 [0] NCCL WARN Failed to initialize any NET plugin\\n')\n"
            f"{end}\n"
        )
        done = ncclops("launch", "--nproc-per-node", "2", script(source))
        assert done.returncode == 1, done.stderr
        run = only_run()
        assert [run.stdout(rank) for rank in range(2)] == ["started\n"] * 2
        (escalation,) = run.named("escalation")
        assert escalation["to"] == "stop"
        assert "plugin-env, which no new start changes" in escalation["reason"]
        assert run.named("retry") == []
        assert (run.verdict["attempts"], run.verdict["outcome"]) == (1, "failed")
        assert run.verdict["classification"]["class"] == "plugin-env"

    @pytest.mark.extended
    def test_the_script_s_own_error_is_tried_twice_and_shown_once(
        self, ncclops: Ncclops, script: Script, only_run: OnlyRun
    ) -> None:
        source = (
            "import os, time\n"
            "print('started', flush=True)\n"
            "if os.environ['RANK'] == '0':\n"
            "    time.sleep(600)\n"
            "assert 1 > 2, f'batch {time.monotonic_ns()} is broken'\n"
        )
        done = ncclops("launch", "--nproc-per-node", "2", script(source))
        assert done.returncode == 1, done.stderr
        run = only_run()
        assert [run.stdout(rank) for rank in range(2)] == ["started\nstarted\n"] * 2
        assert run.stderr(1).count('File "') == 1
        # Of the last time, as the output is.
        assert run.verdict["first_failure"]["message"] in run.stderr(1)
        assert [each["to"] for each in run.named("escalation")] == ["stop"]
        assert run.verdict["attempts"] == 1

    @pytest.mark.extended
    def test_a_hang_for_ever_ends(
        self, ncclops: Ncclops, script: Script, only_run: OnlyRun, tmp_path: Path
    ) -> None:
        """Three times in place and once in new processes; the detector finds it each time."""
        profile = tmp_path / "impatient.toml"
        profile.write_text(
            'description = "Short windows."\nextends = "local-cpu"\n'
            '[timeouts]\nstop_grace = "3s"\n[watch]\nhang = "2s"\nquiet = "3s"\n'
        )
        source = (
            "import time, torch, torch.distributed as dist\n"
            "from ncclops import receipt\n"
            "dist.init_process_group('gloo')\n"
            "print('started', flush=True)\n"
            "for n in range(3):\n"
            "    dist.all_reduce(torch.ones(1))\n"
            "    receipt.step(n)\n"
            "if dist.get_rank() == 1:\n"
            "    time.sleep(600)\n"
            "dist.all_reduce(torch.ones(1))\n"
        )
        options = ["--profile", str(profile), "--nproc-per-node", "2"]
        done = ncclops("launch", *options, script(source))
        assert done.returncode == 1, done.stderr
        run = only_run()
        assert run.stdout(1) == "started\n" * 4
        assert {fault["kind"] for fault in run.named("fault") if fault["kind"]} == {"hung"}
        assert [each["to"] for each in run.named("escalation")] == ["respawn", "stop"]
        assert run.verdict["attempts"] == 2


def test_restarts_are_counted_where_the_script_has_left_nothing_to_read_its_steps_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(RUN_DIR, raising=False)
    assert in_process._progress(0) == (None, None)


def test_leaving_the_debugger_ends_the_job_at_any_time() -> None:
    left = after((incident("bdb.BdbQuit", at=STARTED + 9999), None))
    assert left is not None
    assert (left.to, left.reason) == ("stop", "rank 3: the debugger was left")
