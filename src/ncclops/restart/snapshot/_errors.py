"""What goes wrong with snapshots.

::

    RestartError
    └── SnapshotError        what was asked for cannot be kept, or cannot be restored
        └── PeerError        another rank does not answer, refuses, or sends something else
"""

from __future__ import annotations

from ncclops.restart.exception import RestartError


class SnapshotError(RestartError):
    """A state that cannot be kept or restored; the message says which and what to do."""


class PeerError(SnapshotError):
    """Another rank does not answer, refuses, or sends what was not asked for."""
