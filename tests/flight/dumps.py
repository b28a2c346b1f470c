"""Dumps made to measure, as torch writes them: each rank's entries in a few words."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ncclops.flight import judge
from ncclops.flight.model import FlightEvidence
from ncclops.flight.parse import parse
from ncclops.flight.report import FlightReport

BEGUN_S = 1_790_000_000
WORLD = ("0", "default_pg")


def frames(line: int = 57, file: str = "/home/user/train.py") -> list[dict[str, Any]]:
    """A stack as torch records it: its own function, and the user's step and main."""
    torch = "/opt/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py"
    return [
        {"name": "all_reduce", "filename": torch, "line": 2950},
        {"name": "step", "filename": file, "line": line},
        {"name": "main", "filename": file, "line": 9},
    ]


def entry(
    seq: int,
    *,
    op: str = "nccl:all_reduce",
    group: tuple[str, str] = WORLD,
    sizes: Sequence[Sequence[int]] = ((4,),),
    dtype: str = "Float",
    state: str = "completed",
    line: int = 57,
    pg_id: int = 0,
    at_s: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """One entry; it is retired when it is completed, and made ``seq`` seconds into the job."""
    made = {
        "frames": frames(line),
        "record_id": more.pop("record_id", seq),
        "pg_id": pg_id,
        "process_group": group,
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": op,
        "time_created_ns": int((BEGUN_S + (seq if at_s is None else at_s)) * 1e9),
        "input_sizes": [list(size) for size in sizes],
        "input_dtypes": [dtype] * len(sizes),
        "output_sizes": [list(size) for size in sizes],
        "output_dtypes": [dtype] * len(sizes),
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "timeout_ms": 600_000,
        "is_p2p": False,
    }
    return made | more


def transfer(name: str, *, record_id: int, state: str = "scheduled") -> dict[str, Any]:
    """A pending send or receive of NCCL: ``send 0->1``, ``recv 1<-0``."""
    return entry(
        0, op=f"nccl:{name}", state=state, is_p2p=True, p2p_seq_id=1, record_id=record_id, line=77
    )


def dump(
    entries: Iterable[Mapping[str, Any]],
    groups: Mapping[tuple[str, str], Sequence[int]] | None = None,
    version: str = "2.10",
) -> dict[str, Any]:
    """A dump; ``groups`` has the members, as NCCL's recorder knows them."""
    config = {
        name: {"name": name, "desc": desc, "ranks": str(list(ranks))}
        for (name, desc), ranks in (groups or {}).items()
    }
    return {
        "version": version,
        "comm_lib_version": "2.29.3",
        "pg_config": config,
        "pg_status": {},
        "entries": [dict(made) for made in entries],
    }


def evidence(
    by_rank: Mapping[int, Iterable[Mapping[str, Any]]],
    groups: Mapping[tuple[str, str], Sequence[int]] | None = None,
    *,
    taken_at: float = BEGUN_S + 10_000,
) -> FlightEvidence:
    """What a folder with these ranks' dumps holds, taken long after the last operation."""
    made = FlightEvidence("dumps")
    members = {WORLD: sorted(by_rank)} if groups is None else groups
    for rank, entries in by_rank.items():
        mine = {name: ranks for name, ranks in members.items() if rank in ranks}
        wrapped = {"rank": rank, "host": f"node{rank}", "pid": 1000 + rank, "taken_at": taken_at}
        data = json.dumps(wrapped | {"dump": dump(entries, mine)}).encode()
        made.rank(rank).record = parse(data, rank=None, file=f"rank{rank}")
    return made


def report(
    by_rank: Mapping[int, Iterable[Mapping[str, Any]]],
    groups: Mapping[tuple[str, str], Sequence[int]] | None = None,
) -> FlightReport:
    """The verdict on these ranks' dumps."""
    return judge(evidence(by_rank, groups))


def write_pickles(folder: Path, by_rank: Mapping[int, Mapping[str, Any]], prefix: str) -> None:
    """Dumps as torch names and writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, content in by_rank.items():
        (folder / f"{prefix}{rank}").write_bytes(pickle.dumps(dict(content), protocol=2))
