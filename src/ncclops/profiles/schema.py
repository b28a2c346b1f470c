"""What a profile file may contain, checked by pydantic, with errors of one line."""

from __future__ import annotations

import re
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema

from ncclops.durations import format_duration, parse_duration
from ncclops.exit_codes import SETS, ExitCodes
from ncclops.profiles.model import (
    Growth,
    Kind,
    Nodes,
    Parameter,
    RestartMode,
    Restarts,
    Scope,
    WarmStart,
    WatchSettings,
)
from ncclops.profiles.notification import NotifySettings, Rule
from ncclops.versions import parse_spec

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


# For editors; what is accepted is what ``_is_duration`` accepts.
DURATION_SCHEMA = {
    "type": "string",
    "pattern": r"^\s*(\d+(\.\d+)?\s*(ms|s|m|h|d)|\{[a-z][a-z0-9_]*\})\s*$",
}
Duration = Annotated[str, AfterValidator(_is_duration), WithJsonSchema(DURATION_SCHEMA)]


class _OneOrMore:
    """In the JSON schema: one alone need not be in a list, as ``_as_list`` has it."""

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        several: dict[str, Any] = handler(core)
        return {"anyOf": [several["items"], several]}


_Texts = Annotated[list[str], BeforeValidator(_as_list), _OneOrMore()]
_SomeTexts = Annotated[list[str], Field(min_length=1), BeforeValidator(_as_list), _OneOrMore()]


def _key(says: str, default: Any = None) -> Any:
    """A key of a file, and what docs/profile-keys.md says of it."""
    return Field(default, description=says)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ConditionPart(_Part):
    """When an entry holds; all that is named has to be true."""

    restart: Annotated[list[RestartMode], BeforeValidator(_as_list), _OneOrMore()] | None = _key(
        "The job's `--restart` is one of these."
    )
    torch: Annotated[str, AfterValidator(_is_version_spec)] | None = _key(
        "torch's version, such as `>=2.8,<2.14`; without torch it does not hold."
    )
    absent: _Texts = _key("Variables that the operator has not given.", [])
    host: _SomeTexts | None = _key("Patterns, one of which matches the host's name.")
    value: _SomeTexts | None = _key("Patterns, one of which matches what the operator gives.")


_ACTIONS = ("set", "default", "unset", "scrub")


