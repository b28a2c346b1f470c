"""The request resolved, and the run settled before anything starts: plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncclops.advisories import Finding
from ncclops.agent.layout import Layout, Shown, Target
from ncclops.cluster.rendezvous_config import RendezvousConfig
from ncclops.decision.retrying import RetryPlan
from ncclops.env import Overrides, Plan
from ncclops.exit_codes import ExitCodes
from ncclops.host.software import Software
from ncclops.launch.request import Preflight
from ncclops.launch.stack import Stack
from ncclops.profiles import Profile, RestartMode
from ncclops.receipts.log_formats import Form
from ncclops.record.event_values import EnvChange
from ncclops.record.run_record import AdvisoryNamed, NodesPlanned, ProfileUsed, RunRecord
from ncclops.timeouts.model import Timeouts

if TYPE_CHECKING:
    from ncclops.notify.targets import NotifyPlan


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A request whose parts have been looked up, each as far as it can be alone."""

    target: Target
    profile: Profile
    remarks: list[str]  # what was chosen for the user meanwhile
    overrides: Overrides
    timeouts: Mapping[str, timedelta]  # by name, on top of the profile's
    rendezvous: RendezvousConfig | None  # None: a single node
    master_port: int  # of a single node's store; 0 for any
    allowed_differences: tuple[str, ...]
    nproc: str
    restart: RestartMode
    max_restarts: int
    job_id: str | None
    run_dir: Path | None
    log_dir: Path | None
    tee: str | None
    redirects: str
    local_ranks: str
    require_receipt: bool
    exit_codes: ExitCodes
    preflight: Preflight
    collectives: bool
    require_network: tuple[str, ...]
    snapshot_every: str | None
    control_listen: str | None  # [HOST:]PORT
    control_token_for_reads: bool
    attach_stdin: int | None  # the rank that gets standard input
    stdout_is_data: bool

    @property
    def mode(self) -> RestartMode:
        """The restart mode that applies: what is not Python cannot restart in its process."""
        in_process = self.restart == "in-process" and self.target.kind != "program"
        return "process" if self.restart == "in-process" and not in_process else self.restart


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that is settled and has not begun.

    ``plan`` is its environment, ``argv`` the command of each worker; ``remarks`` are what a person
    should know before the start, ``advisories`` the known issues that concern it. ``to_json()`` is
    what ``launch --dry-run --json`` prints.
    """

    request: Resolved
    plan: Plan
    stack: Stack
    software: Software
    advisories: Sequence[Finding]
    layout: Layout
    timeouts: Timeouts
    retry: RetryPlan
    trainers: Sequence[Form]
    notify: NotifyPlan | None
    shown: Shown
    argv: list[str]
    remarks: list[str]

    def to_json(self) -> dict[str, Any]:
        """What ``run.json`` and ``--dry-run --json`` share."""
        return self.to_record().settled()

    def to_record(self) -> RunRecord:
        """``run.json``, without what only a run has that has begun."""
        profile = self.request.profile
        return RunRecord(
            profile=ProfileUsed(
                name=profile.name,
                files=list(profile.sources),
                parameters=dict(profile.parameters),
            ),
            restart=self.request.mode,
            max_restarts=self.request.max_restarts,
            nodes=self._nodes(),
            nproc_per_node=self.layout.nproc,
            world_size=self.layout.world_size,
            command=self.argv,
            stack=asdict(self.stack),
            software=asdict(self.software),
            advisories=[
                AdvisoryNamed(id=entry.id, severity=entry.severity, title=entry.title)
                for entry in (each.advisory for each in self.advisories)
            ],
            exit_codes=asdict(self.request.exit_codes),
            timeouts=self.timeouts.to_json(),
            plan=[EnvChange(**asdict(change)) for change in self.plan.changes],
        )

    def _nodes(self) -> NodesPlanned:
        rendezvous, nodes = self.request.rendezvous, self.layout.nodes
        if rendezvous is None:
            return NodesPlanned(count=nodes.count, rank=nodes.rank)
        return NodesPlanned(
            count=rendezvous.active,
            spares=rendezvous.most - rendezvous.active,
            rank=rendezvous.rank,
            backend=rendezvous.backend,
            store=rendezvous.address,
            id=rendezvous.job_id,
        )
