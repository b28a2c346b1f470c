"""From events to messages, with real receivers: in order, bounded, counted; nobody waits."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import timedelta

from ncclops.notify.messages import Origin
from ncclops.notify.notifier import Limits, Notifier
from ncclops.notify.targets import NotifyPlan, Target
from ncclops.profiles.notification import NotifySettings
from ncclops.record.event_values import GpuFault
from ncclops.record.events import (
    Event,
    GpuFaultEvent,
    NotifiedEvent,
    RunStartedEvent,
    StepEvent,
    VerdictEvent,
)
from tests.notify.conftest import LIMIT_S, Received, Receiver

ORIGIN = Origin(run_id="r1", run_dir="/runs/r1", node="n0")
FAILED = VerdictEvent(outcome="failed", exit_code=1, reason="rank 0 exited with code 1")
COMPLETED = VerdictEvent(outcome="completed", exit_code=0, reason="1 worker exited 0")


@dataclass
class Heard:
    """What a notifier has recorded, and said."""

    events: list[Event] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    recorded: threading.Event = field(default_factory=threading.Event)

    def record(self, event: Event) -> None:
        self.events.append(event)
        self.recorded.set()


def begin(heard: Heard, *targets: Target, limits: Limits = Limits()) -> Notifier:  # noqa: B008
    plan = NotifyPlan(settings=NotifySettings(), targets=targets)
    notifier = Notifier(plan, ORIGIN, record=heard.record, say=heard.lines.append, limits=limits)
    notifier.start()
    notifier.post(RunStartedEvent(run_id="r1", world_size=1))
    return notifier


def fault(node: str) -> GpuFaultEvent:
    return GpuFaultEvent(rank=0, fault=GpuFault(rank=0, node=node, what="Xid 79"))


def json_to(receiver: Receiver, path: str = "/json", **more: object) -> Target:
    given = {"name": "ops", "kind": "json", "url": receiver.url(path)} | more
    return Target(**given)  # type: ignore[arg-type]


def test_each_target_gets_what_its_rules_are_about(receiver: Receiver) -> None:
    heard = Heard()
    team = Target(
        name="team", kind="slack", url=receiver.url("/slack"), rules=frozenset({"failed"})
    )
    notifier = begin(heard, team, json_to(receiver))
    notifier.post(fault("n0"))
    first = receiver.next()
    assert (first.path, first.body["rule"]) == ("/json", "node-suspected")
    assert heard.recorded.wait(LIMIT_S)
    notifier.post(FAILED)
    notifier.close(LIMIT_S)
    rest = {got.path: got.body for got in (receiver.next(), receiver.next())}
    assert rest["/json"]["rule"] == "failed"
    assert rest["/slack"]["text"].startswith("*critical* run r1: failed: rank 0 exited")
    assert receiver.got.empty()
    assert [(e.to, e.rule, e.error) for e in heard.events if isinstance(e, NotifiedEvent)] == [
        ("ops", "node-suspected", "")
    ], "the verdict is a run's last event"
    assert heard.lines == []


def test_another_try_where_it_may_help_and_what_is_lost_is_told(receiver: Receiver) -> None:
    receiver.codes["/json"] = [503, 200]
    receiver.codes["/TopSecretPart"] = [404]
    heard = Heard()
    bad = json_to(receiver, "/TopSecretPart", name="bad")
    notifier = begin(heard, json_to(receiver), bad, limits=Limits(pauses_s=(0.0, 0.0)))
    notifier.post(FAILED)
    notifier.close(LIMIT_S)
    assert sorted(receiver.next().path for _ in range(3)) == ["/TopSecretPart", "/json", "/json"]
    assert heard.lines == ["1 message to bad not sent: HTTP 404"]


def test_a_heartbeat_for_as_long_as_the_run_goes_on_and_one_at_its_end(receiver: Receiver) -> None:
    heard = Heard()
    target = json_to(receiver, heartbeat=timedelta(hours=1), rules=frozenset())
    notifier = begin(heard, target)
    assert receiver.next().body["state"] == "running"
    notifier.post(StepEvent(rank=0, step=7, step_s=0.5))
    notifier.post(COMPLETED)
    notifier.close(LIMIT_S)
    last = receiver.next().body
    assert (last["state"], last["details"]["outcome"], last["details"]["step"]) == (
        "ended", "completed", 7,
    )  # fmt: skip
    assert receiver.got.empty()


def test_a_receiver_that_is_silent_holds_up_nobody(receiver: Receiver) -> None:
    """Neither who posts, nor another receiver, nor the end; and what is not sent is counted."""
    receiver.silent.add("/stuck")
    heard = Heard()
    stuck = json_to(receiver, "/stuck", name="stuck")
    notifier = begin(heard, stuck, json_to(receiver), limits=Limits(messages=2))
    got: list[Received] = []
    for number in range(10):
        notifier.post(fault(f"n{number}"))
        while not any(each.body["subject"] == f"n{number}" for each in got):
            got += [each for each in [receiver.next()] if each.path == "/json"]
    notifier.close(0.5)
    # One is on its way, two wait, seven found the queue full.
    assert heard.lines == ["10 messages to stuck not sent: too many messages were waiting"]
    receiver.go_on.set()


def test_events_that_come_too_fast_are_counted(receiver: Receiver) -> None:
    heard = Heard()
    notifier = begin(heard, json_to(receiver), limits=Limits(events=1))
    for number in range(20_000):
        notifier.post(StepEvent(rank=0, step=number))
    notifier.close(LIMIT_S)
    (line,) = heard.lines
    assert line.endswith(" events came too fast for notifications")


def test_where_nobody_is_to_be_told_no_thread_is_started() -> None:
    before = threading.active_count()
    notifier = begin(Heard())
    notifier.post(FAILED)
    notifier.close(LIMIT_S)
    assert threading.active_count() == before
