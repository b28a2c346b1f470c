"""A function that goes on with its objects after a fault, instead of being called again.

::

    on_membership ─► function ─┬─ returns ─► the wrapped function goes on
         ▲                     │
         │                     └─ fault ─► the phases of a restart (``loop.py``)
         └──────────────────────────────────────────┘

The wrapped function stays where it is, with all that it has made: model, optimizer, data. Only
``function`` is left and called again, after ``on_membership`` has made the groups anew. A rank that
a fault finds outside of it, and one that comes back in a new process, calls the wrapped function
from its start, and takes part from there. So do all where ``snapshot`` finds that there is no state
for objects that have been trained (``_calls.Call.begins_anew``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ncclops.restart._groups import kept_beside, kept_default, revoking
from ncclops.restart._groups.beside import GroupsBeside
from ncclops.restart._groups.regrouping import regroup
from ncclops.restart._torch_state import TorchState
from ncclops.restart.loop import RestartLoop
from ncclops.restart.regroup import Regrouped
from ncclops.restart.state import FrozenState

T = TypeVar("T")

# By these user code ends its process, or a generator: they are no faults to go on from.
_PASS = (SystemExit, KeyboardInterrupt, GeneratorExit)


@dataclass(frozen=True)
class Membership:
    """This rank among those that take part in an iteration, by their numbers in it."""

    iteration: int
    rank: int
    world_size: int
    initial_rank: int

    @classmethod
    def of(cls, state: FrozenState) -> Membership:
        """Of an active rank."""
        assert state.active_rank is not None and state.active_world_size is not None
        return cls(state.iteration, state.active_rank, state.active_world_size, state.initial_rank)


OnMembership = Callable[[Membership | None, Membership], object]


class KeepGoing:
    """Of one call of a wrapped function: ``loop`` is its loop. Main thread."""

    def __init__(self, loop: RestartLoop) -> None:
        self._loop = loop
        self._is_under_way = False
        # What on_membership is called with, while it is.
        self._changing: tuple[Membership | None, Membership] | None = None
        self._beside = GroupsBeside(loop.session)  # likewise
        # Whether ``on_membership`` has returned since a rank was new, and has made what holds
        # groups: a fault may come before that.
        self._has_objects = False

    def run(self, function: Callable[[], T], on_membership: OnMembership) -> T:
        """See ``CallWrapper.keep_going``."""
        if self._is_under_way:
            raise RuntimeError("keep_going() is for use outside of what it runs")
        self._is_under_way, self._has_objects = True, False
        try:
            return self._run(function, on_membership)
        finally:
            self._is_under_way = False
            self._loop.as_call.goes_on = False
            kept_default.drop()
            kept_beside.drop()
            revoking.end_kept()

    @property
    def is_in_on_membership(self) -> bool:
        """Whether ``on_membership`` is being called: what follows here is for use in it alone."""
        return self._changing is not None

    def regroup(self, backend: str, **options: Any) -> Regrouped:
        """See ``CallWrapper.init_process_group``."""
        assert self._changing is not None
        loop, (_, new) = self._loop, self._changing
        outcome = regroup(
            loop.session,
            backend,
            rank=new.rank,
            world_size=new.world_size,
            goes_on=self._has_objects,
            **options,
        )
        self._has_objects = outcome.objects_stay
        loop.note_regrouped(outcome)
        return outcome

    def new_group(self, *args: Any) -> Any:
        """See ``CallWrapper.new_group``."""
        return self._beside.new_group(*args)

    def init_device_mesh(self, *args: Any) -> Any:
        """See ``CallWrapper.init_device_mesh``."""
        return self._beside.device_mesh(*args)

    def _run(self, function: Callable[[], T], on_membership: OnMembership) -> T:
        loop, torch_state = self._loop, TorchState()
        old: Membership | None = None
        loop.as_call.begins_anew = False
        while True:
            loop.as_call.goes_on = old is not None
            new = Membership.of(loop.frozen_state())
            try:
                return self._attempt(function, on_membership, old, new)
            except _PASS:
                raise
            except BaseException as error:  # noqa: BLE001 - judged by the loop
                caught = error
            if os.getpid() != loop.pid:
                raise caught
            loop.settle()
            try:
                if loop.as_call.begins_anew:
                    raise caught
                loop.restart_inside(caught, torch_state)
            except BaseException:
                kept_beside.drop()
                kept_default.end()  # as all others: this rank does not go on here
                raise
            old = new
            del caught

    def _attempt(
        self,
        function: Callable[[], T],
        on_membership: OnMembership,
        old: Membership | None,
        new: Membership,
    ) -> T:
        try:
            if old is not None:
                self._loop.enter_armed()
            self._beside = beside = GroupsBeside(self._loop.session)
            self._changing = old, new
            on_membership(old, new)
            self._changing, self._has_objects = None, True
            beside.end_unused()
            self._loop.note_regrouped(*beside.outcomes)
            return function()
        except _PASS:
            raise
        except BaseException:
            self._loop.session.interrupter.armed = False  # first and without a call
            self._loop.settle()
            self._changing = None
            raise
