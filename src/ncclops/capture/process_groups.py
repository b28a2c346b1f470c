"""The process groups of this process, as torch knows them, where torch is loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

# Expert-parallel jobs make thousands; each of their members knows all of them.
_MOST_GROUPS = 2000


def groups() -> list[dict[str, Any]]:
    """One entry a group: name, description, global ranks, backend, and operations enqueued so far.

    ``last_enqueued`` is torch's sequence number (None where the backend has none); what the
    recorder knows of started and completed ones is added by :func:`add_status`. Ranks are those
    of the present iteration.
    """
    module = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(module, "_world", None)
    if world is None:
        return []
    return [_describe(world, group) for group in list(world.pg_map)[:_MOST_GROUPS]]


def are_all_gloo() -> bool:
    """Whether no group of this process has another backend than Gloo; also where there is none."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(module, "_world", None)
    if world is None:
        return True
    gloo = getattr(module, "ProcessGroupGloo", None)
    return gloo is not None and all(
        isinstance(backend, gloo) for group in list(world.pg_map) for backend in _backends(group)
    )


def _backends(group: Any) -> Iterator[Any]:
    for device in getattr(group, "_device_types", ()):
        try:
            yield group._get_backend(device)
        except RuntimeError:  # one that is made when it is first used
            yield None


def _describe(world: Any, group: Any) -> dict[str, Any]:
    name = world.pg_names.get(group, "")
    return {
        "name": name,
        "desc": getattr(group, "group_desc", ""),
        "ranks": sorted(world.pg_group_ranks.get(group, {})),
        "backend": str(world.pg_backend_config.get(group, "")),
        "last_enqueued": _sequence_number(group),
        "last_started": None,
        "last_completed": None,
    }


def _sequence_number(group: Any) -> int | None:
    try:
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):  # no backend yet, or one that does not count
        return None


def add_status(described: list[dict[str, Any]], dump: dict[str, Any]) -> None:
    """Fill in what the recorder's ``dump`` knows of each group's last operations."""
    last = {str(entry["process_group"][0]): entry for entry in dump.get("entries", [])}
    status = {str(key): value for key, value in dump.get("pg_status", {}).items()}
    for group in described:
        entry = last.get(group["name"])
        if entry is None:
            continue
        group["last_op"] = _describe_operation(entry)
        known = status.get(str(entry.get("pg_id")), {})
        for what in ("enqueued", "started", "completed"):
            number = int(known.get(f"last_{what}_collective", -1))
            if number >= 0:
                group[f"last_{what}"] = number


def _describe_operation(entry: dict[str, Any]) -> dict[str, Any]:
    """The operation that was enqueued last. ``pending``: torch still holds its work."""
    peer_to_peer = bool(entry.get("is_p2p"))
    return {
        "op": str(entry.get("profiling_name", "?")).partition(":")[2] or "?",
        "seq": entry.get("p2p_seq_id" if peer_to_peer else "collective_seq_id"),
        "pending": not entry.get("retired", True),
        "at": entry.get("time_created_ns", 0) / 1e9,
    }
