"""What the console shows on a terminal whose character set is not UTF-8."""

from __future__ import annotations

import io

import pytest
from rich.console import Group
from rich.text import Text

from ncclops.cli._console import PlainConsole


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", b"lon~\n"), ("utf-8", "lon…\n".encode())]
)
def test_a_line_is_cut_by_a_character_that_there_is(encoding: str, shown: bytes) -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=encoding, errors="backslashreplace")
    console = PlainConsole(file=stream, width=4, height=5)
    console.print(Group(Text("longer", no_wrap=True, overflow="ellipsis")))
    stream.flush()
    assert written.getvalue() == shown
