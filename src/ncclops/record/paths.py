"""The file names of a run directory: no other module joins them. Standard library only.

<run>/run.json                      what was started: profile, plan, stack, command, nodes
<run>/events.jsonl                  one event a line (``record.events``)
<run>/verdict.json                  how it ended
<run>/preflight.json                what the check of this node, and of the edges, has found
<run>/agent.log                     what the agent logs, errors of ncclops with their tracebacks
<run>/store.log, nodes.log          output of the store server, of the rendezvous process
<run>/.node                         the node that has taken the directory; the others of a shared
                                    file system have <run>/nodes/<node>
<run>/control/                      http.sock, token, server.log, stop (a page of memory),
                                    nodes.json (the status of the other nodes)
<run>/incidents/<n>/                incident.json, snapshots of ranks (``record.snapshot_files``)
<run>/where/<n>/                    snapshots that ``ncclops stacks`` has taken
<run>/ranks/<rank>/                 of the initial rank: see :class:`RankPaths`
<parent>/jobs/<name>.jsonl          attempts of a job that a scheduler starts again as a new run
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

DEFAULT_PARENT = Path("runs")
RUN_FILE, EVENTS, VERDICT_FILE = "run.json", "events.jsonl", "verdict.json"
PREFLIGHT_FILE = "preflight.json"
AGENT_LOG, STORE_LOG, NODES_LOG = "agent.log", "store.log", "nodes.log"
FORK_SERVER_LOG = "fork-server.log"
RECEIPT, ENVIRONMENT_FILE, WORKER_EVENTS = "receipt.jsonl", "environment.json", "worker.jsonl"
INCIDENT = "incident.json"
RANKS, NODES, INCIDENTS, WHERE = "ranks", "nodes", "incidents", "where"
NCCL_LOG = "nccl.log"


@dataclass(frozen=True)
class RankPaths:
    """The files of one rank, by its initial number, below ``root``."""

    root: Path

    @property
    def stdout_log(self) -> Path:
        """What the worker has written on stdout, over all attempts."""
        return self.root / "stdout.log"

    @property
    def stderr_log(self) -> Path:
        """What the worker has written on stderr, over all attempts."""
        return self.root / "stderr.log"

    @property
    def nccl_log(self) -> Path:
        """What NCCL logs, where the plan sends it there (``NCCL_DEBUG_FILE``)."""
        return self.root / NCCL_LOG

    @property
    def worker_log(self) -> Path:
        """What ncclops logs in the worker (``worker.own_log``)."""
        return self.root / "worker.log"

    @property
    def worker_events(self) -> Path:
        """What the worker reports to the agent (``record.worker_record``)."""
        return self.root / WORKER_EVENTS

    @property
    def receipt(self) -> Path:
        """What the worker records of its training (``record.receipt_records``)."""
        return self.root / RECEIPT

    @property
    def progress(self) -> Path:
        """The page of memory with its newest step (``record.progress``)."""
        return self.root / "progress"

    @property
    def environment(self) -> Path:
        """Its environment, secrets redacted."""
        return self.root / ENVIRONMENT_FILE

    @property
    def snapshot_server(self) -> Path:
        """The address of the worker's snapshot server (``capture.snapshot_server``)."""
        return self.root / "snapshot-server.json"

    def error(self, attempt: int) -> Path:
        """Where torchelastic's ``@record`` or our worker entry describes an exception."""
        return self.root / f"error-{attempt}.json"


@dataclass(frozen=True)
class RunPaths:
    """The files of the run in ``root``, for reading and for writing; touches no file."""

    root: Path

    @property
    def run(self) -> Path:
        return self.root / RUN_FILE

    @property
    def events(self) -> Path:
        return self.root / EVENTS

    @property
    def verdict(self) -> Path:
        return self.root / VERDICT_FILE

    @property
    def preflight(self) -> Path:
        """The last check before a start, as ``ncclops preflight --json`` has it."""
        return self.root / PREFLIGHT_FILE

    @property
    def agent_log(self) -> Path:
        """What the agent logs (``agent.diagnostics``)."""
        return self.root / AGENT_LOG

    @property
    def store_log(self) -> Path:
        """Output of the store server."""
        return self.root / STORE_LOG

    @property
    def fork_server_log(self) -> Path:
        """Output of the process that workers are forked from."""
        return self.root / FORK_SERVER_LOG

    @property
    def nodes_log(self) -> Path:
        """Output of the rendezvous process."""
        return self.root / NODES_LOG

    @property
    def owner(self) -> Path:
        """Names the node that this directory belongs to."""
        return self.root / ".node"

    @property
    def nodes(self) -> Path:
        """The directories of other nodes that were given the same one."""
        return self.root / NODES

    def of_node(self, node: str) -> Path:
        """That of one of them."""
        return self.nodes / node

    # --- control ------------------------------------------------------------------------------

    @property
    def control(self) -> Path:
        return self.root / "control"

    @property
    def socket(self) -> Path:
        return self.control / "http.sock"

    @property
    def token(self) -> Path:
        return self.control / "token"

    @property
    def server_log(self) -> Path:
        return self.control / "server.log"

    @property
    def stop_page(self) -> Path:
        """The page of memory on which a stop is agreed (``record.stop_point``)."""
        return self.control / "stop"

    @property
    def nodes_status(self) -> Path:
        """The newest status of each of the other nodes."""
        return self.control / "nodes.json"

    # --- ranks and incidents ------------------------------------------------------------------

    @property
    def ranks(self) -> Path:
        return self.root / RANKS

    def rank(self, rank: int) -> RankPaths:
        """The files of the rank that started as ``rank``."""
        return RankPaths(self.ranks / str(rank))

    def rank_numbers(self) -> list[int]:
        """The initial ranks that have a directory, in order."""
        return numbered(self.ranks)

    @property
    def incidents(self) -> Path:
        return self.root / INCIDENTS

    def incident(self, number: int) -> Path:
        """The directory of one incident."""
        return self.incidents / str(number)

    @property
    def where(self) -> Path:
        return self.root / WHERE

    def holds_run(self) -> bool:
        """Whether there is a record of a run, even one that has not begun.

        What a worker has put in the place of its events hides no run: such a run has no events.
        """
        return os.path.lexists(self.events)


def run_of_page(page: Path) -> Path:
    """The run directory of a page of memory: ``RunPaths.stop_page`` or ``RankPaths.progress``."""
    return page.parents[2] if page.name == "progress" else page.parents[1]


def job_history(runs: Path, name: str) -> Path:
    """The attempts of the job ``name``, which must be a plain file name, beside its runs."""
    return runs / "jobs" / f"{name}.jsonl"


def numbered(parent: Path) -> list[int]:
    """The entries of ``parent`` that are numbers, in order; none if it cannot be read."""
    try:
        return sorted(int(entry) for entry in os.listdir(parent) if entry.isdecimal())  # noqa: PTH208
    except OSError:
        return []
