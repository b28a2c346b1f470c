"""What is done to a module once its code has run, be that before or after it was asked for."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ncclops.worker import after_import


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Names of a module and of one that takes names from it."""
    (tmp_path / "made_here.py").write_text("LIMIT = 3\ndef make(): return 'theirs'\n")
    (tmp_path / "taken_there.py").write_text("from made_here import LIMIT, make\nother = make\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("made_here", "taken_there"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "made_here", "taken_there"


def put_ours_in_place(module: ModuleType) -> None:
    module.make = lambda: "ours"  # type: ignore[attr-defined]
    module.LIMIT = 5  # type: ignore[attr-defined]


@pytest.mark.parametrize("imported", [False, True], ids=["before", "after"])
def test_a_function_is_replaced_wherever_it_is_named(
    modules: tuple[str, str], imported: bool
) -> None:
    made, taken = modules
    if imported:
        importlib.import_module(taken)
    after_import.act(made, put_ours_in_place)
    there = importlib.import_module(taken)
    assert (sys.modules[made].make(), there.make(), there.other()) == ("ours",) * 3
    # A value such as 3 may stand for something else elsewhere.
    assert (3 if imported else 5) == there.LIMIT


def test_what_was_found_ahead_holds_for_further_actions_and_later_imports(
    modules: tuple[str, str], tmp_path: Path
) -> None:
    made, taken = modules
    there = importlib.import_module(taken)
    after_import.look_ahead(made)
    (tmp_path / "taken_later.py").write_text("from made_here import make as later\n")
    late = importlib.import_module("taken_later")
    after_import.act(made, put_ours_in_place)
    first = sys.modules[made].make
    assert there.other is late.later is first

    after_import.act(made, lambda module: setattr(module, "make", lambda: f"around {first()}"))
    assert (there.make(), there.other(), late.later()) == ("around ours",) * 3
    del sys.modules["taken_later"]


def test_what_a_name_has_come_to_since_stays(modules: tuple[str, str]) -> None:
    made, taken = modules
    there = importlib.import_module(taken)
    after_import.look_ahead(made)
    vars(there)["other"] = len
    del there.make
    after_import.act(made, put_ours_in_place)
    assert there.other is len
    assert not hasattr(there, "make")
