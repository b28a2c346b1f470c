"""Release notes: the fragments in changes/ are well-formed, and go where they should."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.scripts_of_repository import load_script

changelog = load_script("changelog")

BEFORE = "# Changelog\n\n## Unreleased\n\n- Older.\n\n## 0.1.0 (2026-01-01)\n\n- First.\n"
Tree = Callable[..., Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """``tree(name=text)``: a tree with these fragments."""

    def make(text: str = BEFORE, **fragments: str) -> Path:
        (tmp_path / "changes").mkdir()
        (tmp_path / "docs").mkdir()
        (tmp_path / "docs" / "control.md").touch()
        (tmp_path / "CHANGELOG.md").write_text(text)
        (tmp_path / "changes" / "README.md").write_text("# How\n")
        for name, content in fragments.items():
            (tmp_path / "changes" / f"{name.replace('_', '-')}.md").write_text(content)
        return tmp_path

    return make


def names(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "changes").iterdir())


def test_the_fragments_here_are_well_formed() -> None:
    changelog.fragments(REPOSITORY)
    assert changelog.UNRELEASED in (REPOSITORY / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a-change.md", "Text.\n", None),
        ("20-a.md", "Text of\ntwo lines ([control.md](docs/control.md#all-runs)).\n", None),
        ("a.md", "See [there](https://example.org/x).\n", None),
        ("A change.md", "Text.\n", "its name"),
        ("a-change.txt", "Text.\n", "its name"),
        ("a.md", "", "empty"),
        ("a.md", " \n", "empty"),
        ("a.md", "Text.", "one paragraph"),
        ("a.md", "Text.\n\n", "one paragraph"),
        ("a.md", "Text.\n\nMore.\n", "one paragraph"),
        ("a.md", "- Text.\n", "begins with a mark"),
        ("a.md", "## Text\n", "begins with a mark"),
        ("a.md", "x" * 161 + "\n", "161"),
        ("a.md", "[x](docs/gone.md#a).\n", "docs/gone.md is no file"),
    ],
)
def test_what_a_fragment_may_be(tree: Tree, name: str, text: str, problem: str | None) -> None:
    said = changelog.problem_of(name, text, tree())
    assert (said is None) if problem is None else problem.replace("161", "160") in said


def test_without_an_action_they_are_printed_and_nothing_changes(
    tree: Tree, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tree(b_two="Two\nlines.\n", a_one="One.\n")
    assert changelog.main([], root) == 0
    assert capsys.readouterr().out == "- One.\n- Two\n  lines.\n"
    assert (root / "CHANGELOG.md").read_text() == BEFORE
    assert names(root) == ["README.md", "a-one.md", "b-two.md"]


def test_they_are_collected_above_what_is_there(tree: Tree) -> None:
    root = tree(b_two="Two\nlines.\n", a_one="One.\n")
    assert changelog.main(["collect"], root) == 0
    expected = BEFORE.replace("- Older.", "- One.\n- Two\n  lines.\n- Older.")
    assert (root / "CHANGELOG.md").read_text() == expected
    assert names(root) == ["README.md"]
    assert changelog.main(["collect"], root) == 0  # nothing more
    assert (root / "CHANGELOG.md").read_text() == expected


def test_a_release_takes_all_and_leaves_room_for_the_next(tree: Tree) -> None:
    root = tree(a_one="One.\n")
    assert changelog.main(["release", "0.2.0"], root) == 0
    text = (root / "CHANGELOG.md").read_text()
    assert re.fullmatch(
        r"# Changelog\n\n## Unreleased\n\n## 0\.2\.0 \(\d{4}-\d\d-\d\d\)\n\n- One\.\n- Older\.\n\n"
        r"## 0\.1\.0 .*",
        text,
        re.DOTALL,
    )
    (root / "changes" / "next.md").write_text("Next.\n")
    assert changelog.main(["collect"], root) == 0
    assert "## Unreleased\n\n- Next.\n\n## 0.2.0" in (root / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "text", "fragment", "expected"),
    [
        (["collect"], BEFORE, "- x\n", "changes/a.md: it begins with a mark"),
        (["collect"], "# Changelog\n", "x\n", "there is no ## Unreleased"),
        (["release", "next"], BEFORE, "x\n", "'next' is no version"),
        (["release", "0.1.0"], BEFORE, "x\n", "0.1.0 is there already"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_nothing_is_written(
    tree: Tree,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    text: str,
    fragment: str,
    expected: str,
) -> None:
    root = tree(text, a=fragment)
    assert changelog.main(arguments, root) == 2
    said = capsys.readouterr().err
    assert said.startswith("changelog: error: ")
    assert said.count("\n") == 1
    assert expected in said
    assert (root / "CHANGELOG.md").read_text() == text
    assert names(root) == ["README.md", "a.md"]


def test_a_release_of_nothing_is_refused(tree: Tree) -> None:
    root = tree("# Changelog\n\n## Unreleased\n\n## 0.1.0 (2026-01-01)\n\n- First.\n")
    assert changelog.main(["release", "0.2.0"], root) == 2
