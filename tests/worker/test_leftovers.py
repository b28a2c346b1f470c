"""What a script's packages keep for the life of the process is forgotten between two runs of it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from ncclops.worker import leftovers


def test_deepspeed_makes_its_groups_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules keep them, and a start that follows would be given those that are gone."""
    released: list[object] = []
    groups, comm = ModuleType("deepspeed.utils.groups"), ModuleType("deepspeed.comm.comm")
    vars(groups)["_release_process_group_references"] = lambda *, group: released.append(group)
    vars(comm)["cdb"] = "the backend of the last start"
    for module in (groups, comm):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    leftovers.forget_deepspeed()
    assert released == [None], "those of all groups"
    assert vars(comm)["cdb"] is None

    del vars(groups)["_release_process_group_references"]  # an older version
    leftovers.forget_deepspeed()
