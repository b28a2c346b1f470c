"""Tries channels without a run: one message to each, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ncclops.errors import UsageError
from ncclops.notify.messages import Origin
from ncclops.notify.notifier import message_of
from ncclops.notify.rules import Notice
from ncclops.notify.sending import NotSent, Processes, send
from ncclops.notify.targets import target_of
from ncclops.profiles.notification import Channel


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What came of a message to the channel ``name``: sent, or ``why`` not, and how long it took;
    no secret is in it."""

    name: str
    kind: str
    seconds: float
    why: str = ""


def try_channels(
    channels: Mapping[str, Channel], environ: Mapping[str, str], *, profile: str, node: str
) -> list[Tried]:
    """Send one message that says it is a test to each of ``channels``, whatever its rules are.

    All at once, each with the limit of one try and no other. Starts threads, and processes of
    commands, which have ended when this returns.
    """
    origin = Origin(run_id="notify-test", run_dir="", node=node)
    notice = Notice(
        rule="test",
        summary=f"this is a test of [notify] in profile {profile}: no job has failed",
        details={"profile": profile},
    )

    def attempt(name: str, channel: Channel) -> Tried:
        began, why = time.monotonic(), ""
        try:
            target = target_of(name, channel, environ)
            send(target, message_of(notice, target, origin, time.time()), Processes())
        except (UsageError, NotSent) as error:
            why = str(error)
        return Tried(name=name, kind=channel.kind, seconds=time.monotonic() - began, why=why)

    with ThreadPoolExecutor(max(1, len(channels))) as threads:
        return list(threads.map(attempt, channels.keys(), channels.values()))
