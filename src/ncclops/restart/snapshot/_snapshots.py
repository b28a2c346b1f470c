"""``Snapshots``: what a training loop calls."""

from __future__ import annotations

import logging
import operator
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, NoReturn

from ncclops.restart import _calls
from ncclops.restart.exception import RankShouldRestart
from ncclops.restart.snapshot import _objects
from ncclops.restart.snapshot._agreement import Agreed, Agreement, Order, Told
from ncclops.restart.snapshot._background import Background
from ncclops.restart.snapshot._blobs import (
    Blob,
    checking_threads,
    lay_out,
    layout_of,
)
from ncclops.restart.snapshot._copying import Copier, make_buffer
from ncclops.restart.snapshot._errors import NoRoom, SnapshotError
from ncclops.restart.snapshot._memory import Memory, memory_of, restored_beside
from ncclops.restart.snapshot._pace import FIRST_INTERVAL, VARIABLE, Meter, Often
from ncclops.restart.snapshot._planning import OWN, SHARED, Label, Moment, Seat, Source
from ncclops.restart.snapshot._results import Overhead, Restored, restored_by
from ncclops.restart.snapshot._rounds import Partner, Round, Rounds, decided_by
from ncclops.restart.snapshot._server import Server

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store

log = logging.getLogger("ncclops.restart")

_NO_MOMENT = Moment(-1, -1)
# A round that takes longer than this is one in which a rank does not come along.
_ROUND_WITHIN = timedelta(minutes=2)


@dataclass
class _Place:
    """This rank in the present iteration."""

    role: int
    world: int
    seat: int
    epoch_floor: int
    prefix: str
    connect: Callable[[], Any]
    aborted: Callable[[], bool]
    goes_on: bool = False
    has_reached: Callable[[int], object] = lambda _: None


@dataclass
class _Iteration:
    """What there is from one ``restore`` until the next."""

    place: _Place
    memory: Memory
    order: Order
    background: Background
    rounds: Rounds
    copier: Copier
    layouts: Mapping[str, str]
    epoch: int  # of the next snapshot
    meter: Meter = field(default_factory=Meter)
    newest: int = -1  # the step of the latest one
    calls: int = 0
    next_call: int = 1  # the call of ``take`` that takes the next snapshot
    interval: int = FIRST_INTERVAL  # from that one to the one after it
    round: Round | None = None
    taken: int = 0
    stopped: str = ""  # why no more snapshots are taken

    @property
    def next_round(self) -> int:
        return 0 if self.round is None else self.round.number + 1


def _check_types(**given: tuple[object, type | UnionType, str]) -> None:
    """Raises ``TypeError`` for a value that is of another type than it has to be."""
    for name, (value, kind, wanted) in given.items():
        is_odd = isinstance(value, bool) and kind is not bool  # which Python takes for a number
        if is_odd or not isinstance(value, kind):
            raise TypeError(f"{name}={value!r}: give {wanted}")


