"""The events of a run: one type for each, as ``events.jsonl`` and ``worker.jsonl`` hold them.

A line is ``{"ts": …, "event": …, "rank": …, "node": …}`` and the fields of its type, all of them.
Fields are added with a default and never change their meaning, so that older runs can be read;
readers take no notice of fields and events that they do not know. ``docs/events.md`` is generated
from the texts here (``scripts/events_page.py``): one below each field, one for each event.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal, Union

import msgspec

from ncclops.moments import LATEST_S
from ncclops.record.event_values import (
    EnvChange,
    EvidenceLine,
    GpuFault,
    HangEvidence,
    NetworkUse,
    NodeEntry,
    RetryAdvice,
)

# Kinds of faults that are of no rank.
NODE_LOST, STORE_LOST = "node-lost", "store-lost"
# That of a rank whose processes do not answer, as the restart core has it (`FaultKind.LOST`).
RANK_LOST = "lost"
# The time of an event that is not written yet: it gets that of the writing.
UNSTAMPED = -1.0

Rank = Annotated[int, msgspec.Meta(ge=0)]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """What every event has."""

    ts: float = UNSTAMPED
    """when it happened, in seconds since the epoch"""
    rank: Rank | None = None
    """the initial rank that it is about; null: the run as a whole"""
    node: str = ""
    """the host whose agent recorded it"""


# --- once a run ---------------------------------------------------------------------------------


class RunStartedEvent(Event, tag="run-started", frozen=True, kw_only=True):
    """The agent starts."""

    run_id: str
    """names the run, as in `run.json`"""
    world_size: int
    """workers that are to run, on all nodes"""


class StackEvent(Event, tag="stack", frozen=True, kw_only=True):
    """The versions installed on this node; null where a part is not there."""

    torch: str | None = None
    """version of torch"""
    triton: str | None = None
    """version of Triton"""
    flash_attn: str | None = None
    """version of flash-attn"""
    nccl: str | None = None
    """version of NCCL"""
    cuda: str | None = None
    """version of CUDA that torch was built for"""
    driver: str | None = None
    """version of the NVIDIA driver"""
    gpu: str | None = None
    """model of the GPUs, and how many"""
    python: str | None = None
    """version of Python"""
    commit: str | None = None
    """the git commit of the script's directory"""


class EnvAppliedEvent(Event, tag="env-applied", frozen=True, kw_only=True):
    """The environment of the workers is settled."""

    profile: str
    """its name"""
    changes: list[EnvChange] = []
    """each variable, as in `env diff --json`"""


class VerdictEvent(Event, tag="verdict", frozen=True, kw_only=True):
    """The run has ended; the last event. `verdict.json` says more."""

    outcome: str
    """completed, no-receipt, failed, interrupted or stopped"""
    exit_code: int | None = None
    """of `ncclops launch`"""
    reason: str = ""
    """why, in a line"""
    what: str = ""
    """of a failure, what has happened, in a line: the `story` of `verdict.json` begins with it"""


class PreflightEvent(Event, tag="preflight", frozen=True, kw_only=True):
    """This node was checked before a start, or all nodes and the edges between them were."""

    attempt: int
    """the attempt that was to start, from 0"""
    failed: bool
    """whether something was found that would end the job"""
    hosts: list[str] = []
    """the hosts that are not fit"""
    causes: list[str] = []
    """what is wrong with edges and hosts, the worst first"""


# --- once an attempt, once a worker -------------------------------------------------------------


class NodesEvent(Event, tag="nodes", frozen=True, kw_only=True):
    """The nodes of a job on several have met; once an attempt."""

    attempt: int
    """its number, from 0"""
    nodes: list[NodeEntry] = []
    """the nodes, by their rank; a spare has no workers yet"""


class WorkerStartedEvent(Event, tag="worker-started", frozen=True, kw_only=True):
    """A worker process runs."""

    pid: int | None = None
    """its process"""
    attempt: int = 0
    """the attempt that it belongs to, from 0"""
    started_ticks: int | None = None
    """when the process started, in clock ticks since the machine did; with the boot of `run.json`
    it tells the process from a later one of the same number"""
    forked: bool = False
    """from the fork server, which has imported torch; otherwise it was started afresh"""


class WorkerExitedEvent(Event, tag="worker-exited", frozen=True, kw_only=True):
    """A worker process has ended."""

    exit_code: int | None = None
    """null: a signal ended it"""
    signal: str | None = None
    """the signal's name, such as `SIGKILL`"""
    why: str | None = None
    """that the kernel's OOM killer has ended it, where its memory cgroup shows that"""


