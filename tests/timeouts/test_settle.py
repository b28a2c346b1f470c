"""The timeouts of a run keep their order, whatever a profile or the command line names."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ncclops.errors import UsageError
from ncclops.launch.options import parse_timeouts
from ncclops.profiles import Growth, Restarts, list_profiles, load_profiles
from ncclops.record.variables import LIMITS
from ncclops.restart import Wrapper
from ncclops.timeouts import order
from ncclops.timeouts.handed_over import from_environ, to_variable
from ncclops.timeouts.model import Timeouts, Window
from ncclops.timeouts.settle import (
    Surroundings,
    acts_before,
    remarks,
    settle,
    with_named,
    without_effect,
)
from tests.conftest import CompletedText

SECOND = timedelta(seconds=1)
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
COMPILING = {"process_group": 2 * HOUR, "steady_process_group": 10 * MINUTE}


def around(restart: Any = "in-process", *, gpus: bool = True, **environ: str) -> Surroundings:
    return Surroundings(restart=restart, environ=environ, torch="2.9.0", gpus=gpus, now=1000.0)


def test_the_rest_follows_the_group_timeout() -> None:
    timeouts = settle({"process_group": 100 * MINUTE})
    assert (timeouts.soft, timeouts.hard, timeouts.barrier) == (
        80 * MINUTE,
        90 * MINUTE,
        120 * MINUTE,
    )
    assert timeouts.completion is not None
    assert timeouts.completion >= timeouts.process_group
    assert timeouts.compile == 75 * MINUTE
    assert timeouts.abort == 5 * MINUTE, "nothing of it follows from how long a step may take"
    assert settle({"process_group": 5 * MINUTE}).abort == 270 * SECOND, "hard is shorter"
    assert timeouts.steady is None, "it was named for the whole run"


def test_without_a_word_there_is_a_window_for_a_compile_and_a_shorter_one_afterwards() -> None:
    timeouts = settle({})
    assert timeouts.first == Window(process_group=2 * HOUR, soft=96 * MINUTE, hard=108 * MINUTE)
    assert timeouts.compile == 90 * MINUTE
    assert timeouts.steady is not None
    assert timeouts.steady.process_group == 45 * MINUTE
    assert settle({}, around("process")).steady == Window(
        process_group=45 * MINUTE, soft=None, hard=None
    )


def test_a_named_compile_makes_room_for_itself() -> None:
    timeouts = settle({"compile": 3 * HOUR})
    assert timeouts.process_group == 4 * HOUR
    both = settle({"compile": 100 * MINUTE, "process_group": 109 * MINUTE})
    assert (both.soft, both.hard) == (103 * MINUTE, 106 * MINUTE)


def test_what_acts_first_is_the_one_that_sees_all_ranks() -> None:
    for timeouts in (settle({}), settle(COMPILING), settle({"soft": MINUTE})):
        window = timeouts.steady or timeouts.first
        assert window.soft is not None
        assert acts_before(window) < window.soft
    assert acts_before(settle({}, around("process")).first) == 0.72 * 2 * HOUR


def test_after_warm_up_the_restart_core_is_as_much_ahead_of_torch_as_before() -> None:
    timeouts = settle(COMPILING)
    assert (timeouts.steady_soft, timeouts.steady_hard) == (8 * MINUTE, 9 * MINUTE)
    assert timeouts.compile == 90 * MINUTE
    named = settle(with_named(COMPILING, parse_timeouts(["soft=1m", "hard=2m"])))
    assert (named.steady_soft, named.steady_hard) == (MINUTE, 2 * MINUTE)
    assert named.compile < MINUTE


@pytest.mark.parametrize(
    ("named", "low", "high"),
    [
        ({"soft": 9 * MINUTE, "hard": 8 * MINUTE}, "soft (9m)", "hard (8m)"),
        (
            {"hard": 20 * MINUTE, "process_group": 10 * MINUTE},
            "hard (20m)",
            "process_group (10m)",
        ),
        ({"barrier": 5 * MINUTE}, "hard (108m)", "barrier (5m)"),
        ({"abort": 2 * HOUR}, "abort (2h)", "hard (108m)"),
        ({"heartbeat": 3 * HOUR}, "heartbeat (3h)", "barrier (144m)"),
        ({"steady_process_group": 3 * HOUR}, "steady_process_group (3h)", "process_group (2h)"),
        ({"compile": HOUR, "process_group": HOUR}, "compile (1h)", "soft (48m)"),
        ({"compile": HOUR, "soft": HOUR}, "compile (1h)", "soft (1h)"),
        ({"groups.mesh_*": 3 * HOUR}, "groups.mesh_* (3h)", "process_group (2h)"),
        ({"heartbeat": SECOND}, "heartbeat (1s)", "longer than 1s"),
        ({"soft": SECOND / 2}, "soft (500ms)", "longer than 1s"),
        ({"process_group": 3 * SECOND}, "heartbeat (750ms)", "longer than 1s"),
    ],
)
def test_a_step_out_of_order_names_both_numbers_and_the_remedy(
    named: dict[str, timedelta], low: str, high: str
) -> None:
    with pytest.raises(UsageError) as caught:
        settle(named)
    message = str(caught.value)
    assert low in message
    assert high in message
    assert "--timeout" in message


def test_what_the_ladder_accepts_the_restart_core_accepts() -> None:
    intervals = {
        name: parameter.default
        for name, parameter in signature(Wrapper).parameters.items()
        if name.endswith("_interval")
    }
    assert set(intervals.values()) == {order.INTERVAL}
    more = timedelta(milliseconds=1001)
    timeouts = settle({"soft": more, "heartbeat": more})
    assert timeouts.soft is not None
    assert timeouts.heartbeat is not None
    Wrapper(soft_timeout=timeouts.soft, heartbeat_timeout=timeouts.heartbeat)
    with pytest.raises(ValueError, match="_interval < soft_timeout must hold"):
        Wrapper(soft_timeout=order.INTERVAL)
    with pytest.raises(ValueError, match="_interval < heartbeat_timeout must hold"):
        Wrapper(heartbeat_timeout=order.INTERVAL)


def test_without_restarts_in_place_their_timeouts_are_not_checked() -> None:
    timeouts = settle({"soft": 9 * MINUTE, "hard": 8 * MINUTE}, around("process"))
    assert timeouts.to_json()["soft"] is None
    assert timeouts.to_json()["process_group"] == "2h"


class TestTorchsOwn:
    """torch's watchdog and heartbeat monitor, which end a process when their turn comes."""

    def test_they_do_not_act_without_gpus_or_when_they_are_off(self) -> None:
        for surroundings in (
            around(gpus=False),
            around(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0"),
            around(TORCH_NCCL_BLOCKING_WAIT="1"),
        ):
            timeouts = settle({}, surroundings)
            assert (timeouts.nccl_watchdog, timeouts.nccl_heartbeat) == (None, None)

    def test_the_second_engine_has_no_monitor(self) -> None:
        surroundings = Surroundings(torch="2.15.0", gpus=True)
        assert settle({}, surroundings).nccl_heartbeat is None
        classic = Surroundings(torch="2.15.0", gpus=True, environ={"TORCH_DIST_USE_NCCL2": "0"})
        assert settle({}, classic).nccl_heartbeat == 8 * MINUTE
        chosen = Surroundings(torch="2.14.1", gpus=True, environ={"TORCH_DIST_USE_NCCL2": "1"})
        assert settle({}, chosen).nccl_heartbeat is None

    def test_a_heartbeat_that_ends_a_restart_is_refused_where_it_was_chosen(self) -> None:
        with pytest.raises(UsageError, match=r"hard \(108m\).*nccl_heartbeat \(5m\).*--set TORCH_"):
            settle({}, around(TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="300"))
        (remark,) = remarks(settle({}, around()), around())
        assert "ends a process after 8m" in remark

    def test_the_watchdog_enforces_the_group_timeout(self) -> None:
        timeouts = settle(COMPILING, around("process", TORCH_NCCL_ASYNC_ERROR_HANDLING="1"))
        assert timeouts.nccl_watchdog == 2 * HOUR


class TestScheduler:
    def test_its_limit_is_a_remark_if_a_compile_may_outlast_it(self) -> None:
        timeouts = settle(COMPILING, around(SLURM_JOB_END_TIME=str(1000 + 3600)))
        assert timeouts.scheduler == HOUR
        assert any("ends the job in 60 min" in remark for remark in remarks(timeouts, around()))
        later = settle(COMPILING, around(SLURM_JOB_END_TIME=str(1000 + 9000)))
        assert not any("scheduler" in remark for remark in remarks(later, around()))

    def test_a_job_that_ends_before_it_could_be_stopped_is_refused(self) -> None:
        with pytest.raises(UsageError, match=r"stop_grace \(15s\).*scheduler \(10s\)"):
            settle({}, around(SLURM_JOB_END_TIME="1010"))


class TestCommandLine:
    def test_it_overrides_all_others(self) -> None:
        named = with_named(
            COMPILING, parse_timeouts(["soft=90s", "stop-grace=5s", "groups.mesh_dp=3m"])
        )
        assert named == COMPILING | {
            "soft": 1.5 * MINUTE,
            "stop_grace": timedelta(seconds=5),
            "groups.mesh_dp": 3 * MINUTE,
        }

    def test_a_profiles_longer_windows_make_way(self) -> None:
        profile = {"process_group": 2 * HOUR, "compile": HOUR, "steady_process_group": HOUR}
        named = with_named(profile, parse_timeouts(["process_group=20m"]))
        assert named == {"process_group": 20 * MINUTE}
        assert settle(named).compile == 15 * MINUTE
        shorter = {"process_group": 20 * MINUTE, "steady_process_group": HOUR}
        assert with_named(shorter, {}) == {"process_group": 20 * MINUTE}
        assert "compile" not in with_named(profile, parse_timeouts(["soft=20m"]))

    def test_its_patterns_come_before_the_profiles(self) -> None:
        profile = {"groups.mesh_*": 2 * MINUTE, "groups.*": MINUTE}
        named = with_named(profile, parse_timeouts(["groups.mesh_dp=3m", "groups.*=4m"]))
        assert list(named.items()) == [
            ("groups.*", 4 * MINUTE),
            ("groups.mesh_dp", 3 * MINUTE),
            ("groups.mesh_*", 2 * MINUTE),
        ]

    @pytest.mark.parametrize(
        ("pair", "complaint"),
        [
            ("sofd=90s", "there is no 'sofd'; did you mean soft?"),
            ("soft=90", "'90' is not a duration"),
            ("soft", "write it as NAME=TIME"),
            ("soft=0s", "must be positive"),
        ],
    )
    def test_a_mistake_is_one_line(self, pair: str, complaint: str) -> None:
        with pytest.raises(UsageError) as caught:
            with_named({}, parse_timeouts([pair]))
        assert complaint in str(caught.value)

    def test_a_dry_run_shows_the_whole_ladder(
        self, ncclops: Callable[..., CompletedText], tmp_path: Path
    ) -> None:
        (tmp_path / "train.py").touch()
        words = ["launch", "--dry-run", "--profile", "local-cpu", "--profile", "compile-sensitive"]
        words += ["--timeout", "groups.mesh_*=5m"]
        document = json.loads(ncclops(*words, "--json", "train.py").stdout)
        assert document["timeouts"] == {
            "process_group": "2h",
            "steady_process_group": "45m",
            "compile": "90m",
            "soft": "96m",
            "hard": "108m",
            "abort": "5m",
            "steady_soft": "36m",
            "steady_hard": "2430s",
            "heartbeat": "30s",
            "barrier": "144m",
            "grow": "20s",
            "completion": "7d",
            "stop_grace": "15s",
            "nccl_watchdog": None,
            "nccl_heartbeat": None,
            "scheduler": None,
            "groups.mesh_*": "5m",
        }
        assert "steady_process_group 45m" in ncclops(*words, "train.py").stdout
        refused = ncclops(*words, "--timeout", "hard=3h", "train.py")
        assert refused.returncode == 2
        assert "hard (3h) must be shorter than process_group (2h)" in refused.stderr


def test_workers_are_given_exactly_what_was_settled() -> None:
    timeouts = settle(with_named(COMPILING, parse_timeouts(["groups.mesh_*=5m"])))
    given = (timeouts, Growth(fds=7), Restarts(min_world_size=0))
    assert from_environ({LIMITS: to_variable(*given)}) == given
    assert timeouts.first.process_group == 2 * HOUR
    assert timeouts.steady_group("mesh_dp") == 5 * MINUTE
    assert timeouts.steady_group("undefined") == 10 * MINUTE
    assert from_environ({}) is None


limits = st.timedeltas(timedelta(seconds=1), timedelta(days=30)).map(
    lambda limit: timedelta(milliseconds=limit // timedelta(milliseconds=1))
)


@given(
    st.dictionaries(
        st.sampled_from(["process_group", "stop_grace", "completion", "groups.a", "groups.b*"]),
        limits,
    ),
    st.sampled_from(["in-process", "process"]),
)
def test_what_is_written_is_read_back(named: dict[str, timedelta], restart: Any) -> None:
    try:
        timeouts = settle(named, Surroundings(restart=restart))
    except UsageError:
        assume(False)
    assert Timeouts.from_json(timeouts.to_json()) == timeouts
    assert Window.from_json(timeouts.first.to_json()) == timeouts.first


def test_an_operators_window_holds_for_groups_with_timeouts_of_their_own() -> None:
    timeouts = settle(with_named(COMPILING, parse_timeouts(["groups.mesh_*=5m"])))
    window = Window(process_group=2 * MINUTE, soft=MINUTE, hard=1.5 * MINUTE)
    tighter = timeouts.tightened(window)
    assert tighter.steady == window
    assert tighter.steady_group("mesh_dp") == 2 * MINUTE
    assert tighter.first == timeouts.first


def test_what_the_restart_core_alone_reads_is_told_where_it_does_not_run() -> None:
    asked = {"soft": MINUTE, "process-group": HOUR}
    assert without_effect(asked, "in-process") == []
    (line,) = without_effect(asked, "process")
    assert line.startswith("--timeout soft has no effect with --restart process")
    (line,) = without_effect({"hard": MINUTE, "soft": MINUTE}, "none")
    assert line.startswith("--timeout hard, --timeout soft have no effect with --restart none")


def test_every_shipped_profile_has_a_ladder() -> None:
    for summary in list_profiles():
        settle(load_profiles([summary.name]).timeouts)
