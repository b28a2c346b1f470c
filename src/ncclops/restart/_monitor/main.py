"""What runs in a monitor process: a small process beside each rank's main process.

It waits in one ``select`` on everything that can happen:

* the pidfd of the main process: its death, known the moment it happens (where pidfds are refused,
  at the next tick, as this process has another parent then);
* the link, a socket pair to the main process's watchdog thread;
* the ring: the monitor process of the next rank (watched with pings) and of the previous one;
* a tick of ``monitor_process_interval``: progress on the shared page, measured against the soft
  and hard timeouts.

It never uses the store. What has to be recorded there is *reported* to a main process that is
alive, see ``_monitor.reports``. If no main process is left, no rank is left that would need to
know. Standard library only: ``torch`` would take seconds and 200 MB. See
docs/restart-internals.md.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from ncclops.restart._instant import Instant
from ncclops.restart._monitor.link import (
    FREED_WITHIN_S,
    Message,
    Page,
    Peer,
    Watch,
    receive_packet,
)
from ncclops.restart._monitor.main_process import MainProcess
from ncclops.restart._monitor.outside import Outside
from ncclops.restart._monitor.reports import CONFIRM_WITHIN_S, Reports, confirmation
from ncclops.restart._monitor.ring import Address, Ring, RingActions
from ncclops.restart._process import ignore_what_is_sent_to_all

log = logging.getLogger("ncclops.restart.monitor")

# A tick this late means that this process (or the whole machine) was stopped: the clocks of the
# main process ran on meanwhile and prove nothing.
_OVERSLEPT_S = 5.0
# An abort that takes too long is given up, and the main thread interrupted: it then leaves the
# function in this time, or the abort holds it.
_INTERRUPTED_WITHIN_S = 5.0
# After SIGKILL a process ends within this time, unless it is in the kernel (a driver, a file system
# that hangs) or frozen. It runs no code of its own any more: the others need not wait for it.
_KILLED_WITHIN_S = 5.0
# As much as a report carries; the main thread, which matters, comes last.
_STACKS_CHARS = 8000

# The fields of attribution.ExceededTimeout, which this process does not import.
Timeout = dict[str, Any]
_CLOCKS = {
    "python": "no Python thread could run",
    "main-thread": "the main thread did not move",
    "ping": "no ping",
}


class Monitor:
    """Monitors one rank; ``run`` returns when nothing is left to monitor or to report."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._rank: int = config["rank"]
        self._interval_s: float = config["monitor_process_interval_s"]
        self._grace_s: float = config["termination_grace_time_s"]
        self._abort_s: float = config["abort_timeout_s"]
        self._page = Page(config["page_fd"])
        self._link: socket.socket | None = socket.socket(fileno=config["link_fd"])
        token = (receive_packet(self._link) or b"").decode()
        self._listener = socket.socket(fileno=config["listen_fd"])
        self._main = MainProcess(config["main_pid"], config["pidfd"])
        self._selector = selectors.DefaultSelector()
        self._reports = Reports(self._send_to_main, lambda: self._ring.successor)
        self._count = 0  # of our own reports
        self._ended_for: Timeout | None = None  # what it had exceeded when we began to end it
        self._ended_because = ""  # in words
        self._waits_in = "NCCL"  # or Gloo: the library that the main thread is blocked in
        self._kill_at: float | None = None
        self._killed_since: float | None = None  # SIGKILL was sent, and it is still there
        self._stays = False  # SIGKILL has not ended it in time
        self._soft_reported_in: float | None = None  # the iteration; once in each is enough
        self._timeouts: Message | None = None  # the latest change, for a successor that is new
        self._forgive_until = 0.0  # progress clocks are not older than this
        self._outside = Outside(self._page, config)
        self._looked_in = -1  # the iteration of the last "look-again"
        self._has_left = False  # the main process; it runs on as no rank of this job
        self._done = False
        self._ring = Ring(
            self._rank,
            token,
            config["heartbeat_interval_s"],
            config["heartbeat_timeout_s"],
            RingActions(
                watch=self._watch,
                unwatch=self._unwatch,
                suspect=self._on_suspect,
                withdraw=self._on_withdraw,
                need_addresses=self._need_addresses,
                linked=self._on_linked,
            ),
        )
        self._ring.clock = time.monotonic
        self._ring.on_answer = self._on_confirmation
        self._ring.on_request = self._on_request

    def run(self) -> None:
        """Until the main process has ended or said that it leaves, and all reports are done."""
        assert self._link is not None
        self._link.setblocking(False)
        self._listener.setblocking(False)
        if self._main.pidfd is not None:
            self._selector.register(self._main.pidfd, selectors.EVENT_READ, self._on_main_death)
        self._selector.register(self._link, selectors.EVENT_READ, self._on_link)
        self._selector.register(self._listener, selectors.EVENT_READ, self._on_connection)
        self._need_addresses(self._rank)
        # When the main process started this one: the machine may have been stopped since then.
        next_tick = self._page.monitor_tick
        while not self._done:
            ready = self._selector.select(max(0.0, next_tick - time.monotonic()))
            self._forgive_if_overslept(next_tick)
            for key, _ in ready:
                if key in self._selector.get_map().values():  # an earlier one may have ended it
                    key.data()
            now = time.monotonic()
            if now >= next_tick:
                self._tick(now)
                next_tick = now + min(self._interval_s, CONFIRM_WITHIN_S)
        self._ring.leave()

    # --- time ---------------------------------------------------------------------------------

    def _forgive_if_overslept(self, tick_due: float) -> None:
        now = time.monotonic()
        if now - tick_due > _OVERSLEPT_S:
            self._forgive_until = now
            self._ring.postpone(now)

    def _tick(self, now: float) -> None:
        self._page.monitor_tick = now
        self._ring.tick(now)
        if not self._reports.main_is_gone and self._main.has_ended_unannounced():
            self._on_main_death()
        if not self._reports.main_is_gone and self._has_become_another_program():
            self._leave_main("its process has become another program (exec)")
        if not self._reports.main_is_gone:
            self._judge_progress(now)
            if self._ring.misses_predecessor(now) and not self._page.finished:
                self._send_to_main({"op": "vouch"})
        self._reports.retry(now)
        if self._reports.main_is_gone and (self._reports.are_done or self._ring.alone):
            self._done = True

    def _judge_progress(self, now: float) -> None:
        """Apply the soft and hard timeouts to what the page shows."""
        if self._page.finished or self._page.watch == Watch.OFF:
            return
        silent_s, clock = self._silence(now)
        if silent_s > _KILLED_WITHIN_S and self._outlives_sigkill(now):
            self._stays = True
            self._on_main_death()
            return
        soft_s, hard_s = self._page.timeouts()
        blocked_s = self._page.blocked_s(now)
        held_s = min(silent_s, self._page.aborting_s(now))
        if silent_s > hard_s:
            self._end_main(now, _exceeded("hard", hard_s, silent_s, clock))
        elif blocked_s > 0:
            exceeded = _exceeded("abort", FREED_WITHIN_S, blocked_s, "main-thread")
            self._end_main(now, exceeded | {"waits_in": self._waits_in})
        elif held_s > self._abort_s + _INTERRUPTED_WITHIN_S:
            self._end_main(now, _exceeded("abort-hang", self._abort_s, held_s, clock))
        elif silent_s > soft_s and self._page.watch in (Watch.SOFT_AND_HARD, Watch.NONE):
            self._report_soft(_exceeded("soft", soft_s, silent_s, clock))
        else:
            self._kill_at = self._ended_for = None  # it has outlived the SIGTERM, and moves

    def _outlives_sigkill(self, now: float) -> bool:
        """Whether SIGKILL, whoever has sent it, has not ended the main process in time."""
        if not self._main.is_killed():
            self._killed_since = None
        elif self._killed_since is None:
            self._killed_since = now
        return self._killed_since is not None and now - self._killed_since > _KILLED_WITHIN_S

    def _silence(self, now: float) -> tuple[float, str]:
        """How long there was no progress, by the clock that shows the longest silence."""
        page, floor = self._page, self._forgive_until
        silences = [(now - max(page.watchdog_tick, floor), "python")]
        if page.watch != Watch.NONE:
            silences.append((now - max(page.main_beat, floor), "main-thread"))
            if page.ping:
                silences.append((now - max(page.ping, floor), "ping"))
        return max(silences)

    def _report_soft(self, timeout: Timeout) -> None:
        if self._soft_reported_in != self._page.iteration:
            self._soft_reported_in = self._page.iteration
            what = _describe(timeout)
            log.warning("soft timeout: %s", what)
            is_unresponsive = self._is_unresponsive()
            self._report(
                "soft-timeout", what, gone=False, timeout=timeout, runs=not is_unresponsive
            )
            if is_unresponsive:
                self._outside.main_silent(what)

    def _is_unresponsive(self) -> bool:
        """Whether no Python thread runs there, so that it cannot take a snapshot of itself."""
        soft_s, _ = self._page.timeouts()
        return time.monotonic() - self._page.watchdog_tick > soft_s / 2

    def _end_main(self, now: float, timeout: Timeout) -> None:
        """SIGCONT and SIGTERM, and after the grace time SIGKILL."""
        if self._kill_at is None:
            why = self._why_it_is_ended(timeout)
            log.warning("ending the main process: %s", why)
            self._ended_because = why
            self._ended_for = timeout
            self._outside.main_silent(why)
            self._kill_at = now + self._grace_s
            self._signal(signal.SIGCONT, signal.SIGTERM)
        if now >= self._kill_at:
            self._signal(signal.SIGCONT, signal.SIGTERM, signal.SIGKILL)

    def _why_it_is_ended(self, timeout: Timeout) -> str:
        if timeout["limit"] == "abort":
            aborted = f"its process groups were aborted {timeout['silent_s']:.1f} s ago"
            return f"{aborted}, and it still waits in {self._waits_in}, which no abort ends"
        aborting_s = self._page.aborting_s(time.monotonic())
        hangs = f"the abort of its process groups has not returned for {aborting_s:.1f} s"
        if timeout["limit"] == "abort-hang":
            return f"{hangs} (abort timeout {self._abort_s:g} s)"
        return f"hard timeout: {_describe(timeout)}" + (f"; {hangs}" if aborting_s > 0 else "")

    def _signal(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            try:
                self._main.signal(number)
            except ProcessLookupError:
                return

    # --- the main process ---------------------------------------------------------------------

    def _on_main_death(self) -> None:
        self._reports.main_is_gone = True
        self._stop_watching_main()
        while self._on_link():  # what it sent before it died: addresses of other monitor processes
            pass
        self._close_link()
        if self._has_left:  # one of those messages said so, and it is reported
            return
        if self._page.finished:
            self._done = True
            return
        self._report_death()

    def _on_departed(self, message: Message) -> None:
        """The main process leaves the wrapper, and could not record that in the store."""
        self._leave_main(message["detail"])

    def _has_become_another_program(self) -> bool:
        """What takes no part in a restart any more, and would be waited for.

        Before it has made a group it may run the script anew, as a rank without restarts in place.
        """
        has_group = 0 < self._page.group_made_in == self._page.iteration + 1
        return self._main.runs_another_program() and has_group and not self._page.finished

    def _leave_main(self, why: str) -> None:
        """The main process runs, and is no rank of this job any more."""
        log.warning("the main process leaves: %s", why)
        self._has_left = True
        self._stop_watching_main()
        self._close_link()
        self._report("lost", why, gone=True)
        self._goes_on_without_main()

    def _stop_watching_main(self) -> None:
        pidfd = self._main.pidfd
        if pidfd is not None and pidfd in self._selector.get_map():
            self._selector.unregister(pidfd)

    def _report_death(self) -> None:
        ended_for = self._ended_for
        cause = self._ended_because if ended_for else "the process died"
        if self._stays:
            stays = f"SIGKILL has not ended its process within {_KILLED_WITHIN_S:g} s"
            cause = f"{self._ended_because}; {stays}" if ended_for else stays
        log.warning("the main process ended: %s", cause)
        self._outside.main_ended(cause, by_monitor=ended_for is not None)
        stacks = self._outside.stacks if ended_for is not None else None
        self._report("died", cause, gone=True, stacks=stacks, timeout=ended_for)
        self._goes_on_without_main()

    def _goes_on_without_main(self) -> None:
        """Until what there is to report has been confirmed."""
        self._reports.main_is_gone = True
        self._reports.on_successor(time.monotonic())
        self._done = self._ring.idle

    def _on_link(self) -> bool:
        """Take a message from the main process; whether there was one."""
        if self._link is None:
            return False
        data = receive_packet(self._link)
        if data is None:
            return False
        if not data:
            self._close_link()  # the pidfd says whether this was a death
            return False
        message = json.loads(data)
        handlers: dict[str, Callable[[Message], None]] = {
            "addresses": self._on_addresses,
            "confirm": self._on_confirmation,
            "timeouts": self._on_timeouts,
            "observe": self._on_observe,
            "look-again": self._on_look_again,
            "forget": self._on_forget,
            "blocked": self._on_blocked,
            "departed": self._on_departed,
            "bye": self._on_bye,
        }
        handlers[message["op"]](message)
        return True

    def _send_to_main(self, message: Message) -> bool:
        if self._link is None:
            return False
        try:
            self._link.send(json.dumps(message).encode())
        except OSError:  # also when it does not read: then it is not able to record anything
            return False
        return True

    def _close_link(self) -> None:
        if self._link is not None:
            self._selector.unregister(self._link)
            self._link.close()
            self._link = None

    def _on_observe(self, message: Message) -> None:
        self._outside.iteration_failed(message["iteration"])

    def _on_blocked(self, message: Message) -> None:
        """The main thread waits for what does not come: no need to wait for the next tick."""
        self._waits_in = message["library"]
        self._judge_progress(time.monotonic())

    def _on_bye(self, _message: Message) -> None:
        self._done = True

    # --- reports ------------------------------------------------------------------------------

    def _on_suspect(self, rank: int, evidence: str, patience_s: float) -> None:
        log.warning("rank %d suspected to be lost: %s", rank, evidence)
        message = {"cause": "lost", "detail": evidence, "rank": rank, "gone": True}
        message |= {"by": self._rank, "patience_s": patience_s}
        self._reports.deliver(self._stamped(message), None, time.monotonic())

    def _on_withdraw(self, rank: int) -> None:
        self._reports.withdraw(rank)
        self._send_to_main({"op": "withdraw", "rank": rank})

    def _report(
        self,
        cause: str,
        detail: str,
        *,
        gone: bool,
        stacks: str | None = None,
        timeout: Timeout | None = None,
        runs: bool = False,
    ) -> None:
        """Report something about this rank itself; ``runs``: its Python threads get to run."""
        page = self._page
        message: Message = {"cause": cause, "detail": detail, "rank": self._rank, "gone": gone}
        message |= {"stacks": stacks[-_STACKS_CHARS:] if stacks else None, "timeout": timeout}
        message["runs"] = runs
        message |= {"iteration": int(page.iteration), "number": int(page.number)}
        self._reports.deliver(self._stamped(message), None, time.monotonic())

    def _stamped(self, message: Message) -> Message:
        self._count += 1
        id_ = f"{self._rank}.{os.getpid()}.{self._count}"
        stamp = {"at": time.time(), "instant": Instant.now()}
        return {"op": "report", "id": id_, **stamp, **message}

    def _on_request(self, peer: Peer, message: Message) -> None:
        """A predecessor passes something on."""
        if message["op"] == "timeouts":
            self._on_timeouts(message)
        elif message["op"] == "look-again":
            self._on_look_again(message)
        elif "patience_s" in message and self._ring.hears(message["rank"]):
            # The path to its predecessor was broken, and the one to us is not.
            peer.send(confirmation(message["id"]))
        else:
            self._reports.deliver(message, peer, time.monotonic())
            self._end_if_done()

    def _on_confirmation(self, message: Message) -> None:
        self._reports.confirm(message)
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._reports.main_is_gone and self._reports.are_done:
            self._done = True

    # --- the ring -----------------------------------------------------------------------------

    def _on_connection(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        self._ring.accept(sock)

    def _on_addresses(self, message: Message) -> None:
        addresses = [Address(*address) for address in message["addresses"]]
        self._ring.add_candidates(addresses, time.monotonic())

    def _on_forget(self, message: Message) -> None:
        self._ring.forget(message["rank"])

    def _need_addresses(self, after: int) -> None:
        if not self._send_to_main({"op": "need-addresses", "after": after}):
            self._ring.alone = True

    def _on_timeouts(self, message: Message) -> None:
        """A change of timeouts goes once round the ring and ends where it is known already."""
        if self._timeouts is None or message["stamp"] > self._timeouts["stamp"]:
            self._timeouts = message
            self._page.change_timeouts(message["soft_s"], message["hard_s"], message["stamp"])
            if self._ring.successor is not None:
                self._ring.successor.send(message)

    def _on_look_again(self, message: Message) -> None:
        """A rank waits for others that may not know that its iteration has ended: once round."""
        if message["iteration"] > self._looked_in:
            self._looked_in = message["iteration"]
            self._send_to_main(message)
            if self._ring.successor is not None:
                self._ring.successor.send(message)

    def _on_linked(self) -> None:
        if self._timeouts is not None and self._ring.successor is not None:
            self._ring.successor.send(self._timeouts)
        self._reports.on_successor(time.monotonic())

    def _watch(self, peer: Peer, callback: Callable[[], None], connecting: bool) -> None:
        events = selectors.EVENT_WRITE if connecting else selectors.EVENT_READ
        try:
            self._selector.modify(peer, events, callback)
        except KeyError:
            self._selector.register(peer, events, callback)

    def _unwatch(self, peer: Peer) -> None:
        try:
            self._selector.unregister(peer)
        except (KeyError, ValueError):
            return


def _exceeded(limit: str, limit_s: float, silent_s: float, clock: str) -> Timeout:
    return {"limit": limit, "limit_s": limit_s, "silent_s": round(silent_s, 3), "clock": clock}


def _describe(timeout: Timeout) -> str:
    return (
        f"{_CLOCKS[timeout['clock']]} for {timeout['silent_s']:.1f} s"
        f" ({timeout['limit']} timeout {timeout['limit_s']:g} s)"
    )


def main() -> None:
    """Entry of the process: the configuration is the one argument, as JSON; the token comes by the
    link, as other users can read a command line."""
    config = json.loads(sys.argv[1])
    # A Ctrl-C at the terminal or a scheduler's SIGTERM to the group is for the main process; the
    # monitor process ends when that one does.
    ignore_what_is_sent_to_all()
    if config["logfile"]:
        logging.basicConfig(
            filename=config["logfile"],
            level=config["log_level"],
            format=f"%(asctime)s %(levelname)s rank {config['rank']}: %(message)s",
        )
    try:
        Monitor(config).run()
    except Exception:
        log.exception("the monitor process failed")
        raise