class ScriptExitEvent(Event, tag="script-exit", frozen=True, kw_only=True):
    """The script has ended itself with exit code 0, by `sys.exit()` or such, on this rank."""

    file: str
    """where it did so: the innermost line that is not of ncclops"""
    line: int
    """its number"""
    function: str
    """the function in which it stands"""


class EnteredEvent(Event, tag="entered", frozen=True, kw_only=True):
    """The script is about to run under restarts in place. Of `worker.jsonl` only."""


class BootstrappedEvent(Event, tag="bootstrapped", frozen=True, kw_only=True):
    """The rank has its process group."""


class NetworkOpenEvent(Event, tag="network-open", frozen=True, kw_only=True):
    """What this process has of networks once NCCL is in use. Of `worker.jsonl` only."""

    rdma_devices: list[str] = []
    """the devices of InfiniBand, RoCE or EFA that it has open, as `uverbs0`"""
    plugins: list[str] = []
    """network plugins of NCCL that are loaded: file names, or what `NCCL_NET_PLUGIN` names"""


class ScriptFailedEvent(Event, tag="script-failed", frozen=True, kw_only=True):
    """The script has left with an error. Of `worker.jsonl` only."""

    iteration: int = 0
    """in which start of it in this process, from 0"""
    starting_up: bool | None = None
    """whether a process group of the rank had not completed a collective; null: not known"""


class ReadyToEndEvent(Event, tag="ready-to-end", frozen=True, kw_only=True):
    """The rank has nothing left to do and waits for the others. Of `worker.jsonl` only."""


class FinishedEvent(Event, tag="finished", frozen=True, kw_only=True):
    """The script has ended well on all ranks, under restarts in place. Of `worker.jsonl` only."""


class ExitingEvent(Event, tag="exiting", frozen=True, kw_only=True):
    """The script has ended well here, and so has all that it left to be done at exit: the process
    only has to end. Of `worker.jsonl` only."""


class GroupsAbortedEvent(Event, tag="groups-aborted", frozen=True, kw_only=True):
    """The rank has aborted its process groups, as the agent asked. Of `worker.jsonl` only."""


class OwnWrapperEvent(Event, tag="own-wrapper", frozen=True, kw_only=True):
    """The script applies a restart wrapper itself."""

    wrapper: str
    """the module that it comes from"""
    grows: bool = False
    """a new process may take the place of a lost rank: it has a `grow_timeout`"""


# --- training -----------------------------------------------------------------------------------


class CompileWarmupEvent(Event, tag="compile-warmup", frozen=True, kw_only=True):
    """Compile warm-up is over; once per rank and start."""

    seconds: float | None = None
    """how long it took; null where the script does not say"""
    stated: bool = False
    """false: taken from the second step"""


# A run of weeks has millions of steps: of those under way one becomes an event in so many seconds.
STEP_EVERY_S = 10.0


class StepEvent(Event, tag="step", frozen=True, kw_only=True):
    """A step has ended: the first after each start, one every ten seconds, and the last before a
    fault, a restart or the end, of the lowest rank that reports or prints steps. `ts` is the
    step's end."""

    step: int
    """its number"""
    step_s: float | None = None
    """seconds a step, as a mean since the event before; of the first one, the step's own"""
    rate: float | None = None
    """what was done in a second, in `unit`"""
    unit: str | None = None
    """tokens/s, samples/s or steps/s"""


class StartupStallEvent(Event, tag="startup-stall", frozen=True, kw_only=True):
    """The profile's start-up window has passed without a sign of training."""

    window: Literal["startup"] = "startup"
    """which one"""
    window_s: float
    """the window's length in seconds"""
    message: str
    """the same in words"""


class CompileStallEvent(Event, tag="compile-stall", frozen=True, kw_only=True):
    """The profile's compile window has passed without the end of compile warm-up."""

    window: Literal["compile"] = "compile"
    """which one"""
    window_s: float
    """the window's length in seconds"""
    message: str
    """the same in words"""


class RestartStallEvent(Event, tag="restart-stall", frozen=True, kw_only=True):
    """A restart in place waits for ranks of this node that are still in the script."""

    ranks: list[int]
    """they"""
    after_s: float
    """seconds since the restart began"""
    message: str
    """the same in words"""


