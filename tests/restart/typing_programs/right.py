"""Uses of the API that a type checker has to accept; the types that it must see are asserted."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any, assert_type

from ncclops import restart as inprocess
from ncclops.restart import CallWrapper, Incident, Wrapper
from ncclops.restart.snapshots import OutsideViewSource, register


@inprocess.Wrapper(
    initialize=inprocess.initialize.RetryController(max_iterations=5),
    health_check=inprocess.health_check.CudaHealthCheck(),
    soft_timeout=timedelta(seconds=60),
    hard_timeout=timedelta(seconds=90),
)
def documented(call: inprocess.CallWrapper) -> None:
    with call.phase(
        "compile", soft_timeout=timedelta(minutes=30), hard_timeout=timedelta(minutes=40)
    ):
        pass
    with call.atomic():
        call.ping()


documented()


@Wrapper()
def with_arguments(call: CallWrapper, steps: int, *, name: str = "run") -> float:
    assert_type(call.iteration, int)
    return steps / len(name)


assert_type(with_arguments(3, name="a"), float | None)
assert_type(with_arguments(steps=3), float | None)


@Wrapper()
def without_call_wrapper(path: str) -> list[int]:
    return [len(path)]


assert_type(without_call_wrapper("p"), list[int] | None)


@Wrapper()
def with_optional(call: CallWrapper | None = None, steps: int = 1) -> int:
    return steps


assert_type(with_optional(steps=2), int | None)


def note(incident: Incident) -> None:
    print(incident.iteration, incident.raised and incident.raised.name, incident.escalation)


hooked = Wrapper(on_incident=note, incident_dir="/tmp/incidents", abort=None)
bound = hooked(functools.partial(without_call_wrapper, "p"))
assert_type(hooked.settings.soft_timeout, timedelta)
composed = Wrapper(
    rank_assignment=inprocess.rank_assignment.Tree([inprocess.rank_assignment.Layer()]),
    store_factory=inprocess.store.FileStore,
    store_kwargs={"file_name": "/tmp/store", "world_size": 2},
)


@Wrapper()
def untyped(*args, **kwargs):  # type: ignore[no-untyped-def]
    return args, kwargs


untyped(1, two=2)


class Trainer:
    def fit(self, steps: int) -> int:
        return steps


assert_type(Wrapper()(Trainer().fit)(3), int | None)


class Snapshots:
    """A hook, complete."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def outside_view(self) -> OutsideViewSource | None:
        return None

    def iteration_begins(self) -> None: ...

    def function_left(self, error: BaseException) -> None: ...

    def take(self, directory: Any) -> None: ...

    def record_lost(self, directory: Any, rank: int, reason: str) -> None: ...

    def close(self, timeout_s: float) -> None: ...


register(Snapshots)
Wrapper(snapshots=Snapshots)
raise inprocess.exception.RestartAbort(
    "no use", escalation=inprocess.exception.Escalation("respawn", "no use")
)
