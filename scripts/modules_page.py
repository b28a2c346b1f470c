#!/usr/bin/env python3
"""Writes docs/modules.md from the docstrings of all modules: what each is for, in its own words.

A test holds the page equal to what is written here; run this after changing a module's docstring.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
SOURCE = REPOSITORY / "src"
PAGE = REPOSITORY / "docs" / "modules.md"
HEAD = """\
# Modules

<!-- Written by scripts/modules_page.py from the modules' docstrings: edit the texts there. -->

What each module is for. Which packages there are, what each may import, and how data goes through
them is in [architecture.md](architecture.md).
"""
# A sentence ends where the next one begins, or a list does.
_END = re.compile(r"(?<=[^.\s]{2}[.:])(?=\s+[A-Z`*])")


def page() -> str:
    """The whole page."""
    packages = {path.parent for path in SOURCE.rglob("*.py")}
    return "\n".join([HEAD, *map(_section, sorted(packages))])


def first_sentence(module: Path) -> str:
    """Of the docstring of ``module``, in one line; empty where it has none."""
    text = ast.get_docstring(ast.parse(module.read_text())) or ""
    paragraph = " ".join(text.split("\n\n", 1)[0].split())
    return _END.split(paragraph, maxsplit=1)[0].replace("``", "`").rstrip(".:")


def _section(package: Path) -> str:
    lines = [f"## `{'.'.join(package.relative_to(SOURCE).parts)}`", ""]
    own, others = (
        package / "__init__.py",
        sorted(package.glob("[!_]*.py")) + sorted(package.glob("_[!_]*.py")),
    )
    if said := own.exists() and first_sentence(own):
        lines += [f"{said}.", ""]
    if others:
        lines += ["| module | what it is for |", "|---|---|", *map(_row, others), ""]
    return "\n".join(lines)


def _row(module: Path) -> str:
    text = first_sentence(module).replace("|", "\\|").replace("<", "&lt;")
    return f"| `{module.stem}` | {text} |"


if __name__ == "__main__":
    PAGE.write_text(page())
