"""Rungs that are ruled out where a version has a known issue: entries of the table of advisories.

Of an entry with ``rules_out`` only versions decide (``advisories.table`` sees to that), which each
rank compares with its own; ``regroup`` makes one decision of what all have found. The file alone is
read, once in a process, when it makes its first group: the package that has the rest of the table
takes half a second to import.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from importlib import resources

import torch
from torch import distributed

from ncclops.restart.regroup import Rung
from ncclops.versions import satisfies


def ruled_out(table: str, versions: Mapping[str, str | None]) -> Mapping[Rung, str]:
    """Which rungs the entries of ``table``, TOML, rule out for ``versions``, and why.

    ``versions`` are those of ``nccl`` and of ``torch``; one that is not known counts as good.
    """
    found = dict[Rung, str]()
    for entry in tomllib.loads(table)["advisory"]:
        rungs = entry.get("rules_out", ())
        if rungs and all(_is_met(versions[name], entry["when"].get(name)) for name in versions):
            for rung in rungs:
                found.setdefault(Rung(rung), f"advisory {entry['id']}: {entry['title']}")
    return found


def _is_met(version: str | None, wanted: list[str] | None) -> bool:
    if wanted is None:
        return True
    try:
        return version is not None and any(satisfies(version, each) for each in wanted)
    except ValueError:  # a site's own numbering
        return False


@functools.cache
def ruled_out_here() -> Mapping[Rung, str]:
    """The same of the table that is shipped, for this process."""
    file = resources.files("ncclops") / "advisories" / "advisories.toml"
    nccl = torch.cuda.nccl.version() if distributed.is_nccl_available() else None
    versions = {
        "torch": torch.__version__,
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
    }
    return ruled_out(file.read_text("utf-8"), versions)
