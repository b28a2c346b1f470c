"""The status of a run in Prometheus' text format.

Built from the status on request, so there is one source and no second state. Phases' seconds are
gauges and no counters: what counted as training may turn out to have been a hang.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ncclops.status.model import RankStatus, RunPhase, RunStatus

_GIB = 2**30
# Name without the prefix, what it says, and the value of a rank; None is no sample.
_OF_RANKS = (
    ("step", "Number of the last step", lambda rank: rank.step),
    ("step_seconds", "Median duration of the last steps", lambda rank: rank.step_s),
    ("step_age_seconds", "Time since the last step ended", lambda rank: rank.step_age_s),
    (
        "heartbeat_age_seconds",
        "Time since the interpreter's last heartbeat",
        lambda rank: rank.heartbeat_age_s,
    ),
    ("iteration", "Restarts in place of the rank", lambda rank: rank.iteration),
    ("memory_bytes", "Resident memory", lambda rank: _bytes(rank.memory_gib)),
    ("gpu_memory_bytes", "Memory in use on its GPU", lambda rank: _bytes(rank.gpu_memory_gib)),
)


def render(status: RunStatus) -> bytes:
    """``status`` as ``GET /metrics`` answers it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(status))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, status: RunStatus) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        yield from _of_run(self._status)
        yield from _of_goodput(self._status)
        yield from _of_ranks(self._status)


def _of_run(status: RunStatus) -> Iterator[Metric]:
    info = InfoMetricFamily("ncclops_run", "Which run this is")
    info.add_metric([], {"run_id": status.run_id, "profile": status.profile or ""})
    yield info
    phase = GaugeMetricFamily("ncclops_run_phase", "1 for what it is doing", labels=["phase"])
    for name in get_args(RunPhase):
        phase.add_metric([name], name == status.phase)
    yield phase
    if status.started is not None:
        yield _gauge("ncclops_start_time_seconds", "Start, since the epoch", status.started)
    if status.world_size is not None:
        yield _gauge("ncclops_world_size", "Ranks that were started", status.world_size)
    yield _gauge("ncclops_attempt", "Starts of all workers before this one", status.attempt)
    restarts = CounterMetricFamily(
        "ncclops_restarts", "Restarts, in place or of the processes", labels=["mode"]
    )
    restarts.add_metric(["in-process"], status.restarts)
    restarts.add_metric(["process"], status.attempt)
    yield restarts
    faults = CounterMetricFamily("ncclops_faults", "Faults by class", labels=["class"])
    for kind, count in sorted(status.faults.items()):
        faults.add_metric([kind], count)
    yield faults


def _of_goodput(status: RunStatus) -> Iterator[Metric]:
    if status.goodput is None:
        return
    if status.goodput["ratio"] is not None:
        yield _gauge("ncclops_goodput_ratio", "Share of steps made once", status.goodput["ratio"])
    seconds = GaugeMetricFamily("ncclops_phase_seconds", "Where time went", labels=["phase"])
    for phase, spent in status.goodput["seconds"].items():
        seconds.add_metric([phase], spent)
    yield seconds


def _of_ranks(status: RunStatus) -> Iterator[Metric]:
    for name, says, value_of in _OF_RANKS:
        family = GaugeMetricFamily(f"ncclops_rank_{name}", says, labels=["rank", "host"])
        for rank in status.ranks:
            if (value := value_of(rank)) is not None:
                family.add_metric([str(rank.rank), rank.host], value)
        yield family
    yield _up(status.ranks)
    stragglers = GaugeMetricFamily(
        "ncclops_rank_straggler_ratio", "Own time of ranks that are behind", labels=["rank"]
    )
    for straggler in status.stragglers:
        stragglers.add_metric([str(straggler.rank)], straggler.ratio)
    yield stragglers


def _up(ranks: Iterable[RankStatus]) -> Metric:
    family = GaugeMetricFamily("ncclops_rank_up", "Whether it runs", labels=["rank", "host"])
    for rank in ranks:
        family.add_metric([str(rank.rank), rank.host], not rank.is_gone)
    return family


def _gauge(name: str, says: str, value: float) -> Metric:
    return GaugeMetricFamily(name, says, value=value)


def _bytes(gib: float | None) -> float | None:
    return None if gib is None else gib * _GIB
