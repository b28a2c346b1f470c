"""Values given in place of a profile's parameters (``--param``), checked against its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from ncclops.durations import parse_duration
from ncclops.errors import ProfileError, UsageError
from ncclops.nearest import nearest
from ncclops.profiles.files import profile_files, read
from ncclops.profiles.model import GivenParameter, Parameter, as_text
from ncclops.whole_numbers import MOST, whole_number

_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def parse_parameters(pairs: Sequence[str] | None) -> dict[str, str]:
    """``--param NAME=VALUE`` by name; the last one counts. Raises ``UsageError``."""
    given: dict[str, str] = {}
    for pair in pairs or ():
        name, equals, text = pair.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--param {pair}: write it as NAME=VALUE, as in compile_timeout=45m")
        given[name] = text
    return given


def own_name(asked: str) -> str:
    """The name that a profile has for what was ``asked`` for: dashes count as underscores."""
    return asked.strip().replace("-", "_")


def replaced(
    declared: Mapping[str, Parameter],
    given: Mapping[str, GivenParameter],
    *,
    profile: str,
    cwd: Path | None = None,
) -> dict[str, Parameter]:
    """``declared`` with the values ``given``, each of the type of what it replaces.

    Raises ``UsageError`` for a name that ``profile`` does not have and for a value of another type.
    """
    values = dict(declared)
    for asked, value in given.items():
        name = own_name(asked)
        text = as_text(value)
        if name not in declared:
            raise UsageError(f"--param {asked}={text}: {_unknown(name, declared, profile, cwd)}")
        try:
            values[name] = _typed(text, declared[name])
        except ValueError as error:
            raise UsageError(
                f"--param {asked}={text}: {error} (profile {profile} has"
                f" {name} = {as_text(declared[name])})"
            ) from None
    return values


def _unknown(name: str, declared: Mapping[str, Parameter], profile: str, cwd: Path | None) -> str:
    others = [other for other in _profiles_with(name, cwd) if other not in profile.split("+")]
    where = f"; {' and '.join(others)} {'have' if others[1:] else 'has'} it" if others else ""
    hint = where or nearest(name, list(declared))
    return f"profile {profile} has no parameter {name!r}{hint}"


def _profiles_with(name: str, cwd: Path | None) -> list[str]:
    """The profiles whose own file has a parameter of that name."""
    found = []
    for _, path in profile_files(cwd):
        try:
            content = read(path).content
        except ProfileError:
            continue
        if name in content.parameters:
            found.append(path.stem)
    return found


def _typed(text: str, own: Parameter) -> Parameter:
    """``text`` in the type of the profile's ``own`` value. Raises ``ValueError``."""
    if isinstance(own, bool):
        if text.lower() not in _TRUTH:
            raise ValueError("must be true or false")
        return _TRUTH[text.lower()]
    if isinstance(own, int):
        number = whole_number(text.removeprefix("-"))
        if number is None:
            raise ValueError(f"must be a whole number of at most {MOST}")
        return -number if text.startswith("-") else number
    if isinstance(own, float):
        return _number(text)
    if _is_duration(own) and parse_duration(text) <= timedelta(0):
        raise ValueError("must be positive")
    return text


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError("must be a number")
    return number


def _is_duration(text: str) -> bool:
    try:
        parse_duration(text)
    except ValueError:
        return False
    return True
