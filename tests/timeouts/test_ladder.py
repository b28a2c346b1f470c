"""The timeouts of a run keep their order, whatever a profile or the command line names."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ncclops.errors import UsageError
from ncclops.profiles import Growth, Timeouts, list_profiles, load_profiles
from ncclops.record.variables import LIMITS
from ncclops.timeouts.ladder import Ladder, Surroundings, build_ladder, with_named
from ncclops.timeouts.limits import Limits
from tests.conftest import CompletedText

MINUTE = timedelta(minutes=1)
HOUR = 60 * MINUTE
COMPILING = Timeouts(process_group=2 * HOUR, steady_process_group=10 * MINUTE)


def around(restart: Any = "in-process", *, gpus: bool = True, **environ: str) -> Surroundings:
    return Surroundings(restart=restart, environ=environ, torch="2.9.0", gpus=gpus, now=1000.0)


def test_the_rest_follows_the_group_timeout() -> None:
    ladder = build_ladder(Timeouts(process_group=100 * MINUTE))
    assert (ladder.soft, ladder.hard, ladder.barrier) == (80 * MINUTE, 90 * MINUTE, 120 * MINUTE)
    assert ladder.completion >= ladder.process_group
    assert (ladder.steady_process_group, ladder.steady_soft, ladder.compile) == (None, None, None)


def test_after_warm_up_the_restart_core_is_as_much_ahead_of_torch_as_before() -> None:
    ladder = build_ladder(COMPILING)
    assert (ladder.steady_soft, ladder.steady_hard) == (8 * MINUTE, 9 * MINUTE)
    assert ladder.compile == 2 * HOUR
    named = build_ladder(with_named(COMPILING, ["soft=1m", "hard=2m"]))
    assert (named.steady_soft, named.steady_hard) == (MINUTE, 2 * MINUTE)


@pytest.mark.parametrize(
    ("timeouts", "low", "high"),
    [
        (Timeouts(soft=9 * MINUTE, hard=8 * MINUTE), "soft (9m)", "hard (8m)"),
        (
            Timeouts(hard=20 * MINUTE, process_group=10 * MINUTE),
            "hard (20m)",
            "process_group (10m)",
        ),
        (Timeouts(barrier=5 * MINUTE), "hard (9m)", "barrier (5m)"),
        (Timeouts(heartbeat=HOUR), "heartbeat (1h)", "barrier (12m)"),
        (Timeouts(steady_process_group=HOUR), "steady_process_group (1h)", "process_group (10m)"),
        (Timeouts(compile=HOUR), "compile (1h)", "process_group (10m)"),
        (Timeouts(groups={"mesh_*": HOUR}), "groups.mesh_* (1h)", "process_group (10m)"),
    ],
)
def test_a_step_out_of_order_names_both_numbers_and_the_remedy(
    timeouts: Timeouts, low: str, high: str
) -> None:
    with pytest.raises(UsageError) as caught:
        build_ladder(timeouts)
    message = str(caught.value)
    assert low in message
    assert high in message
    assert "--timeout" in message


def test_without_restarts_in_place_their_timeouts_are_nobodys_concern() -> None:
    ladder = build_ladder(Timeouts(soft=9 * MINUTE, hard=8 * MINUTE), around("process"))
    assert ladder.shown()["soft"] is None
    assert ladder.shown()["process_group"] == "10m"


class TestTorchsOwn:
    """torch's watchdog and heartbeat monitor, which end a process when their turn comes."""

    def test_they_do_not_act_without_gpus_or_when_they_are_off(self) -> None:
        for surroundings in (
            around(gpus=False),
            around(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0"),
            around(TORCH_NCCL_BLOCKING_WAIT="1"),
        ):
            ladder = build_ladder(Timeouts(), surroundings)
            assert (ladder.nccl_watchdog, ladder.nccl_heartbeat) == (None, None)

    def test_the_second_engine_has_no_monitor(self) -> None:
        surroundings = Surroundings(torch="2.15.0", gpus=True)
        assert build_ladder(Timeouts(), surroundings).nccl_heartbeat is None
        classic = Surroundings(torch="2.15.0", gpus=True, environ={"TORCH_DIST_USE_NCCL2": "0"})
        assert build_ladder(Timeouts(), classic).nccl_heartbeat == 8 * MINUTE

    def test_a_heartbeat_that_ends_a_restart_is_refused_where_it_was_chosen(self) -> None:
        with pytest.raises(UsageError, match=r"hard \(9m\).*nccl_heartbeat \(5m\).*--set TORCH_"):
            build_ladder(Timeouts(), around(TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="300"))
        (remark,) = build_ladder(Timeouts(), around()).remarks()
        assert "ends a process after 8m" in remark

    def test_the_watchdog_enforces_the_group_timeout(self) -> None:
        ladder = build_ladder(COMPILING, around("process", TORCH_NCCL_ASYNC_ERROR_HANDLING="1"))
        assert ladder.nccl_watchdog == 2 * HOUR


class TestScheduler:
    def test_its_limit_is_a_remark_if_a_compile_may_outlast_it(self) -> None:
        ladder = build_ladder(COMPILING, around(SLURM_JOB_END_TIME=str(1000 + 3600)))
        assert ladder.scheduler == HOUR
        assert any("ends the job in 60 min" in remark for remark in ladder.remarks())
        later = build_ladder(COMPILING, around(SLURM_JOB_END_TIME=str(1000 + 9000)))
        assert not any("scheduler" in remark for remark in later.remarks())

    def test_a_job_that_ends_before_it_could_be_stopped_is_refused(self) -> None:
        with pytest.raises(UsageError, match=r"stop_grace \(15s\).*scheduler \(10s\)"):
            build_ladder(Timeouts(), around(SLURM_JOB_END_TIME="1010"))


class TestCommandLine:
    def test_it_has_the_last_word(self) -> None:
        timeouts = with_named(COMPILING, ["soft=90s", "stop-grace=5s", "groups.mesh_dp=3m"])
        assert (timeouts.soft, timeouts.stop_grace) == (1.5 * MINUTE, timedelta(seconds=5))
        assert timeouts.groups == {"mesh_dp": 3 * MINUTE}
        assert timeouts.process_group == 2 * HOUR

    @pytest.mark.parametrize(
        ("pair", "complaint"),
        [
            ("sofd=90s", "there is no 'sofd'; known: process_group"),
            ("soft=90", "'90' is not a duration"),
            ("soft", "'' is not a duration"),
            ("soft=0s", "must be more than nothing"),
        ],
    )
    def test_a_mistake_is_one_line(self, pair: str, complaint: str) -> None:
        with pytest.raises(UsageError) as caught:
            with_named(Timeouts(), [pair])
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
            "steady_process_group": "10m",
            "compile": "2h",
            "soft": "96m",
            "hard": "108m",
            "steady_soft": "8m",
            "steady_hard": "9m",
            "heartbeat": "30s",
            "barrier": "144m",
            "completion": "7d",
            "stop_grace": "15s",
            "nccl_watchdog": None,
            "nccl_heartbeat": None,
            "scheduler": None,
            "groups.mesh_*": "5m",
        }
        assert "steady_process_group 10m" in ncclops(*words, "train.py").stdout
        refused = ncclops(*words, "--timeout", "hard=3h", "train.py")
        assert refused.returncode == 2
        assert "hard (3h) must be shorter than process_group (2h)" in refused.stderr


def test_workers_are_told_exactly_what_was_settled() -> None:
    ladder = build_ladder(with_named(COMPILING, ["groups.mesh_*=5m"]))
    limits = ladder.for_workers(Growth(fds=7))
    assert Limits.from_environ({LIMITS: limits.to_json()}) == limits
    assert limits.first.process_group == 2 * HOUR
    assert limits.steady_group("mesh_dp") == 5 * MINUTE
    assert limits.steady_group("undefined") == 10 * MINUTE
    unnamed: Ladder = build_ladder(Timeouts())
    assert unnamed.for_workers(Growth()).first.process_group is None, "as torch has it"


def test_every_shipped_profile_has_a_ladder() -> None:
    for summary in list_profiles():
        build_ladder(load_profiles([summary.name]).timeouts)
