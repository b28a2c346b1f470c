"""docs/modules.md has a line for every module, in the module's own words."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.conftest import REPOSITORY
from tests.scripts_of_repository import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("modules_page")


def test_the_page_is_what_the_docstrings_give(script: ModuleType) -> None:
    written = (REPOSITORY / "docs" / "modules.md").read_text()
    assert written == script.page(), "run scripts/modules_page.py"


def test_every_module_says_what_it_is_for(script: ModuleType) -> None:
    modules = [path for path in script.SOURCE.rglob("*.py") if path.name != "__init__.py"]
    assert len(modules) > 100
    assert [path for path in modules if not script.first_sentence(path)] == []
