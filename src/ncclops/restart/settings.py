"""What a ``Wrapper`` was given, checked once and then immutable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed

from ncclops.restart._assignment.planning import supports_global_plan
from ncclops.restart.abort import Abort
from ncclops.restart.completion import Completion
from ncclops.restart.compose import Compose
from ncclops.restart.finalize import Finalize
from ncclops.restart.health_check import HealthCheck
from ncclops.restart.incident import Incident
from ncclops.restart.initialize import Initialize
from ncclops.restart.rank_assignment import RankAssignment
from ncclops.restart.regroup import Regrouped
from ncclops.restart.snapshots import SnapshotFactory
from ncclops.restart.store import StoreMixin
from ncclops.restart.terminate import Terminate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The parameters of ``Wrapper``; see there for what each means, and for the defaults.

    Raises ``TypeError`` on a value of a wrong type and ``ValueError`` on values that do not go
    together, naming the parameters and their values.
    """

    store_factory: type[StoreMixin]
    store_kwargs: dict[str, Any] | None
    initialize: Initialize | None
    abort: Abort | None
    finalize: Finalize | None
    health_check: HealthCheck | None
    rank_assignment: RankAssignment
    completion: Completion | None
    terminate: Terminate | None
    soft_timeout: timedelta
    hard_timeout: timedelta
    abort_timeout: timedelta
    heartbeat_timeout: timedelta
    barrier_timeout: timedelta
    completion_timeout: timedelta
    last_call_wait: timedelta
    termination_grace_time: timedelta
    monitor_thread_interval: timedelta
    monitor_process_interval: timedelta
    heartbeat_interval: timedelta
    progress_watchdog_interval: timedelta
    monitor_process_logfile: str | None
    monitor_process_pidfile: str | None
    on_incident: Callable[[Incident], object] | None
    incident_dir: str | None
    snapshots: SnapshotFactory | None
    env_rendezvous: bool
    grow_timeout: timedelta | None = None
    on_regrouped: Callable[[Regrouped], object] | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        if not distributed.is_available():
            raise ValueError("torch.distributed is not available in this build of torch")
        _check_orders(self)
        supports_global_plan(self.rank_assignment)  # raises for compositions that cannot work
        for name in ("monitor_process_logfile", "monitor_process_pidfile", "incident_dir"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_absolute():
                raise ValueError(f"{name}={path!r} must be an absolute path")

    @property
    def abort_within(self) -> timedelta:
        """How long an abort is waited for."""
        return min(self.abort_timeout, self.hard_timeout)

    @property
    def barrier_patience(self) -> timedelta:
        """How long a rank waits in a barrier before it asks the others whether they know of it.

        One that does not know that the iteration has ended is killed at its hard timeout.
        """
        return min(self.barrier_timeout / 4, (self.hard_timeout - self.soft_timeout) / 2)


# The smaller one first. The guides give the reasons: a hard timeout must come before the others
# give up on the rank in a barrier, an interval must fit into the timeout it serves.
_ORDERED = (
    ("soft_timeout", "hard_timeout"),
    ("hard_timeout", "barrier_timeout"),
    ("monitor_process_interval", "barrier_timeout"),
    ("heartbeat_timeout", "barrier_timeout"),
    ("heartbeat_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "soft_timeout"),
    ("monitor_thread_interval", "soft_timeout"),
    ("progress_watchdog_interval", "soft_timeout"),
)

# Nobody is waited for. All else would be over as it begins, or take a whole core.
_MAY_BE_ZERO = ("completion_timeout", "grow_timeout", "last_call_wait", "termination_grace_time")

_OPTIONAL_CALLBACKS: dict[str, type] = {
    "initialize": Initialize,
    "abort": Abort,
    "finalize": Finalize,
    "health_check": HealthCheck,
    "completion": Completion,
    "terminate": Terminate,
}


def _check_orders(settings: Settings) -> None:
    """Name every pair that is wrong: a change that corrects one may break another."""
    wrong = []
    for low, high in _ORDERED:
        smaller, larger = getattr(settings, low), getattr(settings, high)
        if not smaller < larger:
            values = f"{low}={_show(smaller)}, {high}={_show(larger)}"
            wrong.append(f"{low} < {high} must hold, and {values}")
    limit = settings.grow_timeout
    if limit is not None and not limit < settings.barrier_timeout:
        values = f"grow_timeout={_show(limit)}, barrier_timeout={_show(settings.barrier_timeout)}"
        wrong.append(f"grow_timeout < barrier_timeout must hold, and {values}")
    if wrong:
        raise ValueError("; ".join(wrong))


def _show(duration: timedelta) -> str:
    return f"{duration.total_seconds():g} s"


def _check_types(settings: Settings) -> None:
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        expected = _expected_type(field)
        if expected is not None and not isinstance(value, expected):
            names = " or ".join(t.__name__ for t in expected).replace("NoneType", "None")
            raise TypeError(
                f"{field.name} must be {names}, not {type(value).__name__}: {value!r}"
                f"{_remedy(value, expected[0])}"
            )
        if isinstance(value, timedelta) and value < timedelta(0):
            raise ValueError(f"{field.name}={_show(value)} must not be negative")
        if value == timedelta(0) and field.name not in _MAY_BE_ZERO:
            raise ValueError(f"{field.name}=0 s must be positive; leave it out for the default")
    factory = settings.store_factory
    if not (isinstance(factory, type) and issubclass(factory, StoreMixin)):
        raise TypeError(f"store_factory must be a subclass of store.StoreMixin, not {factory!r}")
    for name in ("on_incident", "on_regrouped", "snapshots"):
        value = getattr(settings, name)
        if value is not None and not callable(value):
            raise TypeError(f"{name} must be callable or None, not {value!r}")


def _remedy(value: object, expected: type) -> str:
    """What to write instead, where that is plain. The guides' own examples have such a comma."""
    if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], expected):
        return "; remove the comma that makes it a tuple"
    if isinstance(value, type) and issubclass(value, expected):
        return f"; write {value.__name__}()"
    if isinstance(value, Compose):
        return f"; each member of the Compose has to be {expected.__name__}"
    if expected is timedelta and isinstance(value, int | float):
        return f"; write timedelta(seconds={value})"
    return ""


def _expected_type(field: dataclasses.Field[Any]) -> tuple[type, ...] | None:
    if field.name in _OPTIONAL_CALLBACKS:
        return (_OPTIONAL_CALLBACKS[field.name], type(None))
    by_annotation: dict[str, tuple[type, ...]] = {
        "timedelta": (timedelta,),
        "timedelta | None": (timedelta, type(None)),
        "bool": (bool,),
        "str | None": (str, type(None)),
        "dict[str, Any] | None": (dict, type(None)),
        "RankAssignment": (RankAssignment,),
    }
    return by_annotation.get(str(field.type))
