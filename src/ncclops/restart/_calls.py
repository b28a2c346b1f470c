"""The calls of wrapped functions that are under way in this process, the innermost last.

For code inside the function that is not handed a ``CallWrapper``, such as a script under ``ncclops
launch``, and that has to agree on something with the other ranks: ``restart.snapshot``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ncclops.restart.log import logged

if TYPE_CHECKING:
    from ncclops.restart._store.client import StoreClient
    from ncclops.restart.state import FrozenState


@dataclass(eq=False)
class Call:
    """One call of a wrapped function.

    - ``state``: this rank's numbers, as they are now.
    - ``connect``: a connection to the store, in the name space of this call, for one thread.
    - ``aborted``: whether the groups of the present iteration are being aborted, or have been. Set
      before the first one is. Any thread.
    - ``atomic``: a section that no restart of it interrupts. Main thread.
    - ``at_end``: called in the main thread when the call ends, after the last iteration.
    - ``goes_on``: the function goes on with objects of an earlier iteration (``keep_going``).
    - ``begins_anew``: set for it to be called from its start at the end of the iteration instead.
    - ``reached``: the highest step that snapshots have heard of; ``None`` where there are none.
    """

    state: Callable[[], FrozenState]
    connect: Callable[[], StoreClient]
    aborted: Callable[[], bool]
    atomic: Callable[[], contextlib.AbstractContextManager[None]]
    at_end: list[Callable[[], object]] = field(default_factory=list)
    goes_on: bool = False
    begins_anew: bool = False
    reached: int | None = None

    def has_reached(self, step: int) -> None:
        """So many steps are done. Main thread."""
        self.reached = step if self.reached is None else max(self.reached, step)


_under_way: list[Call] = []


def begin(call: Call) -> None:
    """``call`` is the innermost one from now on. Main thread."""
    _under_way.append(call)


def end(call: Call) -> None:
    """``call`` has ended. Main thread."""
    if call in _under_way:
        del _under_way[_under_way.index(call) :]
    for callback in call.at_end:
        with logged("the end of a call"):
            callback()


def current() -> Call | None:
    """The innermost call under way; ``None``: the code runs in no wrapped function."""
    return _under_way[-1] if _under_way else None


@contextlib.contextmanager
def atomic() -> Iterator[None]:
    """A section that no restart of any call under way interrupts. Main thread."""
    with contextlib.ExitStack() as sections:
        for call in _under_way:
            sections.enter_context(call.atomic())
        yield
