"""From files to one profile: follow ``extends``, overlay, fill in the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ncclops.durations import parse_duration
from ncclops.errors import ProfileError
from ncclops.exit_codes import DEFAULT, SETS, ExitCodes
from ncclops.nearest import nearest
from ncclops.profiles.files import Loaded, ProfileNotFound, find, is_path, read, read_all
from ncclops.profiles.model import (
    RUN_PLACEHOLDERS,
    Entry,
    EntryAction,
    EntryCondition,
    GivenParameter,
    Growth,
    NetworkSettings,
    Parameter,
    PreflightNeeds,
    Profile,
    Restarts,
    Scope,
    WarmStart,
    WatchSettings,
)
from ncclops.profiles.notification import Channel, NotifySettings, Secret
from ncclops.profiles.parameters import replaced
from ncclops.profiles.schema import PLACEHOLDER, ChannelPart, EntryPart, TimeoutsPart
from ncclops.toml_files import refuse

P = ParamSpec("P")
T = TypeVar("T")
# Of profiles that extend each other: one behind the other, and on all ways together.
_MOST_LEVELS = 50
_MOST_STEPS = 1000
# No pause between notifications, and goodput from the start on; of all else nothing would work.
_MAY_BE_ZERO = ("notify.cooldown", "notify.goodput_after")


@dataclass(frozen=True)
class _Timeout:
    text: str
    path: Path


def load_profiles(
    refs: Sequence[str],
    *,
    parameters: Mapping[str, GivenParameter] | None = None,
    cwd: Path | None = None,
) -> Profile:
    """The profiles ``refs`` (names or paths) combined, later ones over earlier ones.

    A variable's entry is replaced as a whole; parameters and timeouts one by one. ``parameters``
    come in place of the profiles' own, as ``--param`` does. Raises ``ProfileError`` when a profile
    is unknown or invalid, or when two of them are lanes, and ``UsageError`` for a parameter that
    they do not have or that is of another type.
    """
    if not refs:
        raise ProfileError("no profile given: name one (see `ncclops profile list`)")
    chosen = read_all(refs, cwd=cwd)
    lanes = [loaded for loaded in chosen if loaded.content.kind == "lane"]
    if len(lanes) > 1:
        names = " and ".join(loaded.name for loaded in lanes)
        raise ProfileError(f"{names} are both lanes: choose one, and combine it with overlays")
    files: list[Loaded] = []
    lineages = _Lineages(cwd)
    declared: dict[str, Parameter] = {}
    remarks: list[str] = []
    for loaded in chosen:
        before = dict(declared)
        for file in lineages.of(loaded, ()):
            if file not in files:
                files.append(file)
                declared |= file.content.parameters
        remarks += [
            f"parameter {name} is {declared[name]} by profile {loaded.name}, not {value}:"
            f" --param {name}={value} keeps that"
            for name, value in before.items()
            if declared[name] != value and name not in (parameters or {})
        ]
    name = "+".join(loaded.name for loaded in chosen)
    values = replaced(declared, parameters or {}, profile=name, cwd=cwd)
    profile = _combine(name, lanes[0] if lanes else chosen[-1], files, values)
    return replace(profile, remarks=tuple(remarks))


class _Lineages:
    """What profiles extend. Each file is read once, and what is read is bounded."""

    def __init__(self, cwd: Path | None) -> None:
        self._cwd = cwd
        self._read: dict[Path, Loaded] = {}
        self._steps = 0

    def of(self, loaded: Loaded, trail: tuple[Loaded, ...]) -> list[Loaded]:
        """``loaded`` preceded by everything it extends, each file once, the most basic one first.

        ``trail`` are those that extend it.
        """
        if loaded.path in [earlier.path for earlier in trail]:
            loop = " -> ".join(file.name for file in (*trail, loaded))
            raise ProfileError(f"{trail[-1].path}: extends: the profiles form a loop: {loop}")
        self._steps += 1
        if len(trail) > _MOST_LEVELS or self._steps > _MOST_STEPS:
            raise ProfileError(
                f"{loaded.path}: extends: more than {_MOST_LEVELS} profiles in a row, or"
                f" {_MOST_STEPS} in all; put them together"
            )
        files: dict[Path, Loaded] = {}
        for ref in dict.fromkeys(loaded.content.extends):
            for file in self.of(self._parent(ref, loaded, trail), (*trail, loaded)):
                files.setdefault(file.path, file)
        return [*files.values(), loaded]

    def _parent(self, ref: str, child: Loaded, trail: tuple[Loaded, ...]) -> Loaded:
        # A project's, a user's, a site's and the shipped one of a name may extend each other.
        extending = [*trail, child] if ref == child.name else []
        try:
            if is_path(ref):
                path = find(ref, cwd=child.path.parent)
            else:
                path = find(ref, cwd=self._cwd, skip=[file.path for file in extending])
        except ProfileNotFound as error:
            raise ProfileError(f"{child.path}: extends: {error}") from None
        if path not in self._read:
            self._read[path] = read(path)
        return self._read[path]


def _combine(
    name: str, main: Loaded, files: Sequence[Loaded], parameters: Mapping[str, Parameter]
) -> Profile:
    timeouts: dict[str, _Timeout] = {}
    entries: dict[str, tuple[EntryPart, ...]] = {}
    owners: dict[str, Loaded] = {}
    suppress: dict[str, str] = {}
    retry: dict[str, Any] = {}
    watch: dict[str, Any] = {}
    network = NetworkSettings()
    growth: dict[str, Any] = {}
    restarts: dict[str, Any] = {}
    preflight: dict[str, Any] = {}
    warm_start: dict[str, Any] = {}
    exit_codes = DEFAULT
    notify: dict[str, Any] = {}
    channels: dict[str, tuple[ChannelPart, Path]] = {}
    scopes: dict[Scope, Entry] = {}
    for file in files:
        suppress |= file.content.lint.ignore
        for section, changes in file.content.retry.model_dump(exclude_none=True).items():
            retry[section] = changes if section == "lane" else retry.get(section, {}) | changes
        if file.content.network.expect is not None:
            network = replace(network, expect=tuple(file.content.network.expect))
        if file.content.network.log is not None:
            network = replace(network, log=file.content.network.log)
        growth |= file.content.growth.model_dump(exclude_none=True)
        restarts |= file.content.restarts.model_dump(exclude_none=True)
        preflight |= file.content.preflight.model_dump(exclude_none=True)
        warm_start |= file.content.warm_start.model_dump(exclude_none=True)
        exit_codes = _exit_codes(exit_codes, file.content.exit_codes.model_dump(exclude_none=True))
        notify |= _texts(
            file.content.notify.model_dump(exclude_none=True, exclude={"to"}), file.path
        )
        channels |= {name: (part, file.path) for name, part in _channels(file.content.notify)}
        for scope, wanted in file.content.scopes.items():
            scopes.pop(scope, None)
            if wanted.unset:
                why = " ".join(wanted.why.split())
                scopes[scope] = Entry("unset", why, f"profile {file.name}")
        for key, text in _flat(file.content.timeouts).items():
            timeouts[key] = _Timeout(text, file.path)
        watch |= _texts(file.content.watch.model_dump(exclude_none=True), file.path)
        for variable, parts in file.content.env.items():
            # Taken out first, so that a replaced variable stands where its last word was said.
            entries.pop(variable, None)
            entries[variable], owners[variable] = tuple(parts), file
    problems: list[str] = []
    settled = {
        key: _tried(problems, _duration, timeout, f"timeouts.{key}", parameters)
        for key, timeout in timeouts.items()
    }
    env = {
        variable: [
            _tried(problems, _entry, variable, part, owners[variable], parameters) for part in parts
        ]
        for variable, parts in entries.items()
    }
    watch_settings = WatchSettings(**_settled(problems, "watch", watch, parameters))
    notify_settings = _notify(problems, notify, channels, parameters)
    refuse(problems, ProfileError)
    return Profile(
        name=name,
        description=main.content.description,
        kind=main.content.kind,
        nodes=main.content.nodes,
        parameters=parameters,
        uses=_uses(parameters, timeouts, watch, entries),
        timeouts=_all_there(settled),
        env={variable: tuple(filter(None, each)) for variable, each in env.items()},
        suppress=suppress,
        retry=retry,
        sources=tuple(str(file.path) for file in files),
        watch=watch_settings,
        network=network,
        growth=Growth(**growth),
        restarts=Restarts(**restarts),
        preflight=PreflightNeeds(
            **preflight
            | {"nodes": main.content.nodes, "ignore": tuple(preflight.get("ignore", ()))}
        ),
        warm_start=_warm_start(warm_start),
        exit_codes=exit_codes,
        notify=notify_settings,
        scopes=scopes,
    )


def _tried(
    problems: list[str], make: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T | None:
    """What ``make`` makes; None where it refuses, and why is among ``problems`` then."""
    try:
        return make(*args, **kwargs)
    except ProfileError as error:
        problems.extend(error.lines)
        return None


def _all_there(found: Mapping[str, T | None]) -> dict[str, T]:
    return {key: value for key, value in found.items() if value is not None}


def _settled(
    problems: list[str], table: str, given: Mapping[str, Any], parameters: Mapping[str, Parameter]
) -> dict[str, Any]:
    """What a table has, its durations as such; those that are none are among ``problems``."""
    return _all_there(
        {
            key: _tried(problems, _duration, value, f"{table}.{key}", parameters)
            if isinstance(value, _Timeout)
            else value
            for key, value in given.items()
        }
    )


def _warm_start(given: dict[str, Any]) -> WarmStart:
    if "imports" in given:
        given["imports"] = tuple(given["imports"])
    return WarmStart(**given)


def _texts(given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """``given``, in which what is text is a duration or a parameter, of the file ``path``."""
    return {
        key: _Timeout(value, path) if isinstance(value, str) else value
        for key, value in given.items()
    }


def _channels(part: Any) -> Iterable[tuple[str, ChannelPart]]:
    channels: dict[str, ChannelPart] = part.to
    return channels.items()


def _notify(
    problems: list[str],
    given: Mapping[str, Any],
    channels: Mapping[str, tuple[ChannelPart, Path]],
    parameters: Mapping[str, Parameter],
) -> NotifySettings:
    to = {
        name: _tried(problems, _channel, name, part, path, parameters)
        for name, (part, path) in channels.items()
        if part.kind != "none"
    }
    return NotifySettings(**_settled(problems, "notify", given, parameters), to=_all_there(to))


def _channel(
    name: str, part: ChannelPart, path: Path, parameters: Mapping[str, Parameter]
) -> Channel:
    assert part.kind != "none"
    heartbeat = None
    if part.heartbeat is not None:
        where = f"notify.to.{name}.heartbeat"
        heartbeat = _duration(_Timeout(part.heartbeat, path), where, parameters)
    return Channel(
        kind=part.kind,
        rules=tuple(part.rules or ()),
        url=Secret(value=part.url, variable=part.url_env, file=part.url_file),
        key=Secret(value=part.key, variable=part.key_env, file=part.key_file),
        command=tuple(part.command or ()),
        heartbeat=heartbeat,
    )


def _exit_codes(before: ExitCodes, given: dict[str, Any]) -> ExitCodes:
    """A set that a file names replaces what files before it have said."""
    return replace(SETS[given.pop("set")] if "set" in given else before, **given)


def _uses(
    parameters: Mapping[str, Parameter],
    timeouts: Mapping[str, _Timeout],
    watch: Mapping[str, Any],
    entries: Mapping[str, Sequence[EntryPart]],
) -> dict[str, tuple[str, ...]]:
    """What follows from each parameter: timeouts and variables by their names."""
    texts = [(f"timeouts.{key}", timeout.text) for key, timeout in timeouts.items()]
    texts += [
        (f"watch.{key}", given.text) for key, given in watch.items() if isinstance(given, _Timeout)
    ]
    texts += [
        (variable, part.set_ or part.default or "")
        for variable, parts in entries.items()
        for part in parts
    ]
    uses: dict[str, dict[str, None]] = {name: {} for name in parameters}
    for key, text in texts:
        for name in PLACEHOLDER.findall(text):
            if name in uses:
                uses[name][key] = None
    return {name: tuple(keys) for name, keys in uses.items()}


def _flat(part: TimeoutsPart) -> dict[str, str]:
    """The timeouts as written, those of groups as ``groups.<pattern>``."""
    texts: dict[str, Any] = part.model_dump(exclude_none=True)
    groups: dict[str, str] = texts.pop("groups")
    return texts | {f"groups.{pattern}": text for pattern, text in groups.items()}


def _duration(timeout: _Timeout, key: str, parameters: Mapping[str, Parameter]) -> timedelta:
    where = f"{timeout.path}: {key}"
    match = PLACEHOLDER.fullmatch(timeout.text)
    text = str(_parameter(match[1], parameters, where)) if match else timeout.text
    try:
        duration = parse_duration(text)
    except ValueError as error:
        raise ProfileError(f"{where}: {error}") from None
    if not duration and key not in _MAY_BE_ZERO:
        raise ProfileError(f"{where}: must be positive, not {text}; leave it out for the default")
    return duration


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
        holding=tuple(part.holding),
        unless_holding=tuple(part.unless_holding),
        reference=part.reference,
        follows=part.follows,
        when=EntryCondition(
            restart=None if when.restart is None else frozenset(when.restart),
            torch=when.torch,
            absent=tuple(when.absent),
            host=None if when.host is None else tuple(when.host),
            value=None if when.value is None else tuple(when.value),
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
