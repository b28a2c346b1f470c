"""What the workers of a job run, how many there are, and which of their output is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """This node's place in the job."""

    count: int = 1
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many workers there are, and where: all nodes run the same number."""

    nodes: Nodes
    nproc: int

    @property
    def world_size(self) -> int:
        return self.nodes.count * self.nproc

    def rank(self, local_rank: int) -> int:
        return self.nodes.rank * self.nproc + local_rank


@dataclass(frozen=True)
class Target:
    """What each worker runs: a script, one function of it (``FILE.py:FUNCTION``), a module
    (``-m``) or any program (``--no-python``)."""

    kind: Literal["script", "function", "module", "program"]
    name: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shown:
    """Which streams of which local ranks go to the terminal."""

    stdout: frozenset[int]
    stderr: frozenset[int]
