"""Every timeout of a run in one object, in the order in which they have to fire.

    soft < hard < process_group      the restart core acts first; torch's watchdog, which can only
                                     end the process, is the last resort
    hard < barrier                   a rank that is being ended is still waited for
    steady_... <= ...                after warm-up timeouts get shorter, never longer

A profile as a rule names ``process_group`` alone (a compile window, say), and the rest follows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any

from ncclops.durations import format_duration, parse_duration
from ncclops.errors import UsageError
from ncclops.profiles import Growth, RestartMode, Timeouts
from ncclops.profiles.versions import satisfies
from ncclops.timeouts.limits import Limits, Window

# torch's default for NCCL groups (Gloo's is 30 min): where the ladder hangs if nobody says more.
_TORCH_DEFAULT = timedelta(minutes=10)
# Fractions of the group timeout: room for the hard timeout's signals before the watchdog acts.
SOFT, HARD, _BARRIER = 0.8, 0.9, 1.2
# A guardian that is silent for so long is taken for lost: the restart core's own default.
_HEARTBEAT = timedelta(seconds=30)
# Compile windows of the playbook: cold compiles take 15 to 20 minutes, 2 hours are beyond doubt.
_COMPILE = timedelta(hours=2)
# A rank that has finished waits for the others, who may be writing a last checkpoint or still
# training on more data. Nothing is wrong with that, and those who hang are found by `soft`; so
# this is only there because no wait is without an end.
_COMPLETION = timedelta(days=7)
# TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, in every build from 2.5 on.
_NCCL_HEARTBEAT = timedelta(seconds=480)
_HEARTBEAT_VARIABLE = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
_FALSE = ("0", "n", "no", "f", "false")

_IN_PROFILE = "the profile's [timeouts] or --timeout says otherwise"


@dataclass(frozen=True)
class _Rule:
    low: str
    high: str
    why: str
    fix: str = _IN_PROFILE
    may_be_equal: bool = False
    of_restart_core: bool = True  # these do not exist where workers do not restart in place


_RULES = (
    _Rule("soft", "hard", "a restart is tried before a process is ended"),
    _Rule("hard", "process_group", "the restart core acts before torch does"),
    _Rule("hard", "nccl_watchdog", "torch's watchdog would end the process first"),
    _Rule("hard", "barrier", "a rank that is being ended is still waited for"),
    _Rule("heartbeat", "barrier", "a lost node is noticed while it is waited for"),
    _Rule("steady_soft", "steady_hard", "a restart is tried before a process is ended"),
    _Rule("steady_hard", "steady_process_group", "the restart core acts before torch does"),
    _Rule(
        "steady_process_group",
        "process_group",
        "timeouts get shorter after warm-up",
        may_be_equal=True,
        of_restart_core=False,
    ),
    _Rule(
        "compile",
        "process_group",
        "groups have to outlast the compile",
        may_be_equal=True,
        of_restart_core=False,
    ),
    _Rule(
        "hard",
        "nccl_heartbeat",
        "torch's monitor would end the process during a restart",
        fix=f"--set {_HEARTBEAT_VARIABLE}=SECONDS says otherwise",
    ),
    _Rule(
        "stop_grace",
        "scheduler",
        "no time is left to stop in good order",
        fix="ask the scheduler for more time",
        of_restart_core=False,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What else bears on the timeouts of a run: ``environ`` is the workers', under the plan."""

    restart: RestartMode = "in-process"
    environ: Mapping[str, str] = field(default_factory=dict)
    torch: str | None = None
    gpus: bool = False
    now: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """All timeouts of a run. Raises ``UsageError`` when they are out of order.

    ``steady_...`` hold after compile warm-up (None: as before it), ``groups`` likewise for process
    groups by description. ``compile`` is how long warm-up may take. ``nccl_watchdog`` and
    ``nccl_heartbeat`` are torch's own, None where they do not act; ``scheduler`` is what is left
    until the scheduler ends the job, None if nobody says.
    """

    restart: RestartMode
    process_group: timedelta
    steady_process_group: timedelta | None
    compile: timedelta | None
    soft: timedelta
    hard: timedelta
    steady_soft: timedelta | None
    steady_hard: timedelta | None
    heartbeat: timedelta
    barrier: timedelta
    completion: timedelta
    stop_grace: timedelta
    nccl_watchdog: timedelta | None
    nccl_heartbeat: timedelta | None
    scheduler: timedelta | None
    groups: Mapping[str, timedelta]
    named_process_group: timedelta | None
    named_nccl_heartbeat: bool

    def __post_init__(self) -> None:
        for rule in _RULES:
            self._check(rule)
        for pattern, limit in self.groups.items():
            if limit > self.process_group:
                raise UsageError(
                    f"timeouts: groups.{pattern} ({format_duration(limit)}) must not be longer than"
                    f" process_group ({format_duration(self.process_group)}), which holds during"
                    f" warm-up: {_IN_PROFILE}"
                )

    def _check(self, rule: _Rule) -> None:
        lower, higher = getattr(self, rule.low), getattr(self, rule.high)
        if lower is None or higher is None:
            return
        if rule.of_restart_core and self.restart != "in-process":
            return
        if rule.high == "nccl_heartbeat" and not self.named_nccl_heartbeat:
            return  # see remarks
        if lower < higher or (rule.may_be_equal and lower == higher):
            return
        order = "not be longer than" if rule.may_be_equal else "be shorter than"
        raise UsageError(
            f"timeouts: {rule.low} ({format_duration(lower)}) must {order} {rule.high}"
            f" ({format_duration(higher)}), since {rule.why}: {rule.fix}"
        )

    def remarks(self) -> list[str]:
        """What is no mistake, and worth knowing before hours have passed."""
        found = []
        window = self.compile or self.process_group
        if self.scheduler is not None and self.scheduler < window:
            found.append(
                f"the scheduler ends the job in {_rough(self.scheduler)}, before the window of"
                f" {format_duration(window)} for a compile can pass"
            )
        heartbeat = self.nccl_heartbeat
        core_acts = self.restart == "in-process" and not self.named_nccl_heartbeat
        if core_acts and heartbeat is not None and heartbeat <= self.hard:
            found.append(
                f"torch's heartbeat monitor ends a process after {format_duration(heartbeat)},"
                f" before the hard timeout of {format_duration(self.hard)}:"
                f" --set {_HEARTBEAT_VARIABLE}=SECONDS makes it later"
            )
        return found

    def shown(self) -> dict[str, str | None]:
        """Each timeout as text; None where it does not exist or nobody knows it."""
        in_process = self.restart == "in-process"
        texts = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in _DETAILS:
                continue
            exists = value is not None and (in_process or entry.name not in _OF_RESTART_CORE)
            texts[entry.name] = format_duration(value) if exists else None
        for pattern, limit in self.groups.items():
            texts[f"groups.{pattern}"] = format_duration(limit)
        return texts

    def for_workers(self, growth: Growth) -> Limits:
        """The part of it that workers apply."""
        steady = None
        if self.steady_soft is not None and self.steady_hard is not None:
            steady = Window(
                process_group=self.steady_process_group,
                soft=self.steady_soft,
                hard=self.steady_hard,
            )
        return Limits(
            first=Window(process_group=self.named_process_group, soft=self.soft, hard=self.hard),
            steady=steady,
            groups=self.groups,
            heartbeat=self.heartbeat,
            barrier=self.barrier,
            completion=self.completion,
            growth=growth,
        )


