"""From files to one profile: follow ``extends``, overlay, fill in the parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ncclops.durations import parse_duration
from ncclops.errors import ProfileError
from ncclops.profiles.files import Loaded, ProfileNotFound, find, is_path, read
from ncclops.profiles.model import (
    RUN_PLACEHOLDERS,
    Entry,
    EntryAction,
    EntryCondition,
    Growth,
    Parameter,
    Profile,
    Restarts,
    WatchSettings,
)
from ncclops.profiles.schema import PLACEHOLDER, EntryPart, TimeoutsPart, nearest


@dataclass(frozen=True)
class _Timeout:
    text: str
    path: Path


def load_profiles(refs: Sequence[str], *, cwd: Path | None = None) -> Profile:
    """The profiles ``refs`` (names or paths) combined, later ones over earlier ones.

    A variable's entry is replaced as a whole; parameters and timeouts one by one. Raises
    ``ProfileError`` when a profile is unknown or invalid, or when two of them are lanes.
    """
    if not refs:
        raise ProfileError("no profile given: name one (see `ncclops profile list`)")
    chosen = [read(find(ref, cwd=cwd)) for ref in refs]
    lanes = [loaded for loaded in chosen if loaded.content.kind == "lane"]
    if len(lanes) > 1:
        names = " and ".join(loaded.name for loaded in lanes)
        raise ProfileError(f"{names} are both lanes: choose one, and combine it with overlays")
    files: list[Loaded] = []
    for loaded in chosen:
        files.extend(file for file in _lineage(loaded, cwd, ()) if file not in files)
    return _combine(chosen, lanes[0] if lanes else chosen[-1], files)


def _lineage(loaded: Loaded, cwd: Path | None, trail: tuple[Loaded, ...]) -> list[Loaded]:
    """``loaded`` preceded by everything it extends, each file once, the most basic one first."""
    if loaded.path in [earlier.path for earlier in trail]:
        loop = " -> ".join(file.name for file in (*trail, loaded))
        raise ProfileError(f"{trail[-1].path}: extends: the profiles form a loop: {loop}")
    files: list[Loaded] = []
    for ref in loaded.content.extends:
        parent = _read_parent(ref, loaded, cwd)
        for file in _lineage(parent, cwd, (*trail, loaded)):
            if file.path not in [known.path for known in files]:
                files.append(file)
    return [*files, loaded]


def _read_parent(ref: str, child: Loaded, cwd: Path | None) -> Loaded:
    try:
        if is_path(ref):
            return read(find(ref, cwd=child.path.parent))
        own = {child.path} if ref == child.name else set()
        return read(find(ref, cwd=cwd, skip=own))
    except ProfileNotFound as error:
        raise ProfileError(f"{child.path}: extends: {error}") from None


def _combine(chosen: Sequence[Loaded], main: Loaded, files: Sequence[Loaded]) -> Profile:
    parameters: dict[str, Parameter] = {}
    timeouts: dict[str, _Timeout] = {}
    entries: dict[str, tuple[EntryPart, ...]] = {}
    owners: dict[str, Loaded] = {}
    suppress: dict[str, str] = {}
    retry: dict[str, Any] = {}
    watch: dict[str, Any] = {}
    growth: dict[str, Any] = {}
    restarts: dict[str, Any] = {}
    for file in files:
        parameters |= file.content.parameters
        suppress |= file.content.lint.ignore
        for section, changes in file.content.retry.model_dump(exclude_none=True).items():
            retry[section] = changes if section == "lane" else retry.get(section, {}) | changes
        growth |= file.content.growth.model_dump(exclude_none=True)
        restarts |= file.content.restarts.model_dump(exclude_none=True)
        for name, text in _flat(file.content.timeouts).items():
            timeouts[name] = _Timeout(text, file.path)
        for name, given in file.content.watch.model_dump(exclude_none=True).items():
            is_text = isinstance(given, str)
            watch[name] = _Timeout(given, file.path) if is_text else given
        for name, parts in file.content.env.items():
            # Taken out first, so that a replaced variable stands where its last word was said.
            entries.pop(name, None)
            entries[name], owners[name] = tuple(parts), file
    return Profile(
        name="+".join(loaded.name for loaded in chosen),
        description=main.content.description,
        kind=main.content.kind,
        nodes=main.content.nodes,
        parameters=parameters,
        timeouts={
            name: _duration(timeout, f"timeouts.{name}", parameters)
            for name, timeout in timeouts.items()
        },
        env={
            name: tuple(_entry(name, part, owners[name], parameters) for part in parts)
            for name, parts in entries.items()
        },
        suppress=suppress,
        retry=retry,
        sources=tuple(str(file.path) for file in files),
        watch=_watch(watch, parameters),
        growth=Growth(**growth),
        restarts=Restarts(**restarts),
    )


def _flat(part: TimeoutsPart) -> dict[str, str]:
    """The timeouts as written, those of groups as ``groups.<pattern>``."""
    texts: dict[str, Any] = part.model_dump(exclude_none=True)
    groups: dict[str, str] = texts.pop("groups")
    return texts | {f"groups.{pattern}": text for pattern, text in groups.items()}


def _watch(given: Mapping[str, Any], parameters: Mapping[str, Parameter]) -> WatchSettings:
    values: dict[str, Any] = {}
    for name, value in given.items():
        is_text = isinstance(value, _Timeout)
        values[name] = _duration(value, f"watch.{name}", parameters) if is_text else value
    return WatchSettings(**values)


def _duration(timeout: _Timeout, key: str, parameters: Mapping[str, Parameter]) -> timedelta:
    where = f"{timeout.path}: {key}"
    match = PLACEHOLDER.fullmatch(timeout.text)
    text = str(_parameter(match[1], parameters, where)) if match else timeout.text
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ProfileError(f"{where}: {error}") from None


def _entry(name: str, part: EntryPart, owner: Loaded, parameters: Mapping[str, Parameter]) -> Entry:
    action: EntryAction
    text: str | None = None
    if part.set_ is not None:
        action, text = "set", part.set_
    elif part.default is not None:
        action, text = "default", part.default
    else:
        action = "unset" if part.unset else "scrub"
    where = f"{owner.path}: env.{name}"
    when = part.when
    return Entry(
        action=action,
        why=" ".join(part.why.split()),
        source=f"profile {owner.name}",
        value=None if text is None else _fill(text, parameters, where),
        patterns=tuple(part.scrub or ()),
        reference=part.reference,
        follows=part.follows,
        when=EntryCondition(
            restart=None if when.restart is None else frozenset(when.restart),
            torch=when.torch,
            absent=tuple(when.absent),
            host=None if when.host is None else tuple(when.host),
        ),
    )


def _fill(text: str, parameters: Mapping[str, Parameter], where: str) -> str:
    """``text`` with its parameters; what a run fills in stays in braces."""

    def value(name: str) -> str:
        if name in RUN_PLACEHOLDERS:
            return f"{{{name}}}"
        return _as_value(_parameter(name, parameters, where))

    return PLACEHOLDER.sub(lambda match: value(match[1]), text)


def _parameter(name: str, parameters: Mapping[str, Parameter], where: str) -> Parameter:
    if name not in parameters:
        known = [*parameters, *RUN_PLACEHOLDERS]
        raise ProfileError(f"{where}: there is no parameter {name!r}{nearest(name, known)}")
    return parameters[name]


def _as_value(parameter: Parameter) -> str:
    """A parameter as text in a variable: durations in whole seconds, true and false as 1 and 0."""
    if isinstance(parameter, bool):
        return str(int(parameter))
    if isinstance(parameter, str):
        try:
            return str(math.ceil(parse_duration(parameter) / timedelta(seconds=1)))
        except ValueError:
            return parameter
    return str(parameter)
