"""What the ranks of a job report, gathered by a thread of the harness."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ncclops.restart.incident import Incident
from ncclops.testing._channel import Channel
from ncclops.testing.faults import Fault
from ncclops.testing.results import JobResult, Note, RankResult, Strike


@dataclass
class RankWatch:
    """What one rank has reported so far. ``code`` is there when its process has ended."""

    rank: int
    channel: Channel
    pid: int | None = None
    code: int | None = None
    value: bytes | None = None
    error: dict[str, Any] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)

    def result(self, directory: Path) -> RankResult:
        """As a value; of a rank that has not ended, the code is that of nothing: -1."""
        return RankResult(
            self.rank,
            self.code if self.code is not None else -1,
            directory / f"log-{self.rank}",
            self.value,
            self.error.get("error"),
            self.error.get("chain", ()),
            self.error.get("traceback"),
            tuple(self.incidents),
        )


class Watch:
    """Reads the channels of all ``ranks`` until they have ended.

    ``carry_out`` is called in the thread, for each fault that is the harness's to do.
    """

    def __init__(
        self,
        ranks: dict[int, RankWatch],
        faults: Sequence[Fault],
        carry_out: Callable[[Fault], None],
    ) -> None:
        self.ranks = ranks
        self._faults = faults
        self._carry_out = carry_out
        self._notes: list[Note] = []
        self._strikes: list[Strike] = []
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._selector = selectors.DefaultSelector()
        self._stop, self._stopped = os.pipe()
        self._selector.register(self._stop, selectors.EVENT_READ, None)
        for each in ranks.values():
            self._selector.register(each.channel, selectors.EVENT_READ, each)
        self._thread = threading.Thread(target=self._run, name="ncclops-testing", daemon=True)
        self._thread.start()

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Until ``condition`` holds, looked at after each report; False: it did not in time."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: condition() or self._failure is not None, max(timeout_s, 0)
            )
            if self._failure is not None:
                raise self._failure
            return done

    def notes(self) -> tuple[Note, ...]:
        """All so far, in order of time."""
        return tuple(sorted(self._notes, key=lambda note: note.at))

    def strikes(self) -> tuple[Strike, ...]:
        """All so far, in order of time."""
        return tuple(sorted(self._strikes, key=lambda strike: strike.at))

    def result(self, directory: Path) -> JobResult:
        """What there is, as a value."""
        ranks = {rank: each.result(directory) for rank, each in self.ranks.items()}
        return JobResult(ranks, self.strikes(), self.notes())

    def replace(self, new: RankWatch) -> RankWatch:
        """Read the channel of ``new`` in place of that of the same rank; returns ``new``."""
        with self._changed:
            old = self.ranks[new.rank]
            old.channel.close()
            new.incidents = list(old.incidents)
            self.ranks[new.rank] = new
            self._selector.register(new.channel, selectors.EVENT_READ, new)
        return new

    def close(self) -> None:
        """Stop reading; a rank whose channel closes is ended by its keeper."""
        os.close(self._stopped)
        self._thread.join()
        self._selector.close()
        os.close(self._stop)
        for each in self.ranks.values():
            each.channel.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                try:
                    self._hear(key.data)
                except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
                    with self._changed:
                        self._failure = error
                        self._changed.notify_all()
                    return

    def _hear(self, rank: RankWatch) -> None:
        try:
            message = rank.channel.receive()
        except EOFError:
            self._selector.unregister(rank.channel)
            return
        if message["op"] == "strike":
            self._strike(rank, message)
        with self._changed:
            self._note(rank, message)
            self._changed.notify_all()

    def _strike(self, rank: RankWatch, message: dict[str, Any]) -> None:
        fault = self._faults[message["fault"]]
        self._strikes.append(Strike(fault, message["at"]))
        if fault.from_outside:
            self._carry_out(fault)
            with contextlib.suppress(OSError):  # the fault may have ended the rank
                rank.channel.send({"op": "done"})

    def _note(self, rank: RankWatch, message: dict[str, Any]) -> None:
        match message["op"]:
            case "started":
                rank.pid = message["pid"]
            case "note":
                note = Note(rank.rank, message["name"], message["fields"], message["at"])
                self._notes.append(note)
            case "incident":
                rank.incidents.append(message["incident"])
            case "returned":
                rank.value = message["value"]
            case "raised":
                rank.error = message
            case "ended":
                rank.code = message["code"]
                self._selector.unregister(rank.channel)
