"""Carries out what ``regroup`` decides: the default group comes to the members of an iteration.

Keys, below a prefix that each time has of its own in the present iteration:

=====================  =========================================================================
``offer/<rank>``       what a rank brings (``regroup.Offer``)
``plan``               what all do, from rank 0 (``regroup.Plan``)
``handle/<rank>``      by which torch reconfigures a group that has just been made, or one of NCCL,
                       and the list of all from rank 0: ``handles``
``<try>/done/<rank>``  "", or why the reconfiguration has failed on a rank
``<try>/failed``       from rank 0: "", or why it counts as failed, on all ranks
``<try>/count``        of what NCCL does in threads: how many ranks have succeeded
``<try>/verdict``      of the first rank to know: that all have, or why it counts as failed
``meets/<rank>``       after that has failed, before one is made in the main thread; from rank 0:
                       ``met``
=====================  =========================================================================

Who waits here for a rank that dies is interrupted like anywhere else in the function: the
connection to the store is shut down then. What all wait for has a deadline besides.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed import Store, distributed_c10d

from ncclops.restart._groups import (
    advised,
    kept_default,
    reconfiguring,
    revoking,
    shrinking,
)
from ncclops.restart._groups.aborting import abort_later
from ncclops.restart._groups.ending import is_first_to_end
from ncclops.restart._groups.kept_default import KeptDefault
from ncclops.restart._groups.revoking import Revocable
from ncclops.restart.raised import summarise
from ncclops.restart.regroup import (
    RECONFIGURATIONS,
    Offer,
    Plan,
    Regrouped,
    Rung,
    failure_of,
    plan_for,
    why_nccl_not_in_place,
    why_not_in_place,
    why_not_shrunk,
)

if TYPE_CHECKING:
    from ncclops.restart.session import Session

log = logging.getLogger("ncclops.restart")

_VERDICT, _ALL_HAVE = "verdict", "all ranks have done it"


class Regrouping:
    """Of one rank, once: ``run`` brings the default group to the members there are.

    ``within`` is how long a reconfiguration, or shrinking, may take, ``timeout`` the group's;
    ``None``: torch's default, or that of the profile under ``ncclops launch``. ``shrink``: groups
    of NCCL are to be shrunk. ``reconfigure``: groups are to be reconfigured; ``None``: of Gloo they
    are. ``goes_on``: this rank has its objects of before the fault.

    Raises ``ValueError`` where a group of NCCL is to be shrunk and to be reconfigured.
    """

    def __init__(
        self,
        session: Session,
        backend: str,
        timeout: timedelta | None,
        within: timedelta,
        device_id: torch.device | None,
        *,
        rank: int,
        world_size: int,
        goes_on: bool,
        shrink: bool = False,
        reconfigure: bool | None = None,
    ) -> None:
        is_nccl = "nccl" in backend.lower()
        if is_nccl and shrink and reconfigure:
            raise ValueError("a group of NCCL is shrunk or reconfigured: give one of the two")
        self._session = session
        self._iteration, self._rank, self._size = session.iteration, rank, world_size
        self._backend = backend
        self._timeout = timeout
        self._within = within
        self._device_id = device_id
        self._goes_on = goes_on
        self._shrinks = shrink and is_nccl
        self._joins = bool(reconfigure) and backend.lower() == "nccl"
        self._reconfigures = reconfigure
        self._store = session.store_for_user()
        self._store_timeout = timeout or distributed_c10d.default_pg_timeout
        self._store.set_timeout(self._store_timeout)
        self._tries = 0

    def run(self) -> Regrouped:
        """Raises what torch raises where no group can be made."""
        began = time.monotonic()
        plan = self._agree()
        rung, why = Rung.RECONFIGURED, plan.why
        if plan.handles:
            why = self._reconfigure(plan.handles)
        elif plan.over is not None:
            why = self._join(plan.over, others_have_it=True)
        elif plan.excluded:
            rung, why = Rung.SHRUNK, self._shrink(plan.excluded)
        if why is not None:
            rung = Rung.ANEW
            self._make_anew(plan)
        self._session.group_is_made()
        return Regrouped(
            iteration=self._iteration,
            rung=rung,
            world_size=self._size,
            ms=1000 * (time.monotonic() - began),
            why=why,
            objects_stay=plan.objects_stay,
        )

    def _warn(self, text: str, reason: str) -> None:
        """On one rank."""
        log.log(logging.WARNING if self._rank == 0 else logging.INFO, text, reason)

    # --- what all do ----------------------------------------------------------------------------

    def _agree(self) -> Plan:
        if self._shrinks:
            offer = self._offer_to_shrink()
        else:
            offer = self._offer_to_join() if self._joins else self._offer_to_reconfigure()
        said = offer.to_json()
        plan = self._decided("offer", "plan", said, lambda said: _plan_for(said).to_json())
        return Plan.from_json(plan)

    def _offer_to_reconfigure(self) -> Offer:
        why_not = why_not_in_place(
            self._backend,
            is_asked_for=self._reconfigures,
            torch_version=torch.__version__,
            has_reconfigure=_has_reconfigure(),
            is_wrapped=is_wrapped(),
        ) or advised.ruled_out_here().get(Rung.RECONFIGURED)
        kept = kept_default.kept()
        handle = None if why_not is not None or kept is None else _handle(kept.group)
        return Offer(why_not, handle, self._goes_on)

    def _offer_to_shrink(self) -> Offer:
        if not distributed.is_nccl_available():  # what follows says so
            return Offer("this torch has no NCCL", goes_on=self._goes_on)
        why_not = why_not_shrunk(
            self._backend,
            torch_version=torch.__version__,
            can_shrink=shrinking.can_shrink(),
            nccl_version=torch.cuda.nccl.version(),
            has_device=self._device_id is not None,
            is_wrapped=is_wrapped(),
            watchdog_ends_groups=_watchdog_ends_groups(),
        ) or advised.ruled_out_here().get(Rung.SHRUNK)
        parent = revoking.revoked()
        place = None if parent is None else parent.place
        return Offer(why_not, None, self._goes_on, place, revoking.lacks())

    def _offer_to_join(self) -> Offer:
        if not distributed.is_nccl_available():  # what follows says so
            return Offer("this torch has no NCCL", goes_on=self._goes_on)
        has_second_engine = _has_reconfigure() and reconfiguring.has_second_engine()
        why_not = why_nccl_not_in_place(
            torch_version=torch.__version__,
            has_second_engine=has_second_engine,
            is_second_engine=has_second_engine and reconfiguring.is_second_engine(),
            nccl_version=torch.cuda.nccl.version(),
            has_device=self._device_id is not None,
            is_wrapped=is_wrapped(),
            watchdog_ends_groups=_watchdog_ends_groups(),
        ) or advised.ruled_out_here().get(Rung.RECONFIGURED)
        kept = None if kept_default.is_cut() else revoking.revoked()
        return Offer(
            why_not,
            goes_on=self._goes_on,
            over=None if why_not is not None or kept is None else kept.over,
            grows=reconfiguring.shrinks_and_grows(),
            lacks=revoking.lacks(),
        )

    def _decided(
        self, each: str, all_: str, said: str, decide: Callable[[Sequence[bytes]], str]
    ) -> bytes:
        """What rank 0 makes of what every rank has said."""
        return decided(self._store, self._rank, range(self._size), each, all_, said, decide)

    def _reconfigure(self, handles: Sequence[str]) -> str | None:
        """Reconfigure the default group, on all ranks or none: why none, or ``None``."""
        tried, self._tries = self._tries, self._tries + 1
        group = distributed.group.WORLD
        # Never again the same one among those that use the group's store.
        unique = self._iteration * RECONFIGURATIONS + tried
        said = self._try(unique, handles)
        verdict = self._decided(f"{tried}/done", f"{tried}/failed", said, _verdict)
        if verdict:
            self._warn("a group is not reconfigured: %s", verdict.decode())
            return f"the reconfiguration failed: {verdict.decode()}"
        kept_default.note_members(group, self._store)
        if (kept := kept_default.kept()) is not None:
            _torch("set_timeout")(kept.timeout, group)  # it may be shorter by now
        return None

    def _try(self, unique: int, handles: Sequence[str]) -> str:
        """ "", or why it has failed on this rank."""
        kept_default.begin_connecting(len(handles))
        try:
            work = _torch("_reconfigure")(unique, list(handles), timeout=self._within)
            work.wait()  # on Gloo it is over by now
        except (RuntimeError, TypeError, ValueError) as error:  # torch calls it experimental
            return summarise(error)
        kept_default.connected()
        return ""

    def _shrink(self, excluded: Sequence[int]) -> str | None:
        """Make the default group of the communicator that is there, on all ranks or none."""
        failure = self._in_threads(
            lambda report: shrinking.begin_to_shrink(excluded, report, _end_shrunk)
        )
        if failure is not None:
            self._warn("a group is not shrunk: %s", failure)
            return f"shrinking failed: {failure}"
        with self._session.interrupter.atomic():
            _end_shrunk(shrinking.adopt(distributed.PrefixStore("shrunk", self._store)))
        return None

    def _join(self, over: str, *, others_have_it: bool) -> str | None:
        """Reconfigure the default group of NCCL, which a rank that has none makes over ``over``.

        Otherwise all have none."""
        number = self._iteration * RECONFIGURATIONS + self._tries
        group = None if kept_default.is_cut() else revoking.revoked()
        if group is None:
            end_kept_group_of_nccl()
            kept_default.begin()
            assert self._device_id is not None
            try:
                reconfiguring.is_joining.set(others_have_it)
                store = self._session.store_for_kept_group(over)
                self._make("later", store, enable_reconfigure=True)
            finally:
                reconfiguring.is_joining.set(False)
            group = reconfiguring.made(self._device_id, self._iteration, over)
        keys, said = f"{self._tries}/handle", _handle(group.group)
        handles = json.loads(self._decided(keys, f"{keys}s", said, _as_list))
        failure = self._in_threads(
            lambda report: reconfiguring.begin(
                group, number, handles, self._within, report, _end_reconfigured
            )
        )
        if failure is not None:
            self._warn("a group is not reconfigured: %s", failure)
            return f"the reconfiguration failed: {failure}"
        with self._session.interrupter.atomic():
            reconfiguring.adopt(self._store)
        return None

    def _in_threads(self, begin: Callable[[Callable[[str], object]], object]) -> str | None:
        """Have all ranks do what ``begin`` begins, in a thread that then calls what it is given:
        why that counts as failed, on all of them, or ``None``."""
        # Over a connection of its own: the main thread waits on the other one.
        prefix, self._tries = str(self._tries), self._tries + 1
        theirs = distributed.PrefixStore(prefix, self._session.store_for_user())
        with self._session.interrupter.atomic():
            begin(functools.partial(self._report, theirs))
        store = distributed.PrefixStore(prefix, self._store)
        with contextlib.suppress(distributed.DistStoreError):  # it has taken too long
            store.wait([_VERDICT], self._within)
        too_long = f"not all ranks have done it within {self._within.total_seconds():g} s"
        verdict: str = store.compare_set(_VERDICT, "", too_long).decode()
        return None if verdict == _ALL_HAVE else verdict

    def _report(self, store: Store, failure: str) -> None:
        """A failure ends the wait of all ranks at once: without this one, NCCL waits on theirs."""
        if failure:
            store.compare_set(_VERDICT, "", f"rank {self._rank}: {failure}")
        elif store.add("count", 1) == self._size:
            store.compare_set(_VERDICT, "", _ALL_HAVE)

    def _make_anew(self, plan: Plan) -> None:
        kept_default.end()
        end_kept_group_of_nccl()
        if self._joins and plan.can_later:
            # Also after a reconfiguration has failed, as a rank may have died in it: what waits
            # for that one in a thread can be left, and what follows cannot.
            name = self._session.name_for_kept_group()
            if self._join(name, others_have_it=False) is None:
                return
            end_kept_group_of_nccl()
            self._decided("meets", "met", "", lambda _: "")
        elif self._shrinks:
            store = self._session.store_for_shrinkable_group()
            store.set_timeout(self._store_timeout)
            self._make("once", store)
            if plan.can_later and self._device_id is not None:
                shrinking.keep(distributed.group.WORLD, self._device_id, self._iteration)
            return
        elif plan.can_later and not plan.handles:
            kept_default.begin()
            store = self._session.store_for_kept_group(self._session.name_for_kept_group())
            self._make("later", store, enable_reconfigure=True)
            group = distributed.group.WORLD
            handles = self._decided("handle", "handles", _handle(group), _as_list)
            if self._reconfigure(json.loads(handles)) is None:
                kept_default.keep(KeptDefault(group, _timeout_of(group)))
                return
            distributed.destroy_process_group()
        self._make("once", self._store)

    def _make(self, name: str, store: Store, **options: Any) -> None:
        timeout: dict[str, Any] = {} if self._timeout is None else {"timeout": self._timeout}
        distributed.init_process_group(
            self._backend,
            store=distributed.PrefixStore(name, store),
            rank=self._rank,
            world_size=self._size,
            device_id=self._device_id,
            **timeout,
            **options,
        )


def end_kept_group_of_nccl() -> None:
    """Keep no group of NCCL any more, nor what was made of one and is not in use."""
    shrinking.give_up()
    reconfiguring.give_up()
    shrinking.forget_store()
    if (group := revoking.take()) is not None:
        (_end_shrunk if group.over is None else _end_reconfigured)(group)


def _end_reconfigured(group: Revocable) -> None:
    """End a group that is out of torch's tables, whatever communicator it has."""
    group.backend.options.enable_reconfigure = False  # an abort only revokes with it
    is_first_to_end(group.group)
    abort_later([group.backend], [group.group])


