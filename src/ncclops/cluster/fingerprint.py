"""The properties of a node that all nodes of a job must share, and what differs between nodes.

The catalogue says which variables may differ between ranks or hosts; all others have to be equal.
Of the other properties, ``_JUDGED`` says which differences refuse the start and which are only
reported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from ncclops.env.catalogue import RANKS, catalogue, is_covered

Weight = Literal["refused", "remark", "fine"]

# What the catalogue allows to differ between the ranks of a job.
_MAY_DIFFER = ("free", "per host", "per rank")
_NOT_SET = "(not set)"
# From here on, lines of two hosts cannot be put in order by their times.
_CLOCKS_APART = timedelta(seconds=1)

_JUDGED: Mapping[str, Weight] = {
    "ncclops": "refused",
    "profile": "refused",
    "parameters": "refused",
    "restart": "refused",
    "workers per node": "refused",
    "torch": "refused",
    "NCCL": "refused",
    "driver branch": "refused",
    "commit": "refused",
    "driver": "remark",
    "CUDA": "remark",
    "Python": "remark",
    "GPU": "remark",
    "script": "remark",
    "preflight": "remark",
    "interface": "fine",
    "HCAs": "fine",
}
FACTS = (*_JUDGED, "clock")
_WHY = {
    "commit": "the ranks would run different code",
    "parameters": "timeouts and variables follow from the profile's parameters",
    "driver branch": "NCCL chooses transports by what the driver offers",
    "workers per node": "ranks are counted from it",
}


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """One node. ``variables`` are those that the catalogue covers or the plan sets, as workers
    get them, NCCL's configuration files included; ``per_host`` those that the profile sets by the
    host's name; ``facts`` the names of ``_JUDGED``. ``clock_offset_s`` is against node 0.
    """

    host: str
    variables: Mapping[str, str]
    facts: Mapping[str, str | None]
    per_host: tuple[str, ...] = ()
    clock_offset_s: float = 0.0


@dataclass(frozen=True)
class Difference:
    """One property that is not equal: each value with the hosts that have it, the rarest last."""

    name: str
    weight: Weight
    why: str
    values: tuple[tuple[str, tuple[str, ...]], ...]

    def lines(self) -> list[str]:
        """A small table, host against host."""
        hosts = [", ".join(names) for _, names in self.values]
        width = max(map(len, hosts))
        rows = [
            f"    {host:<{width}}  {value}"
            for host, (value, _) in zip(hosts, self.values, strict=True)
        ]
        return [f"{self.name}: {self.why}", *rows]


@dataclass(frozen=True)
class Comparison:
    """All differences between the nodes of a job."""

    differences: tuple[Difference, ...] = field(default=())

    def of_weight(self, weight: Weight) -> list[Difference]:
        return [difference for difference in self.differences if difference.weight == weight]


def relevant(environ: Mapping[str, str], planned: Collection[str]) -> dict[str, str]:
    """The part of ``environ`` that the nodes compare: what is ``planned`` or covered."""
    known = catalogue()
    return {
        name: value
        for name, value in sorted(environ.items())
        if name in planned or name in known or is_covered(name)
    }


def is_compared(name: str, planned: Collection[str]) -> bool:
    """Whether nodes compare anything of that name: a fact, or a variable that is ``relevant``."""
    return name in FACTS or bool(relevant({name: ""}, planned))


def compare(
    prints: Sequence[Fingerprint], *, allowed: Sequence[str] = (), lost_after: timedelta
) -> Comparison:
    """What differs between ``prints``; differences that refuse the start come first.

    ``allowed`` are names that the operator lets differ. Clocks that are further apart than
    ``lost_after`` are refused: by their time stamps a living node would be taken for lost.
    """
    names = sorted({name for each in prints for name in each.variables})
    found = [
        _variable(name, prints)
        for name in names
        if len({p.variables.get(name) for p in prints}) > 1
    ]
    found += [
        _fact(name, prints) for name in _JUDGED if len({p.facts.get(name) for p in prints}) > 1
    ]
    found += _clocks(prints, lost_after)
    judged = (_allowed(each) if each.name in allowed else each for each in found)
    order: dict[Weight, int] = {"refused": 0, "remark": 1, "fine": 2}
    return Comparison(tuple(sorted(judged, key=lambda each: (order[each.weight], each.name))))


def _variable(name: str, prints: Sequence[Fingerprint]) -> Difference:
    known = catalogue().get(name)
    rule = known.ranks if known else ""
    declared = any(name in each.per_host for each in prints)
    if rule in _MAY_DIFFER:
        weight: Weight = "fine"
    elif declared and rule != "equal":
        weight = "remark"
    else:
        weight = "refused"
    why = RANKS[rule] or "nothing says that it may differ between hosts"
    return Difference(name, weight, why, _by_value(prints, lambda each: each.variables.get(name)))


def _fact(name: str, prints: Sequence[Fingerprint]) -> Difference:
    why = _WHY.get(name, "should be the same on all nodes")
    return Difference(
        name, _JUDGED[name], why, _by_value(prints, lambda each: each.facts.get(name))
    )


def _clocks(prints: Sequence[Fingerprint], lost_after: timedelta) -> list[Difference]:
    apart = [p.clock_offset_s for p in prints]
    spread = timedelta(seconds=max(apart) - min(apart)) if apart else timedelta(0)
    if spread < _CLOCKS_APART:
        return []
    weight: Weight = "refused" if spread >= lost_after else "remark"
    why = f"{spread.total_seconds():.1f}s apart: lines of two hosts cannot be ordered by time"
    values = _by_value(prints, lambda each: f"{each.clock_offset_s:+.1f}s")
    return [Difference("clock", weight, why, values)]


def _allowed(difference: Difference) -> Difference:
    weight: Weight = "remark" if difference.weight == "refused" else difference.weight
    why = f"{difference.why}; --allow-difference lets it"
    return Difference(difference.name, weight, why, difference.values)


def _by_value(
    prints: Sequence[Fingerprint], value_of: Any
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    hosts: dict[str, list[str]] = {}
    for each in prints:
        value = value_of(each)
        hosts.setdefault(_NOT_SET if value is None else value, []).append(each.host)
    # The majority first: a value of a single host is, as a rule, the wrong one.
    ranked = sorted(hosts.items(), key=lambda item: -len(item[1]))
    return tuple((value, tuple(names)) for value, names in ranked)
