"""The order in which the timeouts of a run have to fire.

compile < soft < hard < process_group   a rank that compiles is left alone; the restart core acts
                                 before torch's watchdog, which can only end the process
hard < barrier                   a rank that is being ended is still waited for
abort <= hard                    an abort that hangs is ended as early as a function that hangs
steady_... <= ...                after warm-up timeouts get shorter, never longer
1 s < soft, heartbeat            the restart core looks at either once a second
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from ncclops.durations import format_duration
from ncclops.errors import UsageError
from ncclops.timeouts.model import GROUPS, Timeouts

HEARTBEAT_VARIABLE = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
_IN_PROFILE = "change it in the profile's [timeouts] or by --timeout"

# The intervals of the restart core, which may not be imported here: it needs torch.
INTERVAL = timedelta(seconds=1)


@dataclass(frozen=True)
class _Rule:
    low: str
    high: str
    why: str
    fix: str = _IN_PROFILE
    may_be_equal: bool = False


_RULES = (
    _Rule("soft", "hard", "a restart is tried before a process is ended"),
    _Rule("hard", "process_group", "the restart core acts before torch does"),
    _Rule("hard", "nccl_watchdog", "torch's watchdog would end the process first"),
    _Rule("hard", "barrier", "a rank that is being ended is still waited for"),
    _Rule(
        "abort", "hard", "a rank whose abort hangs is ended then at the latest", may_be_equal=True
    ),
    _Rule("grow", "barrier", "a lost rank's new process is waited for within the barrier"),
    _Rule("heartbeat", "barrier", "a lost node is noticed while it is waited for"),
    _Rule("steady_soft", "steady_hard", "a restart is tried before a process is ended"),
    _Rule("steady_hard", "steady_process_group", "the restart core acts before torch does"),
    _Rule(
        "steady_process_group",
        "process_group",
        "timeouts get shorter after warm-up",
        may_be_equal=True,
    ),
    _Rule("compile", "soft", "a rank that compiles is not restarted"),
    _Rule("compile", "process_group", "groups have to outlast the compile", may_be_equal=True),
    _Rule(
        "stop_grace",
        "scheduler",
        "no time is left to stop gracefully",
        fix="ask the scheduler for more time",
    ),
)
# Only a heartbeat that was chosen is a mistake; torch's own default is worth a remark.
_CHOSEN_HEARTBEAT = _Rule(
    "hard",
    "nccl_heartbeat",
    "torch's monitor would end the process during a restart",
    fix=f"--set {HEARTBEAT_VARIABLE}=SECONDS says otherwise",
)


def check(timeouts: Timeouts, *, chose_heartbeat: bool = False) -> None:
    """Raise ``UsageError`` when ``timeouts`` are out of order; what does not exist is in order.

    ``chose_heartbeat``: the environment sets torch's heartbeat timeout.
    """
    for rule in (*_RULES, _CHOSEN_HEARTBEAT) if chose_heartbeat else _RULES:
        lower, higher = getattr(timeouts, rule.low), getattr(timeouts, rule.high)
        if lower is None or higher is None:
            continue
        if lower < higher or (rule.may_be_equal and lower == higher):
            continue
        order = "not be longer than" if rule.may_be_equal else "be shorter than"
        raise UsageError(
            f"timeouts: {rule.low} ({format_duration(lower)}) must {order} {rule.high}"
            f" ({format_duration(higher)}), since {rule.why}: {rule.fix}"
        )
    for name in ("soft", "heartbeat"):
        limit = getattr(timeouts, name)
        if limit is not None and limit <= INTERVAL:
            raise UsageError(
                f"timeouts: {name} ({format_duration(limit)}) must be longer than"
                f" {format_duration(INTERVAL)}, since it is looked at once in that time:"
                f" {_IN_PROFILE}"
            )
    for pattern, limit in timeouts.groups.items():
        if limit > timeouts.process_group:
            raise UsageError(
                f"timeouts: {GROUPS}{pattern} ({format_duration(limit)}) must not be longer than"
                f" process_group ({format_duration(timeouts.process_group)}), which holds during"
                f" warm-up: {_IN_PROFILE}"
            )


def remarks(timeouts: Timeouts, *, chose_heartbeat: bool = False) -> list[str]:
    """What is not an error, and worth knowing before hours have passed."""
    found = []
    window = timeouts.compile or timeouts.process_group
    if timeouts.scheduler is not None and timeouts.scheduler < window:
        found.append(
            f"the scheduler ends the job in {_rough(timeouts.scheduler)}, before the window of"
            f" {format_duration(window)} for a compile can pass"
        )
    heartbeat, hard = timeouts.nccl_heartbeat, timeouts.hard
    if not chose_heartbeat and hard is not None and heartbeat is not None and heartbeat <= hard:
        found.append(
            f"torch's heartbeat monitor ends a process after {format_duration(heartbeat)},"
            f" before the hard timeout of {format_duration(hard)}:"
            f" --set {HEARTBEAT_VARIABLE}=SECONDS makes it later"
        )
    return found


def _rough(duration: timedelta) -> str:
    minutes, seconds = divmod(round(duration.total_seconds()), 60)
    return f"{minutes} min" if minutes else f"{seconds} s"
