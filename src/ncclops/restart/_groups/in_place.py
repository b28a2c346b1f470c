"""Gloo: the default group is given its new members and connections, and stays the same object.

By torch's ``_reconfigure``, which takes a handle of each member's group.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from ncclops.restart._groups import kept_default
from ncclops.restart._groups.backends import is_wrapped
from ncclops.restart._groups.kept_default import KeptDefault
from ncclops.restart._groups.members import Members
from ncclops.restart.raised import summarise
from ncclops.restart.regroup import (
    RECONFIGURATIONS,
    Offer,
    Plan,
    Rung,
    failure_of,
    why_not_in_place,
)


class InPlace:
    """``is_asked_for``, or ruled out: ``None``: neither. Also of backends that cannot be
    reconfigured, which says why."""

    rung = Rung.RECONFIGURED
    name = "the reconfiguration"

    def __init__(self, members: Members, is_asked_for: bool | None) -> None:
        self._members = members
        self._is_asked_for = is_asked_for
        self._has_failed = False

    def offer(self) -> Offer:
        why_not = why_not_in_place(
            self._members.backend,
            is_asked_for=self._is_asked_for,
            torch_version=torch.__version__,
            has_reconfigure=has_reconfigure(),
            is_wrapped=is_wrapped(),
        )
        kept = kept_default.kept()
        handle = None if why_not is not None or kept is None else _handle(kept.group)
        return Offer(why_not, handle)

    def bring(self, plan: Plan) -> str | None:
        return self._reconfigure(plan.handles)

    def make_for_later(self) -> bool:
        if self._has_failed:
            return False
        members, session = self._members, self._members.session
        kept_default.begin()
        store = session.store_for_kept_group(session.name_for_kept_group())
        members.make("later", store, enable_reconfigure=True)
        group = distributed.group.WORLD
        if self._reconfigure(agreed_handles(members, group, "handle")) is None:
            kept_default.keep(KeptDefault(group, _timeout_of(group)))
            return True
        distributed.destroy_process_group()
        return False

    def _reconfigure(self, handles: Sequence[str]) -> str | None:
        members, tried = self._members, self._members.next_try()
        group = distributed.group.WORLD
        # Never again the same one among those that use the group's store.
        said = _try(members.session.iteration * RECONFIGURATIONS + tried, handles, members.within)
        verdict = members.decided(f"{tried}/done", f"{tried}/failed", said, _verdict).decode()
        if verdict:
            self._has_failed = True
            return verdict
        kept_default.note_members(group, members.store)
        if (kept := kept_default.kept()) is not None:
            distributed_c10d.set_timeout(kept.timeout, group)  # it may be shorter by now
        return None


def _try(number: int, handles: Sequence[str], within: timedelta) -> str:
    """ "", or why it has failed on this rank."""
    kept_default.begin_connecting(len(handles))
    try:
        work = distributed_c10d._reconfigure(number, list(handles), timeout=within)
        work.wait()  # on Gloo it is over by now
    except (RuntimeError, TypeError, ValueError) as error:  # torch calls it experimental
        return summarise(error)
    kept_default.connected()
    return ""


def _verdict(results: Sequence[bytes]) -> str:
    return failure_of([result.decode() for result in results])


def agreed_handles(members: Members, group: Any, key: str) -> list[str]:
    """The handles of all members' groups, of which ``group`` is this one's."""
    handles: list[str] = json.loads(members.decided(key, f"{key}s", _handle(group), _as_list))
    return handles


def _handle(group: Any) -> str:
    return str(distributed_c10d._get_reconfigure_handle(group))


def _as_list(handles: Sequence[bytes]) -> str:
    return json.dumps([handle.decode() for handle in handles])


def _timeout_of(group: Any) -> timedelta:
    """What operations of ``group`` wait for."""
    backend = group._get_backend(torch.device("cpu"))
    timeout: timedelta = backend.options._timeout
    return timeout


@functools.cache
def has_reconfigure() -> bool:
    """Whether this torch has what is used here of it."""
    init = inspect.signature(inspect.unwrap(distributed_c10d.init_process_group))
    functions = ("_reconfigure", "_get_reconfigure_handle")
    return "enable_reconfigure" in init.parameters and all(
        hasattr(distributed_c10d, name) for name in functions
    )
