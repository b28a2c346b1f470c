"""State without a reload: snapshots in host memory, restored after a fault in place.

::

    from ncclops.restart import snapshot

    def train():                                # wrapped, or the script under ncclops launch
        dist.init_process_group()
        model, optimizer = ...
        snapshots = snapshot.Snapshots(
            {"model": model, "optimizer": optimizer, "rng": snapshot.Rng()},
            replicated=["model", "optimizer"],  # DDP: equal on all ranks
            checkpoint=load_checkpoint,         # the last resort
        )
        first = snapshots.restore().step or 0
        for step in range(first, steps):
            ...
            snapshots.take(step + 1)

What is kept, what it costs and what is lost when: docs/snapshots.md. How it works, from the bottom:

==================  ==============================================================================
``_tree``           nested state as JSON and a list of tensors
``_blobs``          one rank's state: a header and one buffer, with a checksum
``_copying``        tensors into the buffer, from a GPU on a stream of its own
``_objects``        what the user gives: its state, and putting that back in place
``_planning``       who takes what from where, who keeps whose copy; pure
``_pace``           how often; pure
``_wire``           put and get between two ranks over TCP  (``_server``: who answers)
``_memory``         what a process keeps over iterations
``_background``     the thread that copies, sends and asks the store, while training goes on
``_agreement``      one restore: all ranks take the same moment
``_rounds``         one snapshot: complete on all ranks before the next one begins
``_snapshots``      ``Snapshots``: what a training loop calls  (``_results``: what it is told)
==================  ==============================================================================
"""

from __future__ import annotations

from ncclops.restart.snapshot._errors import PeerError, SnapshotError
from ncclops.restart.snapshot._planning import Source
from ncclops.restart.snapshot._results import Overhead, Restored
from ncclops.restart.snapshot._rng import Rng
from ncclops.restart.snapshot._snapshots import Snapshots

__all__ = ["Overhead", "PeerError", "Restored", "Rng", "SnapshotError", "Snapshots", "Source"]
