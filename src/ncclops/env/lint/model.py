"""What is linted, under which circumstances, and the findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Literal

from ncclops.profiles.model import DEFAULT_RESTART_MODE, Profile, RestartMode
from ncclops.versions import release, satisfies

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")

# torch's own timeout of an NCCL group, and the in-process wrapper's hard timeout, when no code
# gave another one.
TORCH_GROUP_TIMEOUT = timedelta(minutes=10)
WRAPPER_HARD_TIMEOUT = timedelta(seconds=90)


@dataclass(frozen=True)
class Setting:
    """One assignment. ``value`` None means that it is known only when the program runs.

    ``line`` is 1-based, 0 where there are no lines. ``exported`` is False for a shell variable
    that never reaches a program, ``expanded`` True for one that the script itself makes use of,
    ``printed`` for one of which it does no more than print it.
    ``certain`` is False where it cannot be known whether the assignment is made at all.
    """

    name: str
    value: str | None
    line: int = 0
    exported: bool = True
    expanded: bool = False
    printed: bool = False
    certain: bool = True


@dataclass(frozen=True)
class LintFinding:
    """One finding: the rule, how bad, about which variables, and what to do.

    ``repair`` is what stands in that line and what may safely stand there instead.
    """

    rule: str
    level: Level
    names: tuple[str, ...]
    message: str
    remedy: str = ""
    source: str = ""
    line: int = 0
    repair: tuple[str, str] | None = None


@dataclass(frozen=True)
class Host:
    """What this host has; the sets are names as NCCL and Gloo know them."""

    interfaces: frozenset[str] = frozenset()
    hcas: frozenset[str] = frozenset()
    infiniband: bool = False
    net_plugins: frozenset[str] | None = None


@dataclass(frozen=True)
class Circumstances:
    """What rules may depend on. None is unknown; a rule that depends on it then does not fire.

    ``uses`` are the features that the job is known to use: ``fsdp2``, ``tensor-parallel``,
    ``ucc``, ``torchrun``, ``ras-polling``, ``net-plugin``. ``assumed`` names what of ``torch`` and
    ``nccl`` is taken from this machine, although a file may be for another.
    """

    restart: RestartMode | None = None
    torch: str | None = None
    nccl: str | None = None
    nodes: Literal["one", "many"] | None = None
    gpus: bool | None = None
    host: Host | None = None
    uses: frozenset[str] = frozenset()
    group_timeout: timedelta | None = None
    hard_timeout: timedelta = WRAPPER_HARD_TIMEOUT
    ignore: Mapping[str, str] = field(default_factory=dict)
    assumed: frozenset[str] = frozenset()

    def torch_is(self, spec: str) -> bool:
        """Whether torch is known and meets ``spec``."""
        return self.torch is not None and satisfies(self.torch, spec)

    def nccl_is(self, spec: str) -> bool:
        """Whether NCCL is known and meets ``spec``."""
        return self.nccl is not None and satisfies(self.nccl, spec)


class LintedSettings:
    """The settings of one environment, by name, or of a file with the environments in it.

    A variable that is given several values counts as known only where all agree. Of a file, ``all``
    is what is judged one by one, and combinations are judged in each of ``environments``. In one
    with an ``open_end`` something may follow that changes it, so what is wrong in it is no error.
    ``slips`` are what is wrong with the text itself: a variable that it means to set, and does not.
    """

    def __init__(
        self,
        settings: Iterable[Setting],
        environments: Iterable[LintedSettings] | None = None,
        open_end: bool = False,
        slips: Iterable[LintFinding] = (),
    ) -> None:
        self.all = tuple(settings)
        self.open_end = open_end
        self.slips = tuple(slips)
        self._environments = None if environments is None else tuple(environments)

    @property
    def environments(self) -> tuple[LintedSettings, ...]:
        """What programs see, one for each container, branch and command; itself where it is one."""
        return (self,) if self._environments is None else self._environments

    @cached_property
    def _values(self) -> dict[str, str | None]:
        values: dict[str, str | None] = {}
        for setting in self.all:
            if not setting.exported:
                continue
            same = setting.name not in values or values[setting.name] == setting.value
            values[setting.name] = setting.value if same else None
        return values

    @cached_property
    def varied(self) -> frozenset[str]:
        """The variables that are given several values, each of them known."""
        values: dict[str, set[str]] = defaultdict(set)
        for setting in self.all:
            if setting.value is not None:
                values[setting.name].add(setting.value)
        return frozenset(name for name, given in values.items() if len(given) > 1)

    @cached_property
    def _doubtful(self) -> frozenset[str]:
        return frozenset(setting.name for setting in self.all if not setting.certain)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def doubtful(self, name: str) -> bool:
        """Whether it cannot be known if ``name`` is set."""
        return name in self._doubtful

    def value(self, name: str) -> str | None:
        """The one value that ``name`` has, None when it has none or it cannot be known."""
        return self._values.get(name)

    def line(self, name: str) -> int:
        """The last line that sets ``name``, 0 when none does."""
        return max((setting.line for setting in self.all if setting.name == name), default=0)


def engine(settings: LintedSettings, where: Circumstances) -> Literal["classic", "second"] | None:
    """Which NCCL engine of torch runs; None when torch's version is not known."""
    if where.torch is None:
        return None
    choice = settings.value("TORCH_DIST_USE_NCCL2")
    have = release(where.torch)
    if have >= (2, 15):
        return "classic" if choice == "0" else "second"
    return "second" if have >= (2, 14) and choice == "1" else "classic"


def under_profile(profile: Profile, where: Circumstances) -> Circumstances:
    """``where`` with what a profile says: nodes, timeouts, suppressions."""
    lanes: dict[str, Literal["one", "many"]] = {"one": "one", "many": "many"}
    return replace(
        where,
        restart=where.restart or DEFAULT_RESTART_MODE,
        nodes=where.nodes or lanes.get(profile.nodes),
        group_timeout=profile.timeouts.get("process_group"),
        ignore=profile.suppress,
    )
