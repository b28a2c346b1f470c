"""A decoded dump to a record. All versions and both forms (pickle, JSON) look alike afterwards.

What differs between them: JSON dumps have no stacks, may hold numbers and truth values as
strings (Gloo's), and 2.4 calls the library's version ``nccl_version``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ncclops.flight.columns import Columns, text
from ncclops.flight.decode import NotADump, Unreadable, brief, decode
from ncclops.flight.model import RankRecord

_MOST_ENTRIES = 2_000_000


def parse(data: bytes, *, rank: int | None, file: str) -> RankRecord:
    """The record in a dump's bytes; ``rank`` is what the name says, and contents win.

    Raises :class:`Unreadable`, or :class:`NotADump` for other files that can be read.
    """
    loaded = decode(data)
    wrapper: Mapping[str, Any] = {}
    if "dump" in loaded and "entries" not in loaded:
        wrapper, loaded = loaded, _unwrapped(loaded["dump"])
    if "entries" not in loaded and "pg_config" not in loaded and "pg_status" not in loaded:
        raise NotADump("has no entries of a flight recorder")
    try:
        return _record(loaded, wrapper, rank, file)
    except Unreadable:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise Unreadable(f"not as a recorder writes it ({brief(error)})") from None


def _unwrapped(dump: Any) -> dict[str, Any]:
    if isinstance(dump, str):
        dump = decode(dump.encode())
    if not isinstance(dump, dict):
        raise NotADump("has no dump in it")
    return dump


def _record(
    dump: Mapping[str, Any], wrapper: Mapping[str, Any], rank: int | None, file: str
) -> RankRecord:
    entries = dump.get("entries") or []
    if isinstance(entries, Mapping):
        entries = list(entries.values())
    if not isinstance(entries, list):
        raise Unreadable("not as a recorder writes it (its entries are no list)")
    if len(entries) > _MOST_ENTRIES:
        raise Unreadable(f"more than {_MOST_ENTRIES:,} entries")
    declared = wrapper.get("rank")
    record = RankRecord(
        rank=_rank(declared) if declared is not None else -1 if rank is None else rank,
        file=file,
        version=text(dump.get("version", "")),
        comm_lib=text(dump.get("comm_lib_version") or dump.get("nccl_version") or ""),
        host=_optional_text(wrapper.get("host")),
        pid=None if wrapper.get("pid") is None else int(wrapper["pid"]),
        taken_at=None if wrapper.get("taken_at") is None else float(wrapper["taken_at"]),
        taken_exactly=wrapper.get("taken_at") is not None,
        entries=len(entries),
    )
    _add_members(record, dump.get("pg_config"))
    Columns(record).add_all(entries)
    if record.rank < 0:
        raise Unreadable("does not say whose it is: end its name with the rank, as torch does")
    return record


def _rank(value: Any) -> int:
    number = int(value)
    if not 0 <= number < 1 << 24:
        raise Unreadable(f"rank {number} is none")
    return number


def _add_members(record: RankRecord, config: Any) -> None:
    """Which ranks are in which group. Gloo's recorder has all groups under the empty name."""
    for key, about in config.items() if isinstance(config, Mapping) else ():
        name = text(about.get("name", key))
        ranks = about.get("ranks", "")
        numbers = json.loads(ranks) if isinstance(ranks, str) else ranks
        members = tuple(sorted(map(_rank, numbers or ())))
        if name and members:
            record.ranks_of[(name, text(about.get("desc", "")))] = members
        elif members:
            record.others = tuple(sorted({*record.others, *members}))


def _optional_text(value: Any) -> str | None:
    return None if value is None else text(value)
