"""The loop of ``ncclops status --watch``: waits for keys, files and answers, and draws.

The status is asked for once a second, since steps and memory change without an event, and at once
when ``events.jsonl`` grows. What may take long (an agent, a file system, ranks that are asked for
their stacks) is waited for in threads: keys are answered at once whatever happens.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from ncclops.control import client
from ncclops.errors import NcclopsError
from ncclops.live_view.aside import Aside
from ncclops.live_view.composing import Frame, Scene, compose
from ncclops.live_view.growth import Growth
from ncclops.live_view.history import History, Past
from ncclops.live_view.keys import KeyDecoder
from ncclops.live_view.page_reader import PageReader
from ncclops.live_view.terminal import Left, Terminal
from ncclops.live_view.view import View, pressed
from ncclops.record import event_log
from ncclops.record.paths import RunPaths
from ncclops.status.model import RunStatus

# A person reads no faster, and the agent's server looks no more often than twice as fast.
_EVERY_S = 1.0
_AT_MOST_EVERY_S = 0.5
# Of the time between two looks, the share that looking may take: of a run of thousands of ranks
# that has no agent any more, it takes seconds.
_SHARE = 0.25
# After an Escape alone nothing follows; of a key that begins with it, the rest comes at once.
_ESCAPE_S = 0.1


def watch(run_dir: Path, first: RunStatus) -> RunStatus:
    """Show the run on the terminal until the person leaves; its status as it was last.

    ``first`` is the status to begin with. Raises ``terminal.Left`` where something but the person
    ends it.
    """
    terminal = Terminal(sys.stdin.fileno(), sys.stdout.fileno(), encoding=sys.stdout.encoding)
    watching = _Watching(run_dir, first, terminal)
    try:
        with terminal.opened():
            watching.run()
    except Left as left:
        if left.signum != signal.SIGINT:
            raise
    finally:
        watching.close()
    return watching.status


class _Watching:
    def __init__(self, run_dir: Path, first: RunStatus, terminal: Terminal) -> None:
        self.status = first
        self._paths, self._terminal = RunPaths(run_dir), terminal
        self._past, self._view, self._keys = Past(), View(), KeyDecoder()
        self._frame: Frame | None = None
        self._answered = self._asked = time.monotonic()
        self._took_s = self._typed_at = 0.0
        self._trouble = ""
        self._asking = Aside(terminal.wake)
        self._pages = PageReader(run_dir, terminal.wake)
        self._growth: Growth | None = None
        with suppress(OSError):  # without it, the clock alone
            self._growth = Growth(self._paths.events)
        # Of the thread that looks.
        self._history = History()
        self._events: event_log.EventReader | None = None

    def run(self) -> None:
        """Until the person leaves."""
        self._ask()
        while not self._view.over:
            self._draw()
            typed = self._terminal.wait(self._files(), self._wait_s())
            if self._growth is not None:
                self._growth.take()
            self._asking.take()
            self._pages.take()
            for key in self._typed(typed):
                self._press(key)
            if not self._asking.is_busy and not self._is_over and self._due_s() <= 0:
                self._ask()
            self._pages.want(self._view.request, self.status, follow=self._view.at_end)

    def close(self) -> None:
        self._pages.close()
        if self._growth is not None:
            self._growth.close()

    def _draw(self) -> None:
        silent_s = 0.0 if self._is_over else time.monotonic() - self._answered
        scene = Scene(
            status=self.status,
            past=self._past,
            view=self._view,
            content=self._pages.content,
            silent_s=silent_s,
            trouble=self._trouble,
        )
        self._frame = compose(scene, *self._terminal.size)
        self._view = self._frame.view
        self._terminal.draw(self._frame.lines)

    def _typed(self, typed: bytes) -> list[str]:
        now = time.monotonic()
        if typed:
            self._typed_at = now
            return self._keys.feed(typed)
        return self._keys.expire() if now - self._typed_at >= _ESCAPE_S else []

    def _press(self, key: str) -> None:
        if key == "redraw":
            self._terminal.forget()
        elif self._frame is not None:
            self._view = pressed(self._view, key, self._frame.extent)

    # --- what wakes it ----------------------------------------------------------------------------

    def _files(self) -> list[int]:
        own = () if self._growth is None else self._growth.files
        return [*own, *self._pages.files]

    def _wait_s(self) -> float:
        waits = [_EVERY_S]
        if self._keys.is_waiting:
            waits.append(_ESCAPE_S)
        if not self._asking.is_busy and not self._is_over:
            waits.append(self._due_s())
        if (due_s := self._pages.due_s) is not None:
            waits.append(due_s)
        return max(0.0, min(waits))

    # --- the status -------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self.status.phase == "ended" and self._past.ended is not None

    def _due_s(self) -> float:
        """In how many seconds to look at the run again."""
        has_grown = self._growth is not None and self._growth.has_grown
        least = _AT_MOST_EVERY_S if has_grown else _EVERY_S
        return self._asked + max(least, self._took_s / _SHARE) - time.monotonic()

    def _ask(self) -> None:
        if self._growth is not None:
            self._growth.has_grown = False
        self._asked = time.monotonic()
        self._asking.start(self._look, self._on_trouble)

    def _look(self) -> Callable[[], None]:
        """In a thread: the status, and what the events that are new add to the past."""
        began, status = time.monotonic(), None
        with suppress(NcclopsError):  # what was known stays, and is said to be old
            status = client.status_of(self._paths.root)
        with suppress(OSError):
            if self._events is None:
                self._events = event_log.follow(self._paths.events)
            for event in self._events.new():
                self._history.take(event)
        past = self._history.until(time.time())
        return partial(self._on_status, status, past, time.monotonic() - began)

    def _on_status(self, status: RunStatus | None, past: Past, took_s: float) -> None:
        self._past, self._took_s, self._asked = past, took_s, time.monotonic()
        self._trouble = ""
        if status is not None:
            self.status, self._answered = status, time.monotonic()

    def _on_trouble(self, why: str) -> None:
        """What cannot be helped now may pass: it is asked again."""
        self._asked, self._trouble = time.monotonic(), why
