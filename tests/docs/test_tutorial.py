"""Tutorial and cookbook are true: each command is run as it stands, and says what is shown."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, clean_environ
from tests.docs.shown import first_that_differs, pattern, run_block

PAGES = ("tutorial.md", "cookbook.md")
_BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def steps(page: str) -> list[tuple[str, list[str]]]:
    """Each command of ``page``, with the lines that are shown of its output."""
    blocks = [
        (match[1], match[2]) for match in _BLOCK.finditer((REPOSITORY / "docs" / page).read_text())
    ]
    kinds = [kind for kind, _ in blocks]
    assert kinds == ["sh", "text"] * (len(blocks) // 2), "each command has its output"
    texts = [text for _, text in blocks]
    return [(a, b.splitlines()) for a, b in zip(texts[::2], texts[1::2], strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_each_command_says_what_is_shown(tmp_path: Path, page: str) -> None:
    shutil.copy(REPOSITORY / "docs" / "examples" / "train_ddp.py", tmp_path)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = clean_environ() | {"PATH": path, "COLUMNS": "120"}
    # What the cookbook has typed first.
    environ["XDG_CONFIG_HOME"] = str(tmp_path / "etc")
    for each in ("profiles", "signatures", "checks"):
        (tmp_path / "etc" / "ncclops" / each).mkdir(parents=True)
    for command, shown in steps(page):
        done = run_block(command, tmp_path, environ)
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        missing = first_that_differs(shown, done.stdout)
        assert missing is None, f"{missing}\n---\n{done.stdout}"


def test_what_is_shown_may_differ_in_numbers_alone() -> None:
    wanted = pattern("ncclops: completed after 10.2s: 2 workers, see …")
    assert wanted.match("ncclops: completed after 3s: 12 workers, see runs/1")
    assert not wanted.match("ncclops: failed after 3s: 12 workers, see runs/1")
