"""Has the pages read that need more than the status, and logs again as they grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from ncclops.live_view import pages
from ncclops.live_view.aside import Aside
from ncclops.live_view.composing import Content
from ncclops.live_view.growth import Growth
from ncclops.live_view.view import Request
from ncclops.status.model import RunStatus

# A log may grow thousands of times a second; without inotify, and on the file systems of other
# machines, it is looked at with the status.
_GROWN_EVERY_S, _EVERY_S = 0.2, 1.0


class PageReader:
    """``content`` is what was read for the last request, None while it is not there yet."""

    def __init__(self, run_dir: Path, wake: Callable[[], None]) -> None:
        self.content: Content | None = None
        self._run_dir, self._wake = run_dir, wake
        self._request: Request | None = None
        # One for each page: ranks that do not answer hold up nobody who wants to read a log.
        self._asides: dict[str, Aside] = {}
        self._growth: Growth | None = None
        self._read_at = 0.0

    @property
    def files(self) -> Sequence[int]:
        """Those that are readable when the log has grown."""
        return () if self._growth is None else self._growth.files

    @property
    def due_s(self) -> float | None:
        """In how many seconds it wants to look at its log; None: not before something happens."""
        if self._growth is None or not self._growth.has_grown:
            return None
        return self._read_at + _GROWN_EVERY_S - time.monotonic()

    def take(self) -> None:
        """Take what has been read, and note growth."""
        for aside in self._asides.values():
            aside.take()
        if self._growth is not None:
            self._growth.take()

    def want(self, request: Request | None, status: RunStatus, *, follow: bool) -> None:
        """Have read what ``request`` needs, unless it is there; ``follow``: also what a log has
        grown by."""
        if request != self._request:
            self._begin(request, status)
        elif follow and request is not None and not self._aside(request).is_busy:
            self._continue(request, status)

    def close(self) -> None:
        if self._growth is not None:
            self._growth.close()
            self._growth = None

    def _begin(self, request: Request | None, status: RunStatus) -> None:
        if request is not None and self._aside(request).is_busy:
            return  # it is begun as soon as that is over
        shown, self._request = self.content, request
        is_next = request is not None and request.page == "log" and request.which > 0
        if not is_next:
            self.content = None
        self.close()
        if request is not None:
            self._start(request, partial(self._read, request, status, shown))

    def _continue(self, request: Request, status: RunStatus) -> None:
        shown, now = self.content, time.monotonic()
        if shown is None:
            return
        grown = self._growth is not None and self._growth.has_grown
        if now < self._read_at + (_GROWN_EVERY_S if grown else _EVERY_S):
            return
        self._read_at = now
        if self._growth is not None:
            self._growth.has_grown = False
        self._start(request, partial(self._read_again, request, status, shown))

    def _start(self, request: Request, read: Callable[[], Callable[[], None]]) -> None:
        def otherwise(why: str) -> None:
            self._on_content(request, pages.said(request.page, f"cannot be read: {why}"))

        self._aside(request).start(read, otherwise)

    def _aside(self, request: Request) -> Aside:
        return self._asides.setdefault(request.page, Aside(self._wake))

    def _read(
        self, request: Request, status: RunStatus, shown: Content | None
    ) -> Callable[[], None]:
        content = pages.read(self._run_dir, request, status, shown)
        return partial(self._on_content, request, content)

    def _read_again(
        self, request: Request, status: RunStatus, shown: Content
    ) -> Callable[[], None]:
        """A log as it is now; one that was not there may be by now."""
        if shown.follows is None:
            return self._read(request, status, shown)
        return partial(self._on_content, request, pages.read_again(shown))

    def _on_content(self, request: Request, content: Content) -> None:
        if request != self._request:
            return
        self.content, self._read_at = content, time.monotonic()
        if self._growth is None and content.follows is not None:
            with suppress(OSError):
                self._growth = Growth(content.follows)
