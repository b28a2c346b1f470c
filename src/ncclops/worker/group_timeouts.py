"""Timeouts of process groups: long while a rank may be compiling, the steady ones afterwards.

torch keeps a timeout per backend of each group; no group inherits another's, and a change acts
only on operations that are enqueued later. So every group is found (torch registers all of them,
by any code: ``new_group``, DeviceMesh, FSDP2), changed one by one, and read back.
"""

from __future__ import annotations

import sys
import warnings
from datetime import timedelta
from typing import Any

from ncclops.record import worker_record
from ncclops.record.events import GroupTimeoutEvent
from ncclops.timeouts.model import Timeouts

_MODULE = "torch.distributed.distributed_c10d"
# torch's word for a group without a description.
_UNDESCRIBED = "undefined"
WORLD = "default_pg"  # and for the default group
# How much sooner than a hang is found: who is absent has to be told.
_BEFORE_HANG = timedelta(seconds=10)
_DETAIL = (
    "TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around each group, on which torch does not"
    " change the timeout"
)


class GroupTimeouts:
    """Gives groups their timeouts. Called from the thread that trains.

    ``is_steady`` says which window holds; without a steady window in ``timeouts`` that is so from
    the start, and then only the profile's own timeouts of described groups are left to apply.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._known: set[str] = set()  # names of groups that have what they shall have
        self._lengthened: dict[str, timedelta] = {}  # what groups had before a phase, by name
        self.is_steady = timeouts.steady is None

    def default(self, description: str | None) -> timedelta:
        """For a group that is about to be made and was given no timeout."""
        if self.is_steady:
            return self._timeouts.steady_group(description or _UNDESCRIBED)
        return self._timeouts.first.process_group

    def of_meeting(self, description: str | None) -> timedelta:
        """How long ranks wait for the others before the backend of a group is made that was given
        no timeout: not as long as it takes to find that a rank hangs, which ends them without a
        word about who is absent. Nothing compiles before the default group is made."""
        from ncclops.timeouts.settle import acts_before

        is_steady = self.is_steady or description == WORLD
        steady = self._timeouts.steady if is_steady else None
        limit = acts_before(steady or self._timeouts.first)
        return limit - min(limit / 4, _BEFORE_HANG)

    def use(self, timeouts: Timeouts) -> None:
        """Go by ``timeouts`` from the next change of the window on."""
        self._timeouts = timeouts

    def begin_iteration(self) -> None:
        """The script starts again, and may compile again: groups that it makes wait longer."""
        self._known.clear()
        self._lengthened.clear()
        self.is_steady = self._timeouts.steady is None

    def note_made(self) -> None:
        """The script made a group, which has the timeout of the present window or its own."""
        self._known |= {_name(group) for group in _all_groups()}

    def tighten(self) -> None:
        """Warm-up is over: every group gets its steady timeout."""
        if self._timeouts.steady is None:
            return
        self.is_steady = True
        self._known.clear()
        self.look_for_new()

    def widen(self) -> None:
        """Another warm-up begins in the same iteration: the long window holds once more."""
        if self._timeouts.steady is None or not self.is_steady:
            return
        self.is_steady = False
        for group in _all_groups():
            _change(group, self._timeouts.first.process_group, longer=True)

    def lengthen(self, limit: timedelta) -> timedelta | None:
        """A phase may take up to ``limit``: no collective that begins in it has less.

        Returns the shortest timeout that was in the way, if one was.
        """
        found = []
        for group in _all_groups():
            before = _read(group)
            if before is not None and before < limit:
                found.append(before)
                self._lengthened.setdefault(_name(group), before)
                _change(group, limit, longer=True)
        return min(found, default=None)

    def restore(self) -> None:
        """The phase is over: each group has what it had before."""
        for group in _all_groups():
            if (before := self._lengthened.get(_name(group))) is not None:
                _change(group, before)
        self._lengthened.clear()

    def look_for_new(self) -> None:
        """Groups that came up without a call that we know of get the steady timeout too."""
        if not self.is_steady:
            return
        groups = _all_groups()
        if len(groups) == len(self._known):  # each step looks
            return
        for group in groups:
            if _name(group) not in self._known:
                description = getattr(group, "group_desc", _UNDESCRIBED)
                _change(group, self._timeouts.steady_group(description))
        self._known = {_name(group) for group in groups}


def _all_groups() -> list[Any]:
    """The groups that this process is a member of."""
    module = sys.modules.get(_MODULE)
    world = getattr(module, "_world", None)
    return [] if world is None else list(world.pg_map)


def _name(group: Any) -> str:
    module: Any = sys.modules[_MODULE]
    return str(module._world.pg_names.get(group, id(group)))


def _change(group: Any, limit: timedelta, *, longer: bool = False) -> None:
    """Set the timeout of ``group`` to ``limit``, read it back, and report it to the agent.

    Only ever shortens, or only lengthens if ``longer``; what is so already is left alone.
    """
    before = _read(group)
    if before == limit:
        return
    if before is not None and (before < limit) != longer:
        if not longer:
            _report(group, before, limit, applied=False, why="it is shorter already")
        return
    why = _set(group, limit)
    after = _read(group)
    applied = None if after is None else after == limit
    if applied is None:
        why = why or "torch does not expose the timeout of this backend"
    elif not applied:
        why = _DETAIL if _is_wrapped(group) else why or f"torch has left it at {after}"
    _report(group, before, limit, applied=applied, why=None if applied else why)


def _set(group: Any, limit: timedelta) -> str | None:
    """Use torch's public function where there is one (2.14); returns its error, if any."""
    module: Any = sys.modules[_MODULE]
    change = getattr(module, "set_timeout", None) or module._set_pg_timeout
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            change(limit, group)
        except Exception as error:  # noqa: BLE001 - whatever a backend raises: training goes on
            return f"{type(error).__name__}: {error}"
    return str(said[-1].message) if said else None


def _read(group: Any) -> timedelta | None:
    """The longest timeout among the backends of ``group``; None where no backend exposes it."""
    options = [getattr(backend, "options", None) for backend in _backends(group)]
    found = [getattr(option, "_timeout", None) for option in options]
    return max((limit for limit in found if isinstance(limit, timedelta)), default=None)


def _is_wrapped(group: Any) -> bool:
    return any(hasattr(backend, "wrapped_pg") for backend in _backends(group))


def _backends(group: Any) -> list[Any]:
    found = []
    for device in getattr(group, "_device_types", ()):
        try:
            found.append(group._get_backend(device))
        except RuntimeError:  # a device for which this group has no backend
            continue
    return found


def _report(
    group: Any, before: timedelta | None, limit: timedelta, *, applied: bool | None, why: str | None
) -> None:
    worker_record.report(
        GroupTimeoutEvent(
            group=_name(group),
            desc=getattr(group, "group_desc", _UNDESCRIBED),
            from_s=None if before is None else before.total_seconds(),
            to_s=limit.total_seconds(),
            applied=applied,
            why=why or None,
        )
    )
