"""What torch's flight recorder has of groups and their operations, and which are pending."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from ncclops import flight_recorders


def has_pending_operation() -> bool:
    """Whether an operation has not ended, as torch's flight recorders know it.

    A thread that waits for the device, in a backward pass or for an operation that it has begun
    before, is not in ``torch.distributed`` then, and waits for its peers all the same. Of NCCL the
    recorder's counts do not tell: messages and collectives are numbered apart, and counted
    together. Asks CUDA about operations that are pending. Of Gloo collectives alone are recorded.
    """
    return (
        _is_pending_in_nccl()
        or _is_pending_in_second_engine()
        or any(_pending_in_ended.get(group) != last for group, last in _pending_in_gloo().items())
    )


def _is_pending_in_nccl() -> bool:
    return any(
        operation["pg_id"] > _newest_ended or operation["process_group"][0] in outlive
        for operation in pending_operations()
    )


def _is_pending_in_second_engine() -> bool:
    """Likewise of torch's second engine of NCCL, whose recorder takes a message of a batch for done
    at once. So whether nothing is pending, or which group is idle, it does not tell."""
    return any(True for _ in _pending_in_second_engine())


def _pending_in_second_engine() -> Iterator[dict[str, Any]]:
    found = recorded(flight_recorders.SECOND_OF_NCCL, with_operations=True).get("entries", ())
    return (operation for operation in found if operation["pg_id"] > _newest_ended_of_second)


def is_pending_in_group_of_second_engine(name: str) -> bool:
    """Whether the group of this name has an operation pending, as that recorder knows it: for up to
    a second after its end, as torch looks once a second; not of a message of a batch."""
    return any(operation["process_group"][0] == name for operation in _pending_in_second_engine())


def pending_operations() -> Sequence[dict[str, Any]]:
    """Operations of NCCL that have not ended, as torch's flight recorder has them."""
    found: Sequence[dict[str, Any]] = recorded(flight_recorders.NCCL, with_operations=True).get(
        "entries", ()
    )
    return found


def may_have_pending_operation() -> bool:
    """Likewise, or the recorder has nothing of NCCL: it is off, or no group was used.

    It is off with ``TORCH_FR_BUFFER_SIZE=0``, which torch 2.7 to 2.10 have as default.
    """
    return has_pending_operation() or not recorded_groups()


def may_have_pending_operation_of_nccl() -> bool:
    """Whether an operation of NCCL has not ended, or the recorder has nothing of NCCL."""
    return _is_pending_in_nccl() or not recorded_groups()


# The recorder's highest number of a group of an earlier iteration, whose operations stay pending.
_newest_ended = -1
_newest_ended_of_second = -1
# The names of such groups that have not ended: see ``_groups.kept_beside``.
outlive: set[str] = set()
# What is pending for good in Gloo's groups that have ended.
_pending_in_ended: dict[Any, int] = {}


def _pending_in_gloo() -> dict[Any, int]:
    """The last operation that was begun in each group of Gloo's whose operations have not ended.

    Not of a group in which none has: whether this torch records the end is not known then.
    """
    return {
        group: status["last_enqueued_collective"]
        for group, status in recorded_of_gloo().items()
        if -1 < status["last_completed_collective"] < status["last_enqueued_collective"]
    }


def recorded_groups() -> list[int]:
    """The recorder's numbers of the NCCL groups of this process; of ended ones as well."""
    return list(map(int, recorded(flight_recorders.NCCL).get("pg_status", ())))


def begun_operations() -> list[Any]:
    """The groups of this process by their names, and how many it has had and what it has begun in
    all of them; where the recorder is off, nothing. To be compared with what it was before.

    Sums, as the recorder keeps each group of the process, and none of its counts ever falls.
    """
    found = [recorded(each) for each in flight_recorders.ALL]
    groups = [sorted(of["pg_config"]) for of in found if of.get("pg_config")]
    counts = [
        int(status.get("last_enqueued_collective", 0))
        for of in found
        for status in of.get("pg_status", {}).values()
    ]
    return [*groups, len(counts), sum(counts)] if groups or counts else []


def recorded_of_gloo() -> dict[Any, dict[str, int]]:
    """What the recorder has of Gloo's groups, by its numbers; of ended ones as well."""
    found: dict[Any, dict[str, int]] = recorded(flight_recorders.GLOO).get("pg_status", {})
    return found


def recorded(recorder: str, *, with_operations: bool = False) -> dict[str, Any]:
    """What ``recorder`` has of groups, and of the operations that are pending."""
    dump = flight_recorders.dumps().get(recorder)
    return {} if dump is None else pickle.loads(dump(with_operations, False, True))


def forget_ended() -> None:
    """The groups of the last iteration have ended: what they have pending stays so."""
    global _newest_ended, _newest_ended_of_second, _pending_in_ended
    _newest_ended, _pending_in_ended = max(recorded_groups(), default=-1), _pending_in_gloo()
    second = recorded(flight_recorders.SECOND_OF_NCCL).get("pg_status", ())
    _newest_ended_of_second = max(map(int, second), default=-1)
