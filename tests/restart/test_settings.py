"""What a Wrapper refuses, and that it says which parameters and values are at fault."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ncclops import restart as inprocess

# The smaller one first: the constraints that the API documents.
ORDERED = [
    ("soft_timeout", "hard_timeout"),
    ("hard_timeout", "barrier_timeout"),
    ("monitor_process_interval", "barrier_timeout"),
    ("heartbeat_timeout", "barrier_timeout"),
    ("heartbeat_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "soft_timeout"),
    ("monitor_thread_interval", "soft_timeout"),
    ("progress_watchdog_interval", "soft_timeout"),
]
DURATIONS = [
    "monitor_thread_interval",
    "monitor_process_interval",
    "heartbeat_interval",
    "progress_watchdog_interval",
    "soft_timeout",
    "hard_timeout",
    "abort_timeout",
    "heartbeat_timeout",
    "barrier_timeout",
    "completion_timeout",
    "last_call_wait",
    "termination_grace_time",
]
CALLBACKS = ["initialize", "abort", "finalize", "health_check", "completion", "terminate"]


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


def wrapper_of(**parameters: Any) -> inprocess.Wrapper:
    """With parameters that a type checker would refuse, as a user without one may give them."""
    return inprocess.Wrapper(**parameters)


@pytest.mark.parametrize(("low", "high"), ORDERED)
@pytest.mark.parametrize("excess_s", [0, 7])
def test_each_inconsistent_pair_is_named_with_its_values(
    low: str, high: str, excess_s: int
) -> None:
    limit = getattr(inprocess.Wrapper(), high)
    value_s = limit.total_seconds() + excess_s
    with pytest.raises(ValueError) as refused:
        wrapper_of(**{low: seconds(value_s)})
    text = str(refused.value)
    assert f"{low} < {high}" in text
    assert f"{low}={value_s:g} s" in text
    assert f"{high}={limit.total_seconds():g} s" in text


@pytest.mark.parametrize(("low", "high"), ORDERED)
def test_a_pair_in_order_is_accepted(low: str, high: str) -> None:
    """All intervals small, all timeouts far apart: only the order counts, not the size."""
    durations = {
        **dict.fromkeys(DURATIONS[:4], seconds(0.001)),
        "heartbeat_timeout": seconds(100),
        "soft_timeout": seconds(200),
        "hard_timeout": seconds(300),
        "barrier_timeout": seconds(400),
    }
    barely = durations[high] - timedelta(microseconds=1)
    if low in DURATIONS[:4]:
        durations[low] = min(barely, durations["heartbeat_timeout"] - timedelta(microseconds=1))
    else:
        durations[low] = barely
    wrapper = wrapper_of(**durations)
    assert getattr(wrapper, low) < getattr(wrapper, high)


def test_all_pairs_that_are_wrong_are_reported_at_once() -> None:
    with pytest.raises(ValueError) as refused:
        inprocess.Wrapper(soft_timeout=seconds(500), hard_timeout=seconds(400))
    assert "soft_timeout < hard_timeout" in str(refused.value)
    assert "hard_timeout < barrier_timeout" in str(refused.value)


@pytest.mark.parametrize("name", DURATIONS)
@pytest.mark.parametrize("value", [60, 1.5, "60s", None])
def test_a_duration_is_a_timedelta(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be timedelta.*{re.escape(repr(value))}"):
        wrapper_of(**{name: value})


@pytest.mark.parametrize("name", DURATIONS)
def test_no_duration_is_negative(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=-1 s must not be negative"):
        wrapper_of(**{name: seconds(-1)})


@pytest.mark.parametrize("name", [*DURATIONS, "grow_timeout"])
def test_nothing_is_watched_for_no_time(name: str) -> None:
    """Other ranks need not be waited for; all else is named, and nothing besides it."""
    if name in ("completion_timeout", "grow_timeout", "last_call_wait", "termination_grace_time"):
        assert getattr(wrapper_of(**{name: timedelta(0)}).settings, name) == timedelta(0)
        return
    with pytest.raises(ValueError, match=f"^{name}=0 s must be positive; leave it out"):
        wrapper_of(**{name: timedelta(0)})


@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("value", [print, "name", inprocess.rank_assignment.ShiftRanks()])
def test_a_callback_is_of_its_own_class(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be .* or None, not "):
        wrapper_of(**{name: value})


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_may_be_left_out(name: str) -> None:
    assert getattr(wrapper_of(**{name: None}), name) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enabled", 1),
        ("rank_assignment", None),
        ("rank_assignment", print),
        ("store_kwargs", [("port", 1)]),
        ("store_factory", dist.TCPStore),
        ("store_factory", inprocess.store.FileStore.__init__),
        ("monitor_process_logfile", Path("/tmp/log")),
        ("monitor_process_pidfile", 3),
        ("on_incident", "hook"),
        ("incident_dir", Path("/tmp")),
        ("env_rendezvous", 0),
    ],
)
def test_every_other_parameter_has_a_type(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be ") as refused:
        wrapper_of(**{name: value})
    assert repr(value) in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("soft_timeout", 60, "write timedelta(seconds=60)"),
        ("initialize", inprocess.initialize.RetryController, "write RetryController()"),
        ("abort", inprocess.Compose(print), "each member of the Compose has to be Abort"),
        # as the guides have it in two of their examples
        (
            "rank_assignment",
            (inprocess.rank_assignment.ShiftRanks(),),
            "remove the comma that makes it a tuple",
        ),
    ],
)
def test_what_to_write_instead_is_said_where_it_is_plain(
    name: str, value: Any, remedy: str
) -> None:
    with pytest.raises(TypeError, match=f"{re.escape(remedy)}$"):
        wrapper_of(**{name: value})


def test_an_assignment_that_ends_with_the_first_loss_is_said_at_the_start() -> None:
    with pytest.warns(UserWarning, match=r"MaxActiveWorldSize.*takes no terminated ranks out"):
        wrapper_of(rank_assignment=inprocess.rank_assignment.MaxActiveWorldSize(4))


@pytest.mark.parametrize("name", ["monitor_process_logfile", "monitor_process_pidfile"])
def test_the_monitor_processs_files_have_absolute_paths(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='log-{{rank}}' must be an absolute path"):
        wrapper_of(**{name: "log-{rank}"})


def test_a_parameter_that_does_not_exist_is_named() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'soft_time'"):
        wrapper_of(soft_time=seconds(1))


def test_a_tree_in_a_composition_is_refused_at_once() -> None:
    assignments = inprocess.rank_assignment
    tree = assignments.Tree([assignments.Layer()])
    for others in ([assignments.ShiftRanks()], [assignments.ActivateAllRanks()]):
        with pytest.raises(ValueError, match="Tree cannot be composed"):
            inprocess.Compose(tree, *others)
        with pytest.raises(ValueError, match="Tree cannot be composed"):
            inprocess.Compose(*others, inprocess.Compose(tree))


def test_disabled_gives_the_function_back() -> None:
    def function() -> None: ...

    assert inprocess.Wrapper(enabled=False)(function) is function


def test_the_decorated_function_keeps_its_name_and_text() -> None:
    def function() -> None:
        """What it does."""

    wrapped = inprocess.Wrapper()(function)
    assert (wrapped.__name__, wrapped.__doc__) == ("function", "What it does.")


def test_groups_that_were_made_before_the_call_are_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="inside the function"):
            inprocess.Wrapper()(lambda: None)()
    finally:
        dist.destroy_process_group()
