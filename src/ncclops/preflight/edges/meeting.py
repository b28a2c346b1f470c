"""How hosts meet: each publishes once a round, one of them answers all, over the job's store.

::

    each    add came                       -> its number; who serves the store gathers for all
    each    set facts/<number>             the one: wait for all, set plan
    each    wait plan                      the first round
    each    set first/<number>             the one: set again
    each    wait again                     the second round
    each    set second/<number>            the one: set verdict
    each    wait verdict

Eight requests a host, whatever their number; what all need to know is one value. The store is
torch's TCPStore, as in the launcher's rendezvous. The host that serves it asks for small packets on
its connections, so that hosts meet also where large ones are lost: that is to be found, not met.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import msgspec

from ncclops.errors import STORE_CALL, PreflightRefused
from ncclops.host import interfaces
from ncclops.host_name import with_port
from ncclops.preflight.edges import machine, relay
from ncclops.preflight.edges.model import (
    Again,
    Facts,
    Outcome,
    PairsTried,
    PairTried,
    Plan,
    Verdict,
)
from ncclops.restart import store_server
from ncclops.restart._store.addresses import one_short_query

T = TypeVar("T")
M = TypeVar("M", Facts, Plan, Outcome, Again, Verdict, PairTried, PairsTried)

# The least that every IPv4 host accepts (RFC 9293), without headers.
_SMALL_SEGMENT = 536
_RETRY_S = 0.5  # no event says when another host begins to listen
_CONNECT_S = 5.0
_STORE_TRIES = 3
# Beyond what a wait in the store was given: for the answer's way here.
_ANSWER_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where hosts meet. ``host`` and ``port`` are the store's; ``count`` hosts are expected, of
    which ``least`` have to come; ``expected`` are their names, where a scheduler says them;
    ``rank`` is this host's place, if it has one. ``external``: no host of the job serves it.
    ``gathers``: whether this host gathers for all; None: that is settled when they meet.
    """

    host: str
    port: int
    count: int
    least: int
    job_id: str = "none"
    rank: int | None = None
    external: bool = False
    serves: bool | None = None
    gathers: bool | None = None
    expected: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """``host:port``."""
        return with_port(self.host, self.port)

    def scoped(self, address: str) -> str:
        """``address`` with the interface that ``host`` names, as a link-local one needs."""
        scope = self.host.partition("%")[2]
        is_local = ":" in address and ipaddress.IPv6Address(address).is_link_local
        return f"{address}%{scope}" if scope and is_local else address


class Unmet(PreflightRefused):
    """The hosts could not meet, or the host that gathers for all fell silent."""


class Meeting:
    """One host's part in it. Every call ends within the seconds that it is given, or raises
    ``Unmet``."""

    def __init__(
        self, where: Where, store: Any, number: int, way: contextlib.AsyncExitStack
    ) -> None:
        self._where, self._way = where, way
        self._store = store
        self._round = number // where.count
        self._prefix = f"ncclops-preflight/{where.job_id}/{self._round}/"
        self.number = number % where.count
        self.gathers = False  # whether this host gathers for all

    @classmethod
    async def join(cls, where: Where, within_s: float) -> Meeting:
        """Meet at ``where``; the host whose address that is serves the store.

        Raises ``Unmet`` with what kept this host from it.
        """
        deadline = time.monotonic() + within_s
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # says which names it cannot look up
        tcp_store = store_server.load_tcp_store()
        here = where.serves
        if here is None:
            here = not where.external and interfaces.is_here(where.host)
        serving = here and _serve(where.port, tcp_store)
        way = contextlib.AsyncExitStack()
        store = await _store(where, tcp_store, deadline, way)
        came = await _call(
            lambda: int(store.add(f"ncclops-preflight/{where.job_id}/came", 1)),
            max(_ANSWER_S, deadline - time.monotonic()),  # half of all packets may be lost
            f"the store at {where.address} does not answer",
        )
        meeting = cls(where, store, came - 1, way)
        if where.gathers is not None:
            meeting.gathers = where.gathers
        elif serving or meeting.number == 0:
            await meeting._claim(at_once=serving or where.external)
        return meeting

    async def aclose(self) -> None:
        """Give up the way to the store."""
        await self._way.aclose()

    async def _claim(self, *, at_once: bool) -> None:
        """Gather for all, unless another host does: the one that serves the store, without which
        there is no meeting anyway; the first to arrive where none of them serves it."""
        if not at_once:
            await self._wait("gathers", _ANSWER_S)
        name, own = f"{self._prefix}gathers", str(self.number)

        def claim() -> str:
            answer: bytes = self._store.compare_set(name, "", own)
            return answer.decode()

        lost = f"the store at {self._where.address} does not answer"
        self.gathers = await _call(claim, _ANSWER_S, lost) == own

    async def all_came(self) -> bool:
        """Whether as many hosts as are expected have reached the store."""
        name = f"ncclops-preflight/{self._where.job_id}/came"
        lost = f"the store at {self._where.address} was lost"
        came = await _call(lambda: int(self._store.add(name, 0)), _ANSWER_S, lost)
        return came >= (self._round + 1) * self._where.count

    async def say(
        self, topic: str, value: Facts | Outcome | PairTried, within_s: float = 0.0
    ) -> None:
        """Publish this host's part of ``topic``; it has ``within_s`` for that, or ten seconds."""
        await self._set(f"{topic}/{self.number}", value, within_s)

    async def answer(self, topic: str, value: Plan | Again | Verdict | PairsTried) -> None:
        """Publish what all hosts wait for."""
        await self._set(topic, value)

    async def hear(self, topic: str, kind: type[M], within_s: float) -> M:
        """What the host that gathers publishes. Raises ``Unmet`` where it does not, in time, or
        publishes something else."""
        data = await self._wait(topic, within_s)
        if data is None:
            raise Unmet(
                f"no {topic} came from the host that gathers for all, within {within_s:.0f} s:"
                " it has ended, or its link is lost; its output says more"
            )
        if (said := _decoded(data, kind)) is None:
            raise Unmet(
                f"the {topic} that came from the host that gathers for all cannot be read: install"
                " the same version of ncclops on all hosts, and give each meeting in a store its"
                " own --rdzv-id"
            )
        return said

    async def gather(
        self, topic: str, kind: type[M], numbers: Iterable[int], within_s: float
    ) -> dict[int, M]:
        """What the hosts ``numbers`` (by their arrival) have published of ``topic``; without those
        that are late."""
        deadline, found = time.monotonic() + within_s, dict[int, M]()
        for number in numbers:
            left_s = deadline - time.monotonic()
            data = await self._wait(f"{topic}/{number}", max(0.0, left_s))
            if data is not None and (said := _decoded(data, kind)) is not None:
                found[number] = said  # what cannot be read is as if it had not come
        return found

    async def _set(self, key: str, value: object, within_s: float = 0.0) -> None:
        name, data = self._prefix + key, msgspec.json.encode(value)

        def write() -> None:
            self._store.set(name, data.decode())
            self._store.check([name])  # a write is not answered; this is, after it

        lost = f"the store at {self._where.address} does not answer"
        await _call(write, max(2 * _ANSWER_S, within_s), lost)

    async def _wait(self, key: str, within_s: float) -> bytes | None:
        name = self._prefix + key

        def read() -> bytes | None:
            try:
                if within_s > 0:
                    self._store.wait([name], timedelta(seconds=max(0.01, within_s)))
                elif not self._store.check([name]):
                    return None
                return bytes(self._store.get(name))
            except RuntimeError as error:
                if "timeout" in str(error).lower():
                    return None
                raise

        lost = f"the store at {self._where.address} was lost"
        return await _call(read, within_s + _ANSWER_S, lost)


