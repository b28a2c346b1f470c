"""Ends what ``multiprocessing`` keeps for a run of the script that was left: pools and queues.

A worker of ``multiprocessing.Pool`` that waits for a task holds a lock of the pool. One that is
ended by a signal never lets go of it: the pool starts others in its place, and whoever frees the
pool afterwards waits for that lock for ever, the main thread of the script's next run included. So
pools are asked to end before their workers are.

A process waits at its end until all that was put into a ``Queue`` is written. Of a queue whose
readers were ended that is for ever.
"""

from __future__ import annotations

import multiprocessing.pool
import multiprocessing.queues
import multiprocessing.util
import threading
import time
from typing import Any


def end(limit_s: float) -> None:
    """End all pools of processes, and wait for no queue when the process ends.

    Pools that have not ended after ``limit_s``, such as those whose worker the out-of-memory killer
    has ended, no longer start workers, and freeing them waits for nothing. Main thread.
    """
    # No public name for it; where a version of Python has none, all is as it is.
    registry = getattr(multiprocessing.util, "_finalizer_registry", {})
    finalizers = list(registry.values())
    for finalizer in filter(_writes_queue, finalizers):
        finalizer.cancel()
    of_pools = list(filter(_is_of_pool, finalizers))
    for finalizer in of_pools:
        # A module may keep the pool: it would take tasks, and nobody do them.
        if (pool := getattr(finalizer, "_weakref", lambda: None)()) is not None:
            pool._state = multiprocessing.pool.TERMINATE
    # Called here, they are not called again when the pool is freed.
    threads = [
        threading.Thread(target=finalizer, name="ncclops-pool", daemon=True)
        for finalizer in of_pools
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _writes_queue(finalizer: Any) -> bool:
    join = getattr(multiprocessing.queues.Queue, "_finalize_join", None)
    return join is not None and getattr(finalizer, "_callback", None) is join


def _is_of_pool(finalizer: Any) -> bool:
    owner = getattr(getattr(finalizer, "_callback", None), "__self__", None)
    if not isinstance(owner, type) or not issubclass(owner, multiprocessing.pool.Pool):
        return False
    return not issubclass(owner, multiprocessing.pool.ThreadPool)
