"""``[notify]``: whom to tell what of a run. Plain values; ``ncclops.notify`` acts on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, get_args

from ncclops.durations import format_duration
from ncclops.profiles.keys import says

Rule = Literal[
    "failed",
    "restart-storm",
    "no-progress",
    "slow-rank",
    "spare-used",
    "node-suspected",
    "goodput-below",
]
RULES: tuple[Rule, ...] = get_args(Rule)
# What Kubeflow's Trainer gives to the containers of a TrainJob whose status it takes (v2.2).
KUBEFLOW_URL = "KUBEFLOW_TRAINER_SERVER_URL"
ChannelKind = Literal["slack", "pagerduty", "json", "command"]


@dataclass(frozen=True, kw_only=True)
class Secret:
    """A URL or a key: the ``value`` itself, the name of an environment ``variable`` that has it, or
    a ``file`` that holds nothing else. It is never printed."""

    value: str | None = field(default=None, repr=False)
    variable: str | None = None
    file: str | None = None

    @property
    def place(self) -> str | None:
        """Where it comes from, which may be shown; None where there is none."""
        if self.variable is not None:
            return f"variable {self.variable}"
        if self.file is not None:
            return f"file {self.file}"
        return None if self.value is None else "in the profile"


@dataclass(frozen=True, kw_only=True)
class Channel:
    """``[notify.to.NAME]``: where notifications go. ``rules`` empty: all of them.

    ``key`` is PagerDuty's integration key, or a bearer token for ``json``; ``command`` gets the
    same document on standard input. With a ``heartbeat`` there is a message that often for as long
    as the run goes on, and one when it has ended, so that who misses it can tell.
    """

    kind: ChannelKind
    rules: tuple[Rule, ...] = ()
    url: Secret = Secret()
    key: Secret = Secret()
    command: tuple[str, ...] = ()
    heartbeat: timedelta | None = None


@dataclass(frozen=True)
class NotifySettings:
    """``[notify]``: the limits of the rules, and the channels by name."""

    cooldown: timedelta = field(
        default=timedelta(hours=1),
        metadata=says("Of one rule about one thing there is one notification in so long."),
    )
    progress: timedelta = field(
        default=timedelta(minutes=30), metadata=says("No step for so long is no progress.")
    )
    restarts: int = field(
        default=5, metadata=says("So many restarts within `restarts_within` are a storm.", ge=1)
    )
    restarts_within: timedelta = field(default=timedelta(hours=1), metadata=says("See `restarts`."))
    goodput: float = field(
        default=0.8,
        metadata=says("The share of useful time below which a notification is sent.", gt=0, le=1),
    )
    goodput_after: timedelta = field(
        default=timedelta(hours=1), metadata=says("Not before the run has lasted for so long.")
    )
    steps: int = field(
        default=0,
        metadata=says(
            "How many steps the job is to make, for the progress that Kubeflow shows; 0: unknown.",
            ge=0,
        ),
    )
    to: Mapping[str, Channel] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As `profile show --json` has it: without secrets."""
        durations = ("cooldown", "progress", "restarts_within", "goodput_after")
        return {
            **{name: format_duration(getattr(self, name)) for name in durations},
            "restarts": self.restarts,
            "goodput": self.goodput,
            "steps": self.steps,
            "to": {name: _shown(channel) for name, channel in self.to.items()},
        }


NOBODY = NotifySettings()


def _shown(channel: Channel) -> dict[str, Any]:
    return {
        "kind": channel.kind,
        "rules": list(channel.rules or RULES),
        "url": channel.url.place,
        "key": channel.key.place,
        "command": channel.command[0] if channel.command else None,
        "heartbeat": None if channel.heartbeat is None else format_duration(channel.heartbeat),
    }
