"""Checks of a site's own: a command each, with how its answer is judged; read from TOML.

A file holds an array of tables named ``check``; docs/preflight.md describes the keys. What can be
wrong in one is refused when it is read, so that no check is left out for a typing error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from ncclops.durations import format_duration, parse_duration
from ncclops.nearest import meant, nearest
from ncclops.preflight.catalogue import catalogue
from ncclops.preflight.model import Finding, Status
from ncclops.toml_files import load_toml, refuse, site_directory, user_directories

SITE = site_directory("checks")

_ID = re.compile(r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9][a-z0-9_-]*)+")
_SHORTEST = timedelta(milliseconds=100)
# All run side by side, and the other hosts of a job wait for each other for a minute.
_LONGEST = timedelta(seconds=30)
_NOT_STARTED = (126, 127)  # as a shell says it of what it was to start


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended: with ``code``, by ``signal``, or neither, as it was ``late``.

    ``problem`` is why it could not be started, ``unknown`` why it is not known; ``said`` what it
    gave as reason.
    """

    code: int | None = None
    signal: str | None = None
    late: bool = False
    problem: str | None = None
    unknown: str | None = None
    said: str = ""


_Severity = Literal["WARN", "FAIL"]
ELSEWHERE = Ended(unknown="not run below another root")


class SiteCheck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One check of a site.

    ``wanted`` is what a healthy node shows, ``severity`` the gravest that it says, ``exits`` what
    exit codes stand for: of those that it does not name, 0 is OK and any other as grave as
    ``severity``. ``lanes`` are patterns of profile names that it is about; all, where it has none.
    """

    id: str
    wanted: str
    command: tuple[str, ...]
    remedy: str
    severity: _Severity = "FAIL"
    limit: str = "15s"
    exits: Mapping[Status, tuple[int, ...]] = {}
    lanes: tuple[str, ...] = ()

    @property
    def limit_s(self) -> float:
        """How long its command may take, in seconds."""
        return parse_duration(self.limit).total_seconds()

    def concerns(self, profiles: Collection[str]) -> bool:
        """Whether it is about a job of ``profiles``: a lane, and what that extends."""
        return not self.lanes or any(
            fnmatchcase(profile, lane) for profile in profiles for lane in self.lanes
        )

    def judge(self, ended: Ended) -> Finding:
        """What its command has shown; pure."""
        status, read = self._judged(ended)
        return Finding(
            check=self.id,
            status=status,
            subject="host",
            read=read,
            wanted=self.wanted,
            remedy=self.remedy if status in (Status.WARN, Status.FAIL) else "",
        )

    def _judged(self, ended: Ended) -> tuple[Status, str]:
        name = self.command[0]
        if ended.late:
            return Status(self.severity), f"{name} has not ended within {self.limit}"
        if ended.unknown is not None:
            return Status.CANNOT_TELL, f"{name}: {ended.unknown}"
        if ended.problem is not None:
            return Status.WARN, f"{name} could not be run: {ended.problem}"
        if ended.signal is not None:
            return Status.CANNOT_TELL, f"{name} was ended by {ended.signal}"
        read = ended.said or f"{name} exits with {ended.code}"
        named = {code: status for status, codes in self.exits.items() for code in codes}
        if ended.code in named:
            return named[ended.code], read
        if ended.code in _NOT_STARTED:
            return Status.WARN, f"{name} could not be run: {read}"
        return Status.OK if ended.code == 0 else Status(self.severity), read


_KEYS = SiteCheck.__struct_fields__


def standing_checks() -> tuple[SiteCheck, ...]:
    """What a site and a user have for every command; the user's replaces its namesake.

    Raises ``UsageError``, which names file and entry, with a line for each thing that is wrong.
    """
    problems: list[str] = []
    merged = {
        check.id: check
        for directory in (SITE, *user_directories("checks"))
        for check in _of_directory(directory, problems)
    }
    refuse(problems)
    return tuple(merged.values())


def concerning(checks: Sequence[SiteCheck], sources: Collection[str]) -> tuple[SiteCheck, ...]:
    """Those of ``checks`` that are about the profile made of the files ``sources``."""
    profiles = [Path(source).stem for source in sources]
    return tuple(check for check in checks if check.concerns(profiles))


def _of_directory(directory: Path, problems: list[str]) -> Iterator[SiteCheck]:
    for file in sorted(directory.glob("*.toml")):
        try:
            document = load_toml(file)
        except OSError as error:
            problems.append(f"cannot read the checks in {file}: {error.strerror}")
        except ValueError as error:
            problems.append(f"{file} is not valid TOML: {error}")
        else:
            yield from _checks_in(document, file, problems)


def _checks_in(document: dict[str, Any], file: Path, problems: list[str]) -> Iterator[SiteCheck]:
    entries = document.get("check")
    if document.keys() != {"check"} or not isinstance(entries, list):
        found = ", ".join(sorted(document)) or "nothing"
        what = f"must hold [[check]] tables and nothing else at top level, not {found}"
        problems.append(f"{file} {what}")
        return
    ids = set[str]()
    for entry in entries:
        if not isinstance(entry, dict):
            problems.append(f"{file}: each check is a table, [[check]]")
            continue
        name = f"{file}: check {entry.get('id', '<without id>')!r}"
        shapes = dict(_misshapen(entry))
        sound = {key: value for key, value in entry.items() if key not in shapes}
        wrong = [*_missing(entry), *shapes.values(), *_wrong_values(sound)]
        if (id_ := sound.get("id")) in ids:
            wrong.append("two checks have one id: give each its own")
        if id_ is not None:
            ids.add(id_)
        problems += [f"{name}: {problem}" for problem in wrong]
        if not wrong:
            yield msgspec.convert(entry, SiteCheck)


def _missing(entry: dict[str, Any]) -> Iterator[str]:
    misspelt = {each for key in entry.keys() - set(_KEYS) for each in meant(key, _KEYS)}
    for key in ("id", "wanted", "command", "remedy"):
        if key not in entry and key not in misspelt:
            yield f"{key} is missing"


def _misshapen(entry: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The keys that are not known or of another type than they have to be, in words of TOML."""
    for key, given in entry.items():
        if key not in _KEYS:
            yield key, f"unknown key {key!r}{nearest(key, _KEYS)}"
        elif key in ("command", "lanes"):
            if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
                yield key, f'{key}: write a list of texts, as in ["one", "two"], not {given!r}'
        elif key == "exits":
            if not isinstance(given, dict) or not all(map(_are_exits, given.items())):
                what = "a table of lists, as in { WARN = [1, 2], CANNOT-TELL = [75] }"
                yield key, f"exits: write {what}"
        elif not isinstance(given, str):
            yield key, f'{key}: must be text: write it in quotes, as in "{given}"'


