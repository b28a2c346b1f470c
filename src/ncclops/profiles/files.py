"""Where profiles are, and reading one file."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ncclops.errors import ProfileError
from ncclops.profiles.schema import ProfileFile, describe, nearest


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
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    project, shipped = (cwd or Path.cwd()) / "profiles", shipped_dir()
    own = [] if project == shipped else [("project", project)]
    return [*own, ("user", config / "ncclops" / "profiles"), ("shipped", shipped)]


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


class ProfileNotFound(ProfileError):
    """No file is the one that a name or path means."""


def find(ref: str, *, cwd: Path | None = None, skip: Collection[Path] = ()) -> Path:
    """The file that ``ref`` means. Raises ``ProfileNotFound`` with the nearest names if none does.

    ``skip`` leaves out files, so that a project's ``single-node-h200`` can extend the shipped
    profile of the same name.
    """
    if is_path(ref):
        path = (cwd or Path.cwd()) / Path(ref).expanduser()
        if not path.is_file():
            what = "that is a directory" if path.is_dir() else "there is no such file"
            raise ProfileNotFound(
                f"profile {ref}: {what}; name a .toml file, or a profile of `ncclops profile list`"
            )
        return path
    for _, directory in search_path(cwd):
        path = directory / f"{ref}.toml"
        if path.is_file() and path not in skip:
            return path
    names = [path.stem for _, path in profile_files(cwd)]
    raise ProfileNotFound(
        f"unknown profile {ref!r}{nearest(ref, names)} (see `ncclops profile list`)"
    )


def read(path: Path) -> Loaded:
    """The checked content of ``path``; ``ProfileError`` names file, key and remedy."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ProfileError(f"{path}: cannot be read: {reason}") from None
    try:
        raw: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(
            f"{path}: not valid TOML: {error}; correct that line of the profile"
        ) from None
    try:
        content = ProfileFile.model_validate(raw)
    except ValidationError as error:
        raise ProfileError(f"{path}: {describe(error, raw)}") from None
    return Loaded(path.stem, path, content)
