"""The recorder of a process that is no worker: every method is there and does nothing."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, SupportsFloat

from ncclops.receipts.memory import Peak, peak_memory

StepListener = Callable[[int], None]
UpdateListener = Callable[[], None]
WarmupBeginListener = Callable[[], None]
WarmupListener = Callable[[timedelta | None], None]
PhaseListener = Callable[[timedelta | None], None]
IterationListener = Callable[[], None]
StopCallback = Callable[[], object]
LastMoved = Callable[[], float]


class Silent:
    """Does nothing; the recorder of a process outside `launch`, and the interface of all."""

    active = False

    def begin_iteration(self, iteration: int) -> None:
        """See ``Recorder``, as for all methods here."""

    def begin_warmup(self) -> None: ...

    def end_warmup(self, taken: timedelta | None, *, completed: bool = True) -> None: ...

    def step(
        self,
        n: int,
        tokens: float | None,
        loss: SupportsFloat | None,
        busy: timedelta | None,
        *,
        ends: bool = True,
    ) -> bool:
        del n, tokens, loss, busy, ends
        return False

    def stop(self) -> None: ...

    def update(self) -> None: ...

    def begin_phase(self, name: str, limit: timedelta) -> None: ...

    def end_phase(self) -> None: ...

    def peak_memory(self) -> Peak:
        return peak_memory()

    def end(self) -> None: ...

    def on_step(self, listener: StepListener) -> None: ...

    def on_update(self, listener: UpdateListener) -> None: ...

    def on_warmup_begin(self, listener: WarmupBeginListener) -> None: ...

    def on_warmup_end(self, listener: WarmupListener) -> None: ...

    def on_phase(self, listener: PhaseListener) -> None: ...

    def on_iteration(self, listener: IterationListener) -> None: ...

    def on_stop(self, callback: StopCallback) -> None: ...

    def leave(self) -> None: ...

    def begin_restart(self, limit: timedelta) -> None: ...

    def note_left(self) -> None: ...

    def note_collectives(
        self, counted: tuple[int, int | None] | None, awaited: int | None = None, wait: int = 0
    ) -> None: ...

    def note_pace(self, fields: dict[str, Any]) -> None: ...

    def follow_main_thread(self, last_moved: LastMoved | None) -> None: ...

    @property
    def has_stopped(self) -> bool:
        return False

    @property
    def busy_s(self) -> float | None:
        return None

    @property
    def highest_step(self) -> int | None:
        return None

    def flush(self) -> bool:
        return True

    def close(self) -> None: ...