def _end_shrunk(parent: Revocable, child: Any = None) -> None:
    """End a group whose communicator was revoked, and the backend that was made of it."""
    backends = [each for each in (child, parent.backend) if each is not None]
    abort_later(backends, [parent.group])


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


def _plan_for(said: Sequence[bytes]) -> Plan:
    return plan_for([Offer.from_json(text) for text in said])


def _verdict(results: Sequence[bytes]) -> str:
    return failure_of([result.decode() for result in results])


def _as_list(handles: Sequence[bytes]) -> str:
    return json.dumps([handle.decode() for handle in handles])


def _handle(group: Any) -> str:
    return str(_torch("_get_reconfigure_handle")(group))


def _timeout_of(group: Any) -> timedelta:
    """What operations of ``group`` wait for."""
    backend = group._get_backend(torch.device("cpu"))
    timeout: timedelta = backend.options._timeout
    return timeout


def _torch(name: str) -> Any:
    """One of torch's functions that only newer versions have."""
    return getattr(distributed_c10d, name)


def _watchdog_ends_groups() -> bool:
    return os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "0"


def is_wrapped() -> bool:
    """Whether torch puts a wrapper around each backend."""
    return distributed.get_debug_level() is distributed.DebugLevel.DETAIL


@functools.cache
def _has_reconfigure() -> bool:
    """Whether this torch has what is used here of it."""
    init = inspect.signature(inspect.unwrap(distributed_c10d.init_process_group))
    functions = ("_reconfigure", "_get_reconfigure_handle")
    return "enable_reconfigure" in init.parameters and all(
        hasattr(distributed_c10d, name) for name in functions
    )
