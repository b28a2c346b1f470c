"""The ring of monitor processes: each one watches the next. Standard library only.

Each keeps one connection to the monitor process of the next rank that is alive, and pings it. That
costs each rank one connection and one small message per interval whatever the size of the job, and
nothing of it touches the store. Along the same ring travel the reports that a monitor process
cannot deliver itself, because its own main process is the one that died.

Which ranks are suspected to be lost, and on what evidence:

* a connection that was up breaks, and connecting again is refused: both processes are gone. (The
  main process holds the listening socket open as long as it lives, even when its monitor process
  has to be replaced, so the death of a monitor process alone is not taken for the rank's.)
* a connection that was up stays silent for ``heartbeat_timeout``;
* a rank cannot be reached, whether it ever could or not.

One neighbour's evidence is a suspicion and no more: the path between the two may be broken, or
closed by a firewall. The other side of it: a monitor process that no predecessor is heard from has
its main process say so in the store (``vouch``), again and again. A main process records a
suspected rank as lost only if that rank does not say anything in the store for the time that comes
with the suspicion. So several hosts may be lost at once, and no healthy rank is.

A host that was cut off suspects all others, and can say so once it is back. By then its predecessor
watches the next rank, which therefore does not vouch. So what a rank suspected that is lost itself
does not count, and whoever hears a rank does not pass on that another one does not.

A rank that was passed over, and is not known to be lost, is tried again and again: once the path to
it is back, the suspicion is withdrawn, and it is the next one again, and watched.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ncclops.restart._monitor.link import Message, Peer

log = logging.getLogger("ncclops.restart.monitor")

# A healthy monitor process accepts within milliseconds; this bounds a host that does not answer.
_CONNECT_TIMEOUT_S = 5.0
# A rank without a predecessor says so in the store after a second, and then every second: how long
# it has not to be heard there until it counts as lost.
_VOUCHES_WITHIN_S = 5.0
_VOUCH_AFTER_S = 1.0
_VOUCH_EVERY_S = 1.0
# A process that is on its way out may still take a connection or two before it refuses.
_MOST_CLOSURES = 5
# How often, in each ``heartbeat_timeout``, a rank that was passed over is tried again.
_RETRIES_PER_TIMEOUT = 4


class Address(NamedTuple):
    """Where the monitor process of an initial rank listens, and the token that it asks for."""

    rank: int
    host: str
    port: int
    token: str


class RingActions(NamedTuple):  # a dataclass would take the monitor process 8 ms to import
    """What the ring needs of the process that it runs in."""

    watch: Callable[[Peer, Callable[[], None], bool], None]  # True: for the end of a connect
    unwatch: Callable[[Peer], None]
    suspect: Callable[[int, str, float], None]  # an initial rank, the evidence, and the time it has
    withdraw: Callable[[int], None]  # what was suspected of an initial rank: it has answered
    need_addresses: Callable[[int], None]  # of the ranks after this one
    linked: Callable[[], None]  # a successor is there: what was waiting can be sent


class Ring:
    """The place of one monitor process in the ring: its successor and its predecessors."""

    def __init__(
        self, rank: int, token: str, interval_s: float, timeout_s: float, actions: RingActions
    ) -> None:
        self._rank = rank
        self._token = token
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._actions = actions
        self._candidates: deque[Address] = deque()
        self._asked = False
        self._target: Address | None = None
        self._link: Peer | None = None
        self._connected = False
        self._closures = 0  # by the present target
        self._was_linked = False  # with the present target
        self._last_rank = rank  # the last one that was tried
        self._deadline = 0.0
        self._next_ping = 0.0
        self._skipped: list[Address] = []  # in the order of the ring, all before the target
        self._probe: tuple[Address, Peer] | None = None  # of one that was passed over
        self._probes = 0
        self._next_probe = 0.0
        self.predecessors: set[Peer] = set()
        self._started = time.monotonic()
        self._heard = self._started  # a predecessor, the last time
        self._next_vouch = 0.0
        self.alone = False

    # --- towards the successor ---------------------------------------------------------------

    @property
    def successor(self) -> Peer | None:
        """The link to the successor, once it has answered."""
        return self._link if self._link is not None and self._link.trusted else None

    @property
    def idle(self) -> bool:
        """Whether there is no successor, and no candidate for one."""
        return self._target is None and not self._candidates

    def hears(self, rank: int) -> bool:
        """Whether ``rank`` is this one, or the successor, which answers."""
        answering = None if self.successor is None else self._target
        return rank == self._rank or (answering is not None and rank == answering.rank)

    def add_candidates(self, addresses: list[Address], now: float) -> None:
        """Take the answer to ``need_addresses``; an empty one: no other rank is left."""
        self._asked = False
        self.alone = not addresses
        self._candidates.extend(addresses)
        if self._target is None and addresses:
            self._try_next(now)

    def _try_next(self, now: float) -> None:
        """Turn to the next candidate."""
        self._drop_link()
        self._closures, self._was_linked = 0, False
        self._target = self._candidates.popleft() if self._candidates else None
        if self._target is not None:
            self._connect(now)
        elif not self._asked:
            self._asked = True
            self._actions.need_addresses(self._last_rank)

    def _connect(self, now: float) -> None:
        assert self._target is not None
        self._last_rank = self._target.rank
        self._deadline = now + min(_CONNECT_TIMEOUT_S, self._timeout_s)
        self._connected = False
        self._link, failure = _connecting_to(self._target)
        if failure == 0:
            self._actions.watch(self._link, self._on_connect, True)
        else:
            self._on_failure(failure, now)

    def _on_link(self) -> None:
        link = self._link
        messages = link.receive() if link is not None else []
        if messages is None:
            self._on_broken_link()
            return
        for message in messages:
            if self._link is link is not None:  # a message may have ended the link
                self._on_message(link, message)

    def _on_connect(self) -> None:
        link, now = self._link, self.clock()
        if link is None:
            return
        failure = link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            self._on_failure(failure, now)
            return
        assert self._target is not None
        self._connected = True
        self._deadline = now + self._timeout_s
        link.send({"op": "hello", "rank": self._rank, "token": self._target.token})
        self._actions.watch(link, self._on_link, False)

    def _on_message(self, link: Peer, message: Message) -> None:
        now = self.clock()
        self._deadline = now + self._timeout_s
        if message["op"] == "hello":
            log.info("watching the monitor process of rank %d", self._last_rank)
            link.trusted = self._was_linked = True
            self._next_ping = now + self._interval_s
            self._actions.linked()
        elif message["op"] == "leaving":
            self._try_next(now)
        elif message["op"] != "pong":
            self.on_answer(message)

    def _on_broken_link(self) -> None:
        """The other end closed the connection: see whether its process is gone."""
        now = self.clock()
        self._drop_link()
        self._closures += 1
        if self._was_linked or self._closures == 1:
            self._connect(now)
        elif self._closures >= _MOST_CLOSURES:
            self._give_up("closed the connection", now)
        # else ``tick`` connects once more

    def _on_failure(self, failure: int, now: float) -> None:
        """Connecting has failed with this error number."""
        if failure == errno.ECONNRESET:  # connected, and closed before we have looked
            self._on_broken_link()
            return
        if failure == errno.ECONNREFUSED and self._closures:
            self._was_linked = True  # it listened before: lost, even if it never answered
        self._give_up(f"connect: {errno.errorcode.get(failure, failure)}", now)

    def _give_up(self, evidence: str, now: float) -> None:
        """The target cannot be reached: that is a suspicion. Try the next."""
        target = self._target
        assert target is not None
        # At the start its monitor process may not have begun to miss a predecessor.
        is_new = now - self._started < self._timeout_s and not self._was_linked
        patience_s = self._timeout_s if is_new else _VOUCHES_WITHIN_S
        self._actions.suspect(target.rank, evidence, max(patience_s, _VOUCHES_WITHIN_S))
        if target not in self._skipped:
            self._skipped.append(target)
        self._next_probe = now + self._timeout_s / _RETRIES_PER_TIMEOUT
        self._try_next(now)

    def _drop_link(self) -> None:
        if self._link is not None:
            self._actions.unwatch(self._link)
            self._link.close()
            self._link = None

    # --- towards those that were passed over --------------------------------------------------

    def forget(self, rank: int) -> None:
        """``rank`` is lost: it is not tried again."""
        self._skipped = [address for address in self._skipped if address.rank != rank]
        if self._probe is not None and self._probe[0].rank == rank:
            self._end_probe()

    def _probe_skipped(self, now: float) -> None:
        """Try the next of those that were passed over; one that answers is adopted."""
        self._end_probe()
        self._next_probe = now + self._timeout_s / _RETRIES_PER_TIMEOUT
        address = self._skipped[self._probes % len(self._skipped)]
        self._probes += 1
        peer, failure = _connecting_to(address)
        self._probe = address, peer
        if failure == 0:
            self._actions.watch(peer, self._on_probe_connect, True)

    def _on_probe_connect(self) -> None:
        if self._probe is None:
            return
        address, peer = self._probe
        if peer.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._end_probe()
            return
        peer.send({"op": "hello", "rank": self._rank, "token": address.token})
        self._actions.watch(peer, self._on_probe, False)

    def _on_probe(self) -> None:
        if self._probe is None:
            return
        messages = self._probe[1].receive()
        if messages is None:
            self._end_probe()
        elif any(message["op"] == "hello" for message in messages):
            self._adopt(*self._probe)

    def _adopt(self, address: Address, peer: Peer) -> None:
        """The path to a rank that was passed over is back: it is the successor again."""
        place = self._skipped.index(address)
        later = self._skipped[place + 1 :] + ([self._target] if self._target is not None else [])
        self._skipped = self._skipped[:place]
        self._candidates.extendleft(reversed(later))
        self._drop_link()
        self._target, self._link, self._probe = address, peer, None
        self._last_rank = address.rank
        self._connected, self._closures, self.alone = True, 0, False
        self._actions.withdraw(address.rank)
        self._actions.watch(peer, self._on_link, False)
        self._on_message(peer, {"op": "hello"})

    def _end_probe(self) -> None:
        if self._probe is not None:
            self._actions.unwatch(self._probe[1])
            self._probe[1].close()
            self._probe = None

    # --- towards the predecessor -------------------------------------------------------------

    def accept(self, sock: socket.socket) -> None:
        """A connection has come in; its first message has to prove that it is one of ours."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = Peer(sock)
        self.predecessors.add(peer)
        self._actions.watch(peer, lambda: self._on_predecessor(peer), False)

    def _on_predecessor(self, peer: Peer) -> None:
        messages = peer.receive()
        if peer.trusted:
            self._heard = self.clock()
        for message in messages or ():
            if message["op"] == "hello":
                peer.trusted = message.get("token") == self._token
                peer.send({"op": "hello"})
            elif not peer.trusted:
                messages = None
                break
            elif message["op"] == "ping":
                peer.send({"op": "pong"})
            else:
                self.on_request(peer, message)
        if messages is None:
            self.predecessors.discard(peer)
            self._actions.unwatch(peer)
            peer.close()

    def misses_predecessor(self, now: float) -> bool:
        """Whether it is time to say in the store that this rank lives, as no predecessor asks."""
        has_one = any(peer.trusted for peer in self.predecessors)
        once = max(3 * self._interval_s, self._timeout_s / 4)
        silent_s = now - self._heard
        was_there = self._heard > self._started
        if silent_s < (_VOUCH_AFTER_S if was_there and not has_one else once):
            return False
        if now < self._next_vouch:
            return False
        is_new = silent_s < 2 * self._timeout_s
        self._next_vouch = now + (_VOUCH_EVERY_S if is_new else _VOUCHES_WITHIN_S / 2)
        return True

    # --- set by the owner --------------------------------------------------------------------

    clock: Callable[[], float]
    on_answer: Callable[[Message], None]  # from the successor
    on_request: Callable[[Peer, Message], None]  # from a predecessor

    def tick(self, now: float) -> None:
        """Send the ping that is due and judge silence."""
        if self._skipped and now >= self._next_probe:
            self._probe_skipped(now)
        if self._link is None:
            if self._target is not None:
                self._connect(now)
            return
        if self.successor is not None and now >= self._next_ping:
            self._next_ping = now + self._interval_s
            self._link.send({"op": "ping"})
        if now < self._deadline:
            self._link.flush()
        elif self._connected:
            self._give_up(f"no heartbeat for {self._timeout_s:g} s", now)
        else:
            self._give_up("connect: timed out", now)

    def postpone(self, now: float) -> None:
        """Do not count the silence so far: it was this process that did not run."""
        self._deadline = now + self._timeout_s
        self._heard = now

    def leave(self) -> None:
        """Let the predecessors go on to the next rank, and close."""
        for peer in self.predecessors:
            if peer.trusted:
                peer.send({"op": "leaving"})
            peer.close()
        self.predecessors.clear()
        self._drop_link()
        self._end_probe()


def _connecting_to(address: Address) -> tuple[Peer, int]:
    """A connection that is being made, and the error number if that has failed already, or 0."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    failure = sock.connect_ex((address.host, address.port))
    return Peer(sock), 0 if failure == errno.EINPROGRESS else failure
