"""The workers of one attempt: which run, which have ended and how, what they have reported."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ncclops.agent.workers import Exit, Worker
from ncclops.decision.retrying import Escalated
from ncclops.host.oom_kills import RULED_OUT
from ncclops.record.events import OwnWrapperEvent, ScriptFailedEvent
from ncclops.record.verdict_record import WorkerEnding
from ncclops.record.worker_commands import EndingCommand


@dataclass
class Team:
    """One attempt's workers on this node; a new attempt has a new team."""

    restarts_in_process: bool
    others_work: Callable[[], bool] = lambda: False  # ranks of other nodes
    workers: list[Worker] = field(default_factory=list)
    ended: list[Worker] = field(default_factory=list)  # in the order in which they ended
    asked_to_stop: set[int] = field(default_factory=set)  # ranks that ended only after we asked
    entered: set[int] = field(default_factory=set)  # ranks that the restart core looks after
    # Ranks whose processes have become other programs (exec) before that: nothing restarts them.
    by_themselves: set[int] = field(default_factory=set)
    bootstrapped: set[int] = field(default_factory=set)  # ranks that have had a process group
    ready_to_end: set[int] = field(default_factory=set)  # ranks that wait for the others to be
    finished: set[int] = field(default_factory=set)  # ranks whose script has ended well
    lost: set[int] = field(default_factory=set)  # the restarts went on without them
    lost_for: dict[int, str] = field(default_factory=dict)  # each rank's last fault, in words
    raised: set[int] = field(default_factory=set)  # ranks of which that is an exception
    leaving: set[int] = field(default_factory=set)  # ranks that have said so themselves
    aborted: set[int] = field(default_factory=set)  # ranks whose groups are aborted on demand
    returning: set[int] = field(default_factory=set)  # their new processes have not entered yet
    # Of the script; the one with growth, if there is one.
    own_wrapper: OwnWrapperEvent | None = None
    escalation: Escalated | None = None  # a restart in place cannot help: all are leaving
    script_failures: dict[int, ScriptFailedEvent] = field(default_factory=dict)  # each rank's last
    hung: set[int] = field(default_factory=set)  # ranks whose hang has ended the attempt
    ended_for_hang: set[int] = field(default_factory=set)  # by the agent, and the others go on
    last_faulty: int | None = None
    by_force: bool = False  # ranks were made to leave, or not given the time to
    ending: bool = False  # the workers were told that nothing starts again
    why_ended: dict[int, str] = field(default_factory=dict)  # ranks that the restart core has ended

    explained: dict[int, str] = field(
        default_factory=dict
    )  # why ranks died, as the agent has found
    out_of_memory: dict[int, str] = field(default_factory=dict)  # of these, the OOM killer's
    killed_from_outside: set[int] = field(default_factory=set)  # not by it, nor by the agent

    def running(self) -> list[Worker]:
        return [each for each in self.workers if each.exit is None and not each.is_given_up]

    def at_work(self) -> list[Worker]:
        """Those that run, without new processes that wait for the others."""
        return [worker for worker in self.running() if worker.rank not in self.returning]

    def taking_part(self) -> list[Worker]:
        """Those that run, without ranks that the restarts went on without.

        The process of such a rank may still run, as another program (exec), or because it does not
        end. That it makes no steps is no hang of the job.
        """
        return [worker for worker in self.running() if worker.rank not in self.lost]

    def goes_on(self) -> bool:
        """Whether ranks work that those that are to return can come back to."""
        return bool(self.at_work()) or self.others_work()

    def grows(self, asked: bool) -> bool:
        """Whether lost ranks may come back: as was ``asked`` for, or as the script's own wrapper
        says."""
        return asked or (self.own_wrapper is not None and self.own_wrapper.grows)

    def wrapper_that_does_not_grow(self) -> str | None:
        """In words, where the script has one: nobody would wait for a new process."""
        own = self.own_wrapper
        if own is None or own.grows:
            return None
        return f"the script's own wrapper, of {own.wrapper}, has no grow_timeout"

    def is_over(self) -> bool:
        """Whether no rank of this node works, or is to come back to others that do."""
        return not (self.at_work() or (self.returning and self.others_work()))

    def has_returned(self, rank: int) -> None:
        """The new process of ``rank`` has taken its place: how the old one ended is settled."""
        if rank in self.returning:
            self.returning.discard(rank)
            self.forget([worker for worker in self.ended if worker.rank == rank])
            self.why_ended.pop(rank, None)
            self.explained.pop(rank, None)
            self.out_of_memory.pop(rank, None)
            self.killed_from_outside.discard(rank)
            self.ended_for_hang.discard(rank)

    def forget(self, workers: Collection[Worker]) -> None:
        """Judge the attempt without ``workers``, which have ended."""
        self.workers = [worker for worker in self.workers if worker not in workers]
        self.ended = [worker for worker in self.ended if worker not in workers]

    @property
    def ranks_ended(self) -> set[int]:
        return {worker.rank for worker in self.ended}

    def raised_last(self) -> dict[int, str]:
        """The exception for which the workers gave up restarting in place, by its rank."""
        rank = self.last_faulty
        if self.escalation is None or rank is None or rank not in self.raised:
            return {}
        return {rank: self.lost_for[rank]}

    def starting_up(self) -> bool | None:
        """Whether the attempt failed before each process group had completed a collective.

        As the ranks say whose script failed in the last iteration; None where that is not known.
        """
        failures = self.script_failures.values()
        last = max((failure.iteration for failure in failures), default=0)
        told = {failure.starting_up for failure in failures if failure.iteration == last} - {None}
        if told:
            return True in told
        return None if self.bootstrapped else True

    def send(self, signum: signal.Signals) -> None:
        """Send ``signum`` to all that run."""
        for worker in self.running():
            worker.send(signum)

    def announce_end(self, reason: str) -> None:
        """Have no worker start the script again: the attempt is ending, because of ``reason``."""
        self.ending = True
        for worker in self.running():
            worker.send_command(EndingCommand(reason=reason))

    def release(self) -> None:
        """Signal the workers that are ready to end, once all that run are."""
        running = self.running()
        if running and all(worker.rank in self.ready_to_end for worker in running):
            self.ready_to_end.clear()
            self.send(signal.SIGTERM)

    def final_failure(self) -> Worker | None:
        """The worker whose failure ends the attempt, if there is one."""
        failed = [worker for worker in self.ended if self.has_failed(worker)]
        if self.restarts_in_process and not self.is_over():
            # The others go on without it, unless it never reached the point from which they
            # can, or the restart core has given up for all of them.
            failed = [w for w in failed if self.ends_all(w) or self.escalation]
        elif self.restarts_in_process and len(failed) < len(self.ended):
            # The job was finished by those that were left; they knew nothing of these.
            failed = [worker for worker in failed if worker.rank in self.by_themselves]
        blamed = [worker for worker in failed if worker.rank == self.last_faulty]
        return next(iter(blamed + failed), None)

    def has_failed(self, worker: Worker) -> bool:
        """Whether ``worker`` has ended otherwise than with 0, and not died after its script had
        ended well: another exit code is its own word. And 0 is none after the script has failed.
        """
        ended = worker.exit
        if ended is None:
            return False
        if ended.ok:
            return self._script_failed(worker)
        return ended.signal is None or worker.rank not in self.finished

    def ends_all(self, worker: Worker) -> bool:
        """Whether the failure of ``worker`` ends the attempt on all nodes of the job.

        Under in-process restart the others go on without it, on this node or elsewhere, once it
        had reached the point from which they can.
        """
        looked_after = self.entered - self.by_themselves
        return not self.restarts_in_process or worker.rank not in looked_after

    def note_memory(self, worker: Worker, told: str | None, *, is_ruled_out: bool = False) -> None:
        """``told`` is that the OOM killer has ended a process, once ``worker`` has ended; of one
        that the agent ended itself, it says nothing. ``is_ruled_out``: it can have ended none."""
        ended_by_us = self.asked_to_stop | self.hung | self.ended_for_hang
        killed = worker.exit is not None and worker.exit.signal == "SIGKILL"
        if not killed or worker.rank in ended_by_us:
            return
        if is_ruled_out:
            self.killed_from_outside.add(worker.rank)
        elif told is not None:
            self.explained[worker.rank] = self.out_of_memory[worker.rank] = told

    def told_by_kernel(self) -> dict[int, str]:
        """For each rank that was killed, what the kernel's counters say of that."""
        outside = self.killed_from_outside - self.why_ended.keys()
        return self.out_of_memory | dict.fromkeys(outside, RULED_OUT)

    def explanations(self) -> dict[int, str]:
        """For each rank of which more is known than how it ended, what that is."""
        outside = dict.fromkeys(self.killed_from_outside, "from outside")
        return outside | self.why_ended | self.explained

    def endings(self) -> list[WorkerEnding]:
        """How the workers ended: first those that did, in their order, then the rest."""
        rest = [worker for worker in self.workers if worker not in self.ended]
        return [self._ending(worker) for worker in (*self.ended, *rest)]

    def failed_exits(self) -> dict[int, Exit]:
        """How the ranks ended that failed by themselves: no agent or monitor process ended them."""
        ended_by_us = self.asked_to_stop | self.hung | self.ended_for_hang | set(self.why_ended)
        return {
            worker.rank: worker.exit
            for worker in self.ended
            if worker.exit is not None
            and self.has_failed(worker)
            and worker.rank not in ended_by_us
        }

    def blamed_first(self) -> list[WorkerEnding]:
        """The endings, with the rank in front that the restart core blames."""
        return sorted(self.endings(), key=lambda ending: ending.rank != self.last_faulty)

    def failed_meanwhile(self) -> list[WorkerEnding]:
        """The endings, while the run was stopping, of ranks that failed by themselves.

        Under restarts in place the others leave then as well.
        """
        return [
            ending
            for ending in self.blamed_first()
            if not self.restarts_in_process or ending.signal or ending.rank == self.last_faulty
        ]

    def _ending(self, worker: Worker) -> WorkerEnding:
        return WorkerEnding(
            rank=worker.rank,
            pid=worker.pid,
            exit_code=worker.exit.code if worker.exit else None,
            signal=worker.exit.signal if worker.exit else None,
            seconds=round(worker.ended - worker.started, 3) if worker.ended else None,
            asked_to_stop=worker.rank in self.asked_to_stop - self.hung,
            finished=worker.rank in self.finished,
            left=self._has_left(worker),
            script_failed=self._script_failed(worker),
        )

    def _script_failed(self, worker: Worker) -> bool:
        """Whether ``worker`` exited 0 after its script had left with an error: a callback at exit,
        or a hook for exceptions, has ended the process."""
        if worker.exit is None or not worker.exit.ok or worker.rank not in self.script_failures:
            return False
        started_again = worker.rank in self.entered and not self.escalation
        return not started_again and worker.rank not in self.finished

    def _has_left(self, worker: Worker) -> bool:
        """Whether ``worker`` exited 0 in the middle of its script, as by ``os._exit(0)``, and
        others went on without it."""
        if worker.exit is None or not worker.exit.ok or worker.rank not in self.entered:
            return False
        went_on = worker.rank in self.lost or bool(self.finished)
        return went_on and worker.rank not in self.finished
