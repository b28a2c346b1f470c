"""What ``init_process_group()`` meets inside the wrapped function.

``env://`` makes rank 0 serve a store at ``MASTER_ADDR:MASTER_PORT``. After a restart rank 0 may
be a process on another node, or the port may still be busy; under torchrun all iterations would
share one store and find each other's keys. The wrapper has a store that survives all of that:
inside the function, ``env://`` leads to it, with a name space of its own per iteration. Other
init methods and explicit stores are left alone.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlparse

from torch.distributed import Store


@contextlib.contextmanager
def env_leads_to(store_of_iteration: Callable[[], Store]) -> Iterator[None]:
    """While inside, ``env://`` uses ``store_of_iteration()``."""
    # torch.distributed.rendezvous is a function of that name; the module hides behind it
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers = getattr(module, "_rendezvous_handlers", None)
    if handlers is None or "env" not in handlers:
        yield
        return

    def handler(url: str, *_args: Any, **_kwargs: Any) -> Iterator[tuple[Store, int, int]]:
        query = parse_qs(urlparse(url).query)
        rank = query.get("rank", [os.environ["RANK"]])[0]
        world_size = query.get("world_size", [os.environ["WORLD_SIZE"]])[0]
        yield store_of_iteration(), int(rank), int(world_size)
        raise RuntimeError("env:// cannot be iterated again")

    original, handlers["env"] = handlers["env"], handler
    try:
        yield
    finally:
        handlers["env"] = original
