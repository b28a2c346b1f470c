"""Which advisories concern a job; pure: values in, values out.

A condition holds, does not, or cannot be known. One that does not rules the entry out, whatever
else is unknown; an entry concerns a job where all hold, and else cannot be told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from ncclops.advisories.table import SEVERITIES, Advisory, VariableIs, When
from ncclops.host.software import Software
from ncclops.versions import release, satisfies

State = Literal["concerns", "cannot-tell", "no"]
# Whether a condition holds, None where that is not known, and the condition as a clause after "if".
_Check = tuple[bool | None, str]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A machine, or a job on it. What is None is not known; ``ranks`` are those of all nodes.

    ``environ`` is what the workers get, with what NCCL's own files add.
    """

    software: Software
    environ: Mapping[str, str] | None = None
    nodes: int | None = None
    ranks: int | None = None
    restart: str | None = None


@dataclass(frozen=True)
class Finding:
    """An advisory and whether it concerns a case; ``unknown`` are the clauses that decide."""

    advisory: Advisory
    state: State
    unknown: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """As in ``ncclops.advise/1``."""
        entry = self.advisory
        return {
            "id": entry.id,
            "state": self.state,
            "if": list(self.unknown),
            "severity": entry.severity,
            "title": entry.title,
            "symptom": entry.symptom,
            "remedy": entry.remedy,
            "fixed_in": dict(entry.fixed_in),
            "rules_out": list(entry.rules_out),
            "sources": list(entry.sources),
        }


_LAYERS = {
    "ib": (frozenset({"InfiniBand"}), "InfiniBand"),
    "roce": (frozenset({"Ethernet"}), "RoCE"),
    "any": (frozenset({"InfiniBand", "Ethernet", "Unspecified"}), "InfiniBand or RoCE"),
}


def concerning(table: Sequence[Advisory], case: Case) -> list[Finding]:
    """Every entry's finding: those that concern ``case`` first, the worst first among them."""
    order: dict[State, int] = {"concerns": 0, "cannot-tell": 1, "no": 2}
    found = [_judge(advisory, case) for advisory in table]
    return sorted(found, key=lambda f: (order[f.state], SEVERITIES.index(f.advisory.severity)))


def in_a_line(found: Sequence[Finding]) -> str | None:
    """What is said at a launch; None where nothing is known to concern it."""
    sure = [finding.advisory for finding in found if finding.state == "concerns"]
    if not sure:
        return None
    worst, more = sure[0], len(sure) - 1
    others = f", and {more} more" if more else ""
    return (
        f"known issue with these versions ({worst.severity}): {worst.title} ({worst.id}){others}:"
        " `ncclops advise` shows what it does and the way round"
    )


def _judge(advisory: Advisory, case: Case) -> Finding:
    if not case.software.gpus:
        return Finding(advisory, "no")  # NCCL needs GPUs
    checks = list(_checks(advisory.when, case))
    if any(holds is False for holds, _ in checks):
        return Finding(advisory, "no")
    unknown = tuple(clause for holds, clause in checks if holds is None)
    return Finding(advisory, "cannot-tell" if unknown else "concerns", unknown)


def _checks(when: When, case: Case) -> Iterator[_Check]:
    software = case.software
    yield from _version("NCCL", software.nccl, when.nccl)
    yield from _version("torch", software.torch, when.torch)
    yield from _version("the driver", software.driver, when.driver)
    if when.nccl_from is not None:
        # Another build may have been made in the same way.
        yield (True if software.nccl_from == "wheel" else None), "NCCL was built as its wheel is"
    if when.fabric_manager is not None:
        yield _fabric_manager(software), "the fabric manager's version is not the driver's"
    if when.plugin is not None:
        yield from _plugin(when, software)
    if when.gpu:
        yield _any_matches(software.gpus, when.gpu), f"the GPU is {' or '.join(when.gpu)}"
    if when.cpu:
        known = None if software.cpu is None else _any_matches([software.cpu], when.cpu)
        yield known, f"the CPU is {' or '.join(when.cpu)}"
    if when.rdma is not None:
        layers, named = _LAYERS[when.rdma]
        known = None if software.rdma is None else not layers.isdisjoint(software.rdma)
        yield known, f"there is an {named} device"
    if when.stack_unlimited is not None:
        limit = software.stack_unlimited
        yield (None if limit is None else limit == when.stack_unlimited), "ulimit -s is unlimited"
    yield from _of_the_job(when, case)


def _of_the_job(when: When, case: Case) -> Iterator[_Check]:
    if when.nodes is not None:
        wanted = case.nodes is not None and (case.nodes > 1) == (when.nodes == "many")
        several = "several nodes" if when.nodes == "many" else "one node"
        yield (None if case.nodes is None else wanted), f"the job has {several}"
    if when.ranks:
        holds = case.ranks is not None and _one_of(str(case.ranks), when.ranks)
        yield (None if case.ranks is None else holds), f"it has {' or '.join(when.ranks)} ranks"
    if when.restart:
        holds = case.restart in when.restart
        yield (None if case.restart is None else holds), f"it restarts {' or '.join(when.restart)}"
    for name, wanted_values in when.env.items():
        known = None if case.environ is None else _variable(case.environ.get(name), wanted_values)
        yield known, _variable_clause(name, wanted_values)
    if when.use is not None:
        yield None, when.use


def _version(what: str, version: str | None, wanted: Sequence[str]) -> Iterator[_Check]:
    if wanted:
        clause = f"{what} is {' or '.join(wanted)} (its version is not known)"
        yield _known_version(version, wanted), clause


def _known_version(version: str | None, wanted: Sequence[str]) -> bool | None:
    if version is None:
        return None
    try:
        release(version)
    except ValueError:
        return None  # a site's own numbering
    return _one_of(version, wanted)


def _one_of(version: str, wanted: Sequence[str]) -> bool:
    return any(satisfies(version, spec) for spec in wanted)


def _fabric_manager(software: Software) -> bool | None:
    if software.fabric_manager_known and software.fabric_manager is None:
        return False  # a node without NVSwitch needs none
    if software.fabric_manager is None or software.driver is None:
        return None
    return software.fabric_manager != software.driver


def _plugin(when: When, software: Software) -> Iterator[_Check]:
    assert when.plugin is not None
    name, wanted = when.plugin.name, when.plugin.version
    if not software.plugin_known:
        yield None, f"the network plugin is {name} {' or '.join(wanted)}".rstrip()
        return
    if software.plugin is None or software.plugin.name != name:
        # A library of an unknown make may be it under another name.
        unknown = software.plugin is not None and software.plugin.name.endswith(".so")
        yield (None if unknown else False), f"the network plugin is {name}"
        return
    yield from _version(name, software.plugin.version, wanted)


def _any_matches(values: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(value, pattern) for value in values for pattern in patterns)


def _variable(value: str | None, wanted: VariableIs) -> bool:
    given = None if value is None else value.strip().lower()
    if wanted.is_ and given not in [each.lower() for each in wanted.is_]:
        return False
    return given not in [each.lower() for each in wanted.is_not]


def _variable_clause(name: str, wanted: VariableIs) -> str:
    if wanted.is_:
        return f"{name} is {' or '.join(wanted.is_)}"
    return f"{name} is not {' or '.join(wanted.is_not)}"