def _decoded(data: bytes, kind: type[M]) -> M | None:
    """What another host has published; None where it is no ``kind``."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError):  # of msgspec and of Unicode
        return None


def ask_for_small_packets(listener: socket.socket) -> None:
    """Have those that connect to ``listener`` send packets that every path takes, and be sent such.

    So hosts can meet also where large packets are lost.
    """
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SMALL_SEGMENT)


def _serve(port: int, tcp_store: Any) -> bool:
    listener = store_server.bind(port)
    if listener is None:
        return False  # a store serves there already; if it is none, connecting to it says so
    with listener:
        ask_for_small_packets(listener)
        # A process of its own: it answers until the last host has read the verdict.
        reap = store_server.start(listener, tcp_store)
    threading.Thread(target=reap, name="ncclops-store", daemon=True).start()
    return True


async def _store(
    where: Where, tcp_store: Any, deadline: float, way: contextlib.AsyncExitStack
) -> Any:
    """A client of the store. It connects by itself, from another local port than the trial before
    it: where answers to that one alone are dropped, the next may pass."""
    for tries in itertools.count(1):
        address, port = await _reached(where, deadline, way)

        def connect(address: str = address, port: int = port) -> Any:
            limit = timedelta(seconds=_CONNECT_S)
            with one_short_query():
                return tcp_store(address, port, None, False, limit, wait_for_workers=False)

        failed = f"no store answers at {where.address}"
        try:
            return await _call(connect, _CONNECT_S + _ANSWER_S, failed)
        except Unmet:
            if tries >= _STORE_TRIES and time.monotonic() > deadline:
                raise
    raise AssertionError("the last try returns or raises")


async def _reached(
    where: Where, deadline: float, way: contextlib.AsyncExitStack
) -> tuple[str, int]:
    """The store's address and port, once it accepts a connection. ``way`` is what leads there."""
    says = ""
    while True:
        for address in map(where.scoped, await machine.lookup(where.host)):
            loop = asyncio.get_running_loop()
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
                sock.setblocking(False)
                try:
                    async with asyncio.timeout(_CONNECT_S):
                        await loop.sock_connect(sock, (address, where.port))
                except TimeoutError:
                    says = f"{address} does not answer: packets are dropped on the way or back"
                    if passing := await relay.ports_that_pass(address, where.port, _CONNECT_S):
                        made = relay.relay(address, where.port, passing)
                        return "127.0.0.1", await way.enter_async_context(made)
                except OSError as error:
                    says = f"{address}: {os.strerror(error.errno or 0)}"
                else:
                    return address, where.port
        if time.monotonic() > deadline:
            says = says or f"this host knows no address of {where.host}"
            raise Unmet(
                f"this host could not reach the meeting at {where.address}: {says}."
                " Is preflight running there, and may this host connect to that port?"
            )
        await asyncio.sleep(_RETRY_S)


async def _call(function: Callable[[], T], within_s: float, failed: str) -> T:
    """``function()``, in a thread that nothing waits for beyond ``within_s``."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(error: BaseException | None, result: Any = None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    def call() -> None:
        try:
            outcome = (None, function())
        except Exception as error:  # noqa: BLE001 - raised again where it is awaited
            outcome = (error, None)  # type: ignore[assignment]
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=call, name=STORE_CALL, daemon=True).start()
    try:
        return await asyncio.wait_for(answer, within_s)
    except TimeoutError:
        raise Unmet(f"{failed}: no answer within {within_s:.0f} s") from None
    except (RuntimeError, OSError) as error:
        first = str(error).partition("\n")[0]
        raise Unmet(f"{failed}: {first}") from None
