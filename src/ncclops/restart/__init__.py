"""Restart a distributed function in the same processes when a rank fails.

``from ncclops import restart as inprocess`` serves code written for NVIDIA's in-process wrapper.
torch is imported with the first use of a name below; importing the package itself is light,
which the monitor processes rely on. Nothing else of ncclops is imported: what the core needs from
outside is handed in (``snapshots``).

The threads and processes of one call of a wrapped function. What each waits on, how long and who
wakes it is a table in docs/restart-internals.md:

====================  ==============================  ============================================
thread or process     code                            does
====================  ==============================  ============================================
main thread           ``loop``                        runs the user's function; between iterations
                                                      waits for messages of the monitor thread
monitor thread        ``monitor_thread``              waits in the store for a fault elsewhere;
                                                      aborts the groups, interrupts the main thread
watchdog thread       ``progress_watchdog``           shows the monitor process that the main thread
                                                      moves, receives its messages
reporter thread       ``_monitor.client.Reporter``    writes to the store what the monitor process
                                                      reports; connected from the first report on
abort thread          ``monitor_thread``              runs the ``abort`` callback and then ends
monitor process       ``_monitor.main``               notices that the main process died or makes
                                                      no progress, and watches the next rank's
store server          ``store_server``                serves the store; one process for the job
====================  ==============================  ============================================

Where to begin reading: ``loop`` (the phases), ``ledger`` (what ranks agree on, and the table of the
store's keys), ``monitor_thread`` and ``_interrupt.main_thread`` (how a function is left),
``_monitor.main`` and ``_monitor.ring`` (how a death is noticed), ``session`` (what holds them
together).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ncclops.restart import abort as abort
    from ncclops.restart import attribution as attribution
    from ncclops.restart import completion as completion
    from ncclops.restart import compose as compose
    from ncclops.restart import exception as exception
    from ncclops.restart import finalize as finalize
    from ncclops.restart import health_check as health_check
    from ncclops.restart import incident as incident
    from ncclops.restart import initialize as initialize
    from ncclops.restart import keep_going as keep_going
    from ncclops.restart import monitor_process as monitor_process
    from ncclops.restart import monitor_thread as monitor_thread
    from ncclops.restart import nested_restarter as nested_restarter
    from ncclops.restart import param_utils as param_utils
    from ncclops.restart import progress_watchdog as progress_watchdog
    from ncclops.restart import rank_assignment as rank_assignment
    from ncclops.restart import rank_filter as rank_filter
    from ncclops.restart import regroup as regroup
    from ncclops.restart import sibling_monitor as sibling_monitor
    from ncclops.restart import snapshot as snapshot
    from ncclops.restart import snapshots as snapshots
    from ncclops.restart import state as state
    from ncclops.restart import store as store
    from ncclops.restart import terminate as terminate
    from ncclops.restart import utils as utils
    from ncclops.restart import wrap as wrap
    from ncclops.restart.compose import Compose
    from ncclops.restart.incident import Incident
    from ncclops.restart.keep_going import Membership
    from ncclops.restart.regroup import Regrouped, Rung
    from ncclops.restart.state import FrozenState, Mode, State
    from ncclops.restart.wrap import CallWrapper, Wrapper

__all__ = [
    "CallWrapper",
    "Compose",
    "FrozenState",
    "Incident",
    "Membership",
    "Mode",
    "Regrouped",
    "Rung",
    "State",
    "Wrapper",
]

_HOMES = {
    "CallWrapper": "wrap",
    "Compose": "compose",
    "FrozenState": "state",
    "Incident": "incident",
    "Membership": "keep_going",
    "Mode": "state",
    "Regrouped": "regroup",
    "Rung": "regroup",
    "State": "state",
    "Wrapper": "wrap",
}

_SUBMODULES = {
    "abort",
    "attribution",
    "completion",
    "compose",
    "exception",
    "finalize",
    "health_check",
    "incident",
    "initialize",
    "keep_going",
    "monitor_process",
    "monitor_thread",
    "nested_restarter",
    "param_utils",
    "progress_watchdog",
    "rank_assignment",
    "rank_filter",
    "regroup",
    "sibling_monitor",
    "snapshot",
    "snapshots",
    "state",
    "store",
    "terminate",
    "utils",
    "wrap",
}


if not TYPE_CHECKING:  # type checkers have the imports above, and find names that do not exist

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        if name in _SUBMODULES:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_SUBMODULES})
