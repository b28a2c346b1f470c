"""Where notifications go, with their secrets: looked up once, when the job is settled."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal
from urllib.parse import urlsplit

from ncclops.errors import UsageError
from ncclops.profiles.notification import (
    KUBEFLOW_URL,
    RULES,
    Channel,
    ChannelKind,
    NotifySettings,
    Rule,
    Secret,
)
from ncclops.record.regular_file import read_regular
from ncclops.redaction.marks import Mark, marks_of
from ncclops.redaction.redactor import is_secret, marks_here
from ncclops.toml_files import with_home

PAGERDUTY = "https://events.pagerduty.com/v2/enqueue"
# Files beside ``KUBEFLOW_URL``.
KUBEFLOW_CA = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
KUBEFLOW_TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
# Its controller asks for at most one in five seconds of each job.
_KUBEFLOW_EVERY = timedelta(seconds=15)
_MOST_BYTES = 64 << 10  # of a file with a secret


@dataclass(frozen=True, kw_only=True)
class Target:
    """One channel, ready to be sent to. ``token_file`` is read anew for each message: it rotates.

    ``url`` and ``key`` are secrets: no text of this program has them.
    """

    name: str
    kind: ChannelKind | Literal["kubeflow"]
    rules: frozenset[Rule] = frozenset(RULES)
    heartbeat: timedelta | None = None
    url: str = field(default="", repr=False)
    key: str = field(default="", repr=False)
    command: tuple[str, ...] = field(default=(), repr=False)
    ca_file: str | None = None
    token_file: str | None = None


@dataclass(frozen=True, kw_only=True)
class NotifyPlan:
    """What a job tells whom: the limits of the rules, and the targets; none: nobody.

    ``marks`` are of the secrets that are known here, which no message may quote.
    """

    settings: NotifySettings
    targets: tuple[Target, ...]
    marks: frozenset[Mark] = field(default=frozenset(), repr=False)


def settle(settings: NotifySettings, environ: Mapping[str, str]) -> NotifyPlan:
    """``settings`` with the secrets that they name. Raises ``UsageError``, of one line, where one
    is not there or cannot be used."""
    targets = [target_of(name, channel, environ) for name, channel in settings.to.items()]
    if url := environ.get(KUBEFLOW_URL):
        targets.append(
            Target(
                name="kubeflow",
                kind="kubeflow",
                rules=frozenset(),
                heartbeat=_KUBEFLOW_EVERY,
                url=url,
                ca_file=environ.get(KUBEFLOW_CA),
                token_file=environ.get(KUBEFLOW_TOKEN),
            )
        )
    marks = frozenset((*marks_here(environ), *_marks_of(targets)))
    return NotifyPlan(settings=settings, targets=tuple(targets), marks=marks)


def _marks_of(targets: Sequence[Target]) -> list[Mark]:
    urls = {f"{each.name}.url": each.url for each in targets if each.url != PAGERDUTY}
    secrets = urls | {f"{each.name}.key": each.key for each in targets}
    return marks_of(secrets, dict.fromkeys(secrets, ""))


def target_of(name: str, channel: Channel, environ: Mapping[str, str]) -> Target:
    """One channel, with the secrets that it names. Raises ``UsageError``."""
    where = f"notify.to.{name}"
    url = _value(f"{where}.url", channel.url, environ)
    key = _value(f"{where}.key", channel.key, environ)
    if channel.kind == "pagerduty":
        url = url or PAGERDUTY
    if channel.kind == "command":
        program = channel.command[0]
        if shutil.which(program) is None:
            raise UsageError(f"{where}.command: {program} is not a program: correct it")
    else:
        _check_url(f"{where}.url", url)
    return Target(
        name=name,
        kind=channel.kind,
        rules=frozenset(channel.rules or RULES),
        heartbeat=channel.heartbeat,
        url=url,
        key=key,
        command=channel.command,
    )


def _value(where: str, secret: Secret, environ: Mapping[str, str]) -> str:
    """The secret; empty where there is none to be given."""
    if secret.variable is not None:
        value = environ.get(secret.variable, "").strip()
        if not value:
            raise UsageError(f"{where}_env: {secret.variable} is not set: export it")
        if not is_secret(secret.variable, value):
            # The record of the workers' environment would show it.
            raise UsageError(
                f"{where}_env: nothing in the name {secret.variable} says that it holds a secret,"
                " so records would show it: name it like SLACK_WEBHOOK_URL or PAGERDUTY_KEY"
            )
        return value
    if secret.file is not None:
        try:
            value = read_regular(with_home(secret.file), _MOST_BYTES).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise UsageError(f"{where}_file: {secret.file} cannot be read: {why}") from None
        if not value:
            raise UsageError(f"{where}_file: {secret.file} is empty: write the secret into it")
        return value
    return secret.value or ""


def _check_url(where: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        usable = usable and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable or not url.isascii() or any(each.isspace() or each < "!" for each in url):
        raise UsageError(f"{where}: that is no URL: it has to begin with https:// or http://")
    if "@" in parts.netloc:  # it would be looked up as part of the host's name
        raise UsageError(f"{where}: no name and password are sent: take them out of the URL")
