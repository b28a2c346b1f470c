"""Where profiles are, and reading one file."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from ncclops.errors import ProfileError
from ncclops.nearest import nearest
from ncclops.profiles.messages import describe
from ncclops.profiles.schema import ProfileFile
from ncclops.toml_files import load_toml, refuse, site_directory, user_directories, with_home

SITE = site_directory("profiles")


@dataclass(frozen=True)
class Loaded:
    """One file: its name (the stem), where it lies, and its checked content."""

    name: str
    path: Path
    content: ProfileFile


def shipped_dir() -> Path:
    """The profiles that come with ncclops: inside the wheel, or at the top of a checkout."""
    packaged = Path(__file__).parent / "shipped"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "profiles"


def search_path(cwd: Path | None = None) -> list[tuple[str, Path]]:
    """``(origin, directory)`` in the order of lookup; the first file of a name wins."""
    project, shipped = (cwd or Path.cwd()) / "profiles", shipped_dir()
    own = [] if project == shipped or _is_strangers(project) else [("project", project)]
    users = [("user", directory) for directory in user_directories("profiles")]
    return [*own, *users, ("site", SITE), ("shipped", shipped)]


def _is_strangers(project: Path) -> bool:
    """Whether anybody at all may have put it there, as in ``/tmp``: profiles run commands."""
    try:
        around, found = project.parent.stat(), project.lstat()
    except OSError:
        return False
    anybody = around.st_mode & stat.S_IWOTH
    return bool(anybody) and found.st_uid not in {0, os.geteuid(), around.st_uid}


def profile_files(cwd: Path | None = None) -> Iterator[tuple[str, Path]]:
    """``(origin, file)`` of every profile that a name can reach, hidden ones left out."""
    seen: set[str] = set()
    for origin, directory in search_path(cwd):
        for path in sorted(directory.glob("*.toml")):
            if path.stem not in seen:
                seen.add(path.stem)
                yield origin, path


def is_path(ref: str) -> bool:
    """Whether ``ref`` is a path rather than a name to look up."""
    return "/" in ref or ref.endswith(".toml")


def _is(check: Callable[[], bool]) -> bool:
    try:
        return check()
    except OSError:  # of a name that is too long
        return False


class ProfileNotFound(ProfileError):
    """No file is the one that a name or path means."""


def find(ref: str, *, cwd: Path | None = None, skip: Collection[Path] = ()) -> Path:
    """The file that ``ref`` means. Raises ``ProfileNotFound`` with the nearest names if none does.

    ``skip`` leaves out files, so that a project's ``single-node-h200`` can extend the shipped
    profile of the same name.
    """
    if is_path(ref):
        path = (cwd or Path.cwd()) / with_home(ref)
        if not _is(path.is_file):
            what = "there is no such file"
            if _is(path.exists):
                what = "that is a directory" if path.is_dir() else "that is a pipe or a device"
            raise ProfileNotFound(
                f"profile {ref}: {what}; name a .toml file, or a profile of `ncclops profile list`"
            )
        return path
    for _, directory in search_path(cwd):
        path = directory / f"{ref}.toml"
        if _is(path.is_file) and path not in skip:
            return path
    names = [path.stem for _, path in profile_files(cwd)]
    raise ProfileNotFound(
        f"unknown profile {ref!r}{nearest(ref, names, count=3)} (see `ncclops profile list`)"
    )


def read(path: Path) -> Loaded:
    """The checked content of ``path``; ``ProfileError`` has each mistake: file, key, remedy."""
    try:
        raw = load_toml(path)
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ProfileError(
            f"{path}: not valid TOML: {error}; correct that line of the profile"
        ) from None
    try:
        content = ProfileFile.model_validate(raw)
    except ValidationError as error:
        refuse((f"{path}: {problem}" for problem in describe(error, raw)), ProfileError)
        raise  # not reached: there is at least one
    return Loaded(path.stem, path, content)


def read_all(refs: Iterable[str], *, cwd: Path | None = None) -> list[Loaded]:
    """The files that ``refs`` mean; ``ProfileError`` has what is wrong with any of them."""
    found: list[Loaded] = []
    problems: list[str] = []
    for ref in refs:
        try:
            found.append(read(find(ref, cwd=cwd)))
        except ProfileError as error:
            problems += error.lines
    refuse(problems, ProfileError)
    return found
