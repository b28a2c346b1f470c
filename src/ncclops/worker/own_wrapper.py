"""Notices a script that wraps its function itself, so that it is not wrapped a second time.

This covers our wrapper and the one it is compatible with. What counts is that it is applied: a
script that merely imports the wrapper, for an option that is off, does not use it.
"""

from __future__ import annotations

import dataclasses
import os
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ncclops.record import worker_record
from ncclops.record.events import OwnWrapperEvent
from ncclops.record.paths import RunPaths
from ncclops.record.variables import RETURNING, RUN_DIR
from ncclops.worker import after_import
from ncclops.worker.timeout_phases import TimeoutPhases

_OURS = "ncclops.restart.wrap"
_WRAPPERS = {_OURS: "ncclops.restart", "nvidia_resiliency_ext.inprocess": ""}


class ScriptWrapsItself(BaseException):
    """Leaves the script where it applies a wrapper, so that ours can be taken off before."""


class _Observer:
    def __init__(self, phases: TimeoutPhases | None) -> None:
        self._phases = phases
        self.leaves_script = False  # while our own wrapper is around it
        self._reported: OwnWrapperEvent | None = None
        self._returns = RETURNING in os.environ  # this process, into the place of a lost rank

    def found(self, name: str, grow_timeout: timedelta | None) -> None:
        """The script applies the wrapper of module ``name``."""
        event = OwnWrapperEvent(wrapper=name, grows=grow_timeout is not None)
        if self._reported is None or event.grows > self._reported.grows:
            self._reported = event
            worker_record.report(event)
        if self.leaves_script:
            raise ScriptWrapsItself(name)

    def patch(self, module: ModuleType, name: str) -> None:
        wrapper: Any = module.Wrapper
        if wrapper.__module__ == _OURS and module.__name__ != _OURS:
            return  # ours under the other name
        plain = wrapper.__call__

        def wrap(applied: Any, fn: Any) -> Any:
            if getattr(applied, "enabled", True):
                settings = getattr(applied, "settings", None)
                self.found(name, getattr(settings, "grow_timeout", None))
                if module.__name__ == _OURS:
                    self._listen(applied)
            return plain(applied, fn)

        wrapper.__call__ = wrap

    def _listen(self, applied: Any) -> None:
        """Report the incidents of a wrapper of ours to the agent, too, and obey it at the end."""
        from ncclops.restart import Compose
        from ncclops.worker import no_restart, restart_events
        from ncclops.worker.taken_place import TakenPlace

        previous, finalize = applied.settings.on_incident, applied.settings.finalize
        no_restart.watch()

        def on_incident(incident: Any) -> None:
            restart_events.report(incident)
            restart_events.begin_next(incident, self._phases)
            if previous is not None:
                previous(incident)

        ending = no_restart.NoRestart()  # the last of a Compose is called first
        changes: dict[str, Any] = {
            "on_incident": on_incident,
            "on_regrouped": restart_events.report_regrouped,
            "finalize": ending if finalize is None else Compose(finalize, ending),
        }
        if self._returns:
            entered, initialize = TakenPlace(), applied.settings.initialize
            changes["initialize"] = entered if initialize is None else Compose(initialize, entered)
        if applied.settings.incident_dir is None and RUN_DIR in os.environ:
            changes["incident_dir"] = str(RunPaths(Path(os.environ[RUN_DIR])).incidents)
        applied.settings = dataclasses.replace(applied.settings, **changes)


def watch(phases: TimeoutPhases | None, *, leaves_script: bool = False) -> _Observer:
    """Notice wrappers from now on; ``leaves_script`` as in :class:`ScriptWrapsItself`."""
    observer = _Observer(phases)
    observer.leaves_script = leaves_script
    for module, name in _WRAPPERS.items():
        shown = name or module
        after_import.act(module, partial(observer.patch, name=shown))
    return observer
