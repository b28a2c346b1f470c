"""The records of the shared log: one type for each, one codec.

A record is one JSON object, with its type as ``kind``. Nodes with different versions of ncclops are
refused at the start, but until then they read each other's records: fields that are not known are
passed over, and what has another form is an ``UnknownRecord``, which changes nothing.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from signal import Signals

import msgspec

from ncclops.agent.stop_agreement import StopWay
from ncclops.classify.policy import PastAttempt
from ncclops.decision.deciding import AttemptDecision
from ncclops.decision.node_end import NodeEnd
from ncclops.decision.outcome import StopRequest
from ncclops.health.liveness import NodeView
from ncclops.health.paces import RankPace
from ncclops.timeouts.model import Window

# No node of a round: an agent whose nodes have not met has no rank.
NO_NODE = -1


class LogRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all records. ``node`` is the rank of the node that wrote it, or that it is about."""

    node: int = NO_NODE


class WaitingRecord(LogRecord, tag="waiting", frozen=True, kw_only=True):
    """The names of the nodes that are ``here``, and the ranks of those that are not."""

    here: list[str]
    missing: list[int]


class StartRecord(LogRecord, tag="start", frozen=True, kw_only=True):
    """Node 0 starts an attempt. Names and addresses are those of the nodes, by their rank.

    ``history`` are the job's failed attempts, ``store`` the host and the port of the workers'
    store; ``external``: no node of the job hosts it. ``remarks`` are lines about differences.
    """

    names: list[str]
    addresses: list[str]
    attempt: int
    history: list[PastAttempt]
    store: tuple[str, int]
    external: bool
    prefix: str
    remarks: list[str] = []


class RefusedRecord(LogRecord, tag="refused", frozen=True, kw_only=True):
    """Nothing starts, since the nodes differ in ``names``; ``lines`` are a table for people.

    Or for another reason: ``why``.
    """

    names: list[str]
    lines: list[str]
    why: str = ""


class CheckRecord(LogRecord, tag="check", frozen=True, kw_only=True):
    """All nodes are to check the edges between them; they meet in the job's store as ``meeting``.

    Each that is suspect checks itself first. ``names`` are those of the nodes, by rank.
    """

    meeting: str
    names: list[str]


class LeftOutRecord(LogRecord, tag="left-out", frozen=True, kw_only=True):
    """What the check has come to: the nodes, by rank, that take no part, and why.

    The others meet again.
    """

    nodes: dict[int, str]


class FailureRecord(LogRecord, frozen=True, kw_only=True):
    """A worker has failed: its ``rank``, how it ended in words, and its last lines."""

    rank: int
    how: str
    lines: list[str] = []


class FailedRecord(FailureRecord, tag="failed", frozen=True, kw_only=True):
    """A failure that ends the attempt on all nodes."""


class FaultRecord(FailureRecord, tag="fault", frozen=True, kw_only=True):
    """A failure that the other workers may get over."""


class LostRecord(LogRecord, tag="lost", frozen=True, kw_only=True):
    """The node is taken for lost, by node ``by``."""

    why: str
    by: int = NO_NODE


class BackRecord(LogRecord, tag="back", frozen=True, kw_only=True):
    """The node was only late, and goes on."""


class AtWorkRecord(LogRecord, tag="at-work", frozen=True, kw_only=True):
    """Whether a rank of the node works; if not, all that are left there are to return to others."""

    at_work: bool


class SilentRecord(LogRecord, tag="silent", frozen=True, kw_only=True):
    """Whether the node's agent does not answer, as if it was stopped; its workers may run on."""

    silent: bool


class ByeRecord(LogRecord, tag="bye", frozen=True, kw_only=True):
    """The node's agent needs nothing any more."""


class LimitsRecord(LogRecord, tag="limits", frozen=True, kw_only=True):
    """Shorter timeouts for all workers, as ``by`` has requested."""

    window: Window
    reason: str
    by: str


class StopRecord(LogRecord, tag="stop", frozen=True, kw_only=True):
    """The node was asked to stop the job; ``signal`` is the number, None for a command."""

    reason: str
    grace_s: float
    signal: int | None = None

    @classmethod
    def of(cls, request: StopRequest) -> StopRecord:
        return cls(
            signal=request.signum,
            reason=request.reason,
            grace_s=request.grace.total_seconds(),
        )

    @property
    def request(self) -> StopRequest:
        signum = None if self.signal is None else Signals(self.signal)
        return StopRequest(reason=self.reason, grace=timedelta(seconds=self.grace_s), signum=signum)


class StopWayRecord(LogRecord, tag="stop-way", frozen=True, kw_only=True):
    """The node's ranks can be stopped in this way, and have come as far as ``at``."""

    way: StopWay
    at: int


class StopPointRecord(LogRecord, tag="stop-point", frozen=True, kw_only=True):
    """Proposal ``number``: all ranks hold from ``point`` on, counted by the clock ``way``."""

    number: int
    way: StopWay
    point: int


class StopVoteRecord(LogRecord, tag="stop-vote", frozen=True, kw_only=True):
    """The node's ranks had come as far as ``at`` after proposal ``number`` was put to them."""

    number: int
    at: int


class StopGoRecord(LogRecord, tag="stop-go", frozen=True, kw_only=True):
    """Proposal ``number`` holds."""

    number: int


class ViewRecord(LogRecord, tag="view", frozen=True, kw_only=True):
    """What is thought of the node's ranks; the last one of a node counts."""

    view: NodeView


class PacesRecord(LogRecord, tag="paces", frozen=True, kw_only=True):
    """How much the node's ranks wait for others, of those for which that has changed."""

    paces: list[RankPace]


class EndedRecord(LogRecord, tag="ended", frozen=True, kw_only=True):
    """How the attempt has ended on the node."""

    end: NodeEnd


class DecisionRecord(LogRecord, tag="decision", frozen=True, kw_only=True):
    """What the attempt comes to, for all nodes."""

    decision: AttemptDecision


class UnknownRecord(LogRecord, tag="unknown", frozen=True, kw_only=True):
    """A record that this version cannot read."""


Record = (
    WaitingRecord
    | StartRecord
    | RefusedRecord
    | CheckRecord
    | LeftOutRecord
    | FailedRecord
    | FaultRecord
    | LostRecord
    | BackRecord
    | AtWorkRecord
    | SilentRecord
    | ByeRecord
    | LimitsRecord
    | StopRecord
    | StopWayRecord
    | StopPointRecord
    | StopVoteRecord
    | StopGoRecord
    | ViewRecord
    | PacesRecord
    | EndedRecord
    | DecisionRecord
    | UnknownRecord
)


def name_of(record: LogRecord) -> str:
    """What the log calls it, such as ``stop-vote``."""
    return str(record.__struct_config__.tag)


def encode(record: Record) -> str:
    """One JSON object."""
    return msgspec.json.encode(record).decode()


@functools.cache
def _decoder() -> msgspec.json.Decoder[Record]:
    return msgspec.json.Decoder(Record)


def decode(data: bytes | str) -> Record:
    """The record in ``data``; an ``UnknownRecord`` for what is none, or of another version."""
    try:
        return _decoder().decode(data)
    except (ValueError, RecursionError):  # of msgspec and of Unicode
        return UnknownRecord()
