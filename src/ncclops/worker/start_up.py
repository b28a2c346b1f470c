"""Whether this rank still starts: until each of its process groups has completed a collective.

Without ``device_id`` a communicator is made in its group's first collective, and no barrier over
the store shows whether that works. torch's flight recorder does: it knows which groups have
completed a collective (``receipts.collectives``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from ncclops.receipts import recorder
from ncclops.receipts.collectives import CollectiveCounter
from ncclops.record import worker_record
from ncclops.record.events import ScriptFailedEvent

_MODULE = "torch.distributed.distributed_c10d"
# torch reads either, the second one up to 2.8 alone.
_RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


class StartUp:
    """Looks when the script leaves, before its groups are taken apart.

    ``was_starting`` is what was seen then, None where it is not known. ``iteration`` is the one
    that runs, for the report.
    """

    def __init__(self, counter: CollectiveCounter) -> None:
        self._counter = counter
        self.iteration = 0
        self.was_starting: bool | None = None

    def observed(self, run: Callable[[], None]) -> Callable[[], None]:
        """``run``, with a look and a report to the agent when it fails."""

        def observed() -> None:
            self.was_starting = None
            try:
                run()
            except BaseException as end:
                self.was_starting = self._is_starting()
                failed = isinstance(end, Exception) or (
                    isinstance(end, SystemExit) and end.code not in (None, 0)
                )
                if failed:
                    self._report()
                raise

        return observed

    def _report(self) -> None:
        worker_record.report(
            ScriptFailedEvent(iteration=self.iteration, starting_up=self.was_starting)
        )

    def _is_starting(self) -> bool | None:
        if recorder.current().highest_step is not None:
            return False  # a group may be made and never used
        if _MODULE not in sys.modules:
            return True
        world = getattr(sys.modules[_MODULE], "_world", None)
        configs: Any = getattr(world, "pg_backend_config", None)
        if configs is None or not any(os.environ.get(name, "0") != "0" for name in _RECORDER):
            return None
        nccl, others = self._counter.groups_completed()
        groups = [str(backends) for backends in list(configs.values())]
        if not groups:  # not made yet, or taken apart at the end
            return not (nccl or others)
        of_nccl = sum("nccl" in backends for backends in groups)
        return nccl < of_nccl if of_nccl else others < len(groups)
