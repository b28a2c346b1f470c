"""Ending the workers of torch's data loaders that an abandoned iteration leaves behind.

A multiprocess iterator of a ``DataLoader`` asks its workers to end when it is freed, and waits up
to 5 s for each. After an exception it is often part of a reference cycle, and the garbage
collector closes the queues to the workers before it calls ``__del__``: the workers never receive
the request, and the restart waits 5 s for each of them. A worker that is busy with a sample costs
as much.

So the collector is kept from the queues while it runs, and only used to find which iterators are
garbage. Their workers are then asked to end all at once, and killed when they do not end soon. An
iterator that something outside the iteration still holds is left alone: it goes on in the next one.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
import weakref
from multiprocessing import active_children, connection
from typing import Any

from ncclops.restart.log import logged

# A worker that waits for its next task ends in a millisecond; one that loads a batch when it has.
_END_WITHIN_S = 0.25

# The method that ``__del__`` of an iterator calls.
_SHUTDOWN = "_shutdown_workers"

# What has to stay usable until the workers were asked to end. Nothing of it refers to the user's
# objects, which therefore stay garbage when they are.
_CHANNELS = (
    "_index_queues",
    "_worker_result_queue",
    "_data_queue",
    "_workers",
    "_workers_done_event",
    "_pin_memory_thread",
    "_pin_memory_thread_done_event",
)


class LoaderWorkers:
    """The workers of the data loaders that the iterations of one call leave behind."""

    def __init__(self) -> None:
        self._kept: list[weakref.ref[Any]] = []
        self._doomed: list[Any] = []  # those of them that something would have freed
        self._channels: list[Any] = []

    def keep(self) -> None:
        """From now on an iterator that is freed is kept, workers and all, until ``end``.

        Before the main thread leaves the function, where that is to be interrupted: an iterator
        is often freed on the way out. Any thread; calls add up.
        """
        for iterator in _iterators():
            if _SHUTDOWN not in vars(iterator):
                self._kept.append(weakref.ref(iterator))
                self._channels += [vars(iterator).get(name) for name in _CHANNELS]
                # It refers to the iterator, which so is freed by the collector only.
                kept = functools.partial(self._doomed.append, iterator)
                setattr(iterator, _SHUTDOWN, kept)

    def end(self) -> None:
        """End the workers of those that were freed; the others are as they were. Main thread."""
        doomed, kept = self._doomed, self._kept
        self._doomed, self._kept = [], []
        for reference in kept:
            _restore(reference())
        _end(doomed)
        self._channels.clear()
        if doomed:
            doomed.clear()
            gc.collect()  # what the iterators have kept alive


def _iterators() -> list[Any]:
    """The multiprocess iterators there are, but those from before the first iteration."""
    module = sys.modules.get("torch.utils.data.dataloader")
    kind = getattr(module, "_MultiProcessingDataLoaderIter", None)
    if kind is None or not active_children():
        return []
    found: list[Any] = [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
    # Where the making of one was interrupted, attributes are missing.
    return [iterator for iterator in found if "_workers" in vars(iterator)]


def _restore(iterator: Any) -> None:
    if iterator is not None:
        vars(iterator).pop(_SHUTDOWN, None)


def _end(iterators: list[Any]) -> None:
    """Ask all workers to end, kill those that are late, and let torch do the rest."""
    for iterator in iterators:
        _restore(iterator)  # the collector has cleared the weak references to these
        with logged("telling a data loader's workers to end"):
            _tell(iterator)
    _wait_for([worker for iterator in iterators for worker in iterator._workers])
    for iterator in iterators:
        with logged("ending a data loader's workers"):
            _kill_late(iterator)
            iterator._shutdown_workers()


def _tell(iterator: Any) -> None:
    if not iterator._shutdown:
        iterator._workers_done_event.set()
        for queue in iterator._index_queues:
            queue.put(None)


def _wait_for(workers: list[Any]) -> None:
    deadline = time.monotonic() + _END_WITHIN_S
    waiting = {worker.sentinel for worker in workers if worker.is_alive()}
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        waiting.difference_update(connection.wait(waiting, left_s))


def _kill_late(iterator: Any) -> None:
    late = [worker for worker in iterator._workers if worker.is_alive()]
    if late and iterator._worker_pids_set:
        # or torch's handler of SIGCHLD would raise in the main thread
        sys.modules["torch.utils.data._utils.signal_handling"]._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    for worker in late:
        worker.kill()
