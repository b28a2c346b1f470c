"""The environment plan: what is set, unset, scrubbed and kept for a worker, and why.

Precedence, lowest first: profile ``default`` < what the operator has exported < profile
``set`` < profile ``unset`` and ``scrub`` < the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from ncclops.env.catalogue import catalogue, is_between_nodes, is_within_node
from ncclops.env.host import files_in
from ncclops.env.origins import from_files
from ncclops.errors import UsageError
from ncclops.host_name import host_name
from ncclops.profiles.model import (
    DEFAULT_RESTART_MODE,
    RUN_PLACEHOLDERS,
    Entry,
    Profile,
    RestartMode,
    Scope,
)

Action = Literal["set", "unset", "scrub", "keep"]

COMMAND_LINE = "command line"

# Where NCCL's log goes, and the parts of it in which it names its network: few lines for each
# communicator, while INIT has one for each channel as well.
NCCL_LOG_FILE = "{rank_dir}/nccl.log"
SUBSYSTEMS = "NET,ENV,BOOTSTRAP"


@dataclass(frozen=True)
class PlanContext:
    """What a profile looks at: restart mode, installed torch, this host's name, directories and
    configuration files of NCCL.
    """

    restart: RestartMode = DEFAULT_RESTART_MODE
    torch: str | None = None
    host: str = field(default_factory=host_name)
    files_in: Callable[[str], Collection[str]] = files_in
    from_files: Callable[[Mapping[str, str]], Collection[str]] = from_files


@dataclass(frozen=True)
class Overrides:
    """The options of the command line: ``--set``, ``--unset`` and ``--keep``.

    Raises ``UsageError`` when one variable is in two of them.
    """

    set: Mapping[str, str] = field(default_factory=dict)
    unset: frozenset[str] = frozenset()
    keep: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        groups = {"--set": frozenset(self.set), "--unset": self.unset, "--keep": self.keep}
        for name in sorted(frozenset().union(*groups.values())):
            options = [option for option, names in groups.items() if name in names]
            if len(options) > 1:
                raise UsageError(f"{name} is given with {' and '.join(options)}: choose one")


@dataclass(frozen=True)
class Change:
    """One row of the plan. ``before`` and ``after`` None mean that the variable is not there."""

    name: str
    action: Action
    before: str | None
    after: str | None
    reason: str
    source: str


@dataclass(frozen=True)
class Plan:
    """The rows for one profile, in the profile's order, the command line's own last."""

    profile: str
    changes: tuple[Change, ...]

    def without_run(self, environ: Mapping[str, str]) -> dict[str, str]:
        """``environ`` under the plan, before there is a run: its directories are empty."""
        return self.apply(environ, dict.fromkeys(RUN_PLACEHOLDERS, ""))

    def apply(self, environ: Mapping[str, str], fill: Mapping[str, str]) -> dict[str, str]:
        """``environ`` under the plan; ``fill`` gives ``run_dir`` and ``rank_dir`` of a worker.

        Raises ``KeyError`` when a value needs a placeholder that ``fill`` does not have.
        """
        # A variable without a name, which programs written for other systems leave, can be handed
        # on, and nobody can unset it.
        result = {name: value for name, value in environ.items() if name}
        for change in self.changes:
            if change.action == "keep":
                continue
            if change.after is None:
                result.pop(change.name, None)
            elif change.action == "set":
                result[change.name] = _fill(change.after, fill)
            else:
                result[change.name] = change.after  # the operator's value, taken literally
        return result

    def to_json(self) -> dict[str, Any]:
        """The document ``ncclops.env-diff/1`` of docs/contracts.md."""
        return {
            "schema": "ncclops.env-diff/1",
            "profile": self.profile,
            "changes": [asdict(change) for change in self.changes],
        }


def compute_plan(
    profile: Profile, environ: Mapping[str, str], overrides: Overrides, context: PlanContext
) -> Plan:
    """The plan of ``profile`` over ``environ``. Nothing is changed.

    Nothing else is read but the directories of path lists that ``profile`` scrubs by content and,
    where it asks for NCCL's log, NCCL's configuration files.
    """
    operator = {
        name: value
        for name, value in {**environ, **overrides.set}.items()
        if name not in overrides.unset
    }
    rows: list[Change] = []
    chosen: dict[str, Entry | None] = {
        name: _first_match(name, entries, context, operator)
        for name, entries in profile.env.items()
    }
    chosen |= _of_network(profile, operator, context) | _of_scopes(profile, operator)
    for name, entry in chosen.items():
        row = _override(name, environ, overrides, entry)
        if row is None and entry is not None:
            row = _row(name, entry, environ, operator, context)
        if row is not None:
            rows.append(row)
    said = {row.name for row in rows}
    for name in [*overrides.set, *sorted(overrides.unset), *sorted(overrides.keep)]:
        row = None if name in said else _override(name, environ, overrides, None)
        if row is not None:
            rows.append(row)
    return Plan(profile.name, tuple(rows))


def _first_match(
    name: str, entries: tuple[Entry, ...], context: PlanContext, operator: Mapping[str, str]
) -> Entry | None:
    for entry in entries:
        if entry.when.holds(
            restart=context.restart,
            torch=context.torch,
            operator=operator,
            host=context.host,
            name=name,
        ):
            return entry
    return None


def _of_network(
    profile: Profile, operator: Mapping[str, str], context: PlanContext
) -> dict[str, Entry]:
    """How NCCL is had to say which network it uses, where the profile asks for that.

    Where the operator or the profile says anything of NCCL's log, that stays as it is.
    """
    log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": SUBSYSTEMS, "NCCL_DEBUG_FILE": NCCL_LOG_FILE}
    if not (profile.network.expect and profile.network.log):
        return {}
    said = {*operator, *profile.env, *context.from_files(operator)}
    if not said.isdisjoint(log):
        return {}
    why = (
        f"So that NCCL says which network it uses: this job is meant for"
        f" {' or '.join(profile.network.expect)}. Its log goes to a file of the run."
    )
    source = f"profile {profile.name}, [network]"
    return {name: Entry("default", why, source, value=value) for name, value in log.items()}


def _of_scopes(profile: Profile, operator: Mapping[str, str]) -> dict[str, Entry]:
    """The entries for variables that the profile does not name one by one."""
    found = {}
    for scope, entry in profile.scopes.items():
        for name, value in sorted(operator.items()):
            if name not in profile.env and _IN_SCOPE[scope](name, value):
                found[name] = _about(name, entry)
    return found


_IN_SCOPE: dict[Scope, Callable[[str, str], bool]] = {
    "between_nodes": is_between_nodes,
    "within_node": is_within_node,
}


def _about(name: str, entry: Entry) -> Entry:
    variable = catalogue().get(name)
    return entry if variable is None else replace(entry, why=f"{entry.why} {variable.summary}")


def _override(
    name: str, environ: Mapping[str, str], overrides: Overrides, entry: Entry | None
) -> Change | None:
    """The command line's row for ``name``, saying what it overrules, or None."""
    before = environ.get(name)
    overruled = "" if entry is None else f"; {entry.source} would {_intent(entry)}"
    if name in overrides.set:
        after: str | None = overrides.set[name]
        reason = f"--set on the command line{overruled}"
    elif name in overrides.unset:
        after, reason = None, f"--unset on the command line{overruled}"
    elif name in overrides.keep:
        return Change(
            name, "keep", before, before, f"--keep on the command line{overruled}", COMMAND_LINE
        )
    else:
        return None
    if after == before:
        return Change(name, "keep", before, before, f"{reason}; it is so already", COMMAND_LINE)
    return Change(name, "unset" if after is None else "set", before, after, reason, COMMAND_LINE)


