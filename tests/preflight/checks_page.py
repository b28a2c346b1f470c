"""The table of checks in docs/preflight.md, made of the catalogue: run as a module to write it."""

from __future__ import annotations

from ncclops.preflight.catalogue import catalogue
from tests.conftest import REPOSITORY

PAGE = REPOSITORY / "docs" / "preflight.md"
_BEGIN, _END = "<!-- checks -->\n", "<!-- end of checks -->\n"


def table() -> str:
    """One row a check."""
    rows = [
        "| check | reads | wanted | at worst | cannot tell | source |",
        "|---|---|---|---|---|---|",
    ]
    rows += [
        f"| `{each.id}` | {each.reads} | {each.wanted} | {each.severity} | {each.cannot_tell} |"
        f" {each.source} |"
        for each in catalogue().values()
    ]
    return "\n".join(rows) + "\n"


def main() -> None:
    """Write the table into the page."""
    text = PAGE.read_text()
    head, _, rest = text.partition(_BEGIN)
    PAGE.write_text(head + _BEGIN + table() + _END + rest.partition(_END)[2])


if __name__ == "__main__":
    main()
