"""From the timeouts that a profile and the command line name to all timeouts of a run.

A profile as a rule names ``process_group`` alone (a compile window, say), and the rest follows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from ncclops.durations import format_duration
from ncclops.errors import UsageError
from ncclops.profiles import RestartMode
from ncclops.profiles.model import STOP_GRACE
from ncclops.profiles.versions import satisfies
from ncclops.schedulers.allocation import find_allocation
from ncclops.timeouts import order
from ncclops.timeouts.model import GROUPS, Timeouts

# torch's default for NCCL groups (Gloo's is 30 min): what the rest follows if none is named.
_TORCH_DEFAULT = timedelta(minutes=10)
# Fractions of the group timeout: room for the hard timeout's signals before the watchdog acts.
SOFT, HARD, _BARRIER = 0.8, 0.9, 1.2
# A monitor process that is silent for so long is taken for lost: the restart core's own default.
_HEARTBEAT = timedelta(seconds=30)
# Cold compiles take 15 to 20 minutes; after 2 hours something else is wrong beyond doubt.
_COMPILE = timedelta(hours=2)
# A rank that has finished waits for the others, which may be writing a last checkpoint or still
# training on more data. That is no error, and ranks that hang are found by `soft`; this limit
# exists only because every wait has one.
_COMPLETION = timedelta(days=7)
# TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, in every build from 2.5 on.
_NCCL_HEARTBEAT = timedelta(seconds=480)
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
    given = named.get("process_group")
    group = given or _TORCH_DEFAULT
    steady = named.get("steady_process_group")
    # A compile window of its own is what a profile means that tightens afterwards.
    compiling = named.get("compile") or (min(_COMPILE, group) if steady is not None else None)
    timeouts = Timeouts(
        process_group=group,
        given_process_group=given,
        steady_process_group=steady,
        compile=compiling,
        stop_grace=named.get("stop_grace", STOP_GRACE),
        nccl_watchdog=group if _watchdog_acts(around) else None,
        nccl_heartbeat=_nccl_heartbeat(around) if _monitor_acts(around) else None,
        scheduler=_left_by_scheduler(around),
        groups={
            name.removeprefix(GROUPS): limit
            for name, limit in named.items()
            if name.startswith(GROUPS)
        },
        **(_of_restart_core(named, group) if around.restart == "in-process" else {}),
    )
    order.check(timeouts, chose_heartbeat=around.chose_heartbeat)
    return timeouts


def remarks(timeouts: Timeouts, around: Surroundings) -> list[str]:
    """What is not an error, and worth knowing before hours have passed."""
    return order.remarks(timeouts, chose_heartbeat=around.chose_heartbeat)


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
        if limit <= timedelta(0):
            raise UsageError(f"--timeout {name}={format_duration(limit)}: must be positive")
        if own not in known and not own.startswith(GROUPS):
            raise UsageError(f"--timeout {name}: there is no {own!r}; known: {', '.join(known)}")
        found.setdefault(own, limit)
    return found | {name: limit for name, limit in named.items() if name not in found}


def _of_restart_core(named: Mapping[str, timedelta], group: timedelta) -> dict[str, timedelta]:
    """The timeouts of restarts in place, by name."""
    soft = named.get("soft") or _share(group, SOFT)
    hard = named.get("hard") or _share(group, HARD)
    found = {
        "soft": soft,
        "hard": hard,
        "heartbeat": named.get("heartbeat") or min(_HEARTBEAT, _share(group, 0.25)),
        "barrier": named.get("barrier") or _share(group, _BARRIER),
        "completion": named.get("completion") or max(_COMPLETION, group),
    }
    if (steady := named.get("steady_process_group")) is not None:
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
    second_engine = around.torch is not None and satisfies(around.torch, ">=2.15")
    if second_engine and around.environ.get("TORCH_DIST_USE_NCCL2", "1") != "0":
        return False  # it has no monitor
    monitoring = around.environ.get("TORCH_NCCL_ENABLE_MONITORING", "1").lower()
    return around.gpus and monitoring not in _FALSE and not _blocks(around)


def _blocks(around: Surroundings) -> bool:
    """Whether blocking wait is on: then torch, from 2.6 on, starts neither of the two threads."""
    return around.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0").lower() not in _FALSE


def _nccl_heartbeat(around: Surroundings) -> timedelta:
    text = around.environ.get(order.HEARTBEAT_VARIABLE, "")
    return timedelta(seconds=int(text)) if text.isdecimal() else _NCCL_HEARTBEAT


def _left_by_scheduler(around: Surroundings) -> timedelta | None:
    """Until the scheduler ends the job."""
    ends = find_allocation(around.environ).ends
    return None if ends is None else timedelta(seconds=max(0, round(ends - around.now)))
