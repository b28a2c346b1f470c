"""What to do about an incident, and about what the flight recorders show of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncclops.flight.finding_kinds import FindingKind
from ncclops.rank_lists import ranks_named

if TYPE_CHECKING:
    from ncclops.diagnose.recorder_findings import Recorded
    from ncclops.record.incident_record import IncidentRecord

_DATA = "batches or shards of uneven length are the usual reason (drop_last, padding)"

# By ``flight.finding_kinds.FindingKind``. {who} is to blame, {at} its line of the user's code.
_STEPS: dict[FindingKind, tuple[str, ...]] = {
    FindingKind.NEVER_ARRIVED: ("find out what keeps {who}{at}: the others only wait for it",),
    FindingKind.SHAPE_MISMATCH: (
        "have every rank print the shape right before the call{at}: " + _DATA,
    ),
    FindingKind.DTYPE_MISMATCH: (
        "have every rank print the dtype right before the call{at}: a checkpoint loaded in another"
        " precision, or autocast on some ranks only",
    ),
    FindingKind.OP_MISMATCH: (
        "look for a branch before the call{at} that not all ranks take: `if rank == 0`, a condition"
        " on data, an exception that is caught",
    ),
    FindingKind.ORDER_MISMATCH: (
        "look for a branch before the call{at} that not all ranks take, or a loop that one rank"
        " goes through once more: " + _DATA,
    ),
    FindingKind.ROOT_MISMATCH: (
        "compare src= or dst= of the call{at} over the ranks: it counts the ranks of the job, not"
        " those of the group (that is group_src=)",
    ),
    FindingKind.CROSS_GROUP_DEADLOCK: (
        "use the groups in the same order on all ranks; `ncclops flight analyze` has the lines of"
        " both sides",
    ),
    FindingKind.EXTRA_CALL: ("see why {who} has one step more than the others: " + _DATA,),
    FindingKind.STALLED: (
        "all ranks have come, so it is not the script: look at the links (nvidia-smi nvlink -e,"
        " IB port counters) and for Xid errors on these nodes, and run nccl-tests there",
    ),
}
ENDED_EARLY = (
    "find out why {who} was done before the others: fewer batches than they have (drop_last, a"
    " sampler; torch's Join is for uneven ones), or an exit in the script"
)
_ENDED_ITSELF = (
    "the script ends itself{at} with this code: see there under which condition, and what it had"
    " printed"
)
_EXIT_CODE = re.compile(r"SystemExit: -?\d+")
PEER_EXIT = "peer-exit"  # the class of an exit code that nothing explains
# Of a run whose output shows no failure, as where the launcher was killed.
OUTPUT_SHOWS_NOTHING = (
    "no output of the ranks shows why: look at the kernel's log of that node (dmesg -T has the OOM"
    " killer) and at what the scheduler says of the job"
)
_DATA_LOADER = (
    "it is its data loader: look at the storage, at the loader's workers, and whether there is a"
    " timeout= on it"
)


def steps(kind: FindingKind, who: str, at: str | None, *, in_data_loader: bool) -> list[str]:
    """What to do about a finding of ``kind``; none where its sentence says all there is."""
    place = f" at {at}" if at else ""
    found = [step.format(who=who, at=place) for step in _STEPS.get(kind, ())]
    return found + [_DATA_LOADER] * (in_data_loader and kind == FindingKind.NEVER_ARRIVED)


def on_incident(
    directory: Path,
    record: IncidentRecord,
    found: dict[str, Any] | None,
    recorded: Recorded | None,
    *,
    rank: int,
    line: str | None,
    absent: bool,
    is_hang: bool,
) -> tuple[str, ...]:
    """What to do about the incident in ``directory``, the first thing first.

    ``rank`` is to blame, at ``line`` of the user's code. ``found`` is the classifier's verdict,
    ``recorded`` what the recorders show, where it is by them that the rank is known. ``absent``:
    the others waited where it did not come.
    """
    if absent:
        never = FindingKind.NEVER_ARRIVED
        return tuple(steps(never, f"rank {rank}", line, in_data_loader=False))
    if record.cause == "returned-early":
        # What the others raised is that its connections were closed, and no cause.
        return (ENDED_EARLY.format(who=f"rank {record.first_faulty_rank}"),)
    if _EXIT_CODE.fullmatch(record.exception or "") and (not found or found["class"] == PEER_EXIT):
        return (_ENDED_ITSELF.format(at=f" at {line}" if line else ""),)
    todo = []
    if recorded is not None:
        todo += steps(
            recorded.kind,
            ranks_named(recorded.culprits),
            line,
            in_data_loader=recorded.in_data_loader,
        )
    todo += found["remedy"] if found else []
    if is_hang:
        todo.append(f"compare what each rank enqueued: ncclops flight analyze {directory}")
        todo.append("if it hangs again, look at it while it does: ncclops stacks")
    if record.cause in ("died", "lost") and not found and not is_hang:
        todo.append(
            "look at the kernel's log of that node around that time (dmesg -T): the OOM killer and"
            " Xid errors leave nothing else"
        )
    return tuple(todo)
