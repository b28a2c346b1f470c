"""Incidents and running jobs explained: which rank, which line of whose code, what it waits for.

    from ncclops.diagnose import diagnose

    print(diagnose("runs/20260101-120000-abcdef").what)

``diagnosis`` puts all that is known of a run on one page; ``incident_report`` explains one
incident, ``where`` the ranks of a running job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ncclops.lazy_names import lazy_names

if TYPE_CHECKING:
    from ncclops.diagnose.diagnosis import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]


# It imports most of the package, of which the agent needs only a part.
__getattr__ = lazy_names(__name__, {"Diagnosis": "diagnosis", "diagnose": "diagnosis"})
