"""docs/cli.md says of each command what its help says."""

from __future__ import annotations

import importlib.util

from tests.conftest import REPOSITORY


def test_the_page_is_what_the_help_texts_give() -> None:
    spec = importlib.util.spec_from_file_location("cli_page", REPOSITORY / "scripts/cli_page.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert (REPOSITORY / "docs" / "cli.md").read_text() == script.page(), "run scripts/cli_page.py"
