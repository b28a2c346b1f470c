"""``nvidia_resiliency_ext.inprocess`` is ``ncclops.restart``, where that is asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from ncclops import restart
from ncclops.compat import serve
from ncclops.restart import alias


@pytest.fixture(autouse=True)
def served() -> Iterator[None]:
    """For the test alone."""
    finders, modules = list(sys.meta_path), dict(sys.modules)
    serve()
    yield
    sys.meta_path[:] = finders
    for name in set(sys.modules) - set(modules):
        if name.partition(".")[0] == alias.PACKAGE:
            del sys.modules[name]


def imported(statement: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(statement, names)
    return names


@pytest.mark.parametrize(
    ("statement", "name", "ours"),
    [
        ("import nvidia_resiliency_ext.inprocess as inprocess", "inprocess.Wrapper", "Wrapper"),
        ("from nvidia_resiliency_ext import inprocess", "inprocess.abort.Abort", "abort.Abort"),
        ("from nvidia_resiliency_ext.inprocess import CallWrapper", "CallWrapper", "CallWrapper"),
        (
            "import nvidia_resiliency_ext.inprocess.rank_assignment",
            "nvidia_resiliency_ext.inprocess.rank_assignment.Tree",
            "rank_assignment.Tree",
        ),
        (
            "from nvidia_resiliency_ext.inprocess.state import FrozenState, Mode",
            "FrozenState",
            "state.FrozenState",
        ),
        ("from nvidia_resiliency_ext.inprocess import *", "Compose", "Compose"),
    ],
)
def test_every_form_of_import_gets_our_class(statement: str, name: str, ours: str) -> None:
    names = imported(statement)
    assert eval(name, names) is eval(f"restart.{ours}", {"restart": restart})


def test_every_documented_module_is_served() -> None:
    inprocess = import_module(alias.SERVED)
    for name in alias._MODULES:
        module = getattr(inprocess, name)
        assert module is import_module(f"{alias.SERVED}.{name}")
        assert set(dir(module)) == set(dir(import_module(f"ncclops.restart.{name}")))


def test_what_is_not_there_is_named_in_one_line() -> None:
    inprocess: Any = import_module(alias.SERVED)
    says = "is not there: ncclops serves nvidia_resiliency_ext.inprocess in this process"
    with pytest.raises(AttributeError, match=f"^{alias.SERVED}.abort.AbortNone {says}.*$"):
        _ = inprocess.abort.AbortNone
    with pytest.raises(ImportError, match="cannot import name 'AbortNone'"):
        imported("from nvidia_resiliency_ext.inprocess.abort import AbortNone")
    with pytest.raises(ModuleNotFoundError, match=f"^{alias.SERVED}.tools {says}.*$"):
        imported("import nvidia_resiliency_ext.inprocess.tools as tools")
    with pytest.raises(
        ModuleNotFoundError, match=f"^nvidia_resiliency_ext.fault_tolerance {says}.*$"
    ):
        imported("import nvidia_resiliency_ext.fault_tolerance")
    assert not hasattr(inprocess, "rank_assignments")
    assert not hasattr(inprocess, "__file__"), "it is no file of ours to a reader of sources"


def test_the_rest_of_an_installed_package_stays_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / alias.PACKAGE
    (package / "inprocess").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "checkpointing.py").write_text("here = True")
    (package / "inprocess" / "__init__.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    inprocess = imported("import nvidia_resiliency_ext.inprocess as it")["it"]
    assert inprocess.Wrapper is restart.Wrapper
    assert imported("from nvidia_resiliency_ext.checkpointing import here")["here"]
    assert find_spec("nvidia_resiliency_ext.attribution") is None


def test_it_is_refused_where_the_real_one_has_been_imported() -> None:
    real = ModuleType(alias.SERVED)
    real.__file__ = "/site-packages/nvidia_resiliency_ext/inprocess/__init__.py"
    with (
        mock.patch.dict(sys.modules, {alias.SERVED: real}),
        pytest.raises(
            ImportError, match=r"^nvidia_resiliency_ext.inprocess has been imported from"
        ),
    ):
        serve()


def test_serving_it_twice_is_serving_it_once() -> None:
    before = list(sys.meta_path)
    serve()
    assert sys.meta_path == before
