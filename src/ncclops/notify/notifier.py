"""The threads of notifications: events go in, messages go out, and nobody waits for them.

    the agent's event loop --> queue --> one thread with the rules --> queue of each target --> its
    (which only puts events in)                                        thread, which sends

A queue that is full drops what comes, and counts it; so is counted what could not be sent.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ncclops.notify import messages
from ncclops.notify.messages import Origin
from ncclops.notify.rules import Notice, Progress, Rules
from ncclops.notify.sending import SEND_LIMIT_S, NotSent, Processes, send
from ncclops.notify.targets import NotifyPlan, Target
from ncclops.record.events import UNSTAMPED, Event, NotifiedEvent, VerdictEvent

log = logging.getLogger(__name__)

_TICK_S = 1.0
_NOTHING = Event()  # has come for so long


@dataclass(frozen=True, kw_only=True)
class Limits:
    """``events`` that wait for the rules, ``messages`` that wait for one target (with cooldowns
    there are a few an hour); ``pauses_s`` after a try where another one may do better; ``send_s``
    for one try."""

    events: int = 5000
    messages: int = 50
    pauses_s: tuple[float, ...] = (1.0, 5.0)
    send_s: float = SEND_LIMIT_S


class Notifier:
    """Tells what happens to one run, from :meth:`start` to :meth:`close`.

    ``record`` gets an event for each notification that was sent or not, while the run goes on;
    ``say`` one line at the end where some were lost. Both are called in other threads.
    """

    def __init__(
        self,
        plan: NotifyPlan,
        origin: Origin,
        *,
        record: Callable[[Event], None],
        say: Callable[[str], None],
        limits: Limits = Limits(),
    ) -> None:
        self._say, self._record = say, record
        self._processes = Processes()
        self._steps = plan.settings.steps
        self._origin = origin
        self._rules = Rules(plan.settings, node=origin.node)
        self._events: queue.Queue[Event | None] = queue.Queue(limits.events)
        self._lost_events = 0
        self._over = False
        self._senders = [
            _Sender(target, limits, self._processes, self._on_result) for target in plan.targets
        ]
        self._thread = threading.Thread(target=self._run, name="ncclops-notify", daemon=True)

    @property
    def processes(self) -> Processes:
        """Those of commands."""
        return self._processes

    def start(self) -> None:
        """Begin, where anybody is to be told anything. Any events come after that."""
        if not self._senders:
            return
        try:
            for thread in (self._thread, *(sender.thread for sender in self._senders)):
                thread.start()
        except RuntimeError:  # as many threads as are allowed
            self._say("notifications are not sent: no thread is to be had")

    def post(self, event: Event) -> None:
        """Take one event of the run; returns at once. Any thread."""
        if not self._thread.is_alive() or isinstance(event, NotifiedEvent):
            return
        if event.ts == UNSTAMPED:
            event = msgspec.structs.replace(event, ts=time.time())
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self._lost_events += 1

    def close(self, limit_s: float) -> None:
        """Send what there is to send, for ``limit_s`` at most, and say what was lost."""
        deadline = time.monotonic() + limit_s
        if self._thread.is_alive():
            _put(self._events, None, limit_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        for sender in self._senders:
            sender.finish(max(0.0, deadline - time.monotonic()))
        for sender in self._senders:
            if (lost := sender.unsent()) and sender.thread.ident is not None:
                self._say(
                    f"{lost} message{'s' * (lost != 1)} to {sender.target.name} not sent:"
                    f" {sender.why or 'no time was left'}"
                )
        if self._lost_events:
            self._say(f"{self._lost_events} events came too fast for notifications")

    # --- the thread with the rules ----------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=_TICK_S)
            except queue.Empty:
                event = _NOTHING
            if event is None:
                return
            try:
                self._take(event)
            except Exception:
                log.exception("notifications: an event was passed over")

    def _take(self, event: Event) -> None:
        now = time.monotonic()
        if event is not _NOTHING:
            for notice in self._rules.take(event, now):
                self._tell(notice)
        if isinstance(event, VerdictEvent):
            self._over = True
            self._beat(now, last=True)
        elif self._events.empty():
            self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        for notice in self._rules.tick(now, time.time()):
            self._tell(notice)
        self._beat(now)

    def _tell(self, notice: Notice) -> None:
        log.info("notification: %s: %s", notice.rule, notice.summary)
        for sender in self._senders:
            target = sender.target
            if notice.rule in target.rules:
                message = message_of(notice, target, self._origin, time.time())
                sender.put(_Message(name=notice.rule, body=message))

    def _beat(self, now: float, *, last: bool = False) -> None:
        if self._over and not last:
            return
        for sender in self._senders:
            if sender.is_due(now, last=last) and self._beats_for(sender.target):
                body = self._beat_of(sender.target, self._rules.progress)
                sender.put(_Message(name="heartbeat", body=body), if_idle=not last)

    def _beats_for(self, target: Target) -> bool:
        # A job has one status, an agent a heartbeat of its own: it is the agent that may be dead.
        return target.kind != "kubeflow" or self._rules.speaks_for_all

    def _beat_of(self, target: Target, progress: Progress) -> dict[str, Any]:
        if target.kind == "kubeflow":
            return messages.as_trainjob_status(progress, time.time(), self._steps)
        return messages.heartbeat(progress, self._origin, time.time())

    def _on_result(self, target: Target, message: _Message, why: str) -> None:
        """In a thread of a sender."""
        if why:
            log.info("%s to %s: not sent: %s", message.name, target.name, why)
        if not self._over and (why or message.name != "heartbeat"):
            self._record(NotifiedEvent(to=target.name, rule=message.name, error=why))


def message_of(notice: Notice, target: Target, origin: Origin, ts: float) -> dict[str, Any]:
    """``notice`` as ``target`` takes it."""
    match target.kind:
        case "slack":
            return messages.as_slack(notice, origin)
        case "pagerduty":
            return messages.as_pagerduty(notice, origin, ts, target.key)
        case "json" | "command" | "kubeflow":
            return messages.as_json(notice, origin, ts)


@dataclass(frozen=True)
class _Message:
    """``name`` is the rule's, or ``heartbeat``; ``body`` holds a secret, maybe."""

    name: str
    body: dict[str, Any] = field(repr=False)


