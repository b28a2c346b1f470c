"""Which profiles there are, and which one fits when none was named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ncclops.errors import ProfileError
from ncclops.profiles.files import profile_files, read_all
from ncclops.profiles.resolve import load_profiles


@dataclass(frozen=True)
class ProfileSummary:
    """One line of ``profile list``; ``problem`` is set when the file cannot be used."""

    name: str
    kind: str
    nodes: str
    description: str
    origin: str
    path: Path
    problem: str | None = None


def list_profiles(cwd: Path | None = None) -> list[ProfileSummary]:
    """Every profile that a name can reach; one that cannot be used is listed with its problem."""
    return [_summary(origin, path, cwd) for origin, path in profile_files(cwd)]


def _summary(origin: str, path: Path, cwd: Path | None) -> ProfileSummary:
    try:
        profile = load_profiles([str(path)], cwd=cwd)  # with all that it extends
    except ProfileError as error:
        problem = error.first_line("ncclops profile validate")
        return ProfileSummary(path.stem, "-", "-", "", origin, path, problem)
    return ProfileSummary(path.stem, profile.kind, profile.nodes, profile.description, origin, path)


def choose_profile(*, nnodes: int, gpus: int, rdma: bool) -> str:
    """The lane for a job of ``nnodes`` nodes on hosts like this one."""
    if not gpus:
        return "local-cpu" if nnodes == 1 else "base"
    if nnodes == 1:
        return "single-node-h200"
    return "multi-host-h200" if rdma else "multi-host-h200-socket"


def with_lane(
    refs: Sequence[str],
    choose: Callable[[], str],
    *,
    default: Callable[[], Sequence[str]] = tuple,
    cwd: Path | None = None,
) -> tuple[str, ...]:
    """``refs``, preceded by a lane when all of them are overlays (or there are none).

    ``default`` names what a site has in that case, overlays included; where that has no lane
    either, ``choose`` names one. Both are called only where they are needed.
    """
    if _has_lane(refs, cwd):
        return tuple(refs)
    refs = tuple(dict.fromkeys([*default(), *refs]))
    return refs if _has_lane(refs, cwd) else (choose(), *refs)


def _has_lane(refs: Sequence[str], cwd: Path | None) -> bool:
    return "lane" in [loaded.content.kind for loaded in read_all(refs, cwd=cwd)]
