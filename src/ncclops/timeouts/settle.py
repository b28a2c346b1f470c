"""From the timeouts that a profile and the command line name to all timeouts of a run.

Most profiles name none: a long window while a rank may be compiling, and a shorter one once warm-up
is over. One that names ``process_group`` alone has that for the whole run, and the rest follows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from ncclops.durations import format_duration
from ncclops.errors import UsageError
from ncclops.nearest import nearest
from ncclops.profiles import RestartMode
from ncclops.profiles.model import STOP_GRACE
from ncclops.schedulers.allocation import find_allocation
from ncclops.timeouts import order
from ncclops.timeouts.model import ATTENDED, GROUPS, Timeouts, Window
from ncclops.versions import satisfies
from ncclops.whole_numbers import whole_number

# Groups until warm-up is over, as long as ``h200-base`` has torch's heartbeat. Cold compiles of
# large models take 15 to 20 minutes, and of ranks that compile in turn a multiple of it.
_GROUP = timedelta(hours=2)
# And afterwards: an idle rank outside collectives is given 30 minutes (``[watch] quiet``), and
# torch, which ends the ranks that wait for it, must not be first.
_STEADY = timedelta(minutes=45)
# Fractions of the group timeout. Compile warm-up ends before the restart core acts by itself, and
# there is room for the hard timeout's signals before the watchdog acts.
_COMPILE, SOFT, HARD, _BARRIER = 0.75, 0.8, 0.9, 1.2
# The authority over liveness acts before the restart core or torch would.
_FIRST = 0.9
# An abort takes milliseconds, seconds on a slow node. The longest that we know of took more than
# two minutes: each of many queued kernels of NCCL went on for 0.2 s before it looked for the abort
# (github.com/NVIDIA/nccl/pull/1462). Twice that, as a rank that is ended too early is lost.
_ABORT = timedelta(minutes=5)
# A monitor process that is silent for so long is taken for lost: the restart core's own default.
_HEARTBEAT = timedelta(seconds=30)
# For a new process in a lost rank's place: a fork takes tenths of a second, and one that imports
# torch anew takes some seconds.
_GROW = timedelta(seconds=20)
# A rank that has finished waits for the others, which may be writing a last checkpoint or still
# training on more data. That is no error, and ranks that hang are found by `soft`; this limit
# exists only because every wait has one.
_COMPLETION = timedelta(days=7)
# TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, in every build from 2.5 on.
_NCCL_HEARTBEAT = timedelta(seconds=480)
# What a profile names makes way for a shorter one of these that is asked for.
_WITHIN = {"compile": ("soft", "process_group"), "steady_process_group": ("process_group",)}
_MOST_SECONDS = 10**9  # 30 years: what a timedelta takes, by far
_FALSE = ("0", "n", "no", "f", "false")


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What else bears on the timeouts of a run: ``environ`` is the workers', under the plan."""

    restart: RestartMode = "in-process"
    environ: Mapping[str, str] = field(default_factory=dict)
    torch: str | None = None
    gpus: bool = False
    now: float = field(default_factory=time.time)

    @property
    def chose_heartbeat(self) -> bool:
        """Whether the environment sets the timeout of torch's heartbeat monitor."""
        return order.HEARTBEAT_VARIABLE in self.environ


def settle(named: Mapping[str, timedelta], around: Surroundings | None = None) -> Timeouts:
    """All timeouts: those ``named`` (as ``Profile.timeouts``), the rest in proportion to the
    group timeout. Raises ``UsageError`` when they are out of order.
    """
    around = around or Surroundings()
    group = named.get("process_group")
    steady = named.get("steady_process_group")
    if group is None:
        compiling = named.get("compile")
        group = _GROUP if compiling is None else _share(compiling, 1 / _COMPILE)
        steady = steady or (_STEADY if group > _STEADY else None)
    core = _of_restart_core(named, group, steady) if around.restart == "in-process" else {}
    timeouts = Timeouts(
        process_group=group,
        steady_process_group=steady,
        compile=named.get("compile") or _compile(core.get("soft"), group),
        stop_grace=named.get("stop_grace", STOP_GRACE),
        nccl_watchdog=group if _watchdog_acts(around) else None,
        nccl_heartbeat=_nccl_heartbeat(around) if _monitor_acts(around) else None,
        scheduler=_left_by_scheduler(around),
        groups={
            name.removeprefix(GROUPS): limit
            for name, limit in named.items()
            if name.startswith(GROUPS)
        },
        **core,
    )
    order.check(timeouts, chose_heartbeat=around.chose_heartbeat)
    return timeouts


def remarks(timeouts: Timeouts, around: Surroundings) -> list[str]:
    """What is not an error, and worth knowing before hours have passed."""
    return order.remarks(timeouts, chose_heartbeat=around.chose_heartbeat)


def without_effect(asked: Mapping[str, timedelta], restart: RestartMode) -> list[str]:
    """A line where ``asked`` of ``--timeout`` has timeouts of the restart core and it does not run.

    What ends a hang then follows from ``process_group`` (``acts_before``).
    """
    core = _of_restart_core({}, _GROUP, None)
    idle = sorted(name for given in asked if (name := given.strip().replace("-", "_")) in core)
    if restart == "in-process" or not idle:
        return []
    pairs = ", ".join(f"--timeout {name}" for name in idle)
    return [
        f"{pairs} {'has' if len(idle) == 1 else 'have'} no effect with --restart {restart}, as"
        " nothing restarts in place: process_group says how soon a hang is ended"
    ]