_DETAILS = ("restart", "groups", "named_process_group", "named_nccl_heartbeat")
_OF_RESTART_CORE = (
    "soft",
    "hard",
    "steady_soft",
    "steady_hard",
    "heartbeat",
    "barrier",
    "completion",
)


def build_ladder(timeouts: Timeouts, around: Surroundings | None = None) -> Ladder:
    """The ladder of a profile: what it names, and the rest in proportion to the group timeout.

    Raises ``UsageError`` when that is out of order.
    """
    around = around or Surroundings()
    group = timeouts.process_group or _TORCH_DEFAULT
    soft, hard = timeouts.soft or group * SOFT, timeouts.hard or group * HARD
    steady = timeouts.steady_process_group
    # A compile window of its own is what a profile means that tightens afterwards.
    compiling = timeouts.compile or (min(_COMPILE, group) if steady is not None else None)
    return Ladder(
        restart=around.restart,
        process_group=group,
        steady_process_group=steady,
        compile=compiling,
        soft=soft,
        hard=hard,
        steady_soft=None if steady is None else min(soft, steady * SOFT),
        steady_hard=None if steady is None else min(hard, steady * HARD),
        heartbeat=timeouts.heartbeat or min(_HEARTBEAT, group / 4),
        barrier=timeouts.barrier or group * _BARRIER,
        completion=timeouts.completion or max(_COMPLETION, group),
        stop_grace=timeouts.stop_grace,
        nccl_watchdog=group if _watchdog_acts(around) else None,
        nccl_heartbeat=_nccl_heartbeat(around) if _monitor_acts(around) else None,
        scheduler=_left_by_scheduler(around),
        groups=timeouts.groups,
        named_process_group=timeouts.process_group,
        named_nccl_heartbeat=_HEARTBEAT_VARIABLE in around.environ,
    )


