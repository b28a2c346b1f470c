"""The default group that outlives a restart, and its place in torch's tables.

An abort and the cleaning up between two iterations leave it where it is
(``_groups.tables``): its connections are shut down like all others, and
``_groups.regrouping`` gives it new ones.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import Store, distributed_c10d


@dataclass(frozen=True)
class KeptDefault:
    """``group`` is torch's object, ``timeout`` what its operations had when it was made."""

    group: Any
    timeout: timedelta


_kept: KeptDefault | None = None
# Its connection to the store, or that of a group which is about to be kept, was shut down.
_is_cut = False
# How many connections Gloo's device of that group has made so far: at least, and at most.
_fewest = _most = _at_once = 0


def begin() -> None:
    """A group is about to be made that is to be kept. Main thread."""
    global _is_cut, _fewest, _most, _at_once
    _is_cut = False
    _fewest = _most = _at_once = 0


def keep(group: KeptDefault) -> None:
    """Have ``group``, torch's default group, outlive faults from now on."""
    global _kept
    _kept = group


def cut() -> None:
    """Its connection to the store is being shut down: it cannot be reconfigured. Any thread."""
    global _is_cut
    _is_cut = True


def is_cut() -> bool:
    """Whether that has happened since the group was about to be made."""
    return _is_cut


def begin_connecting(members: int) -> None:
    """The group is about to be connected to ``members``, itself included. Main thread."""
    global _at_once
    _at_once = members


def connected() -> None:
    """It is."""
    global _fewest, _most, _at_once
    _fewest, _most, _at_once = _fewest + _at_once - 1, _most + _at_once, 0


def numbers_being_connected() -> range:
    """Among these are Gloo's numbers of the connections that the group waits for. Any thread."""
    return range(_fewest, _most + _at_once + 1) if _at_once else range(0)


def drop() -> None:
    """No group outlives the next fault."""
    global _kept
    _kept = None


def kept() -> KeptDefault | None:
    """The group that is kept, if it is still torch's default group: a script may end it."""
    if _kept is not None and not _is_cut and distributed.group.WORLD is _kept.group:
        return _kept
    return None


def is_kept(group: Any) -> bool:
    """Whether ``group`` is that one."""
    found = kept()
    return found is not None and found.group is group


def end() -> None:
    """End the group that is kept, if there is one, as an abort would have."""
    found = _kept
    drop()
    if found is not None and distributed.group.WORLD is found.group:
        distributed.destroy_process_group()


def end_others() -> None:
    """Destroy all groups but the one that is kept."""
    for group in list(distributed_c10d._world.pg_map):
        if not is_kept(group):
            # One that was half made is in some tables and not in others.
            with contextlib.suppress(Exception):
                distributed.destroy_process_group(group)


# Tables that have groups as keys.
_BY_GROUP = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "pg_flight_recorder_hooks",
)


class Entries:
    """What torch's tables have of ``group``, to be put back after it has been taken out of them."""

    def __init__(self, group: Any) -> None:
        world = distributed_c10d._world
        tables = {name: getattr(world, name, {}) for name in _BY_GROUP}
        self.group = group
        self._of_group = {n: table[group] for n, table in tables.items() if group in table}
        self._tags = [tag for tag, groups in world.tags_to_pg.items() if group in groups]

    def take_out(self) -> None:
        """Have torch not know the group any more."""
        world = distributed_c10d._world
        for name in self._of_group:
            getattr(world, name).pop(self.group, None)
        for tag in self._tags:
            world.tags_to_pg[tag] = [g for g in world.tags_to_pg[tag] if g is not self.group]
        torch._C._distributed_c10d._unregister_process_group(self._of_group["pg_names"])

    def put_back(self) -> None:
        """As torch's own functions had left them."""
        group, world = self.group, distributed_c10d._world
        for name, value in self._of_group.items():
            getattr(world, name)[group] = value
        for tag in self._tags:
            world.tags_to_pg.setdefault(tag, []).append(group)
        torch._C._distributed_c10d._register_process_group(self._of_group["pg_names"], group)


def note_members(group: Any, store: Store) -> None:
    """Have torch's tables agree with the members that ``group``, the default one, has now.

    Further groups are made over ``store``: over the one with which ``group`` was made they would
    find addresses of groups that had their names before.
    """
    world = distributed_c10d._world
    world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    backend, _ = world.pg_map[group]
    world.pg_map[group] = backend, store
    world.group_count = 1  # by which the next one is named, also where this one was just made
