"""What NCCL's RAS service reports: processes that do not answer, ranks that launched fewer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ncclops.flight.model import FlightEvidence, RankEvidence
from ncclops.flight.ras_client import MOST_BYTES, RasError, ask, why_not
from ncclops.record.regular_file import read_regular

_TEXT_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_TEXT_SECTION = re.compile(
    r"^(Errors|Warnings)\s*\n=+\s*\n(.*?)(?=^\S[^\n]*\n=+\s*$|\Z)", re.M | re.S
)
_SHOWN_LINES = 40
_SAVED = ("ras.json", "ras.txt")


@dataclass(frozen=True)
class RasRank:
    """A member of a communicator, by its number there. ``state`` is what is wrong with it, in
    words; ``dead``: RAS takes its process for dead."""

    rank: int
    host: str
    pid: int
    state: str
    launched: int | None = None
    dead: bool = False


@dataclass(frozen=True)
class Communicator:
    """``silent`` do not answer; ``behind`` have launched fewer collectives than ``launched``."""

    hash: str
    size: int
    launched: int
    silent: tuple[RasRank, ...] = ()
    behind: tuple[RasRank, ...] = ()
    broken: tuple[RasRank, ...] = ()


@dataclass(frozen=True)
class View:
    """The service's report. ``lines`` are its text where it has no JSON (before 2.28.7)."""

    nccl_version: str
    communicators: tuple[Communicator, ...] = ()
    lines: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def find_view(evidence: FlightEvidence, address: str | None) -> View | None:
    """The service's answer: saved beside the dumps, or by asking at ``address``.

    What it says, or why there is none, goes into the evidence and its notes.
    """
    try:
        text = _saved(Path(evidence.source))
        if text is None and address is not None:
            versions = {r.record.comm_lib for r in evidence.ranks.values() if r.record is not None}
            version = max(filter(None, versions), default="")
            if reason := why_not(version):
                raise RasError(f"not asked: {reason}")
            text = ask(address)
        view = None if text is None else read(text)
    except RasError as error:
        evidence.notes.append(f"RAS: {error}")
        return None
    if view is not None:
        evidence.notes += add_to(evidence, view) or ["RAS: finds nothing wrong"]
    return view


def _saved(folder: Path) -> str | None:
    for name in _SAVED:
        try:
            return read_regular(folder / name, MOST_BYTES).decode(errors="replace")
        except OSError:
            continue
    return None


def read(text: str) -> View:
    """An answer of the service, JSON or text. Raises :class:`RasError`."""
    if not text.lstrip().startswith("{"):
        return _read_text(text)
    try:
        loaded = json.loads(text)
        found = loaded["communicators"]
        return View(str(loaded["nccl_version"]), tuple(_communicator(comm) for comm in found))
    except (
        AttributeError,
        KeyError,
        OverflowError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise RasError(f"its JSON is not as documented ({type(error).__name__}: {error})") from None


def _read_text(text: str) -> View:
    version = _TEXT_VERSION.search(text)
    if version is None:
        raise RasError(f"its answer is not as documented: {text[:60]!r}")
    lines = [
        line.strip()
        for section in _TEXT_SECTION.finditer(text)
        for line in section.group(2).splitlines()
        if line.strip()
    ]
    return View(version.group(1), lines=tuple(lines[:_SHOWN_LINES]))


def _communicator(comm: Mapping[str, Any]) -> Communicator:
    counts = [sum(int(n) for n in rank["collective_counts"].values()) for rank in comm["ranks"]]
    most = max(counts, default=0)
    members = list(zip(comm["ranks"], counts, strict=True))
    return Communicator(
        hash=str(comm["hash"]),
        size=int(comm["size"]),
        launched=most,
        silent=tuple(_rank(rank, _silence(rank)) for rank in comm.get("missing_ranks") or ()),
        behind=tuple(_rank(rank, "behind", count) for rank, count in members if count < most),
        broken=tuple(_rank(rank, state) for rank, _ in members if (state := _trouble(rank))),
    )


def _silence(rank: Mapping[str, Any]) -> str:
    return "considered dead" if _is_dead(rank) else "does not answer"


def _is_dead(rank: Mapping[str, Any]) -> bool:
    return bool((rank.get("status") or {}).get("considered_dead"))


def _trouble(rank: Mapping[str, Any]) -> str:
    status = rank.get("status") or {}
    if status.get("abort_flag"):
        return "aborted"
    error = status.get("async_error")
    return f"asynchronous error {error}" if error not in (None, 0, "0", "ncclSuccess") else ""


def _rank(rank: Mapping[str, Any], state: str, launched: int | None = None) -> RasRank:
    number, host, pid = int(rank["rank"]), str(rank["host"]), int(rank["pid"])
    return RasRank(number, host, pid, state, launched, dead=_is_dead(rank))


def add_to(evidence: FlightEvidence, view: View) -> list[str]:
    """Add the service's report to ``evidence``; returns it in lines for people.

    Its ranks are those of communicators; processes are found by host and process id, or, in a
    communicator of the whole job, by their number.
    """
    lines = [f"RAS: {line}" for line in view.lines]
    for comm in view.communicators:
        name = f"communicator {comm.hash} of {comm.size} ranks"
        for member in comm.silent + comm.broken:
            lines.append(
                f"RAS: {_describe_member(evidence, comm, member)} of {name} {member.state}"
            )
            rank = _find(evidence, comm, member)
            if rank is not None and member.dead and rank.record is None:
                rank.ended = rank.ended or "NCCL's RAS considers it dead"
        if comm.behind:
            least = min(member.launched or 0 for member in comm.behind)
            late = ", ".join(_describe_member(evidence, comm, member) for member in comm.behind[:8])
            lines.append(
                f"RAS: {late} of {name} launched {least} collectives, others {comm.launched}"
            )
    return lines


def _find(evidence: FlightEvidence, comm: Communicator, member: RasRank) -> RankEvidence | None:
    for about in evidence.ranks.values():
        record = about.record
        if record is not None and (record.host, record.pid) == (member.host, member.pid):
            return about
    everyone = comm.size >= len(evidence.ranks) and comm.size > max(evidence.ranks, default=0)
    return evidence.rank(member.rank) if everyone else None


def _describe_member(evidence: FlightEvidence, comm: Communicator, member: RasRank) -> str:
    about = _find(evidence, comm, member)
    who = f"rank {about.rank}" if about is not None else f"its rank {member.rank}"
    return f"{who} (pid {member.pid} on {member.host})"