class Snapshots:
    """Keeps the state of training in host memory, and puts it back after a fault.

    Made anew in each iteration, inside the function that ``Wrapper`` restarts (or in the script
    that ``ncclops launch`` runs), with that iteration's objects; what was kept stays in the process
    and is found again. ``restore()`` comes first, then ``take(step)`` after each step. All ranks
    make the same calls with the same parameters.

    - ``state``: what is kept, by name: modules, optimizers and anything else with ``state_dict``
      and ``load_state_dict``, tensors (``DTensor`` included), dictionaries and lists. ``Rng()``
      stands for the random number generators of the process.
    - ``replicated``: the names of those entries that are equal on several ranks, such as the model
      and the optimizer under DDP. They are restored from any of these ranks, and sent to no partner
      as long as two nodes have them.
    - ``shard``: which ranks those are: all that give the same text. The default is for DDP, where
      all ranks are equal. With hybrid sharding, ``f"{mesh.get_local_rank('shard')}"``.
    - ``every``: steps from one snapshot to the next. ``None``: as often as ``budget`` allows.
    - ``budget``: the share of the time of training that snapshots may take (0.02).
      ``NCCLOPS_SNAPSHOT_EVERY`` in the environment has the last word: a number of steps, ``auto``,
      or a share such as ``5%``.
    - ``checkpoint``: called on all ranks where memory has no complete state. It loads what is on
      disk into the same objects, and returns its step, or ``None`` where there is nothing.
    - ``partner``: whether each rank has another one, on another node where there is one, keep a
      copy of what no replica has.
    - ``overlap``: on a GPU, copy parameters and optimizer state during the next forward and
      backward pass. Needs an optimizer whose ``step()`` runs in Python, which a captured CUDA graph
      does not.
    - ``domain``: what fails as a whole, if that is not the node: the name of a rack, say.
    - ``memory_for_partner``: the most bytes for another rank's copies. ``None``: half of what the
      host has left when the first one comes.
    - ``store``: for use without a ``Wrapper``: a ``torch.distributed`` store that outlives the
      fault, such as a ``PrefixStore`` with a prefix of its own for each restart. ``RANK`` and
      ``WORLD_SIZE`` then say who this rank is.
    - ``name``: tells several ``Snapshots`` of one function apart.

    Raises ``TypeError`` for an entry whose state could not be put back and for an argument of
    another type, and ``ValueError`` for names or numbers that make no sense.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        replicated: Collection[str] = (),
        shard: str = "",
        every: int | None = None,
        budget: float = 0.02,
        checkpoint: Callable[[], int | None] | None = None,
        partner: bool = True,
        overlap: bool = True,
        domain: str | None = None,
        memory_for_partner: int | None = None,
        store: Store | None = None,
        name: str = "",
    ) -> None:
        if not isinstance(state, Mapping):
            raise TypeError(
                f"state is of type {type(state).__qualname__}: give a dictionary, by name"
            )
        if isinstance(replicated, str) or not isinstance(replicated, Collection):
            raise TypeError(f"replicated={replicated!r}: give a list of names")
        _check_types(
            every=(every, Integral | None, "a number of steps, or None"),
            budget=(budget, Real, "a share of the time, as 0.02"),
            memory_for_partner=(memory_for_partner, Integral | None, "a number of bytes, or None"),
            shard=(shard, str, "text"),
            domain=(domain, str | None, "text, or None"),
            name=(name, str, "text"),
            partner=(partner, bool, "True or False"),
            overlap=(overlap, bool, "True or False"),
        )
        # It is called when nothing else is left: too late to find out.
        if not (checkpoint is None or callable(checkpoint)):
            raise TypeError(f"checkpoint={checkpoint!r}: give a function that loads the newest one")
        if unknown := sorted(set(replicated) - set(state)):
            raise ValueError(f"replicated={unknown}: there is no such entry in state")
        if not state:
            raise ValueError("state is empty: there is nothing to keep")
        if every is not None and every < 1:
            raise ValueError(f"every={every}: at least 1 step")
        if not 0 < budget <= 1:
            raise ValueError(f"budget={budget}: a share of the time, above 0 and up to 1")
        _objects.check(state)
        self._state = dict(state)
        self._entries = {
            unit: entries
            for unit, entries in (
                (OWN, {k: v for k, v in state.items() if k not in replicated}),
                (SHARED, {k: v for k, v in state.items() if k in replicated}),
            )
            if entries
        }
        self._shard = shard
        often = Often(every, budget).as_asked(os.environ.get(VARIABLE))
        self._every, self._budget = often.every, often.budget
        self._checkpoint = checkpoint
        self._partner = partner
        self._overlap = overlap
        self._domain = domain
        self._most_copied = memory_for_partner
        self._store = store
        self._name = name
        self._now: _Iteration | None = None

    # --- restore --------------------------------------------------------------------------------

    def restore(self, timeout: timedelta = timedelta(minutes=5)) -> Restored:
        """Put the newest state that all ranks can have into the objects, in place.

        Called on every rank, once in each iteration, before the first ``take``; also in the first
        one, where there is nothing yet, or a checkpoint. Blocks until all ranks are there.

        Where nothing is there, and ``keep_going`` goes on with objects that have been trained, it
        does not return: the wrapped function is called from its start, on all ranks. So it is on
        this one where its objects do not take back what was kept of them.

        Raises ``SnapshotError`` where they are not within ``timeout``, where the ranks'
        checkpoints are of different steps, and where it was called before in the iteration, under
        the same ``name``; and what ``checkpoint`` raises.
        """
        call = _calls.current()
        memory = memory_of(call, self._name)
        place = self._place(call)
        if call is not None and self._store is None:
            # Some ranks would find what was agreed on the first time, and others not.
            if memory.restored_in == place.prefix:
                raise SnapshotError(
                    "restore() was called before in this iteration: once is enough, and several "
                    "Snapshots of one function are told apart by name="
                )
            memory.restored_in = place.prefix
        layouts = {
            unit: layout_of(_objects.fixed_states(entries))
            for unit, entries in self._entries.items()
        }
        self._now = None
        memory.end_iteration()
        if self._most_copied is not None:
            memory.most_copied = self._most_copied
        if memory.server is None:
            memory.server = Server(memory)
        background = memory.background = Background(place.connect)
        agreement = Agreement(background, memory, place.prefix, place.world, timeout)

        def agree() -> Agreed:
            for blob in memory.own():
                blob.seal(checking_threads())  # where the fault came before that
            return agreement.reach(self._tell(memory, place, layouts))

        agreed = background.result_of(agree, timeout)
        self._now = self._begin(place, memory, agreed.order, background, layouts)
        _objects.drop_interrupted_step(self._state)
        if place.goes_on:
            _objects.put_back_modes(self._state, memory.modes)
        memory.modes = _objects.modes_of(self._state)
        if agreed.order.moment is None:
            restored = self._from_checkpoint(memory, agreement, agreed.order, timeout)
        else:
            try:
                restored = self._from_memory(memory, agreed)
            except Exception:
                if call is not None and place.goes_on:
                    call.begins_anew = True  # these objects have become others than were kept
                raise
        if restored.step is not None:
            place.has_reached(restored.step)
        if call is not None:
            self._compare_with_others(call, memory, restored)
        is_behind = agreed.order.moment is None and agreed.order.missing
        log.log(logging.WARNING if is_behind else logging.INFO, "%s", restored)
        return restored

    def _compare_with_others(self, call: _calls.Call, memory: Memory, restored: Restored) -> None:
        """Each agrees on a step of its own: those that are taken at the same steps on the same."""
        iteration = call.state().iteration
        memory.restored = iteration, restored.step
        for name, (restored_in, step) in restored_beside(call, self._name).items():
            if restored_in == iteration and step != restored.step:
                log.warning(
                    "Snapshots %r restored step %s, and %r step %s: take both at the same steps, "
                    "with one every=, or keep all in one",
                    *(self._name, restored.step, name, step),
                )

    def _place(self, call: _calls.Call | None) -> _Place:
        if self._store is None and call is not None:
            state = call.state()
            iteration = state.iteration
            if state.active_rank is None or state.active_world_size is None:
                raise SnapshotError("restore() is for ranks that run the function, not a reserve")
            return _Place(
                role=state.active_rank,
                world=state.active_world_size,
                seat=state.initial_rank,
                epoch_floor=iteration + 1,
                prefix=f"{iteration}/snapshots/{self._name}",  # with which the ledger deletes it
                connect=call.connect,
                aborted=lambda: call.state().iteration != iteration or call.aborted(),
                goes_on=call.goes_on,
                has_reached=call.has_reached,
            )
        if self._store is None:
            raise SnapshotError(
                "Snapshots outside of a wrapped function: call it inside one (ncclops launch wraps "
                "the script), or give a store="
            )
        from ncclops.restart._store.client import Connection, StoreClient
        from ncclops.restart.store import another_connection

        store = self._store
        rank = int(os.environ.get("RANK", "0"))
        return _Place(
            role=rank,
            world=int(os.environ.get("WORLD_SIZE", "1")),
            seat=rank,
            epoch_floor=1,
            prefix=f"ncclops/snapshots/{self._name}",
            connect=lambda: StoreClient(Connection(another_connection(store))),
            aborted=lambda: False,
        )

    def _tell(self, memory: Memory, place: _Place, layouts: Mapping[str, str]) -> Told:
        assert memory.server is not None
        seat = Seat(
            role=place.role,
            seat=place.seat,
            domain=self._domain or _node(),
            shard=self._shard,
            needs=layouts,
            holdings=[holding for holding, _ in memory.holdings()],
        )
        address, interval = memory.server.address, memory.interval
        return Told(
            seat, address, place.epoch_floor, self._every, interval, self._partner, place.goes_on
        )

    def _begin(
        self,
        place: _Place,
        memory: Memory,
        order: Order,
        background: Background,
        layouts: Mapping[str, str],
    ) -> _Iteration:
        partner = None
        if order.partner is not None:
            partner = Partner(background, *order.partner)
        interval = order.every or order.interval or FIRST_INTERVAL
        decide = decided_by(order.every, self._budget, interval)
        rounds = Rounds(
            background, place.prefix, place.role, place.world, partner, decide, place.aborted
        )
        copier = memory.copier = Copier(overlaps=self._overlap)
        return _Iteration(
            place,
            memory,
            order,
            background,
            rounds,
            copier,
            layouts,
            order.epoch,
            interval=interval,
        )

    def _from_memory(self, memory: Memory, agreed: Agreed) -> Restored:
        now, order = self._in_iteration(), agreed.order
        assert order.moment is not None
        for unit, entries in self._entries.items():
            _objects.load(entries, agreed.blobs[unit], self._state)
        for unit, blob in agreed.blobs.items():
            memory.keep_only(unit, blob)
        memory.keep_copies_of(order.moment, list(agreed.blobs.values()))
        # The first round of this iteration is about what is there already.
        sent = [
            blob
            for unit, blob in agreed.blobs.items()
            if unit in order.copied and unit not in order.is_there
        ]
        now.next_call = now.interval
        now.meter.began(time.monotonic())
        self._start_round(now, [], sent)
        units = {unit: fetch.source for unit, (fetch, _) in order.fetches.items()}
        return restored_by(order, order.moment.step, units)

    def _from_checkpoint(
        self, memory: Memory, agreement: Agreement, order: Order, timeout: timedelta
    ) -> Restored:
        now = self._in_iteration()
        for unit in self._entries:
            memory.keep_only(unit, None)
        memory.keep_copies_of(_NO_MOMENT, ())
        step = None
        if self._checkpoint is not None:
            step = self._checkpoint()
            if step is not None:
                step = operator.index(step)
            steps = now.background.result_of(
                lambda: agreement.compare(now.place.role, "checkpoint", step), timeout
            )
            if len(set(steps)) > 1:
                told = ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(steps[:16]))
                raise SnapshotError(f"the ranks' checkpoints are of different steps: {told}")
        if step is not None:
            return restored_by(order, step, dict.fromkeys(self._entries, Source.CHECKPOINT))
        if order.goes_on:
            self._begin_anew(agreement, order, timeout)
        return restored_by(order, None, {})

    def _begin_anew(self, agreement: Agreement, order: Order, timeout: timedelta) -> NoReturn:
        """Nothing is there for objects that have been trained: all ranks make others.

        Those that are new do, too: DDP may have given them the others' weights by now.
        """
        now, call = self._in_iteration(), _calls.current()
        assert call is not None
        call.begins_anew = True
        # What the first one raises interrupts the others: they know by then.
        now.background.result_of(
            lambda: agreement.compare(now.place.role, "begins-anew", True), timeout
        )
        raise RankShouldRestart(
            "no state to restore into objects that have been trained"
            + (f" ({order.missing})" if order.missing else "")
            + ": the function is called from its start"
        )

    # --- take -----------------------------------------------------------------------------------

    def take(self, step: int) -> bool:
        """After each step, with how many are done: take a snapshot where one is due.

        Returns whether one was begun. It waits only for what is on the host to be copied, and for
        the snapshot before, if that is not complete on all ranks yet: that is measured, and longer
        intervals follow.

        A step that is not above that of the snapshot before is gone back to: the earlier snapshots
        are of what was given up.

        Raises ``SnapshotError`` before ``restore()``, and for a state that cannot be kept, and
        ``TypeError`` for a step that is no whole number.
        """
        entered = time.monotonic()
        try:
            step = operator.index(step)  # of numpy or torch it would be no JSON, for the others
        except TypeError:
            raise TypeError(f"take({step!r}): give how many steps are done") from None
        now = self._in_iteration()
        now.place.has_reached(step)
        now.calls += 1
        under_way = now.round is not None and not now.round.is_reported
        now.meter.step_ended(entered, busy=under_way)
        self._report_cost(now)
        taken = now.calls == now.next_call and not now.stopped and self._take(now, step)
        now.meter.call_ended(entered, time.monotonic())
        return taken

    def _take(self, now: _Iteration, step: int) -> bool:
        if not self._last_has_ended(now):
            log.warning("no more snapshots until the next restart: %s", now.stopped)
            return False
        now.meter.began(time.monotonic())
        if step <= now.newest:  # training has gone back, or counts something else than steps
            now.epoch += 1
        now.newest = step
        try:
            blobs = {unit: self._copy(now, unit, step) for unit in self._entries}
        except NoRoom as error:
            now.stopped = f"snapshot {now.next_round} of this iteration: {error}"
            log.warning("no more snapshots until the next restart: %s", now.stopped)
            now.background.submit(lambda: now.rounds.give_up(now.next_round))
            return False
        for unit, blob in blobs.items():
            now.memory.keep(unit, blob)
        sent = [blob for unit, blob in blobs.items() if unit in now.order.copied]
        now.memory.modes = _objects.modes_of(self._state)
        now.next_call = now.calls + now.interval
        now.taken += 1
        self._start_round(now, list(blobs.values()), sent)
        return True

    def _copy(self, now: _Iteration, unit: str, step: int) -> Blob:
        entries = self._entries[unit]
        states = {name: _objects.state_of(entry) for name, entry in entries.items()}
        header, rows, sources, nbytes = lay_out(states)
        blob = Blob(header, self._buffer(now, unit, nbytes, sources))
        blob.draft = Label(
            unit=unit,
            epoch=now.epoch,
            step=step,
            role=now.place.role,
            world=now.place.world,
            seat=now.place.seat,
            shard=self._shard if unit == SHARED else "",
            layout=now.layouts[unit],
            nbytes=nbytes,
            digest="",
        )
        now.copier.copy(blob, rows, sources, _objects.changed_by_steps(self._state))
        return blob

    def _buffer(self, now: _Iteration, unit: str, nbytes: int, sources: Sequence[Tensor]) -> Tensor:
        """That of the snapshot before the last, as a rule."""
        old = now.memory.buffer_for(unit, nbytes)
        # What has come over the wire is not pinned.
        if old is not None and (old.is_pinned() or not any(each.is_cuda for each in sources)):
            return old
        began = time.monotonic()
        made = make_buffer(nbytes, sources)
        now.meter.comes_once(time.monotonic() - began)
        return made

    def _start_round(self, now: _Iteration, blobs: list[Blob], sent: list[Blob]) -> None:
        following = Round(now.next_round)
        rounds = now.rounds
        now.background.submit(lambda: rounds.run(following, blobs, sent))
        now.round = following

    def _report_cost(self, now: _Iteration) -> None:
        """Hand over what the latest snapshot has cost, once it is complete."""
        latest = now.round
        if latest is not None and latest.complete.is_set() and not latest.is_reported:
            latest.is_reported = True
            latest.cost.put(now.meter.cost(latest.complete_at))

    def _last_has_ended(self, now: _Iteration) -> bool:
        """Wait for the round of the last snapshot; the interval after the next one is then known.

        False: it does not end, and ``stopped`` says why. Then no rank goes on with snapshots, as
        none can end its round, and all keep the last one that is complete.
        """
        last = now.round
        if last is None:
            return True
        try:
            now.background.wait(last.complete, _ROUND_WITHIN)
            self._report_cost(now)
            now.background.wait(last.ended, _ROUND_WITHIN)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            now.stopped = f"snapshot {last.number} of this iteration did not end: {error}"
            return False
        now.interval = now.memory.interval = last.interval
        if now.taken:
            now.memory.drop_copies_before(now.order.epoch)
        return True

    # --- what it costs --------------------------------------------------------------------------

    @property
    def overhead(self) -> Overhead:
        """What snapshots have cost this rank since ``restore``. Raises ``SnapshotError`` before."""
        now = self._in_iteration()
        own, copied = now.memory.nbytes
        meter = now.meter
        return Overhead(
            share=meter.total_cost_s / meter.total_s if meter.total_s else 0.0,
            cost_s=meter.total_cost_s,
            step_s=meter.step_s,
            steps=meter.steps,
            snapshots=now.taken,
            every=now.interval,
            own_bytes=own,
            copied_bytes=copied,
        )

    def wait(self, timeout: timedelta = timedelta(minutes=2)) -> bool:
        """Wait until the latest snapshot is complete on this rank, its partner's copy included.

        Never needed; for tests and measurements. False: it is not, within ``timeout``.
        """
        now = self._in_iteration()
        try:
            if now.round is not None:
                now.background.wait(now.round.complete, timeout)
        except SnapshotError:
            return False
        return now.rounds.partner is None or now.rounds.partner.failure is None

    def _in_iteration(self) -> _Iteration:
        if self._now is None:
            raise SnapshotError("call restore() on every rank before take()")
        return self._now


def _node() -> str:
    """What all processes of this host, and no others, have in common."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"