def _intent(entry: Entry) -> str:
    if entry.action in ("set", "default"):
        return f"{entry.action} it to {entry.value}"
    return f"{entry.action} it"


def _row(
    name: str,
    entry: Entry,
    environ: Mapping[str, str],
    operator: Mapping[str, str],
    context: PlanContext,
) -> Change | None:
    before = environ.get(name)
    if entry.action == "unset" and before is not None:
        return Change(name, "unset", before, None, entry.why, entry.source)
    if entry.action == "scrub" and before is not None:
        return _scrubbed(name, entry, before, context)
    if entry.action in ("unset", "scrub"):
        return None
    if entry.action == "default" and before is not None:
        return Change(
            name,
            "keep",
            before,
            before,
            f"yours is kept; the default is {entry.value}. {entry.why}",
            entry.source,
        )
    after = operator.get(entry.follows, entry.value) if entry.follows else entry.value
    action: Action = "keep" if after == before else "set"
    return Change(name, action, before, after, entry.why, entry.source)


def _scrubbed(name: str, entry: Entry, before: str, context: PlanContext) -> Change:
    """``before`` without the entries that go; order and spelling of the rest stay."""
    kept, remarks = [], []
    for directory in before.split(":"):
        goes, remark = _goes(directory, entry, context)
        if not goes:
            kept.append(directory)
        if remark:
            remarks.append(f"{directory} {remark}.")
    after = ":".join(kept)
    if after == before:
        reason = " ".join(["no entry to scrub.", entry.why, *remarks])
        return Change(name, "keep", before, before, reason, entry.source)
    reason = " ".join([entry.why, *remarks])
    return Change(name, "scrub", before, after or None, reason, entry.source)


def _goes(directory: str, entry: Entry, context: PlanContext) -> tuple[bool, str | None]:
    """Whether an entry of a path list goes, and what its content has to do with that."""
    if any(fnmatchcase(directory.rstrip("/"), pattern) for pattern in entry.patterns):
        return True, None
    if not entry.holding or not directory:
        return False, None
    files = context.files_in(directory)
    unwanted, needed = _first_of(files, entry.holding), _first_of(files, entry.unless_holding)
    if unwanted is None:
        return False, None
    if needed is not None:
        return False, f"holds {unwanted} and stays, since it holds {needed} too"
    return True, f"holds {unwanted}"


def _first_of(files: Collection[str], patterns: tuple[str, ...]) -> str | None:
    matching = (name for name in sorted(files) if any(fnmatchcase(name, p) for p in patterns))
    return next(matching, None)


def _fill(text: str, fill: Mapping[str, str]) -> str:
    for name in RUN_PLACEHOLDERS:
        if f"{{{name}}}" in text:
            text = text.replace(f"{{{name}}}", fill[name])
    return text
