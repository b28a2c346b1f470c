"""A rank that has the launcher's standard input, for a debugger: ``--attach-stdin``."""

from __future__ import annotations

import builtins
import os
import sys
import threading

from ncclops.receipts import recorder
from ncclops.record.progress import INPUT_PHASE
from ncclops.record.variables import ATTACHED
from ncclops.timeouts.model import ATTENDED

_is_attached = False


def install() -> None:
    """If this is the rank, its waits for input are declared: it does not hang, and neither do the
    ranks that wait for it. ``pdb`` and ``breakpoint()`` call ``input``.
    """
    global _is_attached
    if os.environ.pop(ATTACHED, None) is None:
        return
    _is_attached = True
    plain = builtins.input

    def declared(prompt: object = "", /) -> str:
        if threading.current_thread() is not threading.main_thread():
            return plain(prompt)
        own = recorder.current()
        own.begin_phase(INPUT_PHASE, ATTENDED)
        try:
            return plain(prompt)
        finally:
            own.end_phase()

    builtins.input = declared


def leave_debugger() -> None:
    """The script starts again: a debugger that was interrupted traces no longer."""
    if _is_attached:
        sys.settrace(None)
