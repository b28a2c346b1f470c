#!/usr/bin/env python3
"""Release notes from the fragments in changes/ (changes/README.md says what one looks like).

scripts/changelog.py                   prints what would be added to CHANGELOG.md
scripts/changelog.py collect           adds it there, under Unreleased, and removes the fragments
scripts/changelog.py release VERSION   the same; what is under Unreleased becomes VERSION, of today

A fragment that is not well-formed is one line on stderr and exit code 2; nothing is written then.
"""

from __future__ import annotations

import argparse
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
UNRELEASED = "## Unreleased\n\n"
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\.md")
_LINK = re.compile(r"\]\((?!https?://)([^)#]*)[^)]*\)")
_VERSION = re.compile(r"\d+(\.\d+)+([a-z]+\d+)?")
_MOST_CHARS = 160  # of a line


class Malformed(Exception):
    """A fragment, a changelog or a version that is not as it should be; the text is one line."""


def fragments(root: Path) -> dict[Path, str]:
    """The texts of the fragments below ``root``, in the order of their names.

    Raises ``Malformed``.
    """
    found = {}
    for path in sorted((root / "changes").iterdir()):
        if path.name == "README.md":
            continue
        text = path.read_text(encoding="utf-8")
        if (problem := problem_of(path.name, text, root)) is not None:
            raise Malformed(f"changes/{path.name}: {problem}; changes/README.md shows the form")
        found[path] = text.strip()
    return found


def problem_of(name: str, text: str, root: Path) -> str | None:
    """What is wrong with a fragment, None for nothing; links lead to files below ``root``."""
    if not _NAME.fullmatch(name):
        return "its name is not as in a-few-words.md"
    if not text.strip():
        return "it is empty"
    if text != f"{text.strip()}\n" or "\n\n" in text:
        return "it is not one paragraph that ends with a newline"
    if text.startswith(("-", "*", "#", ">")):
        return "it begins with a mark: it is the text of an item, which gets its dash here"
    if any(len(line) > _MOST_CHARS for line in text.splitlines()):
        return f"a line has more than {_MOST_CHARS} characters"
    dead = [each for each in _LINK.findall(text) if each and not (root / each).exists()]
    return f"{dead[0]} is no file: links go from the top of the tree" if dead else None


def items(texts: list[str]) -> str:
    """The lines of CHANGELOG.md for ``texts``."""
    return "".join("- " + text.replace("\n", "\n  ") + "\n" for text in texts)


def collected(changelog: str, texts: list[str]) -> str:
    """``changelog`` with ``texts`` as the first items under Unreleased. Raises ``Malformed``."""
    before, heading, after = changelog.partition(UNRELEASED)
    if not heading:
        raise Malformed("CHANGELOG.md: there is no ## Unreleased with an empty line below it")
    gap = "\n" if texts and after.startswith("## ") else ""
    return before + heading + items(texts) + gap + after


def released(changelog: str, version: str, day: str) -> str:
    """``changelog`` with what is under Unreleased as ``version`` of ``day``.

    Raises ``Malformed``.
    """
    if not _VERSION.fullmatch(version):
        raise Malformed(f"{version!r} is no version: give one as in 1.2.0")
    if f"\n## {version} " in changelog:
        raise Malformed(f"CHANGELOG.md: {version} is there already")
    before, heading, after = changelog.partition(UNRELEASED)
    if not heading or not after.startswith("- "):
        raise Malformed("CHANGELOG.md: there is nothing under ## Unreleased")
    return f"{before}{heading}## {version} ({day})\n\n{after}"


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Do what the module's text says; return the exit code."""
    parser = argparse.ArgumentParser(description="Release notes from the fragments in changes/.")
    actions = parser.add_subparsers(dest="action", metavar="[collect | release VERSION]")
    actions.add_parser("collect", help="into CHANGELOG.md, under Unreleased")
    actions.add_parser("release", help="and as a version").add_argument("version")
    asked = parser.parse_args(arguments)
    path = root / "CHANGELOG.md"
    try:
        found = fragments(root)
        if asked.action is None:
            sys.stdout.write(items(list(found.values())))
            return 0
        text = collected(path.read_text(encoding="utf-8"), list(found.values()))
        if asked.action == "release":
            text = released(text, asked.version, datetime.now(UTC).date().isoformat())
    except Malformed as error:
        print(f"changelog: error: {error}", file=sys.stderr)
        return 2
    path.write_text(text, encoding="utf-8")
    for fragment in found:
        fragment.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