class StragglerEvent(Event, tag="straggler", frozen=True, kw_only=True):
    """The rank is slower than the median rank, of all nodes where waiting is measured."""

    ratio: float
    """its time for a step over the median's"""
    kind: str
    """chronic or one-off; over: it was chronic, and keeps pace again"""
    since_step: int
    """the first slow step; of a script without steps, update of an optimizer or stretch of time"""
    since: float
    """when that step ended, in seconds since the epoch"""
    steps_slow: int = 0
    """how many of the steps were slow"""
    steps_compared: int = 0
    """how many steps were looked at"""
    advice: str = ""
    """what to do"""
    measured: str = ""
    """what is compared: waiting in collectives, busy (as the script reports it) or step"""
    over_s: float = 0.0
    """for how long it was slow, in seconds"""
    host: str = ""
    """where it runs"""
    gpu: dict[str, Any] | None = None
    """what NVML reads on its GPU, null where nothing can be read"""
    hardware: list[str] = []
    """the cause as far as it is seen, in words: of its GPU, and of its process"""


class NetworkEvent(Event, tag="network", frozen=True, kw_only=True):
    """NCCL has said which network it uses on this node, or what a rank has open shows it."""

    use: NetworkUse
    """the network, its devices, what was expected, and why it is another one"""


class GroupTimeoutEvent(Event, tag="group-timeout", frozen=True, kw_only=True):
    """The timeout of a process group changes, or the change is put off."""

    group: str | None = None
    """its name in torch; null: all of them"""
    desc: str | None = None
    """its description in torch"""
    from_s: float | None = None
    """seconds before; null: not known"""
    to_s: float | None = None
    """seconds after"""
    applied: bool | None = None
    """read back and found; null: it cannot be read back"""
    why: str | None = None
    """why it is not applied"""


class ResourceGrowthEvent(Event, tag="resource-growth", frozen=True, kw_only=True):
    """The process holds more than it did before restarts in place."""

    iteration: int
    """restarts in place so far"""
    grown: dict[str, float] = {}
    """by how much, by what"""
    now: dict[str, float | None] = {}
    """how much there is now; null: not known"""
    threads_left: list[str] = []
    """names of threads that earlier iterations have left"""
    exceeded: str | None = None
    """the limit that is passed, in words: the next restart has new processes"""


# --- failures -----------------------------------------------------------------------------------


class HangEvent(Event, tag="hang", frozen=True, kw_only=True):
    """Ranks hang, by two kinds of evidence."""

    culprits: list[int]
    """the ranks that the others wait for"""
    cause: str
    """the evidence, in a line"""
    evidence: list[HangEvidence] = []
    """what is known of each rank"""
    action: str = ""
    """what is done about it"""


class HangEndedEvent(Event, tag="hang-ended", frozen=True, kw_only=True):
    """A rank that hangs and did not move is killed, so that the others can go on."""

    signal: str = "SIGKILL"
    """what it was sent"""


class OutputPassedOverEvent(Event, tag="output-passed-over", frozen=True, kw_only=True):
    """The rank has written more than could be read: this part was neither classified nor searched
    for steps, and is in the file."""

    file: str
    """its path below the run directory"""
    begin: int
    """the first byte that was not read"""
    end: int
    """the first that was read again"""


class ExitForcedEvent(Event, tag="exit-forced", frozen=True, kw_only=True):
    """A process whose script had ended well did not end, and is killed. No failure of the job."""

    after_s: float
    """how long nothing but its end was left"""
    signal: str = "SIGKILL"
    """what it was sent"""


class SlowExitEvent(Event, tag="slow-exit", frozen=True, kw_only=True):
    """The script has ended well on a rank, and what it left to be done at exit takes long: threads
    that it started, callbacks at exit."""

    after_s: float
    """how long ago the script has ended or, where the process is ended, nothing has happened"""
    waits_for: str
    """what the main thread does"""
    ended: bool = False
    """nothing has happened for so long that the process ends itself, with 0"""


class FaultEvent(Event, tag="fault", frozen=True, kw_only=True):
    """Something has failed: a rank, a node, or the job's store."""

    cause: str
    """an exception, how a worker ended, `hung: …`, `node-lost` or `store-lost`"""
    kind: str | None = None
    """what failed: `node-lost`, `store-lost`, or what the restart core calls it (exception,
    died, hung, …); null: a worker that ended, or a loss in older runs"""
    attempt: int | None = None
    """the attempt that it has ended; null: none, or not known yet"""
    on: str | None = None
    """the node that it happened on, where that is not this one"""
    how: str | None = None
    """how a worker of another node ended"""
    lines: list[str] | None = None
    """its last lines"""
    why: str | None = None
    """how a node or the store was found to be lost"""
    log: str | None = None
    """the file to look into"""

    @property
    def loss(self) -> str | None:
        """``node-lost`` or ``store-lost``; None for all that fails on a rank."""
        name = self.cause if self.kind is None else self.kind
        return name if name in (NODE_LOST, STORE_LOST) else None


