"""What to do about what the flight recorders show. Data: a text per kind of finding."""

from __future__ import annotations

from ncclops.flight.finding_kinds import FindingKind

_DATA = "batches or shards of uneven length are the usual reason (drop_last, padding)"

# By ``ncclops.flight.findings.KINDS``. {who} is to blame, {at} its line of the user's code.
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
_DATA_LOADER = (
    "it is its data loader: look at the storage, at the loader's workers, and whether there is a"
    " timeout= on it"
)


def steps(kind: FindingKind, who: str, at: str | None, *, in_data_loader: bool) -> list[str]:
    """What to do about a finding of ``kind``; none where its sentence says all there is."""
    place = f" at {at}" if at else ""
    found = [step.format(who=who, at=place) for step in _STEPS.get(kind, ())]
    return found + [_DATA_LOADER] * (in_data_loader and kind == FindingKind.NEVER_ARRIVED)
