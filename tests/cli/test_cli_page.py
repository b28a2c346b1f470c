"""docs/cli.md and the man page say of each command what its help says."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from ncclops.cli._commands import COMMANDS
from tests.conftest import LIMIT_S, REPOSITORY
from tests.scripts_of_repository import load_script

MAN_PAGE = REPOSITORY / "docs" / "man" / "ncclops.1"


def test_the_page_is_what_the_help_texts_give() -> None:
    written = (REPOSITORY / "docs" / "cli.md").read_text()
    assert written == load_script("cli_page").page(), "run scripts/cli_page.py"


def test_the_man_page_is_what_the_help_texts_give() -> None:
    assert MAN_PAGE.read_text() == load_script("man_page").page(), "run scripts/man_page.py"


def test_the_man_page_has_every_command_and_text_that_roff_would_take_for_its_own() -> None:
    page = MAN_PAGE.read_text()
    sections = re.findall(r'^\.SS "ncclops ([\w\\-]+)', page, re.MULTILINE)
    named = {each.name for each in COMMANDS if not each.old_name}
    assert {each.replace("\\-", "-") for each in sections} == named
    text = load_script("man_page")._text
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
