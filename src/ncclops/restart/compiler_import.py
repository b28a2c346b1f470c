"""torch's compiler is not imported only because torch names the frames of a stack.

For that it asks ``hasattr(torch, "_inductor")``, which is an import: 800 modules, seconds on a busy
machine. Its NCCL watchdog does so when it prints the stack of a collective that has failed or was
aborted, in the middle of a restart, and ``init_process_group`` of the next iteration waits until
the import has ended. That the compiler is not loaded is all that torch has to know there.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

_here = threading.local()


@functools.cache
def keep_compiler_unloaded() -> None:
    """Let no thread of torch's own import the compiler; Python code still does by naming it."""
    torch = sys.modules["torch"]
    load = torch.__dict__.get("__getattr__")
    if load is None:
        return

    def load_unless_naming_frames(name: str) -> Any:
        if name == "_inductor":
            # A thread that C++ has started, and that runs no Python code.
            by_torch = sys._getframe().f_back is None
            if by_torch or getattr(_here, "naming_frames", False):
                raise AttributeError(name)
        return load(name)

    # torch's warnings about old names are for its caller, and torch filters those of its own
    # modules: this function is one of them, or each use of torch.compile would print four lines.
    torch.__dict__["__getattr__"] = FunctionType(
        load_unless_naming_frames.__code__,
        globals() | {"__name__": torch.__name__},
        closure=load_unless_naming_frames.__closure__,
    )


@contextmanager
def naming_frames() -> Iterator[None]:
    """In this thread, torch is asked for a stack."""
    keep_compiler_unloaded()
    _here.naming_frames = True
    try:
        yield
    finally:
        _here.naming_frames = False
