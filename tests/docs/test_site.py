"""The documentation site can be built without a warning: no dead link, no page that is missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import LIMIT_S, REPOSITORY, clean_environ

DOCS = REPOSITORY / "docs"


class _Nav(yaml.SafeLoader):
    """Reads what MkDocs alone knows as nothing."""


_Nav.add_multi_constructor("", lambda *_: None)


def pages(entry: object) -> list[str]:
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    assert not isinstance(parts, int)
    return [page for part in parts for page in pages(part)]  # type: ignore[attr-defined]


def test_each_page_is_in_the_navigation() -> None:
    nav = yaml.load((REPOSITORY / "mkdocs.yml").read_text(), _Nav)["nav"]
    here = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert sorted(pages(nav)) == sorted(here)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra docs")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=REPOSITORY,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "CallWrapper" in (tmp_path / "reference" / "index.html").read_text()