def _wrong_values(entry: dict[str, Any]) -> Iterator[str]:
    """What is wrong with values that are of the right type."""
    if "id" in entry and not _ID.fullmatch(entry["id"]):
        yield "id: write two or more words of a-z, 0-9, - and _ with dots, as in site.data"
    if entry.get("id") in catalogue():
        yield "id: ncclops has a check of this name: choose another, as in site.data"
    for key in ("wanted", "remedy"):
        if key in entry and not entry[key].strip():
            yield f"{key} is empty"
    command = entry.get("command", ["true"])
    if not command or not command[0] or any("\0" in each for each in command):
        yield 'command: write the program and its arguments, as in ["test", "-d", "/data"]'
    if "limit" in entry:
        yield from _wrong_limit(entry["limit"])
    severities = get_args(_Severity)
    if (severity := entry.get("severity", "FAIL")) not in severities:
        what = f"{severity!r} is neither {' nor '.join(severities)}"
        yield f"severity: {what}{nearest(severity, severities, or_else='')}"
    exits = entry.get("exits", {})
    codes = [code for each in exits.values() for code in each]
    if any(not 0 <= code <= 255 for code in codes) or len({*codes}) != len(codes):
        yield "exits: write exit codes from 0 to 255, each once"
    if severity == "WARN" and exits.get(Status.FAIL):
        yield 'exits: FAIL is graver than severity = "WARN"'


def _wrong_limit(text: str) -> Iterator[str]:
    try:
        limit = parse_duration(text)
    except ValueError as error:
        yield f"limit: {error}"
    else:
        if not _SHORTEST <= limit <= _LONGEST:
            least, most = format_duration(_SHORTEST), format_duration(_LONGEST)
            yield f"limit: {text} is not between {least} and {most}"


def _are_exits(named: tuple[str, object]) -> bool:
    status, codes = named
    return (
        status in set(Status)
        and isinstance(codes, list)
        and all(type(code) is int for code in codes)
    )