class XidEvent(Event, tag="xid", frozen=True, kw_only=True):
    """The driver reports an Xid error of the GPU of `rank`, which need not fail of it."""

    xid: int
    """its number in NVIDIA's catalogue"""
    device: str = ""
    """the GPU, with its UUID and PCI address"""
    what: str = ""
    """the error in words"""


class GpuFaultEvent(Event, tag="gpu-fault", frozen=True, kw_only=True):
    """`rank` has failed, and its GPU is the cause: the job starts no process on this node again."""

    fault: GpuFault
    """the GPU, the node, and what is wrong"""


class RestartEvent(Event, tag="restart", frozen=True, kw_only=True):
    """All ranks start the script again in their processes."""

    iteration: int | None = None
    """restarts in place so far, with this one"""
    cause: str = ""
    """the fault that led to it"""
    faulty_ranks: list[int] = []
    """all ranks that had a fault, the one that caused the others first"""
    ranks_lost: list[int] = []
    """those whose processes are gone"""
    ranks_returned: list[int] = []
    """those, lost now or before, in whose places new processes go on"""
    why_ended: dict[str, str] = {}
    """of those among them that their monitor processes have ended: why"""
    world_size: int | None = None
    """ranks that go on"""
    place: str | None = None
    """the line of the script that the exception came from; null: not known, or no exception"""
    alike: int = 0
    """how many more ranks raised the same"""
    instead: str | None = None
    """respawn or stop: that follows, and the script is not started again; null: it is"""
    phases_ms: dict[str, float] = {}
    """milliseconds in each phase, of the rank that reports"""


class RegroupedEvent(Event, tag="regrouped", frozen=True, kw_only=True):
    """After a restart in place, a group of a script that keeps going has come to its members
    (`init_process_group` and `new_group` of `CallWrapper`)."""

    iteration: int
    """restarts in place so far"""
    group: str = "default"
    """default: all ranks; another one by its description, or backend, and its ranks"""
    rung: str
    """reconfigured: the group is the one of before; shrunk: it was made of the communicator of
    before; kept: it lost nobody, and is the one of before with its connections; anew: it was made
    anew"""
    why: str | None = None
    """why it was made anew"""
    world_size: int
    """its members"""
    ms: float
    """milliseconds that it took on the rank that reports"""


class ClassifiedEvent(Event, tag="classified", frozen=True, kw_only=True):
    """What made an attempt fail. `rank` is the one to blame, or the first to report it."""

    class_: str = msgspec.field(name="class")
    """the failure's class"""
    signature: str | None = None
    """the signature that matched"""
    confidence: float = 0.0
    """from 0 to 1"""
    rank_began_it: bool = False
    """false: `rank` only reported it first, or is null"""
    phase: str | None = None
    """the phase of the run in which such a failure comes"""
    summary: str = ""
    """in a line"""
    retry: RetryAdvice | None = None
    """whether such a failure may be tried again, and why"""
    remedy: list[str] = []
    """what to do"""
    evidence: list[EvidenceLine] = []
    """the lines that prove it"""


class InternalErrorEvent(Event, tag="internal-error", frozen=True, kw_only=True):
    """Something in ncclops itself failed and was left out; the run went on. Please report it."""

    doing: str
    """what failed, such as `judging the receipt`"""
    error: str = ""
    """the exception, in a line"""
    log: str = ""
    """the file with its traceback"""


class NotifiedEvent(Event, tag="notified", frozen=True, kw_only=True):
    """Somebody was told of something that happened, or was to be (`[notify]`)."""

    to: str
    """the channel, as the profile names it"""
    rule: str
    """failed, restart-storm, no-progress, slow-rank, spare-used, node-suspected, goodput-below or
    heartbeat; of heartbeats only those that were not sent"""
    error: str = ""
    """why it was not sent; empty where it was"""


class EventsLostEvent(Event, tag="events-lost", frozen=True, kw_only=True):
    """Events could not be written, because the disk was full or did not answer."""

    count: int
    """how many, since the last event of this kind"""


class SnapshotsRemovedEvent(Event, tag="snapshots-removed", frozen=True, kw_only=True):
    """The ranks' snapshots of an old incident were removed: a run keeps those of the first 10 and
    last 50 incidents."""

    incident: int
    """its number; its ``incident.json`` is kept"""


# What ``EscalationEvent.failure`` says of a hang, whoever has found it; its place is the rank.
HANG = "a hang"


