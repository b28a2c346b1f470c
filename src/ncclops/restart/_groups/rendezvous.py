"""``env://`` inside the wrapped function leads to the wrapper's store.

``env://`` makes rank 0 serve a store at ``MASTER_ADDR:MASTER_PORT``. After a restart rank 0 may
be a process on another node, or the port may still be busy; under torchrun all iterations would
share one store and find each other's keys. The wrapper has a store that survives all of that:
inside the function, ``env://`` leads to it, with a separate name space per iteration. Other
init methods and explicit stores are left alone.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlparse

from torch import distributed
from torch.distributed import Store


@contextlib.contextmanager
def env_leads_to(
    store_for_groups: Callable[[], Store], group_is_made: Callable[[float], object]
) -> Iterator[None]:
    """While inside, ``env://`` uses ``store_for_groups()``.

    ``group_is_made`` is called when the making of a default group with that has succeeded, with the
    milliseconds that it took.
    """
    # torch.distributed.rendezvous is a function of that name, which shadows the module
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers = getattr(module, "_rendezvous_handlers", None)
    if handlers is None or "env" not in handlers:
        yield
        return

    def handler(url: str, *_args: Any, **_kwargs: Any) -> Iterator[tuple[Store, int, int]]:
        query = parse_qs(urlparse(url).query)
        rank = query.get("rank", [os.environ["RANK"]])[0]
        world_size = query.get("world_size", [os.environ["WORLD_SIZE"]])[0]
        began = time.monotonic()
        try:
            yield store_for_groups(), int(rank), int(world_size)
        finally:  # torch lets go of this when init_process_group() ends
            if distributed.is_initialized():
                group_is_made(1000 * (time.monotonic() - began))
        raise RuntimeError("env:// cannot be iterated again")

    original, handlers["env"] = handlers["env"], handler
    try:
        yield
    finally:
        handlers["env"] = original
