"""A package whose import was cut is imported again, whole."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from ncclops.restart import _cut_imports
from ncclops.restart._cut_imports import let_import_again

FILES = {
    "__init__.py": """
import cut_package.whole
import cut_package.inner.deep.whole
VALUES = cut_package.whole.VALUE + cut_package.inner.deep.whole.VALUE
""",
    "whole.py": "VALUE = 3\nis_first = True\n",
    "inner/__init__.py": """
from .deep import whole
import cut_package.cut
CUT = cut_package.cut
""",
    "inner/deep/__init__.py": "from . import whole\n",
    "inner/deep/whole.py": "VALUE = 4\n",
    "cut.py": "import cut_package\nif cut_package.whole.is_first: raise KeyboardInterrupt\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, text in FILES.items():
        path = tmp_path / "cut_package" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(_cut_imports, "_aside", _cut_imports._Aside())
    monkeypatch.syspath_prepend(tmp_path)
    yield "cut_package"
    for name in [each for each in sys.modules if each.startswith("cut_package")]:
        del sys.modules[name]


def test_what_was_whole_is_found_again_and_not_run_again(package: str) -> None:
    let_import_again()
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module(package)
    assert package not in sys.modules
    whole, deep = sys.modules[f"{package}.whole"], sys.modules[f"{package}.inner.deep"]
    spec = whole.__spec__
    whole.__dict__["is_first"] = False
    let_import_again()
    again = importlib.import_module(package)
    assert again.VALUES == 7
    assert again.inner.CUT is again.cut
    assert again.whole is whole
    assert again.inner.deep is deep
    assert whole.__spec__ is spec
    assert isinstance(whole.__loader__, SourceFileLoader)
    let_import_again()
    assert not _cut_imports._aside.modules


def test_modules_that_never_had_a_package_stay_where_they_are(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "no_such_package.inner", sys)
    before = [*sys.meta_path]
    let_import_again()
    monkeypatch.setitem(sys.modules, "nor_this.inner", sys)  # made while the script ran
    let_import_again()
    assert "nor_this.inner" in sys.modules
    assert "no_such_package.inner" in sys.modules
    assert sys.meta_path == before
