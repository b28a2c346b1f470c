"""What runs in a rank: the function under test, and the faults that strike it."""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import importlib
import multiprocessing.util
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ncclops.errors import UsageError
from ncclops.restart import _observer
from ncclops.testing import notes
from ncclops.testing._channel import Channel
from ncclops.testing.errors import InjectedFault
from ncclops.testing.faults import Fault, FaultKind

if TYPE_CHECKING:
    from ncclops.restart.incident import Incident
    from ncclops.restart.settings import Settings
    from ncclops.testing._order import RankOrder

# Longer than any deadline.
_FOR_EVER_S = 100_000


def prepare() -> None:
    """Import what every rank needs, before ranks are forked."""
    importlib.import_module("torch.distributed")
    importlib.import_module("ncclops.restart.wrap")


def run(order: RankOrder, channel: Channel) -> NoReturn:
    """Become the rank: run the function and report how it ended."""
    os.setsid()  # what it forks can be found by its session
    code = 1
    try:
        _redirect(order)
        faulthandler.enable()
        code = _call(order, channel)
    except BaseException:  # noqa: BLE001 - becomes the exit code
        traceback.print_exc()
    finally:
        # As an interpreter does when it ends: what multiprocessing has started as a daemon, such as
        # the workers of a data loader, ends with the rank.
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(order: RankOrder) -> None:
    log = os.open(order.directory / f"log-{order.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.working_directory)
    sys.path[:] = [*order.path, *(place for place in sys.path if place not in order.path)]


def _call(order: RankOrder, channel: Channel) -> int:
    """The exit code. What the function returns or raises goes to the harness."""
    rank = os.getpid()

    def report(message: dict[str, Any]) -> None:
        if os.getpid() == rank:  # a child that the function has forked is not the rank
            channel.send(message)

    def send_note(name: str, fields: dict[str, Any]) -> None:
        report({"op": "note", "name": name, "fields": fields, "at": time.time()})

    notes.install(send_note)
    try:
        function = order.target.load()
        args, kwargs, faults, wrapper = pickle.loads(order.call)
        _observer.install(RankObserver(order.rank, faults, wrapper, channel))
        value = function(*args, **kwargs)
        report({"op": "returned", "value": pickle.dumps(value)})
        return 0
    except BaseException as error:
        report(
            {
                "op": "raised",
                "error": repr(error),
                "chain": tuple(_chain(error)),
                "traceback": traceback.format_exc(),
            }
        )
        if not isinstance(error, SystemExit):
            raise
        return error.code if isinstance(error.code, int) else int(error.code is not None)


def _chain(error: BaseException | None) -> list[str]:
    chain: list[str] = []
    while error is not None and len(chain) < 10:
        chain.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return chain


class RankObserver:
    """Has the faults of one rank strike, and sends its incidents to the harness.

    ``wrapper`` replaces parameters of every ``Wrapper`` that is called in this rank.
    """

    def __init__(
        self, rank: int, faults: Sequence[Fault], wrapper: dict[str, Any], channel: Channel
    ) -> None:
        self._pid = os.getpid()
        self._waiting = {
            (fault.at, fault.n): number for number, fault in enumerate(faults) if fault.rank == rank
        }
        self._faults = faults
        self._wrapper = wrapper
        self._channel = channel
        self._passed: Counter[str] = Counter()
        self._lock = threading.Lock()

    def passes(self, place: str) -> None:
        """Suffer what is due at ``place``."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._passed[place] += 1
            number = self._waiting.pop((place, self._passed[place]), None)
        if number is not None:
            fault = self._faults[number]
            self._channel.send({"op": "strike", "fault": number, "at": time.time()})
            if fault.from_outside:
                self._channel.receive()  # the harness has done it
            else:
                _suffer(fault)

    def settings(self, settings: Settings) -> Settings:
        """With the parameters that the test replaces, and incidents on their way to it."""
        unknown = set(self._wrapper) - {field.name for field in dataclasses.fields(settings)}
        if unknown:
            raise UsageError(f"wrapper={{{min(unknown)!r}: …}}: Wrapper has no such parameter")
        changed = dataclasses.replace(settings, **self._wrapper)
        previous = changed.on_incident

        def on_incident(incident: Incident) -> None:
            self._channel.send({"op": "incident", "incident": incident})
            if previous is not None:
                previous(incident)

        return dataclasses.replace(changed, on_incident=on_incident)


def _suffer(fault: Fault) -> None:
    match fault.kind:
        case FaultKind.EXCEPTION:
            raise fault.error or InjectedFault(f"injected at {fault.at!r}, passing {fault.n}")
        case FaultKind.EXIT:
            sys.exit(fault.code)
        case FaultKind.HANG:
            time.sleep(_FOR_EVER_S)
        case FaultKind.GIL_HANG:
            ctypes.PyDLL(None).sleep(_FOR_EVER_S)
        case FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case FaultKind.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
