"""The status of each node's ranks, copied to the node whose server shows the whole run.

Each member puts its node's status into the store every few seconds. The first node that is left
takes those of the others from there and keeps them where its server finds them
(``status.merge``): two operations for each node and round, on no critical path.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from ncclops.status import merge
from ncclops.status.model import RunStatus, from_json
from ncclops.status.reading import RunReader

# Steps take longer, and a status of many nodes need not be newer.
_EVERY_S = 2.0


class Statuses:
    """The exchange of one round over ``store``, a separate connection, until ``over``.

    ``living`` gives the ranks of the nodes that are left, with this one.
    """

    def __init__(
        self, store: Any, prefix: str, rank: int, living: Callable[[], Collection[int]]
    ) -> None:
        self._store, self._prefix, self._rank, self._living = store, prefix, rank, living

    def exchange(self, run_dir: Path, over: threading.Event) -> None:
        """Send and fetch statuses periodically. Raises what the store raises."""
        reader = RunReader(run_dir)
        try:
            while not over.wait(_EVERY_S):
                mine = json.dumps(reader.own().to_json())
                self._store.set(self._key(self._rank), mine)
                others = sorted(set(self._living()) - {self._rank})
                if others and self._rank < others[0]:
                    with suppress(OSError):  # a full disk: the run goes on, and shows less
                        merge.save(run_dir, self._of(others))
        finally:
            reader.close()

    def _of(self, ranks: list[int]) -> list[RunStatus]:
        keys = [key for key in map(self._key, ranks) if self._store.check([key])]
        documents = self._store.multi_get(keys) if keys else []
        return [from_json(json.loads(document)) for document in documents]

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/status/{rank}"
