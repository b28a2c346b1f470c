"""Reports that a script has ended well, and that only the end of its process is left.

From then on the agent takes nothing that becomes of the process for a failure, and ends it if it
stays.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable

from ncclops.record import worker_record
from ncclops.record.events import ExitingEvent


class _Script:
    has_ended_well = False


_script = _Script()


def watch() -> None:
    """Call before anything else registers a callback at exit: they run in the reverse order."""
    atexit.register(_report)


def _report() -> None:
    # Python has waited for the script's threads, and what the script registered at exit has run.
    if _script.has_ended_well:
        worker_record.report(ExitingEvent())


def note_good_end() -> None:
    """The script has ended well, and the process will."""
    _script.has_ended_well = True


def observed(run: Callable[[], None]) -> None:
    """``run()``, the script with what is around it, and note whether it ends well."""
    try:
        run()
    except SystemExit as end:
        if end.code in (None, 0):
            note_good_end()
        raise
    note_good_end()
