"""The terminal of a run: workers' output and our own lines, and an end that cannot block us."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta

from ncclops.agent import log_files
from ncclops.agent.condition import Condition
from ncclops.agent.echo import Echo, Source
from ncclops.agent.in_thread import InThread
from ncclops.agent.job import Job
from ncclops.agent.screen import Screen


class Terminal:
    """Shows what workers of ``job`` write, from :meth:`open` until :meth:`finish`."""

    def __init__(self, job: Job) -> None:
        stdout = sys.stderr if job.stdout_is_data else sys.stdout
        self._job = job
        self._echo = Echo(Screen(stdout.buffer, sys.stderr.buffer))
        self._shown: list[Source] = []

    def open(self) -> None:
        self._echo.start()

    def follow(self, ranks: Sequence[int]) -> None:
        """Show what these write too, by local rank; those that are followed stay as they are."""
        self._shown = log_files.shown(self._job.run, ranks, self._job.shown, self._job.attached)
        self._echo.follow(self._shown)

    def lose(self, rank: int, others: Sequence[int]) -> None:
        """``others`` go on without ``rank``: one of them is shown if no rank is any more."""
        lost = [source for source in self._shown if source.rank == rank]
        self._shown = [source for source in self._shown if source.rank != rank]
        if self._shown or not lost or not others:
            return
        run, successor = self._job.run, min(others)
        for source in lost:
            path = (
                run.paths.rank(successor).stderr_log
                if source.to_stderr
                else run.paths.rank(successor).stdout_log
            )
            self._shown.append(Source(successor, path, source.to_stderr, from_end=True))
        self.note(f"rank {rank} exited; now showing rank {successor}")
        self._echo.follow(self._shown)

    def say(self, note: str) -> None:
        """Show a line of our own on stderr, between workers' lines; never blocks the caller."""
        self._echo.say(note)

    def note(self, note: str) -> None:
        """The same for what goes as it should: not with ``-q``."""
        if not self._job.quiet:
            self.say(note)

    def progress(self, text: str | None) -> None:
        """What is being waited for, at the bottom of a terminal; see ``Echo.progress``."""
        self._echo.progress(text)

    def hold(self, held: bool) -> None:
        """Show nothing while ``held``: the terminal is somebody else's. Nothing is lost."""
        self._echo.hold(held)

    async def finish(
        self, condition: Condition, give_up: Callable[[], bool], limit: timedelta | None = None
    ) -> bool:
        """Show what is left; False if the terminal does not take it and ``give_up`` says so, or
        does not within ``limit``.

        In a separate thread that is not waited for: a terminal may block without end.
        """
        finishing = InThread(self._echo.finish, condition)
        await condition.until(lambda: finishing.is_done or give_up(), limit)
        return finishing.is_done