class EscalationEvent(Event, tag="escalation", frozen=True, kw_only=True):
    """Restarts in place, or new processes, cannot help any more."""

    to: str
    """respawn: new processes; stop: the end of the job"""
    reason: str = ""
    """why"""
    failure: tuple[str, str] | str | None = None
    """what happened and where, for comparing it with the next failure; null: no single failure.
    One text in older runs"""
    failed_start: bool = False
    """a communicator did not come up: new processes make theirs lazily"""
    passing: bool = False
    """the failure ended ranks that waited for others in NCCL or Gloo: it does not count against new
    ones"""
    hung: int | None = None
    """the rank that hangs; null: the failure is no hang"""


class RetryEvent(Event, tag="retry", frozen=True, kw_only=True):
    """Another attempt follows, in new processes."""

    attempt: int | None = None
    """its number, from 1: the second attempt is 2"""
    reason: str = ""
    """why"""
    action: str | None = None
    """what is done: retry or replace-node"""
    row: str | None = None
    """the row of the retry policy's table"""
    init: str | None = None
    """eager or lazy: when NCCL communicators are made"""
    barrier: str | None = None
    """the barrier after `init_process_group`: standard or skipped"""
    watchdog: str | None = None
    """the NCCL watchdog's setting"""
    cooldown_s: float = 0.0
    """seconds until the attempt starts"""
    changes: dict[str, str] = {}
    """variables that are set for it"""


# --- asked from outside -------------------------------------------------------------------------


class ControlEvent(Event, tag="control", frozen=True, kw_only=True):
    """A command came from outside ([control.md](control.md))."""

    action: str
    """stop, restart or tighten-timeouts"""
    reason: str = ""
    """as it was given"""
    by: str = ""
    """the user, and from where"""
    told: bool | None = None
    """of tighten-timeouts: whether all workers have it"""
    process_group: float | None = None
    """of tighten-timeouts: the timeout of process groups after it, in seconds"""
    soft: float | None = None
    """of tighten-timeouts: the soft timeout of restarts in place, in seconds"""
    hard: float | None = None
    """of tighten-timeouts: the hard one"""


class StopRequestedEvent(Event, tag="stop-requested", frozen=True, kw_only=True):
    """The run is asked to stop; with `SIGKILL`: workers that did not end in time are killed."""

    reason: str | None = None
    """by which request, and why"""
    grace_s: float | None = None
    """seconds that workers have to end together"""
    signal: str | None = None
    """the signal that asked; null: a command"""
    ranks: list[int] | None = None
    """of `SIGKILL`: the ranks that are killed"""

    @property
    def asks_the_run(self) -> bool:
        """Whether the run is to end: workers are killed after a failed attempt as well."""
        return self.signal != "SIGKILL"


class StopAgreedEvent(Event, tag="stop-agreed", frozen=True, kw_only=True):
    """All ranks end after the same step, or the same update of an optimizer."""

    step: int | None = None
    """the number of that step"""
    update: int | None = None
    """the number of that update, where the script reports no steps"""
    ranks: list[int] = []
    """the ranks of this node"""


class StopForcedEvent(Event, tag="stop-forced", frozen=True, kw_only=True):
    """Ranks could not end together: their process groups are aborted, then SIGTERM is sent. Or they
    had been sent it, and waited for ranks that had ended, so that their own handlers did not run.
    """

    ranks: list[int] = []
    """the ranks of this node that still run"""
    reason: str = ""
    """why"""
    late: list[int] = []
    """those that have not come to the step or update after which all were to end"""


TYPES: tuple[type[Event], ...] = tuple(Event.__subclasses__())
"""All events, in the order of the documentation."""


def name_of(event: Event | type[Event]) -> str:
    """What the line calls it, such as ``worker-started``."""
    return str(event.__struct_config__.tag)


def fields_of(event: Event) -> dict[str, Any]:
    """The line's fields by name, in its order: ``ts``, ``event``, ``rank``, ``node``, its own."""
    names = zip(event.__struct_fields__, event.__struct_encode_fields__, strict=True)
    values = {encoded: getattr(event, name) for name, encoded in names}
    return {"ts": values.pop("ts"), "event": name_of(event), **values}


@functools.cache
def _decoder() -> msgspec.json.Decoder[Event]:
    return msgspec.json.Decoder(Union[TYPES])  # noqa: UP007


def decode(line: bytes | str) -> Event | None:
    """The event in ``line``; None for what is not whole, not known or not well-formed."""
    try:
        event = _decoder().decode(line)
    except (ValueError, RecursionError):  # of msgspec and of Unicode
        return None
    return event if 0 <= event.ts <= LATEST_S else None
