"""What a profile file may contain, checked by pydantic, with errors of one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)

from ncclops.durations import parse_duration
from ncclops.exit_codes import SETS, ExitCodes
from ncclops.profiles.model import (
    Growth,
    Kind,
    Nodes,
    Parameter,
    RestartMode,
    Restarts,
    Scope,
    WatchSettings,
)
from ncclops.profiles.notification import NotifySettings, Rule
from ncclops.profiles.versions import parse_spec

PLACEHOLDER = re.compile(r"\{([a-z][a-z0-9_]*)\}")


def _as_list(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _is_variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{name!r} cannot be the name of an environment variable")
    return name


def _is_parameter_name(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"parameter {name!r}: use lower-case letters, digits and _")
    return name


def _is_channel(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", name):
        raise ValueError(f"channel {name[:40]!r}: use letters, digits, - and _, at most 40")
    return name


def _is_module(name: str) -> str:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{name!r} cannot be the name of a module")
    return name


def _is_duration(text: str) -> str:
    if not PLACEHOLDER.fullmatch(text):
        parse_duration(text)
    return text


def _is_version_spec(text: str) -> str:
    parse_spec(text)
    return text


Duration = Annotated[str, AfterValidator(_is_duration)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ConditionPart(_Part):
    """``when`` of an entry."""

    restart: Annotated[list[RestartMode], BeforeValidator(_as_list)] | None = None
    torch: Annotated[str, AfterValidator(_is_version_spec)] | None = None
    absent: Annotated[list[str], BeforeValidator(_as_list)] = []
    host: Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1)] | None = None
    value: Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1)] | None = None


class EntryPart(_Part):
    """One action on one variable."""

    set_: str | None = Field(None, alias="set")
    default: str | None = None
    unset: Literal[True] | None = None
    scrub: list[str] | None = Field(None, min_length=1)
    holding: list[str] = []
    unless_holding: list[str] = []
    follows: str | None = None
    why: str = Field(min_length=1)
    reference: str | None = None
    when: ConditionPart = ConditionPart()

    @model_validator(mode="after")
    def _one_action(self) -> EntryPart:
        given = [
            action
            for action in (self.set_, self.default, self.unset, self.scrub)
            if action is not None
        ]
        if len(given) != 1:
            raise ValueError("needs exactly one of set, default, unset = true and scrub")
        if self.follows is not None and self.default is None:
            raise ValueError("follows goes with default: only a default can give way")
        if (self.holding or self.unless_holding) and self.scrub is None:
            raise ValueError("holding and unless_holding go with scrub")
        return self


class ScopePart(_Part):
    """What is done with all variables of a scope; false takes back what a parent does."""

    unset: bool
    why: str = Field(min_length=1)


class TimeoutsPart(_Part):
    """``[timeouts]``; each is a duration or one parameter in braces."""

    process_group: Duration | None = None
    steady_process_group: Duration | None = None
    compile: Duration | None = None
    soft: Duration | None = None
    hard: Duration | None = None
    abort: Duration | None = None
    heartbeat: Duration | None = None
    barrier: Duration | None = None
    grow: Duration | None = None
    completion: Duration | None = None
    stop_grace: Duration | None = None
    groups: dict[Annotated[str, Field(min_length=1)], Duration] = {}


def timeout_names() -> list[str]:
    """What ``[timeouts]`` may name, but for ``groups``."""
    return [name for name in TimeoutsPart.model_fields if name != "groups"]


def _part_of(settings: type, **more: Any) -> type[_Part]:
    """The table of a file that sets fields of ``settings``, a dataclass; all may be left out.

    ``more`` are keys beside those. Durations are text, and the limits of a number are in the
    metadata of its field.
    """
    hints = get_type_hints(settings)
    parts: dict[str, Any] = dict(more)
    for entry in fields(settings):
        if entry.name in parts:
            continue
        kind = hints[entry.name]
        if kind is timedelta:
            kind = Duration
        elif kind is bool:
            kind = Annotated[bool, Field(strict=True)]
        elif kind in (int, float):
            kind = Annotated[kind, Field(strict=kind is int, **entry.metadata)]
        else:
            kind = list[dict[str, Any]]
        parts[entry.name] = (kind | None, None)
    return create_model(settings.__name__, __base__=_Part, **parts)


if TYPE_CHECKING:
    ExitCodesPart = _Part
    GrowthPart = _Part
    NotifyPart = _Part
    RestartsPart = _Part
    WatchPart = _Part
else:
    ExitCodesPart = _part_of(ExitCodes, set=(Literal[tuple(SETS)] | None, None))
    GrowthPart = _part_of(Growth)
    RestartsPart = _part_of(Restarts)
    WatchPart = _part_of(WatchSettings)


_SECRETS = ("url", "key")
_CHANNEL_NEEDS = {"slack": "url", "json": "url", "pagerduty": "key", "command": "command"}


class ChannelPart(_Part):
    """``[notify.to.NAME]``; kind ``none`` takes back what a parent says."""

    kind: Literal["slack", "pagerduty", "json", "command", "none"]
    rules: Annotated[list[Rule], Field(min_length=1)] | None = None
    url: str | None = None
    url_env: Annotated[str, AfterValidator(_is_variable)] | None = None
    url_file: str | None = None
    key: str | None = None
    key_env: Annotated[str, AfterValidator(_is_variable)] | None = None
    key_file: str | None = None
    command: Annotated[list[str], Field(min_length=1)] | None = None
    heartbeat: Duration | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> ChannelPart:
        given = {
            name: [
                each
                for each in (name, f"{name}_env", f"{name}_file")
                if getattr(self, each) is not None
            ]
            for name in _SECRETS
        }
        for name, ways in given.items():
            if len(ways) > 1:
                raise ValueError(f"{' and '.join(ways)} say the same: give one")
            if ways and name == "key" and self.kind not in ("pagerduty", "json"):
                raise ValueError(f"{ways[0]} goes with pagerduty and json, not with {self.kind}")
        need = _CHANNEL_NEEDS.get(self.kind)
        has = bool(self.command) if need == "command" else bool(need is None or given[need])
        if not has:
            ways_ = need if need == "command" else f"{need}, {need}_env or {need}_file"
            raise ValueError(f"{self.kind} needs {ways_}")
        if self.heartbeat is not None and self.kind not in ("json", "command"):
            raise ValueError("heartbeat goes with json and command: people are not paged by it")
        return self


class PreflightPart(_Part):
    """``[preflight]``: what the lane needs of a node, and checks that say nothing of it."""

    rdma: bool | None = None
    gpus: Annotated[int, Field(strict=True, ge=0)] | None = None
    rdma_ports: Annotated[int, Field(strict=True, ge=0)] | None = None
    rdma_gbps: Annotated[int, Field(strict=True, gt=0)] | None = None
    ignore: list[str] | None = None


class NetworkPart(_Part):
    """``[network]``: what NCCL is expected to use; an empty list takes back what a parent says."""

    expect: list[Annotated[str, Field(min_length=1)]] | None = None
    log: bool | None = None


class WarmStartPart(_Part):
    """``[warm_start]``; an empty list imports nothing but what workers of ncclops do."""

    enabled: bool | None = None
    imports: list[Annotated[str, AfterValidator(_is_module)]] | None = None


if not TYPE_CHECKING:
    NotifyPart = _part_of(
        NotifySettings, to=(dict[Annotated[str, AfterValidator(_is_channel)], ChannelPart], {})
    )


class RetryPart(_Part):
    """``[retry]``: the lane, and changes to the retry table, which checks them itself."""

    lane: Literal["generic", "expert-parallel"] | None = None
    limits: dict[str, Any] | None = None
    cooldown: dict[str, Any] | None = None
    rows: dict[str, Any] | None = None
    policies: dict[str, Any] | None = None


class LintPart(_Part):
    """``[lint]``: rules the profile breaks on purpose, each with its reason."""

    ignore: dict[str, str] = {}


class ProfileFile(_Part):
    """A profile file as written."""

    description: str = Field(min_length=1)
    kind: Kind = "lane"
    nodes: Nodes = "any"
    extends: Annotated[list[str], BeforeValidator(_as_list)] = []
    parameters: dict[Annotated[str, AfterValidator(_is_parameter_name)], Parameter] = {}
    timeouts: TimeoutsPart = TimeoutsPart()
    watch: WatchPart = WatchPart()
    network: NetworkPart = NetworkPart()
    growth: GrowthPart = GrowthPart()
    restarts: RestartsPart = RestartsPart()
    preflight: PreflightPart = PreflightPart()
    warm_start: WarmStartPart = WarmStartPart()
    exit_codes: ExitCodesPart = ExitCodesPart()
    notify: NotifyPart = NotifyPart()
    env: dict[
        Annotated[str, AfterValidator(_is_variable)],
        Annotated[list[EntryPart], BeforeValidator(_as_list), Field(min_length=1)],
    ] = {}
    scopes: dict[Scope, ScopePart] = {}
    lint: LintPart = LintPart()
    retry: RetryPart = RetryPart()


def nearest(word: str, known: Sequence[str]) -> str:
    """``"; did you mean …?"`` with the closest of ``known``, or the whole list if none is close."""
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; known: {', '.join(known)}" if known else ""


def describe(error: ValidationError, raw: Mapping[str, Any]) -> str:
    """The first problem of ``error`` as ``key: what is wrong, what to write``."""
    problem = error.errors(include_url=False)[0]
    location = tuple(part for part in problem["loc"] if part != "[key]")
    key = ".".join(_as_written(location, raw)) or "profile"
    return f"{key}: {_say(problem, location)}"


def _as_written(location: tuple[int | str, ...], raw: object) -> list[str]:
    """``location`` without the list positions that the file does not have."""
    written = []
    for part in location:
        if isinstance(part, int):
            if not isinstance(raw, list):
                continue
            raw = raw[part] if part < len(raw) else None
            written.append(f"[{part + 1}]")
            continue
        raw = raw.get(part) if isinstance(raw, dict) else None
        written.append(str(part))
    return written


def _say(problem: Any, location: tuple[int | str, ...]) -> str:
    kind, given = problem["type"], problem.get("input")
    if location[:2] == ("notify", "to") and kind in ("string_type", "model_type", "dict_type"):
        return "must be text" if kind == "string_type" else "must be a table"  # it may be a secret
    if kind == "extra_forbidden":
        return f"unknown key{nearest(str(location[-1]), _known_keys(location))}"
    if kind == "missing":
        return "is missing: every entry says why" if location[-1] == "why" else "is missing"
    if kind == "value_error":
        return str(problem["ctx"]["error"])
    if kind == "string_type":
        return f'must be text: write it in quotes, as in "{given}"'
    if kind == "literal_error":
        return f"cannot be {given!r}; write {problem['ctx']['expected']}"
    if kind in ("string_too_short", "too_short"):
        return "must not be empty"
    if kind in ("model_type", "dict_type"):
        return f"must be a table in braces, not {given!r}"
    return f"{problem['msg'].lower()}, not {given!r}"


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    """The keys allowed where ``location`` ends."""
    models: dict[str, type[BaseModel]] = {
        "timeouts": TimeoutsPart,
        "watch": WatchPart,
        "network": NetworkPart,
        "warm_start": WarmStartPart,
        "exit_codes": ExitCodesPart,
        "notify": NotifyPart,
        "growth": GrowthPart,
        "restarts": RestartsPart,
        "preflight": PreflightPart,
        "lint": LintPart,
        "retry": RetryPart,
    }
    if location[0] == "scopes":
        return list(get_args(Scope) if len(location) == 2 else ScopePart.model_fields)
    if location[:2] == ("notify", "to"):
        return list(ChannelPart.model_fields)
    if location[0] == "env" and len(location) > 2:
        model: type[BaseModel] = ConditionPart if "when" in location else EntryPart
    else:
        model = models.get(str(location[0]), ProfileFile) if len(location) > 1 else ProfileFile
    return [info.alias or name for name, info in model.model_fields.items()]
