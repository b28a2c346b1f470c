"""A node's part in the check of all nodes of a job, in a process of its own.

    python -m ncclops.preflight.part < PART > RESULT

The agent of a node starts it once the nodes have met, and may end it at any time: what it does with
sockets, name servers and torch's store holds nobody up. PART and RESULT are JSON.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import BinaryIO

import msgspec

from ncclops.preflight import pairs
from ncclops.preflight.edges.model import Verdict
from ncclops.preflight.edges.run import Limits, Unmet, Where, run
from ncclops.preflight.machine import collective
from ncclops.preflight.model import Finding, NodeReport, Status
from ncclops.preflight.node import check_node
from ncclops.preflight.site_checks import SiteCheck
from ncclops.profiles.model import PreflightNeeds

# Until all processes of this kind have come up, and those of suspects have checked their nodes.
_JOIN_S = 90.0
_SLACK_S = 30.0


class NodeCheck(msgspec.Struct, frozen=True, kw_only=True):
    """How this node is checked, and what that has come to: ``report``, None where it was not.

    ``edges``: the edges between the nodes are to be checked as well. ``collectives``: an all_reduce
    is run, too. ``environ`` is what NCCL will be given; ``spaces`` are the directories that need
    space; ``site`` are the site's own checks.
    """

    edges: bool
    collectives: bool = False
    needs: PreflightNeeds = PreflightNeeds()
    environ: dict[str, str] = {}
    spaces: tuple[str, ...] = ()
    site: tuple[SiteCheck, ...] = ()
    report: NodeReport | None = None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What a node needs for it: the store and the ``meeting`` there, its place in the job, itself.

    ``count`` nodes take part, of which ``least`` are needed; node 0 gathers for all. ``again``:
    this node is suspect, and is checked first.
    """

    host: str
    port: int
    meeting: str
    count: int
    least: int
    rank: int
    name: str
    check: NodeCheck
    again: bool = False

    @property
    def join_s(self) -> float:
        """How long nodes wait for each other, in seconds: a suspect checks itself meanwhile."""
        return _JOIN_S + (collective.LIMIT.total_seconds() if self.check.collectives else 0.0)

    @property
    def limit(self) -> timedelta:
        """It takes no longer."""
        most_s = Limits(join=self.join_s).all + _SLACK_S
        return timedelta(seconds=most_s + (pairs.MOST_S if self.check.collectives else 0.0))


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """``verdict`` is that of all nodes; None, and ``why``, where this one could not take part.

    ``report`` is on this node, where it was checked again.
    """

    verdict: Verdict | None = None
    report: NodeReport | None = None
    why: str = ""


@dataclass(frozen=True)
class Running:
    """A part under way."""

    process: subprocess.Popen[bytes]

    def result(self, part: Part) -> Result:
        """Have it do ``part``, and wait for its end; blocks, for at most ``part.limit``."""
        data, within = msgspec.json.encode(part), part.limit
        try:
            output, _ = self.process.communicate(data, timeout=within.total_seconds())
            return msgspec.json.decode(output, type=Result)
        except subprocess.TimeoutExpired:
            self.end()
            return Result(why=f"it did not end within {within.total_seconds():.0f} s")
        except (ValueError, OSError):  # of msgspec: nothing whole came
            return Result(why="its process was ended")

    def end(self) -> None:
        """End it: it has nothing to save."""
        self.process.kill()
        self.process.wait()


def start(log: BinaryIO) -> Running:
    """A process for a part; what it says on the way goes to ``log``. Raises ``OSError``."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "ncclops.preflight.part"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,
    )
    return Running(process)


def take_part(part: Part) -> Result:
    """Check this node if it is suspect, then the edges, with all other nodes."""
    check, report = part.check, part.check.report
    if part.again:
        report = check_node(
            check.needs,
            environ=check.environ,
            spaces=check.spaces,
            collectives=check.collectives,
            site=check.site,
        )
        report = msgspec.structs.replace(report, host=part.name)
    findings: tuple[Finding, ...] = ()
    if report is not None:
        findings = tuple(report.of(Status.FAIL, Status.WARN))
    where = Where(
        host=part.host,
        port=part.port,
        count=part.count,
        least=part.least,
        job_id=part.meeting,
        rank=part.rank,
        external=True,
        gathers=part.rank == 0,
    )

    def note(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    offer = None
    if check.collectives and report is not None:
        offer = pairs.offer(report, check.environ, check.needs)
    try:
        verdict = run(
            where,
            environ=check.environ,
            limits=Limits(join=part.join_s),
            name=part.name,
            findings=findings,
            offer=offer,
            traits=None if report is None else report.traits,
            then=pairs.Pairs(pairs.measure(check.environ), note),
            note=note,
        )
    except Unmet as error:
        return Result(report=report, why=str(error))
    return Result(report=report, verdict=verdict)


def main() -> None:
    part = msgspec.json.decode(sys.stdin.buffer.read(), type=Part)
    sys.stdout.buffer.write(msgspec.json.encode(take_part(part)))
    sys.stdout.buffer.flush()
    os._exit(0)  # a thread may wait in torch's store: see ``errors.STORE_CALL``


if __name__ == "__main__":
    main()
