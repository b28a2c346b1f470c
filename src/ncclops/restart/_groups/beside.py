"""Groups beside the default one, after a fault: kept with their connections, or made anew.

All ranks of the default group ask for the same ones in the same order. Keys, below a prefix in the
default group's store that each has of its own:

==============  =================================================
``had/<rank>``  what a member has of before (``regroup.Had``)
``plan``        which of it is kept, or why none is, from rank 0
==============  =================================================
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from ncclops.restart._groups import advised, gloo_sockets, kept_beside
from ncclops.restart._groups.backends import is_wrapped
from ncclops.restart._groups.kept_beside import KeptGroup
from ncclops.restart._groups.members import decided
from ncclops.restart._groups.recorder import recorded_of_gloo
from ncclops.restart.regroup import Had, Regrouped, Rung, which_to_keep, why_never_kept

if TYPE_CHECKING:
    from ncclops.restart.session import Session

# torch names a group by a number: from k + 1 times this on those of iteration k.
_NAMES = 1_000_000


class GroupsBeside:
    """Of one rank, in one call of ``on_membership``.

    ``outcomes`` are those that this rank knows of; rank 0 knows all.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._iteration = session.iteration
        self._asked_for = 0
        self._oldest: int | None = None  # on rank 0, when the oldest of them was made
        self.outcomes: list[Regrouped] = []

    def end_unused(self) -> None:
        """All have been asked for that are to be there."""
        kept_beside.end_unused(self._iteration, self._oldest)

    def new_group(
        self,
        ranks: Sequence[int],
        backend: str,
        timeout: timedelta | None,
        device_id: torch.device | None,
        group_desc: str,
    ) -> Any:
        """See ``CallWrapper.new_group``."""
        began, me = time.monotonic(), distributed.get_rank()
        ranks = sorted(ranks)
        if ranks != sorted(set(ranks) & set(range(distributed.get_world_size()))):
            raise ValueError(f"{ranks=} are not different ranks of the default group")
        number, self._asked_for = self._asked_for, self._asked_for + 1
        made = self._iteration, number

        def new_group() -> Any:
            return distributed.new_group(
                ranks, timeout, backend, device_id=device_id, group_desc=group_desc or None
            )

        why = why_never_kept(
            backend,
            is_wrapped=is_wrapped(),
            all_meet=distributed_c10d._is_barrier_after_init() == 1,
        )
        if why is not None:
            group = new_group()
        elif me and me not in ranks and distributed.group.WORLD.bound_device_id is None:
            return distributed.GroupMember.NON_GROUP_MEMBER  # whatever becomes of it
        else:
            description = f"{backend.lower()} {group_desc}"
            before, why = self._agree(number, description, ranks)
            if why is not None:
                kept_beside.end(before)
                group = self._make(made, description, ranks, new_group)
            else:
                assert before is not None
                made, group = before, distributed.GroupMember.NON_GROUP_MEMBER
                if me in ranks:
                    with self._session.interrupter.atomic():
                        group = kept_beside.adopt(before, ranks, self._iteration)
        if me == 0:
            self._oldest = made[0] if self._oldest is None else min(self._oldest, made[0])
        self.outcomes.append(
            Regrouped(
                iteration=self._iteration,
                rung=Rung.KEPT if why is None else Rung.ANEW,
                world_size=len(ranks),
                ms=1000 * (time.monotonic() - began),
                why=why,
                group=f"{group_desc or backend} ({', '.join(map(str, ranks))})",
            )
        )
        return group

    def device_mesh(
        self,
        device_type: str,
        shape: Sequence[int],
        names: Sequence[str],
        backend: str | None,
        timeout: timedelta | None,
        device_id: torch.device | None,
    ) -> DeviceMesh:
        """See ``CallWrapper.init_device_mesh``."""
        me, size = distributed.get_rank(), distributed.get_world_size()
        if math.prod(shape) != size or len(names) != len(shape):
            raise ValueError(
                f"mesh_shape={tuple(shape)} with mesh_dim_names={tuple(names)}: its product has to"
                f" be {size}, the ranks of the default group, and each dimension needs a name"
            )
        backend = backend or distributed.Backend.default_device_backend_map.get(device_type)
        if backend is None:
            raise ValueError(f"torch has no backend for {device_type=}: backend= has to say which")
        mesh, mine = torch.arange(size).view(*shape), []
        for dimension, name in enumerate(names):
            for ranks in mesh.movedim(dimension, -1).reshape(-1, shape[dimension]).tolist():
                group = distributed.group.WORLD  # as torch has it
                if len(ranks) < size:
                    group = self.new_group(ranks, backend, timeout, device_id, f"mesh_{name}")
                if me in ranks:
                    mine.append(group)
        groups = mine[0] if len(mine) == 1 else mine
        return DeviceMesh.from_group(groups, device_type, mesh, mesh_dim_names=tuple(names))

    def _agree(
        self, number: int, description: str, ranks: Sequence[int]
    ) -> tuple[tuple[int, int] | None, str | None]:
        """See ``which_to_keep``. Between the members, rank 0, and who has to know."""
        me, default = distributed.get_rank(), distributed_c10d._get_default_store()

        def decide(said: Sequence[bytes]) -> str:
            return json.dumps(which_to_keep(description, ranks, list(map(Had.from_json, said))))

        said = Had.to_json(kept_beside.had(self._iteration)) if me in ranks else None
        store = distributed.PrefixStore(f"beside/{number}", default)
        made, why = json.loads(decided(store, me, ranks, "had", "plan", said, decide))
        return None if made is None else tuple(made), why

    def _make(
        self,
        made: tuple[int, int],
        description: str,
        ranks: Sequence[int],
        new_group: Callable[[], Any],
    ) -> Any:
        """With a name that no group has had, and over a store of its own. torch takes the name from
        its count of groups, and the store from what its tables have of the default group."""
        world, default = distributed_c10d._world, distributed.group.WORLD
        usual, count = world.pg_map[default], world.group_count
        is_member, sockets = distributed.get_rank() in ranks, set[int]()
        threads, recorded = gloo_sockets.gloo_threads(), set(recorded_of_gloo())
        if is_member:
            store, sockets = self._session.store_for_group_beside()
            store.set_timeout(usual[1].timeout)
            world.pg_map[default] = usual[0], store
        world.group_count = (made[0] + 1) * _NAMES + made[1]
        try:
            group = new_group()
        finally:
            if default in world.pg_map:  # no abort has emptied the tables
                world.pg_map[default], world.group_count = usual, count
        if not is_member:
            return group
        kept = KeptGroup(made, description, group, group.group_name, sockets, made[0])
        if description.startswith("gloo"):
            distributed.barrier(group)  # whereupon the recorder has it
            kept.find_gloo(threads, recorded)
        kept.why_not = kept.why_not or advised.ruled_out_here().get(Rung.KEPT)
        with self._session.interrupter.atomic():
            kept_beside.add(kept)
        return group
