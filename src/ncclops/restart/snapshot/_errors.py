"""What goes wrong with snapshots.

::

    RestartError
    └── SnapshotError        what was asked for cannot be kept, or cannot be restored
        ├── PeerError        another rank does not answer, refuses, or sends something else
        └── NoRoom           the host has not enough memory; snapshots stop, and training goes on
"""

from __future__ import annotations

from ncclops.restart.exception import RestartError


class SnapshotError(RestartError):
    """A state that cannot be kept or restored; the message says which and what to do."""


class PeerError(SnapshotError):
    """Another rank does not answer, refuses, or sends what was not asked for."""


class NoRoom(SnapshotError):
    """The host has not enough memory for a snapshot."""
