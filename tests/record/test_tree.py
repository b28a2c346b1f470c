"""Walking through a directory: pruned, sorted, without links, and as deep as it goes."""

from __future__ import annotations

from pathlib import Path

from ncclops.record.tree import walk
from tests.record.deep_tree import deep_tree


def test_directories_are_walked_in_the_order_that_the_caller_gives(tmp_path: Path) -> None:
    for name in ("b/inner", "a", "pruned/inner"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "b" / "file").touch()
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    found = []
    for folder, folders, rest in walk(tmp_path):
        folders[:] = sorted(set(folders) - {"pruned"})
        found.append((folder.relative_to(tmp_path).as_posix(), rest))
    assert found == [(".", []), ("a", ["up"]), ("b", ["file"]), ("b/inner", [])]


def test_a_directory_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert list(walk(tmp_path / "none")) == []


def test_a_path_longer_than_the_system_takes_ends_the_way_down_not_the_walk(
    tmp_path: Path,
) -> None:
    (tmp_path / "b").mkdir()
    with deep_tree(tmp_path / "a", 3000):
        names = [each for each, _, _ in walk(tmp_path)]
    assert tmp_path / "b" in names
    assert len(names) > 1500
