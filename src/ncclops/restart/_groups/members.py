"""The members of a default group that is to be: what they agree on, and do at the same time.

Who waits here for a rank that dies is interrupted like anywhere else in the function: the
connection to the store is shut down then. What all wait for has a deadline besides.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed import Store, distributed_c10d

if TYPE_CHECKING:
    from ncclops.restart.session import Session

log = logging.getLogger("ncclops.restart")

_VERDICT, _ALL_HAVE = "verdict", "all ranks have done it"


@dataclass
class Members:
    """Of an iteration, as the one with ``rank`` of the ``size`` sees them.

    ``timeout`` is that of the group's operations; ``None``: torch's default, or that of the profile
    under ``ncclops launch``. ``within`` is how long they may take to change a group. The keys of
    ``store`` are those of ``regrouping``.
    """

    session: Session
    backend: str
    timeout: timedelta | None
    within: timedelta
    device_id: torch.device | None
    rank: int
    size: int
    tries: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.store = self.session.store_for_user()
        self.store_timeout = self.timeout or distributed_c10d.default_pg_timeout
        self.store.set_timeout(self.store_timeout)

    def decided(
        self, each: str, all_: str, said: str, decide: Callable[[Sequence[bytes]], str]
    ) -> bytes:
        """What rank 0 makes of what every rank has said."""
        return decided(self.store, self.rank, range(self.size), each, all_, said, decide)

    def next_try(self) -> int:
        """Its number, from 0 on, the same for all."""
        self.tries += 1
        return self.tries - 1

    def all_have(self, begin: Callable[[Callable[[str], object]], object]) -> str | None:
        """Have all ranks do what ``begin`` begins, in a thread that then calls what it is given:
        why that counts as failed, on all of them, or ``None``."""
        prefix = str(self.next_try())
        # Over a connection of its own: the main thread waits on the other one.
        theirs = distributed.PrefixStore(prefix, self.session.store_for_user())
        with self.session.interrupter.atomic():
            begin(functools.partial(self._report, theirs))
        store = distributed.PrefixStore(prefix, self.store)
        with contextlib.suppress(distributed.DistStoreError):  # it has taken too long
            store.wait([_VERDICT], self.within)
        too_long = f"not all ranks have done it within {self.within.total_seconds():g} s"
        verdict: str = store.compare_set(_VERDICT, "", too_long).decode()
        return None if verdict == _ALL_HAVE else verdict

    def _report(self, store: Store, failure: str) -> None:
        """A failure ends the wait of all ranks at once: without this one, NCCL waits on theirs."""
        if failure:
            store.compare_set(_VERDICT, "", f"rank {self.rank}: {failure}")
        elif store.add("count", 1) == self.size:
            store.compare_set(_VERDICT, "", _ALL_HAVE)

    def make(self, name: str, store: Store, **options: Any) -> None:
        """Make torch's default group, over the part ``name`` of ``store``."""
        timeout: dict[str, Any] = {} if self.timeout is None else {"timeout": self.timeout}
        distributed.init_process_group(
            self.backend,
            store=distributed.PrefixStore(name, store),
            rank=self.rank,
            world_size=self.size,
            device_id=self.device_id,
            **timeout,
            **options,
        )

    def warn(self, text: str, *args: object) -> None:
        """On one rank."""
        log.log(logging.WARNING if self.rank == 0 else logging.INFO, text, *args)


def decided(
    store: Store,
    rank: int,
    ranks: Sequence[int],
    each: str,
    all_: str,
    said: str | None,
    decide: Callable[[Sequence[bytes]], str],
) -> bytes:
    """What rank 0 makes of what each of ``ranks`` has said below ``each``; found in ``all_``.

    ``said`` is what this one says, ``None``: it is none of them.
    """
    if said is not None:
        store.set(f"{each}/{rank}", said)
    if rank == 0:
        keys = [f"{each}/{member}" for member in ranks]
        if store.has_extended_api():
            found = store.multi_get(keys)
        else:
            found = [store.get(key) for key in keys]
        store.set(all_, decide(found))
    result: bytes = store.get(all_)
    return result