class EntryPart(_Part):
    """What is done with one variable: exactly one of `set`, `default`, `unset`, `scrub`."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": [action]} for action in _ACTIONS]}
    )

    set_: str | None = Field(None, alias="set", description="Its value, whatever the shell has.")
    default: str | None = _key("Its value, unless the shell has exported it.")
    unset: Literal[True] | None = _key("It is removed.")
    scrub: list[str] | None = Field(
        None, min_length=1, description="Patterns of entries that are taken out of a path list."
    )
    holding: list[str] = _key(
        "With `scrub`: patterns of file names; a directory that has one is taken out.", []
    )
    unless_holding: list[str] = _key("With `scrub`: a directory that has one of these stays.", [])
    follows: str | None = _key("With `default`: another spelling, whose value is taken over.")
    why: str = Field(min_length=1, description="Why; tables show the first sentence.")
    reference: str | None = _key("Where to read about it.")
    when: ConditionPart = Field(
        default_factory=ConditionPart,
        description="When this holds; the first entry that does is taken.",
    )

    @model_validator(mode="after")
    def _one_action(self) -> EntryPart:
        given = [
            action
            for action in (self.set_, self.default, self.unset, self.scrub)
            if action is not None
        ]
        if len(given) != 1:
            raise ValueError("needs exactly one of set, default, unset = true and scrub")
        if "\0" in (self.set_ or self.default or ""):
            raise ValueError("holds the character NUL, which no variable can")
        if self.follows is not None and self.default is None:
            raise ValueError("follows goes with default: only a default can give way")
        if (self.holding or self.unless_holding) and self.scrub is None:
            raise ValueError("holding and unless_holding go with scrub")
        return self


class ScopePart(_Part):
    """All variables of a kind that `[env]` does not name."""

    unset: bool = Field(
        description="Whether they are removed; false takes back what a parent says."
    )
    why: str = Field(min_length=1, description="Why.")


class TimeoutsPart(_Part):
    """How long each thing may take; what is left out follows from `process_group`."""

    process_group: Duration | None = _key(
        "What process groups are made with; 2 hours where nothing is named."
    )
    steady_process_group: Duration | None = _key("Theirs once warm-up is over.")
    compile: Duration | None = _key("How long warm-up may take.")
    soft: Duration | None = _key("Without progress on a rank for so long, all restart in place.")
    hard: Duration | None = _key("Without progress for so long, the rank's process is ended.")
    abort: Duration | None = _key("How long the abort of a rank's groups may take.")
    heartbeat: Duration | None = _key(
        "Without a sign of life of a rank's process for so long, it is lost."
    )
    barrier: Duration | None = _key("How long a restart waits for ranks to come.")
    grow: Duration | None = _key("How long ranks wait for the new process of a lost one.")
    completion: Duration | None = _key("How long a rank that is done waits for the others.")
    stop_grace: Duration | None = _key("From SIGTERM to SIGKILL; 15s.")
    groups: dict[Annotated[str, Field(min_length=1)], Duration] = _key(
        "Timeouts of single groups once warm-up is over, by a pattern of their description.", {}
    )


def timeout_names() -> list[str]:
    """What ``[timeouts]`` may name, but for ``groups``."""
    return [name for name in TimeoutsPart.model_fields if name != "groups"]


def _part_of(settings: type, doc: str, **more: Any) -> type[_Part]:
    """The table of a file that sets fields of ``settings``, a dataclass; all may be left out.

    ``more`` are keys beside those. Durations are text. The metadata of a field has what the pages
    say of it, and the limits of a number.
    """
    hints = get_type_hints(settings)
    parts: dict[str, Any] = dict(more)
    for entry in fields(settings):
        if entry.name in parts:
            continue
        kind, limits = hints[entry.name], dict(entry.metadata)
        says = limits.pop("description")
        default: Any = entry.default
        if kind is timedelta:
            kind, default = Duration, format_duration(default)
        elif kind is bool:
            kind = Annotated[bool, Field(strict=True)]
        elif kind in (int, float):
            kind = Annotated[kind, Field(strict=kind is int, **limits)]
        else:
            kind, default = list[dict[str, Any]], list(default)
        known = Field(None, description=says, json_schema_extra={"default": default})
        parts[entry.name] = (kind | None, known)
    return create_model(settings.__name__, __base__=_Part, __doc__=doc, **parts)


if TYPE_CHECKING:
    ExitCodesPart = _Part
    GrowthPart = _Part
    RestartsPart = _Part
    WatchPart = _Part
else:
    ExitCodesPart = _part_of(
        ExitCodes,
        "What `launch` exits with, from 1 to 255.",
        set=(
            Literal[tuple(SETS)] | None,
            _key("A whole set of codes, which the keys beside it change."),
        ),
    )
    GrowthPart = _part_of(Growth, "How much restarts in place may leave behind on a rank.")
    RestartsPart = _part_of(Restarts, "What a job that restarts in place may come to.")
    WatchPart = _part_of(WatchSettings, "How long progress may be missing.")


_SECRETS = ("url", "key")
_CHANNEL_NEEDS = {"slack": "url", "json": "url", "pagerduty": "key", "command": "command"}


class ChannelPart(_Part):
    """Where notifications go; `NAME` is of your choice."""

    kind: Literal["slack", "pagerduty", "json", "command", "none"] = Field(
        description="What takes them; `none` takes back what a parent says."
    )
    rules: Annotated[list[Rule], Field(min_length=1)] | None = _key("Which; all where left out.")
    url: str | None = _key("Where to post.")
    url_env: Annotated[str, AfterValidator(_is_variable)] | None = _key(
        "The variable with the URL."
    )
    url_file: str | None = _key("The file with the URL.")
    key: str | None = _key("PagerDuty's integration key, or a bearer token for `json`.")
    key_env: Annotated[str, AfterValidator(_is_variable)] | None = _key(
        "The variable with the key."
    )
    key_file: str | None = _key("The file with the key.")
    command: Annotated[list[str], Field(min_length=1)] | None = _key(
        "A program and its arguments; it gets the message as JSON on standard input."
    )
    heartbeat: Duration | None = _key("A message this often while the run goes on.")

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
    """What the lane needs of a node; what is left out is judged by what the node has."""

    rdma: bool | None = _key(
        "Whether ranks talk over InfiniBand or RoCE: a port that is down fails."
    )
    gpus: Annotated[int, Field(strict=True, ge=0)] | None = _key("At least so many GPUs.")
    rdma_ports: Annotated[int, Field(strict=True, ge=0)] | None = _key(
        "At least so many active ports that the job may use."
    )
    rdma_gbps: Annotated[int, Field(strict=True, gt=0)] | None = _key(
        "Each of them at least so fast, in Gbit/s."
    )
    ignore: list[str] | None = _key("Ids of checks that say nothing of this cluster.")


class NetworkPart(_Part):
    """Which network NCCL is meant to use between nodes."""

    expect: list[Annotated[str, Field(min_length=1)]] | None = _key(
        "One of these: `ib`, `roce`, `socket`, `plugin`, or a name as NCCL prints it; `[]` takes"
        " back what a parent says."
    )
    log: bool | None = _key("NCCL is had to say which it uses, in a file of the run.")


class WarmStartPart(_Part):
    """Workers are forked from a process of the node that has imported what takes long."""

    enabled: bool | None = _key("Whether they are; where the restart is in process, if left out.")
    imports: list[Annotated[str, AfterValidator(_is_module)]] | None = Field(
        default=None,
        description="What it imports besides what workers of ncclops do.",
        json_schema_extra={"default": list(WarmStart().imports)},
    )


if TYPE_CHECKING:
    NotifyPart = _Part
else:
    NotifyPart = _part_of(
        NotifySettings,
        "Whom a job tells what, and when.",
        to=(
            dict[Annotated[str, AfterValidator(_is_channel)], ChannelPart],
            _key("Where notifications go, by a name of your choice.", {}),
        ),
    )


class RetryPart(_Part):
    """Changes to the retry table, which checks them itself."""

    lane: Literal["generic", "expert-parallel"] | None = _key("Whose row a retry uses.")
    limits: dict[str, Any] | None = _key("`max_attempts` and `no_progress_attempts` of a job.")
    cooldown: dict[str, Any] | None = _key(
        "The pause before a retry: `first`, `factor`, `longest`, `jitter`."
    )
    rows: dict[str, Any] | None = _key(
        "How a retry starts, by lane: `init`, `barrier`, `watchdog`."
    )
    policies: dict[str, Any] | None = _key(
        "What a policy of the signatures comes to: `action`, `row`, `times`, `cooldown`, `why`."
    )


class LintPart(_Part):
    """What `ncclops env lint` does not report of this profile."""

    ignore: dict[str, str] = _key("Rules that it breaks on purpose, each with the reason.", {})


class ProfileFile(_Part):
    """A launch profile of ncclops."""

    description: str = Field(min_length=1, description="What it is for, in one sentence.")
    kind: Kind = _key("A job has one lane, and any number of overlays on top of it.", "lane")
    nodes: Nodes = _key("How many nodes a job may have.", "any")
    extends: _Texts = _key(
        "Profiles that this one changes: names, or paths from its directory.", []
    )
    parameters: dict[Annotated[str, AfterValidator(_is_parameter_name)], Parameter] = _key(
        "Values that timeouts and variables name in braces, and `--param` changes.", {}
    )
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
        Annotated[list[EntryPart], Field(min_length=1), BeforeValidator(_as_list), _OneOrMore()],
    ] = _key("What is done with each variable; of several entries the first that holds.", {})
    scopes: dict[Scope, ScopePart] = _key(
        "The same for all variables of a kind: `between_nodes`, `within_node`.", {}
    )
    lint: LintPart = LintPart()
    retry: RetryPart = RetryPart()


# The tables of a file, by their names; `[env]` and `[scopes]` have tables of their own below them.
TABLES: dict[str, type[BaseModel]] = {
    name: info.annotation
    for name, info in ProfileFile.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
}


class _OfToml(GenerateJsonSchema):
    """TOML has no null: a key is there or left out."""

    def nullable_schema(self, schema: Any) -> Any:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: Any) -> Any:
        described: Any = super().default_schema(schema)
        if described.get("default") is None or isinstance(described["default"], dict):
            described.pop("default", None)  # of a table: what it has, its own keys say
        return described

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


def json_schema() -> dict[str, Any]:
    """A profile file as a JSON schema (2020-12), for editors; ``read`` checks more than it says."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **ProfileFile.model_json_schema(schema_generator=_OfToml),
    }
