"""Faults as values: what strikes which rank, where and when."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from ncclops.errors import UsageError


class FaultKind(enum.StrEnum):
    """What happens to a rank, or around it."""

    EXCEPTION = "exception"
    EXIT = "exit"
    HANG = "hang"
    GIL_HANG = "gil-hang"
    KILL = "kill"
    STOP = "stop"
    LOST_HOST = "lost-host"
    LOST_CONNECTION = "lost-connection"
    CUT_OFF = "cut-off"
    SLOW_STORE = "slow-store"
    PAUSED_STORE = "paused-store"


# They take their ranks out of the job wherever they strike; a rank that is stopped or holds the
# GIL is ended at the hard timeout, one that is cut off leaves with ``StoreGone``.
_LETHAL = frozenset(
    {
        FaultKind.EXIT,
        FaultKind.GIL_HANG,
        FaultKind.KILL,
        FaultKind.STOP,
        FaultKind.LOST_HOST,
        FaultKind.CUT_OFF,
    }
)
# A rank that fails here cannot go on, see ``Wrapper``.
_PLACES_OF_NO_RETURN = frozenset({"finalize", "restart_health_check", "barrier"})
_OF_A_RANK = frozenset({FaultKind.EXCEPTION, FaultKind.HANG})
# What the harness does from outside, to the processes or to the connections to the store.
_FROM_OUTSIDE = frozenset(
    {
        FaultKind.LOST_HOST,
        FaultKind.LOST_CONNECTION,
        FaultKind.CUT_OFF,
        FaultKind.SLOW_STORE,
        FaultKind.PAUSED_STORE,
    }
)


@dataclass(frozen=True)
class Fault:
    """One fault. It strikes once: when ``rank`` passes the place ``at`` for the ``n``-th time.

    ``rank`` is the initial rank. Passings are counted from 1 over the whole job, restarts
    included, so that a step that is done again counts again. Made by the methods below.

    Raises ``UsageError`` on ``n`` below 1, a rank below 0 and values of a wrong type.
    """

    kind: FaultKind
    rank: int
    at: str
    n: int = 1
    ranks: tuple[int, ...] = ()
    error: Exception | None = None
    code: int = 0
    delay: timedelta = timedelta(0)
    duration: timedelta = timedelta(0)
    silent: bool = False

    def __post_init__(self) -> None:
        if self.n < 1 or self.rank < 0 or not self.at:
            raise UsageError(
                f"{self}: ranks count from 0, passings from 1, and a place has a name; "
                "n=1 strikes at the first passing"
            )
        if self.error is not None and not isinstance(self.error, Exception):
            raise UsageError(
                f"{self}: error={self.error!r} is no exception, as OSError(28, 'full')"
            )
        for name in ("delay", "duration"):
            value = getattr(self, name)
            if not isinstance(value, timedelta) or value < timedelta(0):
                raise UsageError(
                    f"{self}: {name}={value!r}: give a timedelta, as timedelta(seconds=2)"
                )

    # --- what the rank does to itself ---------------------------------------------------------

    @classmethod
    def exception(cls, rank: int, at: str, n: int = 1, error: Exception | None = None) -> Fault:
        """The rank raises ``error``, by default an ``InjectedFault`` that names the place.

        ``error`` has to be picklable.
        """
        return cls(FaultKind.EXCEPTION, rank, at, n, error=error)

    @classmethod
    def exit(cls, rank: int, at: str, n: int = 1, code: int = 1) -> Fault:
        """The rank calls ``sys.exit(code)``: it leaves, the others go on without it."""
        return cls(FaultKind.EXIT, rank, at, n, code=code)

    @classmethod
    def hang(cls, rank: int, at: str, n: int = 1) -> Fault:
        """The rank sleeps, and can be interrupted."""
        return cls(FaultKind.HANG, rank, at, n)

    @classmethod
    def gil_hang(cls, rank: int, at: str, n: int = 1) -> Fault:
        """The rank sleeps in C code with the GIL in hand: none of its threads runs any more."""
        return cls(FaultKind.GIL_HANG, rank, at, n)

    @classmethod
    def kill(cls, rank: int, at: str, n: int = 1) -> Fault:
        """SIGKILL to the rank's main process. Its monitor process lives."""
        return cls(FaultKind.KILL, rank, at, n)

    @classmethod
    def stop(cls, rank: int, at: str, n: int = 1) -> Fault:
        """SIGSTOP to the rank's main process."""
        return cls(FaultKind.STOP, rank, at, n)

    # --- what happens around it ---------------------------------------------------------------

    @classmethod
    def lost_host(cls, rank: int, at: str, n: int = 1, ranks: Iterable[int] = ()) -> Fault:
        """SIGKILL to all processes of ``rank`` and ``ranks`` at once, monitor processes included.

        ``rank`` is the one whose passing counts. The store is on another host.
        """
        return cls(FaultKind.LOST_HOST, rank, at, n, ranks=tuple(ranks))

    @classmethod
    def lost_connection(cls, rank: int, at: str, n: int = 1, *, silent: bool = False) -> Fault:
        """All connections of the rank to the store are reset, once; it may connect again.

        With ``silent`` they are not: nothing is passed on any more, and nothing shows it.
        """
        return cls(FaultKind.LOST_CONNECTION, rank, at, n, silent=silent)

    @classmethod
    def cut_off(cls, rank: int, at: str, n: int = 1, *, silent: bool = False) -> Fault:
        """Likewise, for good: new connections are refused too, or with ``silent`` not answered."""
        return cls(FaultKind.CUT_OFF, rank, at, n, silent=silent)

    @classmethod
    def slow_store(
        cls, rank: int, at: str, n: int = 1, *, delay: timedelta, duration: timedelta
    ) -> Fault:
        """From the passing on, for ``duration``, what any rank sends to the store or gets from it
        takes ``delay`` longer each way."""
        return cls(FaultKind.SLOW_STORE, rank, at, n, delay=delay, duration=duration)

    @classmethod
    def paused_store(cls, rank: int, at: str, n: int = 1, *, duration: timedelta) -> Fault:
        """From the passing on, for ``duration``, the store neither receives nor answers."""
        return cls(FaultKind.PAUSED_STORE, rank, at, n, duration=duration)

    # --- what follows -------------------------------------------------------------------------

    @property
    def from_outside(self) -> bool:
        """Whether the harness carries it out, while the rank waits at the place."""
        return self.kind in _FROM_OUTSIDE

    @property
    def takes(self) -> frozenset[int]:
        """The initial ranks that it takes out of the job: the others have to finish."""
        lethal_here = self.kind in _OF_A_RANK and self.at in _PLACES_OF_NO_RETURN
        if self.kind in _LETHAL or lethal_here:
            return frozenset({self.rank, *self.ranks})
        return frozenset()

    def __str__(self) -> str:
        silent = "silent " if self.silent else ""
        return f"{silent}{self.kind} on rank {self.rank} at {self.at!r}, passing {self.n}"
