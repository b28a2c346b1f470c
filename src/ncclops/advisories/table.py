"""The table of advisories: its form, and reading it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Literal

import msgspec

# high: hangs, crashes or wrong results. medium: a failure to start, or a loss that shows.
# low: rare, or only for those who use one feature.
Severity = Literal["high", "medium", "low"]
SEVERITIES: tuple[Severity, ...] = ("high", "medium", "low")


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class PluginIs(_Strict, frozen=True, kw_only=True):
    """A network plugin; ``version`` are conditions on it, one of which has to hold."""

    name: Literal["aws-ofi-nccl", "gib", "nccl-rdma-sharp"]
    version: list[str] = []


class VariableIs(_Strict, frozen=True, kw_only=True, rename={"is_": "is"}):
    """Values of a variable, in upper or lower case: one of ``is_``, and none of ``is_not``.

    A variable that is not set meets ``is_not`` and no ``is_``.
    """

    is_: list[str] = []
    is_not: list[str] = []


class When(_Strict, frozen=True, kw_only=True):
    """What has to hold, all of it; what is left out does not restrict.

    Versions are conditions as in profiles (``">=2.28.3,<2.28.9"``), one of which has to hold;
    ``gpu`` and ``cpu`` shell-style patterns for NVML's name and the kernel's of the architecture.
    ``nccl_from``: the wheel's own build. ``rdma``: there is such a device.
    ``use`` is what no version shows, as a clause after "if": such an entry never says that it
    concerns a job.
    """

    nccl: list[str] = []
    nccl_from: Literal["wheel"] | None = None
    torch: list[str] = []
    driver: list[str] = []
    fabric_manager: Literal["differs-from-driver"] | None = None
    plugin: PluginIs | None = None
    gpu: list[str] = []
    cpu: list[str] = []
    rdma: Literal["ib", "roce", "any"] | None = None
    stack_unlimited: bool | None = None
    nodes: Literal["one", "many"] | None = None
    ranks: list[str] = []
    restart: list[Literal["in-process", "process", "none"]] = []
    env: dict[str, VariableIs] = {}
    use: str | None = None


class Advisory(_Strict, frozen=True, kw_only=True):
    """One entry. ``fixed_in`` is by component (``{nccl = "2.26.2"}``), empty where nothing is known
    to be; ``remedy`` the way round; ``sources`` addresses of what was seen.

    ``rules_out``: how no process group comes to its new members after a restart in place, on any
    rank, where the entry concerns one (``restart.regroup.Rung``). Workers know versions alone, so
    its conditions are of these. Raises ``ValueError`` where they are not.
    """

    id: str
    title: str
    severity: Severity
    symptom: str
    remedy: str
    sources: list[str]
    when: When
    fixed_in: dict[Literal["nccl", "torch", "driver", "aws-ofi-nccl", "gib"], str] = {}
    rules_out: list[Literal["reconfigured", "shrunk", "kept"]] = []

    def __post_init__(self) -> None:
        when = self.when
        known = When(nccl=when.nccl, torch=when.torch, restart=["in-process"])
        if self.rules_out and (when != known or not (when.nccl or when.torch)):
            raise ValueError(
                f"{self.id}: with rules_out, when has versions of nccl or torch, restart = "
                '["in-process"], and nothing else'
            )


class _Table(_Strict, frozen=True, kw_only=True):
    advisory: list[Advisory]


def read(text: str) -> Sequence[Advisory]:
    """The entries of a table in TOML. Raises ``ValueError`` for what is no such table."""
    return tuple(msgspec.convert(tomllib.loads(text), _Table).advisory)


@cache
def advisories() -> Sequence[Advisory]:
    """The shipped table, in its order."""
    return read(
        resources.files("ncclops.advisories").joinpath("advisories.toml").read_text("utf-8")
    )


def by_id() -> Mapping[str, Advisory]:
    """The same by id."""
    return {advisory.id: advisory for advisory in advisories()}