def attended(named: Mapping[str, timedelta]) -> dict[str, timedelta]:
    """What holds in place of a profile's ``named`` timeouts where a person may stop a rank."""
    kept = {name: limit for name, limit in named.items() if name == "stop_grace"}
    return {**kept, "process_group": ATTENDED}


def with_named(
    named: Mapping[str, timedelta], asked: Mapping[str, timedelta]
) -> dict[str, timedelta]:
    """``named``, as a profile names them, with those of ``--timeout`` on top.

    ``groups.PATTERN`` is for groups; what was asked for last comes first, since the first pattern
    that matches counts. Raises ``UsageError`` for a name that is not known and for nothing or less.
    """
    from ncclops.profiles.schema import timeout_names

    known = timeout_names()
    found: dict[str, timedelta] = {}
    for name, limit in reversed(list(asked.items())):
        own = name if name.startswith(GROUPS) else name.strip().replace("-", "_")
        if not isinstance(limit, timedelta):  # of a caller in Python that no type checker sees
            raise UsageError(f"--timeout {name}: give a datetime.timedelta, not {limit!r}")
        if limit <= timedelta(0):
            raise UsageError(f"--timeout {name}={format_duration(limit)}: must be positive")
        if own not in known and not own.startswith(GROUPS):
            raise UsageError(f"--timeout {name}: there is no {own!r}{nearest(own, known)}")
        found.setdefault(own, limit)
    given = dict(found)
    for name, limit in named.items():
        if all(limit < given.get(longer, timedelta.max) for longer in _WITHIN.get(name, ())):
            found.setdefault(name, limit)
    # A profile's parameter may make the long window shorter than the one that follows it.
    group = found.get("process_group", timedelta.max)
    if "steady_process_group" not in given and found.get("steady_process_group", group) > group:
        del found["steady_process_group"]
    return found


def acts_before(window: Window) -> timedelta:
    """By when a hang is dealt with where ``window`` holds: before the restart core acts by itself,
    or torch where nothing restarts in place.
    """
    return _share(window.soft or _share(window.process_group, SOFT), _FIRST)


def _compile(soft: timedelta | None, group: timedelta) -> timedelta:
    """How long warm-up may take, where that is not named."""
    return _share(group, _COMPILE) if soft is None else _share(soft, _COMPILE / SOFT)


def _of_restart_core(
    named: Mapping[str, timedelta], group: timedelta, steady: timedelta | None
) -> dict[str, timedelta]:
    """The timeouts of restarts in place, by name."""
    soft, hard = _share(group, SOFT), _share(group, HARD)
    compiling = named.get("compile")
    if compiling is not None and soft <= compiling < group:
        soft, hard = compiling + (group - compiling) / 3, compiling + (group - compiling) / 1.5
    soft, hard = named.get("soft") or _share(soft, 1), named.get("hard") or _share(hard, 1)
    found = {
        "soft": soft,
        "hard": hard,
        "abort": named.get("abort") or min(_ABORT, hard),
        "heartbeat": named.get("heartbeat") or min(_HEARTBEAT, _share(group, 0.25)),
        "barrier": named.get("barrier") or _share(group, _BARRIER),
        "grow": named.get("grow") or min(_GROW, _share(group, 0.5)),
        "completion": named.get("completion") or max(_COMPLETION, group),
    }
    if steady is not None:
        found["steady_soft"] = min(soft, _share(steady, SOFT))
        found["steady_hard"] = min(hard, _share(steady, HARD))
    return found


def _share(group: timedelta, factor: float) -> timedelta:
    """In whole milliseconds, the smallest unit that is written down."""
    return timedelta(milliseconds=math.ceil(group * factor / timedelta(milliseconds=1)))


def _watchdog_acts(around: Surroundings) -> bool:
    """Whether torch's NCCL watchdog ends a process when a collective times out."""
    handling = around.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    return around.gpus and handling != "0" and not _blocks(around)


def _monitor_acts(around: Surroundings) -> bool:
    """Whether torch's heartbeat monitor ends a process whose NCCL watchdog is silent."""
    asked = around.environ.get("TORCH_DIST_USE_NCCL2")
    since = ">=2.14" if asked == "1" else ">=2.15"
    if asked != "0" and around.torch is not None and satisfies(around.torch, since):
        return False  # the second engine has no monitor
    monitoring = around.environ.get("TORCH_NCCL_ENABLE_MONITORING", "1").lower()
    return around.gpus and monitoring not in _FALSE and not _blocks(around)


def _blocks(around: Surroundings) -> bool:
    """Whether blocking wait is on: then torch, from 2.6 on, starts neither of the two threads."""
    return around.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0").lower() not in _FALSE


def _nccl_heartbeat(around: Surroundings) -> timedelta:
    text = around.environ.get(order.HEARTBEAT_VARIABLE, "")
    seconds = whole_number(text, _MOST_SECONDS)
    return _NCCL_HEARTBEAT if seconds is None else timedelta(seconds=seconds)


def _left_by_scheduler(around: Surroundings) -> timedelta | None:
    """Until the scheduler ends the job."""
    ends = find_allocation(around.environ).ends
    return None if ends is None else timedelta(seconds=max(0, round(ends - around.now)))
