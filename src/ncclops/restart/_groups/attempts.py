"""What NCCL does and nothing can interrupt, in a thread of its own: it may be left at any time."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ncclops.restart.log import logged
from ncclops.restart.raised import summarise


class Attempt:
    """Calls ``act`` in a thread of its own, ``name``.

    ``report`` is then called with "", or with why ``act`` has failed, in that thread. Where the
    attempt has been left, ``end`` is called in its place, in any thread: once ``act`` has returned,
    whenever that is.
    """

    def __init__(
        self,
        name: str,
        act: Callable[[], object],
        report: Callable[[str], object],
        end: Callable[[], object],
    ) -> None:
        self._act = act
        self._report = report
        self._end = end
        self._lock = threading.Lock()
        self._is_left = self._has_returned = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        failure = ""
        try:
            self._act()
        except Exception as error:  # noqa: BLE001 - torch's, or of the store that it connects to
            failure = summarise(error)
        with self._lock:
            self._has_returned = True
            is_left = self._is_left
        if is_left:
            self._end()
        else:
            with logged("telling the other ranks how it has ended"):
                self._report(failure)

    def leave(self) -> None:
        """Have what it has come to, or comes to, ended. Does not block."""
        with self._lock:
            self._is_left = True
            has_returned = self._has_returned
        if has_returned:
            self._end()
