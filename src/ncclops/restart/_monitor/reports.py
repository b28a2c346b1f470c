"""Reports on their way from a monitor process to a main process that can record them.

A report says that a rank died, was lost or has exceeded its soft timeout. Only a main process can
write it to the store. Each report goes to the monitor process's own main process first; if that is
dead or does not confirm it in time, to the next monitor process along the ring, which does the
same, until one confirms. The confirmation travels back the same way. Standard library only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ncclops.restart._monitor.link import Message, Peer

log = logging.getLogger("ncclops.restart.monitor")

# A main process that has not confirmed a report by then is dead, stopped or holds its GIL.
CONFIRM_WITHIN_S = 1.0
# How long the monitor process of a dead main process looks for one that confirms.
_DELIVER_WITHIN_S = 60.0


class _Report:
    """One report, until it is confirmed."""

    def __init__(self, message: Message, source: Peer | None, now: float) -> None:
        self.message = message
        self.source = source  # to which the confirmation goes on; None: the report is our own
        self.given_up_at = now + _DELIVER_WITHIN_S
        self.forward_at = now + CONFIRM_WITHIN_S


class Reports:
    """The reports of one monitor process, its own and those that it passes on.

    ``send_to_main`` returns whether the main process has taken a message; ``successor`` is the
    next monitor process, ``None`` while there is none. ``main_is_gone`` is set by the owner.
    Times are ``time.monotonic()``.
    """

    def __init__(
        self,
        send_to_main: Callable[[Message], bool],
        successor: Callable[[], Peer | None],
    ) -> None:
        self._send_to_main = send_to_main
        self._successor = successor
        self._waiting: dict[str, _Report] = {}
        self._confirmed: set[str] = set()
        self.main_is_gone = False

    @property
    def are_done(self) -> bool:
        """Whether nothing waits for a confirmation."""
        return not self._waiting

    def deliver(self, message: Message, source: Peer | None, now: float) -> None:
        """Hand a report to the main process; ``retry`` does what else is needed."""
        if source is not None and message["id"] in self._confirmed:
            source.send(confirmation(message["id"]))
            return
        known = self._waiting.get(message["id"])
        if known is not None:
            self._on_repeat(known, source)
            return
        report = self._waiting[message["id"]] = _Report(message, source, now)
        if self.main_is_gone or not self._send_to_main(message):
            report.forward_at = now
            self._forward(report, now)

    def _on_repeat(self, report: _Report, source: Peer | None) -> None:
        """A report comes again: a predecessor has repeated it, or it went round the whole ring."""
        if report.source is None and self.main_is_gone:
            # Ours, and no main process on the way has confirmed it. Each has received it, and one
            # that merely hangs finds the message when it continues.
            answer = confirmation(report.message["id"])
            self.confirm(answer)
            if source is not None:
                source.send(answer)
        else:
            report.source = source or report.source

    def _forward(self, report: _Report, now: float) -> None:
        successor = self._successor()
        if successor is not None and now >= report.forward_at:
            report.forward_at = now + 2 * CONFIRM_WITHIN_S
            successor.send(report.message)

    def on_successor(self, now: float) -> None:
        """There is a successor (again): pass on what waits for one."""
        for report in self._waiting.values():
            if self.main_is_gone:
                report.forward_at = now
            self._forward(report, now)

    def retry(self, now: float) -> None:
        """Pass on what the main process has not confirmed in time."""
        for id_, report in list(self._waiting.items()):
            if now >= report.given_up_at:
                log.warning("no main process has confirmed the report %s", report.message)
                del self._waiting[id_]
            else:
                self._forward(report, now)

    def withdraw(self, rank: int) -> None:
        """Pass on no suspicion of ``rank`` any more: it has been heard again."""
        for id_, report in list(self._waiting.items()):
            if "patience_s" in report.message and report.message["rank"] == rank:
                del self._waiting[id_]

    def confirm(self, confirmation: Message) -> None:
        """A main process has recorded a report."""
        report = self._waiting.pop(confirmation["id"], None)
        self._confirmed.add(confirmation["id"])
        if report is not None and report.source is not None:
            report.source.send(confirmation)


def confirmation(id_: str) -> Message:
    """What ends the report ``id_`` on each monitor process that it came through."""
    return {"op": "confirm", "id": id_}
