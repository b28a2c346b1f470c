"""The plan written down for others: shell lines, a ``.env`` file, a JSON document."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ncclops.env.plan import Plan

# What a shell and the readers of ``.env`` files take for a name. The kernel takes others, and a
# shell that evaluates one of them, such as ``NCCL_$(id)``, runs what it says.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def unnameable(plan: Plan) -> list[str]:
    """The variables that the plan changes and that no shell can name: ``to_sh`` and ``to_dotenv``
    leave them out."""
    return [
        change.name
        for change in plan.changes
        if change.action != "keep" and not _NAME.fullmatch(change.name)
    ]


def to_sh(plan: Plan, environ: Mapping[str, str], fill: Mapping[str, str]) -> str:
    """Lines to ``eval`` in any POSIX shell; only what the plan changes, see ``unnameable``."""
    after = plan.apply(environ, fill)
    lines = []
    for change in plan.changes:
        if change.action == "keep" or not _NAME.fullmatch(change.name):
            continue
        value = after.get(change.name)
        if value is None:
            lines.append(f"unset {change.name}")
        else:
            lines.append(f"export {change.name}={_sh_quote(value)}")
    return "".join(f"{line}\n" for line in lines)


def to_dotenv(plan: Plan, environ: Mapping[str, str], fill: Mapping[str, str]) -> str:
    """A ``.env`` file with every variable the plan leaves a value for.

    It is read elsewhere, so kept variables are in it too; one that is to be absent can only
    be a comment there.
    """
    after = plan.apply(environ, fill)
    lines = []
    for change in plan.changes:
        if not _NAME.fullmatch(change.name):
            continue
        value = after.get(change.name)
        if value is None:
            lines.append(f"# {change.name} must not be set")
        else:
            lines.append(f"{change.name}={_dotenv_quote(value)}")
    return "".join(f"{line}\n" for line in lines)


def to_document(plan: Plan, environ: Mapping[str, str], fill: Mapping[str, str]) -> dict[str, Any]:
    """``ncclops.env-export/1``: ``set`` with the kept values too, ``unset`` with the names."""
    after = plan.apply(environ, fill)
    names = [change.name for change in plan.changes]
    return {
        "schema": "ncclops.env-export/1",
        "profile": plan.profile,
        "set": {name: after[name] for name in names if name in after},
        "unset": [name for name in names if name not in after],
    }


def _sh_quote(value: str) -> str:
    """Single quotes hold everything in sh but themselves."""
    return "'" + value.replace("'", "'\"'\"'") + "'"


def _dotenv_quote(value: str) -> str:
    """Double quotes with the escapes that the common readers of ``.env`` files share."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r") + '"'