def with_named(timeouts: Timeouts, named: list[str]) -> Timeouts:
    """``timeouts`` with ``name=duration`` pairs of a command line on top, as a profile names them;
    ``groups.PATTERN=duration`` is for groups. Raises ``UsageError``.
    """
    known = [entry.name for entry in fields(Timeouts) if entry.name != "groups"]
    for pair in named:
        name, _, text = pair.partition("=")
        name = name.strip().replace("-", "_") if not name.startswith("groups.") else name
        try:
            limit = parse_duration(text)
        except ValueError as error:
            raise UsageError(f"--timeout {pair}: {error}") from None
        if limit <= timedelta(0):
            raise UsageError(f"--timeout {pair}: must be more than nothing")
        if name.startswith("groups."):
            groups = {name.removeprefix("groups."): limit, **timeouts.groups}
            timeouts = replace(timeouts, groups=groups)
        elif name in known:
            change: dict[str, Any] = {name: limit}
            timeouts = replace(timeouts, **change)
        else:
            raise UsageError(f"--timeout {pair}: there is no {name!r}; known: {', '.join(known)}")
    return timeouts


def _watchdog_acts(around: Surroundings) -> bool:
    """Whether torch's NCCL watchdog ends a process when a collective times out."""
    handling = around.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    return around.gpus and handling != "0" and not _blocks(around)


def _monitor_acts(around: Surroundings) -> bool:
    """Whether torch's heartbeat monitor ends a process whose NCCL watchdog is silent."""
    second_engine = around.torch is not None and satisfies(around.torch, ">=2.15")
    if second_engine and around.environ.get("TORCH_DIST_USE_NCCL2", "1") != "0":
        return False  # it has no monitor
    monitoring = around.environ.get("TORCH_NCCL_ENABLE_MONITORING", "1").lower()
    return around.gpus and monitoring not in _FALSE and not _blocks(around)


def _blocks(around: Surroundings) -> bool:
    """Whether blocking wait is on: then torch, from 2.6 on, starts neither of the two threads."""
    return around.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0").lower() not in _FALSE


def _nccl_heartbeat(around: Surroundings) -> timedelta:
    text = around.environ.get(_HEARTBEAT_VARIABLE, "")
    return timedelta(seconds=int(text)) if text.isdecimal() else _NCCL_HEARTBEAT


def _left_by_scheduler(around: Surroundings) -> timedelta | None:
    """Until Slurm ends the job; it says when in seconds since the epoch."""
    end = around.environ.get("SLURM_JOB_END_TIME", "")
    if not end.isdecimal():
        return None
    return timedelta(seconds=max(0, round(int(end) - around.now)))


def _rough(duration: timedelta) -> str:
    minutes, seconds = divmod(round(duration.total_seconds()), 60)
    return f"{minutes} min" if minutes else f"{seconds} s"
