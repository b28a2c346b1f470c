"""docs/adr: one page for each decision, numbered without a gap, of one form, and in the list."""

from __future__ import annotations

import re

from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / "docs" / "adr"
PARTS = ["Context", "Decision", "Consequences", "Not taken"]


def test_decisions_have_one_form_and_are_in_the_list() -> None:
    pages = sorted(path for path in FOLDER.glob("*.md") if path.name != "index.md")
    rows = []
    for number, path in enumerate(pages, 1):
        text = path.read_text()
        head = re.match(
            r"# (\d+)\. (.+)\n\n(?:Accepted|Replaced by \[.+\]\(.+\)), (\d{4}-\d\d-\d\d)\.\n", text
        )
        assert head is not None, path.name
        assert path.name.startswith(f"{number:04}-")
        assert int(head[1]) == number
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == PARTS, path.name
        assert all(part.strip() for part in re.split(r"^#+ .*$", text, flags=re.MULTILINE)[1:])
        rows.append(f"| {number} | [{head[2]}]({path.name}) | {head[3]} |")
    listed = (FOLDER / "index.md").read_text().partition("|---|---|---|\n")[2]
    assert listed.splitlines() == rows
    assert len(rows) > 10
