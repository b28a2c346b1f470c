"""Decides for the script how process groups come up: their timeout, eager or lazy, who meets.

No variable sets the timeout of a collective or the moment at which NCCL communicators are made:
torch takes both from the arguments of ``init_process_group`` and ``new_group`` alone. So those
get defaults of ours, put in place when torch.distributed is imported; a script that never imports
it pays nothing.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

from ncclops.record import worker_record
from ncclops.record.events import BootstrappedEvent
from ncclops.record.variables import BOOTSTRAP_BARRIER, NCCL_INIT
from ncclops.worker import after_import
from ncclops.worker.group_timeouts import WORLD, GroupTimeouts
from ncclops.worker.meeting import Meeting, Team

MODULE = "torch.distributed.distributed_c10d"
_CONSTANTS = "torch.distributed.constants"
# Each makes a group and takes `timeout`; what is built on them (DeviceMesh, FSDP2) calls them.
_MAKERS = ("init_process_group", "new_group", "split_group", "_new_group_with_tag")
# Makes the backends of a group on its members, for all of them but `split_group`.
_HELPER = "_new_process_group_helper"
# These bring no store of their own, or need none.
_WITHOUT_STORE = ("mpi", "fake")
# torch's own default for NCCL groups.
_BARRIER_LIMIT = timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True)
class GroupRules:
    """What the agent wants of process groups; see ``variables``.

    ``init`` eager or lazy gives or withholds ``device_id``; None leaves it to the script.
    ``barrier``: whether all ranks meet again once the default group is up, so that a failure to
    start is distinguished from a later one.
    """

    init: str | None
    barrier: bool

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> GroupRules:
        return cls(
            init=environ.get(NCCL_INIT),
            barrier=environ.get(BOOTSTRAP_BARRIER) != "skipped",
        )


def apply(rules: GroupRules, timeouts: GroupTimeouts | None, team: Team) -> None:
    """Have groups of ``team`` made by ``rules``, with ``timeouts``. Call before torch is imported.

    Before the backend of a group is made its ranks meet.
    """
    after_import.act(MODULE, lambda module: _patch(module, rules, timeouts, team))


def _patch(
    module: ModuleType, rules: GroupRules, timeouts: GroupTimeouts | None, team: Team
) -> None:
    setattr(module, _HELPER, _meeting_first(module, getattr(module, _HELPER), team))
    init = _bootstrapping(module, rules, timeouts, team)
    module.init_process_group = init  # type: ignore[attr-defined]
    if timeouts is None:
        return
    # Whoever asks torch for the default of NCCL groups, as the restart core does, is told the same.
    constants = sys.modules[_CONSTANTS]
    if getattr(constants, "default_pg_nccl_timeout", None) is not None:
        constants.default_pg_nccl_timeout = timeouts.default(WORLD)  # type: ignore[attr-defined]
    for name in _MAKERS:
        if hasattr(module, name):
            setattr(module, name, _with_default(getattr(module, name), timeouts))


def _bootstrapping(
    module: Any, rules: GroupRules, timeouts: GroupTimeouts | None, team: Team
) -> Callable[..., Any]:
    init = module.init_process_group

    @functools.wraps(init)
    def bootstrap(*args: Any, **kwargs: Any) -> Any:
        # torch is loaded now
        from ncclops.restart._groups.ending import keep_backends_longer_than_groups

        keep_backends_longer_than_groups()
        if rules.init == "lazy":
            kwargs.pop("device_id", None)
        elif rules.init == "eager" and kwargs.get("device_id") is None:
            kwargs |= _own_device(kwargs.get("backend", args[0] if args else None))
        result = init(*args, **kwargs)
        store = module._get_default_store()
        if rules.barrier and store is not None and not _is_joining():
            own = kwargs.get("timeout", args[2] if len(args) > 2 else None)
            usual = None if timeouts is None else timeouts.default(WORLD)
            rank, ranks = module.get_rank(), range(module.get_world_size())
            here = Meeting(
                store=store,
                group="up",
                what="the end of init_process_group",
                ranks=ranks,
                own=rank,
                team=team if _is_whole(team, rank, len(ranks)) else None,
            )
            here.wait(own or usual or _BARRIER_LIMIT)
        worker_record.report(BootstrappedEvent())
        return result

    return bootstrap


# How long ranks meet for the group that is being made, where it was given no timeout.
_meeting_limit: ContextVar[timedelta | None] = ContextVar("meeting_limit", default=None)


def _meeting_first(module: Any, make: Callable[..., Any], team: Team) -> Callable[..., Any]:
    """``make``, after all members of the group have come to it.

    Where they do not wait for each other in it, and are free to make groups in any order, they do
    not meet: so are groups of NCCL without a device, made with ``use_local_synchronization``.
    """
    import inspect

    signature = inspect.signature(make)

    @functools.wraps(make)
    def meet_and_make(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        meeting = _meeting(module, given, team)
        if meeting is not None:
            meeting.wait(_meeting_limit.get() or given["timeout"])
        return make(*args, **kwargs)

    return meet_and_make


def _meeting(module: Any, given: Mapping[str, Any], team: Team) -> Meeting | None:
    """None where this rank is no member of the group, or none has to wait."""
    backend, name = str(given["backend"]), str(given["group_name"])
    ranks = list(given["global_ranks_in_group"]) or list(range(given["group_size"]))
    is_lazy = backend == "nccl" and given.get("device_id") is None
    if len(ranks) < 2 or backend in _WITHOUT_STORE or (is_lazy and not name.isdigit()):
        return None
    if _is_joining():
        return None
    if not given["global_ranks_in_group"]:
        own = number = given["group_rank"]
        # Not the call itself: one that imports within it is not here yet.
        size, what = given["group_size"], "the making of the default group (init_process_group)"
    else:
        number, size = module.get_rank(), module.get_world_size()
        if number not in ranks:
            return None
        described = given.get("group_desc") or name
        own, what = ranks.index(number), f"the making of group {described}"
    return Meeting(
        store=given["store"],
        group=name,
        what=what,
        ranks=ranks,
        own=own,
        team=team if _is_whole(team, number, size) else None,
    )


def _is_joining() -> bool:
    """Whether the group that is being made joins one that the other ranks have, and do not make."""
    from ncclops.restart._groups.reconfiguring import is_joining  # torch is loaded now

    return is_joining.get()


def _is_whole(team: Team, rank: int, size: int) -> bool:
    """Whether ranks are numbered as they were started; none of them has been lost then."""
    return size == team.size and rank == team.rank


def _own_device(backend: str | None) -> dict[str, Any]:
    """``device_id`` for eager NCCL: this rank's GPU, where there is one and NCCL is used."""
    import torch

    if not torch.cuda.is_available() or (backend is not None and "nccl" not in str(backend)):
        return {}
    return {"device_id": torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))}


def _with_default(make_group: Callable[..., Any], timeouts: GroupTimeouts) -> Callable[..., Any]:
    import inspect  # torch has loaded it by now; a script without torch need not

    signature = inspect.signature(make_group)
    described = WORLD if make_group.__name__ == "init_process_group" else None

    @functools.wraps(make_group)
    def with_default(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        limit = _meeting_limit.get()  # of a maker that calls this one
        if given.arguments.get("timeout") is None:  # None is torch's own word for "the default"
            description = given.arguments.get("group_desc") or described
            given.arguments["timeout"] = timeouts.default(description)
            limit = timeouts.of_meeting(description)
        with _meeting_for(limit):
            group = make_group(*given.args, **given.kwargs)
        timeouts.note_made()
        return group

    return with_default


@contextmanager
def _meeting_for(limit: timedelta | None) -> Iterator[None]:
    before = _meeting_limit.set(limit)
    try:
        yield
    finally:
        _meeting_limit.reset(before)
