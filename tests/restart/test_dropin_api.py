"""The audit: every documented name of the other wrapper, where it is documented, as documented.

``DOCUMENTED`` holds names, parameters and defaults as facts. A parameter of ours beyond those is
allowed where it has a default.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import inspect
from datetime import timedelta
from typing import Any

import pytest

from ncclops import restart as inprocess

REQUIRED = inspect.Parameter.empty


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


DOCUMENTED: dict[str, dict[str, Any]] = {
    "State": {
        "rank": REQUIRED,
        "world_size": REQUIRED,
        "active_rank": None,
        "active_world_size": None,
        "initial_rank": None,
        "initial_world_size": None,
        "iteration": 0,
        "mode": inprocess.Mode.INITIALIZED,
        "fn_exception": None,
    },
    "State.copy_from": {"self": REQUIRED, "other": REQUIRED, "fields": None},
    "initialize.RetryController": {
        "max_iterations": None,
        "min_world_size": 1,
        "min_active_world_size": 1,
    },
    "abort.AbortTorchDistributed": {"torch_fr_trace_path": None},
    "abort.AbortTransformerEngine": {},
    "abort.AbortPersistentCheckpointProcesses": {},
    "finalize.ThreadedFinalize": {
        "timeout": REQUIRED,
        "fn": REQUIRED,
        "args": (),
        "kwargs": None,
    },
    "health_check.CudaHealthCheck": {"timeout": seconds(30)},
    "health_check.FaultCounter": {"max_rank_faults": None},
    "health_check.ChainedGPUHealthCheck": {"device_index": None},
    "health_check.ChainedNVLHealthCheck": {"device_index": None},
    "health_check.ChainedNicHealthCheck": {"device_index": None},
    "nested_restarter.NestedRestarterHandlingCompleted": {"special_rank": 0},
    "nested_restarter.NestedRestarterHandlingStarting": {"special_rank": 0},
    "nested_restarter.NestedRestarterFinalized": {"special_rank": 0},
    "nested_restarter.NestedRestarterAborted": {"special_rank": 0},
    "rank_assignment.RankAssignmentCtx": {
        "state": REQUIRED,
        "store": REQUIRED,
        "terminated_ranks": REQUIRED,
    },
    "rank_assignment.ActivateAllRanks": {},
    "rank_assignment.MaxActiveWorldSize": {"max_active_world_size": None},
    "rank_assignment.ActiveWorldSizeDivisibleBy": {"divisor": 1},
    "rank_assignment.ShiftRanks": {},
    "rank_assignment.FillGaps": {},
    "rank_assignment.FilterCountGroupedByKey": {
        "key_or_fn": REQUIRED,
        "condition": REQUIRED,
        "timeout": seconds(60),
    },
    "rank_assignment.Layer": {
        "min_ranks": 1,
        "max_ranks": None,
        "key_or_fn": "",
        "flag": None,
    },
    "rank_assignment.Tree": {"layers": REQUIRED, "world_size_filter": None},
    "rank_filter.WorldSizeDivisibleBy": {"divisor": 1},
    "rank_filter.MaxActiveWorldSize": {"max_active_world_size": None},
    "rank_assignment.FilterGroupedByKey": {
        "key_or_fn": REQUIRED,
        "condition": REQUIRED,
        "timeout": seconds(60),
    },
    "store.TCPStore": {
        "host_name": None,
        "port": None,
        "world_size": None,
        "timeout": seconds(300),
        "wait_for_workers": True,
        "multi_tenant": False,
        "use_libuv": True,
    },
    "store.PrefixStore": {"iteration": REQUIRED, "store": REQUIRED},
    "CallWrapper.ping": {"self": REQUIRED},
    "CallWrapper.atomic": {"self": REQUIRED},
    "CallWrapper.disable_hang_protection": {"self": REQUIRED},
    "CallWrapper._disable_hang_protection": {"self": REQUIRED},
    "CallWrapper._enable_hang_protection": {"self": REQUIRED},
    "CallWrapper.shutdown": {"self": REQUIRED},
}
WRAPPER = {
    "store_factory": inprocess.store.TCPStore,
    "store_kwargs": None,
    "initialize": None,
    "finalize": None,
    "health_check": None,
    "monitor_thread_interval": seconds(1),
    "monitor_process_interval": seconds(1),
    "heartbeat_interval": seconds(1),
    "progress_watchdog_interval": seconds(1),
    "soft_timeout": seconds(60),
    "hard_timeout": seconds(90),
    "heartbeat_timeout": seconds(30),
    "barrier_timeout": seconds(120),
    "completion_timeout": seconds(120),
    "last_call_wait": seconds(0),  # there: 1 s; the barrier gathers concurrent faults here
    "termination_grace_time": seconds(5),
    "monitor_process_logfile": None,
    "monitor_process_pidfile": None,
    "enabled": True,
    "completion": None,
    "terminate": None,
}
MODULES = [
    "abort",
    "attribution",
    "completion",
    "compose",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "monitor_process",
    "monitor_thread",
    "nested_restarter",
    "param_utils",
    "progress_watchdog",
    "rank_assignment",
    "rank_filter",
    "sibling_monitor",
    "state",
    "store",
    "terminate",
    "utils",
    "wrap",
]
# subclass: base
LINEAGE = {
    "exception.RestartError": "builtins.Exception",
    "exception.HealthCheckError": "exception.RestartError",
    "exception.InternalError": "exception.RestartError",
    "exception.TimeoutError": "exception.RestartError",
    "rank_assignment.RankDiscarded": "exception.RestartError",
    "health_check.FaultCounterExceeded": "exception.RestartError",
    "store.BarrierError": "exception.RestartError",
    "store.BarrierTimeout": "store.BarrierError",
    "store.BarrierOverflow": "store.BarrierError",
    "exception.RestartAbort": "builtins.BaseException",
    "monitor_thread.RankShouldRestart": "builtins.BaseException",
    "initialize.RetryController": "initialize.Initialize",
    "abort.AbortTorchDistributed": "abort.Abort",
    "abort.AbortTransformerEngine": "abort.Abort",
    "abort.AbortPersistentCheckpointProcesses": "abort.Abort",
    "finalize.ThreadedFinalize": "finalize.Finalize",
    "health_check.CudaHealthCheck": "health_check.HealthCheck",
    "health_check.FaultCounter": "health_check.HealthCheck",
    "health_check.ChainedGPUHealthCheck": "health_check.HealthCheck",
    "health_check.ChainedNVLHealthCheck": "health_check.HealthCheck",
    "health_check.ChainedNicHealthCheck": "health_check.HealthCheck",
    "nested_restarter.NestedRestarterHandlingCompleted": "initialize.Initialize",
    "nested_restarter.NestedRestarterHandlingStarting": "abort.Abort",
    "nested_restarter.NestedRestarterFinalized": "completion.Completion",
    "nested_restarter.NestedRestarterAborted": "terminate.Terminate",
    "rank_assignment.RankFilter": "rank_assignment.RankAssignment",
    "rank_assignment.ActivateAllRanks": "rank_assignment.RankFilter",
    "rank_assignment.MaxActiveWorldSize": "rank_assignment.RankFilter",
    "rank_assignment.ActiveWorldSizeDivisibleBy": "rank_assignment.RankFilter",
    "rank_assignment.ShiftRanks": "rank_assignment.RankAssignment",
    "rank_assignment.FillGaps": "rank_assignment.RankAssignment",
    "rank_assignment.FilterCountGroupedByKey": "rank_assignment.RankAssignment",
    "rank_assignment.Tree": "rank_assignment.RankAssignment",
    "rank_filter.WorldSizeDivisibleBy": "rank_filter.RankFilter",
    "rank_filter.MaxActiveWorldSize": "rank_filter.RankFilter",
    "store.TCPStore": "store.StoreMixin",
    "store.FileStore": "store.StoreMixin",
    "store.PrefixStore": "store.StoreMixin",
}
CALLBACKS = [
    "initialize.Initialize",
    "abort.Abort",
    "finalize.Finalize",
    "health_check.HealthCheck",
    "completion.Completion",
    "terminate.Terminate",
    "rank_assignment.RankAssignment",
]


def find(path: str) -> Any:
    found: Any = inprocess
    if path.startswith("builtins."):
        found, path = importlib.import_module("builtins"), path.partition(".")[2]
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("path", DOCUMENTED)
def test_parameters_and_defaults_are_the_documented_ones(path: str) -> None:
    documented = DOCUMENTED[path]
    ours = inspect.signature(find(path)).parameters
    assert list(ours)[: len(documented)] == list(documented), "names, in positional order"
    for name, default in documented.items():
        assert ours[name].default == default, name
    beyond = list(ours.values())[len(documented) :]
    assert all(p.default is not REQUIRED or p.kind is p.VAR_KEYWORD for p in beyond)


def test_the_wrapper_takes_the_documented_parameters() -> None:
    refused, *taken = inspect.signature(inprocess.Wrapper).parameters.values()
    assert refused.kind is inspect.Parameter.VAR_POSITIONAL, "so that an error says what to write"
    assert {p.kind for p in taken} == {inspect.Parameter.KEYWORD_ONLY}
    ours = {p.name: p for p in taken}
    wrapper = inprocess.Wrapper()
    for name, default in WRAPPER.items():
        assert ours[name].default == default, name
        assert getattr(wrapper, name) == default, name
    assert isinstance(wrapper.abort, inprocess.abort.AbortTorchDistributed)
    assert [type(step).__name__ for step in wrapper.rank_assignment.instances] == [
        "ActivateAllRanks",
        "ShiftRanks",
    ]
    assert {"rank_assignment", "abort", "rank_filter"} <= ours.keys()


@pytest.mark.parametrize("name", MODULES)
def test_submodules_are_attributes_and_can_be_imported(name: str) -> None:
    assert importlib.import_module(f"ncclops.restart.{name}") is getattr(inprocess, name)


@pytest.mark.parametrize("path", LINEAGE)
def test_classes_descend_from_the_documented_bases(path: str) -> None:
    assert issubclass(find(path), find(LINEAGE[path]))


def test_the_asynchronous_exception_is_no_exception() -> None:
    """``except Exception`` in a training loop must not catch what has to get out."""
    for path in ("exception.RestartAbort", "monitor_thread.RankShouldRestart"):
        assert not issubclass(find(path), Exception)


@pytest.mark.parametrize("path", CALLBACKS)
def test_callbacks_are_abstract_in_their_call_alone(path: str) -> None:
    base = find(path)
    assert issubclass(base, abc.ABC)
    assert base.__abstractmethods__ == {"__call__"}


def test_state_and_its_frozen_copy() -> None:
    state = inprocess.State(1, 4)
    assert (state.initial_rank, state.initial_world_size) == (1, 4)
    frozen = state.freeze()
    assert isinstance(frozen, inprocess.FrozenState)
    names = [field.name for field in dataclasses.fields(state)]
    assert [field.name for field in dataclasses.fields(frozen)] == names
    with pytest.raises(dataclasses.FrozenInstanceError):
        frozen.rank = 0  # type: ignore[misc]
    assert [mode.name for mode in inprocess.Mode] == [
        "INITIALIZED",
        "ACTIVE",
        "INACTIVE",
        "TERMINATED",
    ]


def test_layer_flags_combine() -> None:
    flag = inprocess.rank_assignment.LayerFlag
    assert flag.RESERVE | flag.BACKFILL not in (flag.RESERVE, flag.BACKFILL)


def test_nested_restarter_callbacks_take_the_documented_parameters() -> None:
    ours = inspect.signature(inprocess.nested_restarter.NestedRestarterCallback).parameters
    assert list(ours) == ["restarter_state", "restarter_stage", "logger", "special_rank"]
    assert (ours["restarter_stage"].default, ours["special_rank"].default) == (None, 0)


def test_the_base_store_names_no_critical_rank_and_a_users_may() -> None:
    class Mine(inprocess.store.StoreMixin):
        critical_ranks = (0,)

    assert inprocess.store.StoreMixin().critical_ranks == ()
    assert inprocess.store.critical_ranks(Mine()) == (0,)
