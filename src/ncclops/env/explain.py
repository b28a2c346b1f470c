"""Everything known about one variable, and its value here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ncclops.env.catalogue import LIBNCCL, RANKS, Variable, catalogue, is_covered, nearest_names
from ncclops.env.origins import exported_by, from_files
from ncclops.env.values import problem_with
from ncclops.errors import UsageError
from ncclops.redaction.redactor import Redactor

_STATUS = {
    "active": "in use",
    "plugin": "read only when its plugin is loaded",
    "deprecated": "deprecated",
    "removed": "removed",
    "unread": "read by nothing",
}


def explain(
    name: str,
    environ: Mapping[str, str],
    *,
    torch: str | None,
    nccl: str | None,
    etc: Path = Path("/etc"),
) -> dict[str, Any]:
    """The document ``ncclops.env-explain/1``; ``UsageError`` with the nearest names if unknown."""
    variable = catalogue().get(name)
    if variable is None:
        raise UsageError(_unknown(name))
    return {
        "schema": "ncclops.env-explain/1",
        "name": name,
        "summary": variable.summary,
        "read_by": variable.reader,
        "status": _STATUS[variable.status],
        "type": variable.kind,
        "unit": variable.unit or None,
        "accepts": variable.accepts or None,
        "default": variable.default or None,
        "since": variable.since,
        "deprecated": variable.deprecated,
        "removed": variable.removed,
        "replaced_by": variable.replaced_by,
        "read_when": variable.read_when,
        "ranks": RANKS[variable.ranks] or None,
        "debug_only": variable.debug,
        "multi_host_only": variable.multi_host,
        "documented": variable.documented,
        "second_engine": _second_engine(variable),
        "restart": variable.restart_note or None,
        "single_node_risk": variable.single_node,
        "risk": variable.risk,
        "read_here": variable.read_in(torch=torch, nccl=nccl),
        "source": variable.source,
        "here": _here(variable, environ, etc),
    }


def _unknown(name: str) -> str:
    if not name.strip():
        return "an empty name explains nothing: name a variable, such as NCCL_DEBUG"
    near = nearest_names(name)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    scope = "not in the catalogue" if is_covered(name) or near else "not one the catalogue covers"
    return f"{name}: {scope}{hint} (`ncclops env audit` shows what the installed libraries read)"


def _second_engine(variable: Variable) -> str | None:
    if variable.nccl2 is None:
        return None
    return (
        "read by torch's second NCCL engine too (the default from 2.15 on)"
        if variable.nccl2
        else "not read by torch's second NCCL engine (the default from 2.15 on)"
    )


def _here(variable: Variable, environ: Mapping[str, str], etc: Path) -> dict[str, Any]:
    """The value in effect here, its origin, and what is wrong with it."""
    name = variable.name
    added = from_files(environ, etc)
    if name in environ:
        value, origin = environ[name], exported_by(name, environ[name])
    elif name in added:
        value, origin = added[name].value, f"{added[name].source} (only NCCL sees it)"
    else:
        return {"value": None, "from": None, "problem": None}
    plugin = environ.get("NCCL_ENV_PLUGIN", "none")
    if plugin != "none" and variable.component in LIBNCCL and name != "NCCL_ENV_PLUGIN":
        origin += f"; NCCL asks the plugin {plugin} first, which may say otherwise"
    shown = Redactor().variable(name, value)
    return {"value": shown, "from": origin, "problem": problem_with(variable, value)}
