"""What a rank is started with. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ncclops.testing._target import Target


@dataclass(frozen=True)
class RankOrder:
    """What a rank is started with. ``call`` is pickled: ``(args, kwargs, faults, wrapper)``."""

    rank: int
    target: Target
    call: bytes
    directory: Path
    environment: dict[str, str]
    working_directory: str
    path: list[str]
