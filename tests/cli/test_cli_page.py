"""docs/cli.md and the man page say of each command what its help says."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from typing import Any

import pytest

from ncclops.cli._commands import COMMANDS
from tests.conftest import LIMIT_S, REPOSITORY

MAN_PAGE = REPOSITORY / "docs" / "man" / "ncclops.1"


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / f"scripts/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_help_texts_give() -> None:
    written = (REPOSITORY / "docs" / "cli.md").read_text()
    assert written == script("cli_page").page(), "run scripts/cli_page.py"


def test_the_man_page_is_what_the_help_texts_give() -> None:
    assert MAN_PAGE.read_text() == script("man_page").page(), "run scripts/man_page.py"


def test_the_man_page_has_every_command_and_text_that_roff_would_take_for_its_own() -> None:
    page = MAN_PAGE.read_text()
    sections = re.findall(r'^\.SS "ncclops ([\w\\-]+)', page, re.MULTILINE)
    named = {each.name for each in COMMANDS if not each.old_name}
    assert {each.replace("\\-", "-") for each in sections} == named
    text = script("man_page")._text
    assert text(".TH is 'no' \"macro\"\\n --x") == (
        "\\&.TH is \\(aqno\\(aq \\(dqmacro\\(dq\\en \\-\\-x"
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_groff_has_nothing_to_warn_of() -> None:
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-P-cbou", MAN_PAGE],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--nproc-per-node N|auto|gpu|cpu" in done.stdout
