"""`ncclops launch` from Python: a request in, a verdict out.

    from ncclops.launch import LaunchRequest, launch

    verdict = launch(LaunchRequest(target="train.py", nproc_per_node=2))
    print(verdict.outcome, verdict.reason)

From a notebook, a scheduler's plugin, any thread: the run is a separate process tree. ``start``
returns a handle instead of waiting; ``prepare`` settles everything and starts nothing.

request, verdict, handle   what a caller sees         (start_report: how a launcher reports)
resolve, prepared          what was asked for, and what was settled
options, launch_config     spellings of people, torchrun and schedulers, as values
command                    prepare (no side effects: also ``--dry-run``), then start
describe_node              what this node brings to a job of several
stack                      the versions of torch, NCCL, the driver…, for the record
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ncclops.launch.handle import LaunchedRun, launch, start
from ncclops.launch.request import LaunchRequest
from ncclops.launch.verdict import RunVerdict, read_verdict
from ncclops.lazy_names import lazy_names

if TYPE_CHECKING:
    from ncclops.launch.command import prepare
    from ncclops.launch.prepared import Prepared

__all__ = [
    "LaunchRequest",
    "LaunchedRun",
    "Prepared",
    "RunVerdict",
    "launch",
    "prepare",
    "read_verdict",
    "start",
]


# These import the agent and profiles, which a caller of ``launch`` does not need.
__getattr__ = lazy_names(__name__, {"prepare": "command", "Prepared": "prepared"})
