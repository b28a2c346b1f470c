"""Garbage collection around restarts."""

from __future__ import annotations

import gc
import traceback

from ncclops.restart._chains import chain_of
from ncclops.restart._process import holds_much

_is_frozen = False


def freeze_heap() -> None:
    """Exempt all that exists before the first iteration from garbage collection.

    A full collection over what torch has loaded takes tens of milliseconds, and each restart
    needs one, to release what the abandoned iteration holds. What was frozen is not looked at.

    Garbage that is frozen stays for good. A process that may hold much is therefore collected
    completely before; in a small one only what is young, so that the start costs nothing.
    """
    global _is_frozen
    if not _is_frozen:
        _is_frozen = True
        gc.collect(2 if holds_much() else 1)
        gc.freeze()


def release(error: BaseException | None) -> None:
    """Let go of what the abandoned iteration's frames hold: activations, optimizers, groups.

    ``error`` and what it is chained to stay, with their tracebacks but without local variables.
    """
    for link in chain_of(error):
        traceback.clear_frames(link.__traceback__)
    gc.collect()
