"""A new process takes the place of a lost rank, and the others wait for it."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from datetime import timedelta

from ncclops.restart._inbox import Inbox
from ncclops.restart._store.connections import Connections
from ncclops.restart.agreement import INITIAL
from ncclops.restart.attribution import Fault, FaultKind
from ncclops.restart.generations import Generation
from ncclops.restart.ledger import Ledger
from ncclops.restart.monitor_thread import Agreed
from ncclops.restart.settings import Settings
from ncclops.restart.state import State

log = logging.getLogger("ncclops.restart")

# A new process has said that it is there; on a busy machine its next steps may take seconds.
_COMES_WITHIN = timedelta(seconds=10)
# From the agreement to joining anew, a session ends and another one begins: some 0.1 s, and 16 s
# where all that the first one waits for hangs. No code of the user's runs, so no timeout covers it.
_STAYS_WITHIN = timedelta(seconds=60)
# Between the ranks that record as gone who has not come, and between two looks of each.
_IN_TURN = timedelta(seconds=2)
_MOST_IN_TURN = 3


def find_generation(
    connections: Connections, initial_rank: int, initial_world_size: int
) -> Generation:
    """The generation in which this process takes the place of ``initial_rank``.

    Waits for it as long as the others run, and restarts them once if they can go on from that.
    ``connections`` then lead to its name space. Raises ``JobEnded``, and what the store raises.
    """
    generation = Generation()
    while True:
        ledger = Ledger(connections.first, initial_world_size, generation=generation)
        # In a later one also in the place of a process that was to stay: it has ended on the way.
        if generation.number and ledger.is_awaited(initial_rank):
            return generation
        generation = _wait_for_next(ledger, initial_rank)
        connections.enter_generation(generation.number)


def _wait_for_next(ledger: Ledger, initial_rank: int) -> Generation:
    """The generation after that of ``ledger``, in which all know that this process is there."""
    generations = ledger.generations
    if (following := generations.next()) is not None:
        return following
    log.info("a new process for rank %d waits for the others", initial_rank)
    generations.announce(initial_rank)
    asked: int | None = None
    while following is None:
        iteration = generations.iteration()
        if iteration is not None and iteration != asked and not ledger.is_over(iteration):
            ledger.record_fault(iteration, _request(initial_rank, iteration))
            asked = iteration
        following = generations.wait_for_next()
    return following


def _request(initial_rank: int, iteration: int) -> Fault:
    detail = "a new process takes its place"
    return Fault.observed(FaultKind.REQUESTED, initial_rank, iteration, detail)


def _absence(initial_rank: int, waited: timedelta) -> Fault:
    detail = f"did not join the others within {waited.total_seconds():.0f} s"
    return Fault.observed(FaultKind.LOST, initial_rank, INITIAL, detail, gone=True)


def await_join(
    inbox: Inbox,
    ledger: Ledger,
    state: State,
    settings: Settings,
    record_gone: Callable[[Fault], None],
) -> Agreed:
    """Who is there in the generation of ``ledger``, on a rank that was there before.

    Ranks that do not come are recorded as gone: those that were to come back after
    ``grow_timeout``; any after a minute, or twice ``heartbeat_timeout`` if that is longer, but not
    later than half of ``barrier_timeout``; those whose process has ended at once, as a new one
    says: no monitor process watches them yet. Raises ``BarrierTimeout``.
    """
    generation = ledger.generation
    stay = set(range(state.initial_rank)) - generation.absent - generation.returning
    everyone = frozenset(range(state.initial_world_size))
    # One rank records them, and the next ones if that one is lost.
    turn = min(len(stay), _MOST_IN_TURN) * _IN_TURN
    return_within = (settings.grow_timeout or _COMES_WITHIN) + turn
    longest = max(_STAYS_WITHIN, 2 * settings.heartbeat_timeout)
    stay_within = max(return_within, min(longest, settings.barrier_timeout / 2) + turn)
    began, waited = time.monotonic(), timedelta(0)
    recorded: set[int] = set()
    while waited < stay_within:
        try:
            return inbox.agreement_within(_IN_TURN)
        except queue.Empty:
            waited = timedelta(seconds=time.monotonic() - began)
        given_up: set[int] = set()
        if waited >= return_within:
            given_up |= generation.returning
        if waited >= stay_within:
            given_up |= everyone
        gone = ledger.missing(INITIAL, generation.absent) & given_up
        if len(stay) < _MOST_IN_TURN:
            gone |= ledger.generations.announced() - generation.absent
        for rank in sorted(gone - recorded):
            recorded.add(rank)
            record_gone(_absence(rank, waited))
    # The last one to come may have ended before it could say that all had.
    ledger.count_losses(INITIAL, generation.absent)
    return inbox.agreement(INITIAL)
