"""Incidents and running jobs explained: which rank, which line of whose code, what it waits for.

    from ncclops.diagnose import diagnose

    print(diagnose("runs/20260101-120000-abcdef").what)

``diagnosis`` puts all that is known of a run on one page; ``incident_report`` explains one
incident, ``where`` the ranks of a running job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ncclops.diagnose.diagnosis import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]


def __getattr__(name: str) -> Any:
    # It imports most of the package, of which the agent needs only a part.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ncclops.diagnose import diagnosis

    return getattr(diagnosis, name)
