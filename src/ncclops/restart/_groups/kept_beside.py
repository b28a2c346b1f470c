"""Groups beside the default one that outlive a restart, where no operation of them is under way.

``_groups.beside`` makes them. When a fault has come, the thread that aborts looks at each
(``spare``). One that is idle is taken out of torch's tables, and its connections are left alone, so
that no abort meets it. Any other is *cut*: it counts as one of torch's from then on, and is aborted
like all. Each is looked at again when the main thread is out of the function, and while that waits
for something: it may have begun an operation meanwhile. After the barrier the members agree on what
goes on, and that is put back (``adopt``).

torch's flight recorder knows what is under way. What it does not see puts a group in doubt, and one
in doubt is cut: messages between two ranks, of which each counts alone, and CUDA graphs.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d

from ncclops.restart._groups import gloo_sockets
from ncclops.restart._groups.aborting import abort_later
from ncclops.restart._groups.backends import backends_of, error_of
from ncclops.restart._groups.kept_default import Entries
from ncclops.restart._groups.recorder import (
    outlive,
    pending_operations,
    recorded_groups,
    recorded_of_gloo,
)
from ncclops.restart._interrupt.delicate import is_delicate
from ncclops.restart.regroup import LOST_CONNECTION, Had

# The recorder learns of the end of an operation a moment after who has waited for it.
_LOOKS = 4
_BETWEEN_LOOKS_S = 0.0005
# Who has not left the function for so long waits for something, whatever the recorder says.
_LEAVES_WITHIN_S = 1.0

_UNDER_WAY = "an operation of it was under way"
_MESSAGES = "messages between two ranks (send, recv) were sent in it"
_NOT_RECORDED = "torch's flight recorder, which is off or too old, does not have it"


@dataclass(eq=False)
class KeptGroup:
    """``made`` as in ``regroup.Had``; ``group`` and ``name`` as torch has them.

    ``used_in`` is the latest iteration that it was asked for in. ``sockets``: those of its
    connection to the store. Of Gloo, ``epoll`` is the instance in which its connections are
    registered, and ``number`` the recorder's.
    """

    made: tuple[int, int]
    description: str
    group: Any
    name: str
    sockets: set[int]
    used_in: int
    epoll: int | None = None
    number: str | None = None
    why_not: str | None = None
    out: Entries | None = None  # of torch's tables, while it is out of them

    def find_gloo(self, threads: set[int], recorded: set[Any]) -> None:
        """Of Gloo: there were these threads and numbers before it was made, and used."""
        for _ in range(_LOOKS):  # a thread names itself, and a group of one rank waits for nobody
            if new_threads := gloo_sockets.gloo_threads() - threads:
                break
            time.sleep(_BETWEEN_LOOKS_S)
        new_numbers = set(recorded_of_gloo()) - recorded
        if len(new_numbers) != 1:
            self.why_not = _NOT_RECORDED
        elif len(new_threads) != 1 or (epoll := gloo_sockets.epoll_of(*new_threads)) is None:
            self.why_not = "its connections cannot be told from others"
        else:
            (self.number,), self.epoll = new_numbers, epoll

    def why_not_idle(self) -> str | None:
        """``None``: no operation of it is under way. Any thread."""
        for _ in range(_LOOKS):
            if (why := self._why_not_idle()) != _UNDER_WAY:
                break
            time.sleep(_BETWEEN_LOOKS_S)
        return why

    def _why_not_idle(self) -> str | None:
        begun = self.group._get_sequence_number_for_group()
        if self.epoll is not None:
            if (status := recorded_of_gloo().get(self.number)) is None:
                return _NOT_RECORDED
            return None if status["last_completed_collective"] == begun else _UNDER_WAY
        if begun and not recorded_groups():
            return _NOT_RECORDED
        pending = any(each["process_group"][0] == self.name for each in pending_operations())
        return _UNDER_WAY if pending else None

    def why_disconnected(self) -> str | None:
        """``None``: its connections are whole, as far as that can be told."""
        if self.epoll is None:
            errors = map(error_of, backends_of(self.group))
            return next((f"NCCL reports {each}" for each in errors if each is not None), None)
        connections = gloo_sockets.gloo_connections({self.epoll})
        for connection in connections:
            connection.close()
        return None if len(connections) == self.group.size() - 1 else LOST_CONNECTION

    def cut(self, why: str) -> None:
        """An abort meets it from now on; where one has gone past it is ended here."""
        if self.why_not is not None:
            return
        self.why_not = why
        gloo_sockets.left_alone.discard(self.epoll)
        outlive.discard(self.name)
        if self.out is not None and self.epoll is not None:
            gloo_sockets.shut_down_gloo_connections({self.epoll})
        elif self.out is not None:
            abort_later(list(backends_of(self.group)), [self.group])


_groups: tuple[KeptGroup, ...] = ()
_lock = threading.Lock()
_in_use_since: int | None = None
_waits_since: float | None = None


# --- while the function runs ----------------------------------------------------------------------


@is_delicate  # holds a lock
def add(group: KeptGroup) -> None:
    """Have ``group``, which has just been made, outlive faults. In an atomic section."""
    global _groups
    note_messages()
    with _lock:
        _groups = (*_groups, group)
        if group.why_not is None:
            outlive.add(group.name)
            gloo_sockets.left_alone.add(group.epoll)


def doubt(group: Any, why: str) -> None:
    """``group``, of torch, is used in a way that does not show whether it is idle. Any thread."""
    for each in _groups:
        if each.group is group:
            each.cut(why)


@functools.cache
def note_messages() -> None:
    """Have messages put their group in doubt, for the rest of the process."""

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def note_and_call(group: Any, *args: Any, **kwargs: Any) -> Any:
            doubt(group, _MESSAGES)
            return function(group, *args, **kwargs)

        return note_and_call

    for name in ("send", "recv", "recv_anysource"):
        setattr(distributed.ProcessGroup, name, noting(getattr(distributed.ProcessGroup, name)))


def sockets() -> set[int]:
    """Of connections to the store that are not to be shut down. Any thread."""
    return {inode for each in _groups if each.why_not is None for inode in each.sockets}


# --- after a fault --------------------------------------------------------------------------------


def spare() -> None:
    """Take the idle ones out of what an abort meets, and cut the others. Not the armed thread."""
    global _waits_since
    _waits_since = None
    with _lock:
        for each in _groups:
            if each.why_not is not None:
                continue
            if (why := each.why_not_idle()) is not None:
                each.cut(why)
            elif each.out is None and each.group in distributed_c10d._world.pg_map:
                each.out = Entries(each.group)
                each.out.take_out()
            elif each.out is None:
                each.cut("the script has ended it")


def end_waits() -> None:
    """The main thread waits for something that no abort has ended: cut what that may be.

    In the thread that interrupts it.
    """
    global _waits_since
    now = time.monotonic()
    _waits_since = _waits_since or now
    waits_long = now - _waits_since > _LEAVES_WITHIN_S
    with _lock:
        for each in _groups:
            if each.why_not is None:
                why = "the main thread waited" if waits_long else each.why_not_idle()
                if why is not None:
                    each.cut(why)


# --- when the members of an iteration are known: main thread --------------------------------------


def had(iteration: int) -> Sequence[Had]:
    """What there is of before ``iteration``, and has not been put back."""
    return [
        Had(
            each.made,
            each.description,
            each.group.rank(),
            each.group.size(),
            each.group._get_sequence_number_for_group(),
            each.why_not or each.why_not_idle() or each.why_disconnected(),
        )
        for each in _groups
        if each.used_in < iteration
    ]


def adopt(made: tuple[int, int], ranks: Sequence[int], iteration: int) -> Any:
    """The group that was ``made`` then, back in torch's tables: its members are ``ranks`` now.

    In an atomic section.
    """
    (found,) = (each for each in _groups if each.made == made)
    assert found.out is not None
    found.out.put_back()
    found.out, found.used_in = None, iteration
    note_ranks(found.group, ranks)
    return found.group


def note_ranks(group: Any, ranks: Sequence[int]) -> None:
    """Have torch know by which ranks of the default group its members go."""
    distributed_c10d._world.pg_group_ranks[group] = {rank: n for n, rank in enumerate(ranks)}


@is_delicate  # holds a lock
def end(made: tuple[int, int] | None) -> None:
    """End the group that was ``made`` then, if any: another one takes its place."""
    _end([each for each in _groups if each.made == made])


@is_delicate  # holds a lock
def end_unused(iteration: int, in_use_since: int | None) -> None:
    """End those that were not asked for in ``iteration``. No group that is in use was made before
    ``in_use_since``, another one; ``None``: that is not known."""
    global _in_use_since
    _end([each for each in _groups if each.used_in < iteration])
    if in_use_since is not None:
        _in_use_since = in_use_since


@is_delicate  # holds a lock
def drop() -> None:
    """No group outlives the next fault; those that are out of torch's tables end."""
    _end(_groups)


def _end(groups: Sequence[KeptGroup]) -> None:
    global _groups
    with _lock:
        for each in groups:
            each.cut("it has ended")
        _groups = tuple(each for each in _groups if each not in groups)


def in_use_since() -> int | None:
    """See ``end_unused``. Any thread."""
    return _in_use_since