class _Sender:
    """One target's queue and thread: one that does not answer holds up no other."""

    def __init__(
        self,
        target: Target,
        limits: Limits,
        processes: Processes,
        on_result: Callable[[Target, _Message, str], None],
    ) -> None:
        self.target = target
        self.why = ""
        self._limits, self._processes, self._on_result = limits, processes, on_result
        self._waiting: queue.Queue[_Message | None] = queue.Queue(limits.messages)
        self._lost, self._pending = 0, 0
        self._counting = threading.Lock()
        self._ending = threading.Event()
        self._beaten_at: float | None = None
        self.thread = threading.Thread(
            target=self._run, name=f"ncclops-notify-{target.name}", daemon=True
        )

    def put(self, message: _Message, *, if_idle: bool = False) -> None:
        """Have ``message`` sent soon; with ``if_idle`` not where others wait."""
        if if_idle and not self._waiting.empty():
            return
        with self._counting:
            self._pending += 1
        try:
            self._waiting.put_nowait(message)
        except queue.Full:
            self._count_lost("too many messages were waiting")

    def is_due(self, now: float, *, last: bool) -> bool:
        """Whether a heartbeat is due, and then the next one later."""
        every = self.target.heartbeat
        if every is None:
            return False
        due = self._beaten_at is None or now - self._beaten_at >= every.total_seconds()
        if due or last:
            self._beaten_at = now
        return due or last

    def finish(self, limit_s: float) -> None:
        """No more will come: send what waits, without pauses, for ``limit_s`` at most."""
        self._ending.set()
        if self.thread.is_alive():
            deadline = time.monotonic() + limit_s
            _put(self._waiting, None, limit_s)
            self.thread.join(max(0.0, deadline - time.monotonic()))

    def unsent(self) -> int:
        """Messages that were lost, or are not sent yet."""
        with self._counting:
            return self._lost + self._pending

    def _run(self) -> None:
        while (message := self._waiting.get()) is not None:
            why = self._send(message)
            if why:
                self._count_lost(why)
            else:
                with self._counting:
                    self._pending -= 1
            self._on_result(self.target, message, why)

    def _send(self, message: _Message) -> str:
        """Why it could not be sent; empty where it was."""
        pauses = iter(() if message.name == "heartbeat" else self._limits.pauses_s)
        while True:
            try:
                send(self.target, message.body, self._processes, self._limits.send_s)
            except NotSent as error:
                pause = next(pauses, None)
                if pause is None or not error.again:
                    return str(error)
                self._ending.wait(pause)
            except Exception as error:  # noqa: BLE001 - the boundary of the thread; told
                return f"internal error: {type(error).__name__}"
            else:
                return ""

    def _count_lost(self, why: str) -> None:
        with self._counting:
            self._lost += 1
            self._pending -= 1
        self.why = why


def _put(waiting: queue.Queue[Any], item: object, limit_s: float) -> None:
    try:
        waiting.put(item, timeout=limit_s)
    except queue.Full:
        return
