"""What is said at the start about an environment in which ranks cannot restart."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest

from ncclops.restart.environment_notes import environment_notes
from tests.conftest import LIMIT_S, clean_environ

FINE = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}
AGENT_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
NEW: dict[str, Any] = {
    "nccl_version": (2, 27, 3),
    "nccl_timeout": timedelta(minutes=10),
    "hard_timeout": timedelta(seconds=90),
}


def test_nothing_is_said_where_nothing_is_in_the_way() -> None:
    assert environment_notes(FINE, (2, 13), True, **NEW) == []


def test_where_torch_is_left_to_its_default_its_watchdog_sleeps_for_a_minute() -> None:
    env = {n: v for n, v in FINE.items() if n != "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"}
    (note,) = environment_notes(env, (2, 13), True, **NEW)
    assert "for 60 s" in note


def test_without_a_gpu_only_the_launcher_matters() -> None:
    old: dict[str, Any] = {**NEW, "nccl_version": (2, 19, 3), "nccl_timeout": timedelta(seconds=1)}
    assert environment_notes({}, (2, 5), False, **old) == []
    (note,) = environment_notes({"TORCHELASTIC_RUN_ID": "1"}, (2, 5), False)
    assert "torchrun" in note


@pytest.mark.parametrize(
    ("env", "torch_version", "changed", "words"),
    [
        ({"NCCL_NVLS_ENABLE": "1"}, (2, 13), {}, "NCCL_NVLS_ENABLE=0"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, (2, 13), {}, "NCCL watchdog ends the process"),
        ({"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "15000"}, (2, 13), {}, "for 60 s: set TORCH"),
        ({"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}, (2, 13), {}, "NONBLOCKING=0"),
        ({}, (2, 7), {}, "pytorch#150690"),
        ({}, (2, 15), {}, "set LOCAL_RANK"),
        ({"TORCH_DIST_USE_NCCL2": "1"}, (2, 14), {}, "set LOCAL_RANK"),
        ({"TORCH_DIST_USE_NCCL2": "no"}, (2, 15), {}, "set LOCAL_RANK"),
        ({}, (2, 13), {"nccl_version": (2, 21, 5)}, "NCCL 2.21.5 .* set NCCL_NET_PLUGIN=none"),
        ({}, (2, 13), {"nccl_timeout": timedelta(seconds=60)}, "longer timeout"),
        ({}, (2, 13), {"nccl_timeout": timedelta(seconds=90)}, "longer timeout"),
    ],
)
def test_each_thing_in_the_way_is_one_line(
    env: dict[str, str], torch_version: tuple[int, int], changed: dict[str, Any], words: str
) -> None:
    notes = environment_notes({**FINE, **env}, torch_version, True, **{**NEW, **changed})
    (note,) = notes
    assert re.search(words, note)
    assert "\n" not in note


def test_the_gpu_of_a_rank_is_settled_where_the_engine_does_not_take_it_from_the_number() -> None:
    assert environment_notes(FINE | {"LOCAL_RANK": "1"}, (2, 15), True, **NEW) == []
    assert environment_notes(FINE | {"TORCH_DIST_USE_NCCL2": "0"}, (2, 15), True, **NEW) == []


def test_an_old_nccl_without_plugins_is_still_too_old() -> None:
    env = {**FINE, "NCCL_NET_PLUGIN": "none"}
    (note,) = environment_notes(env, (2, 13), True, **{**NEW, "nccl_version": (2, 21, 5)})
    assert "2.26.2" in note
    assert "NCCL_NET_PLUGIN" not in note


def test_a_store_that_may_not_open_enough_files_is_one_line_on_its_host() -> None:
    large = {"RANK": "0", "WORLD_SIZE": "1000"}
    (note,) = environment_notes(large, (2, 13), False, most_open_files=4096)
    assert "4096 open files" in note and "1000 ranks" in note and "ulimit -Hn" in note
    assert environment_notes(large, (2, 13), False, most_open_files=65536) == []
    assert environment_notes(large, (2, 13), False) == []
    elsewhere = ({"RANK": "1"}, {"NCCLOPS_STORE": "store:29400"}, AGENT_STORE)
    for env in elsewhere:
        assert environment_notes({**large, **env}, (2, 13), False, most_open_files=4096) == []


def test_the_limit_of_this_process_is_looked_at(starts_processes: None) -> None:
    program = (
        "import logging, resource\nfrom datetime import timedelta\n"
        "from ncclops.restart.call_wrapper import _warn_once\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))\nlogging.basicConfig()\n"
        "_warn_once(timedelta(seconds=90), hosts_store=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=clean_environ({"RANK": "0", "WORLD_SIZE": "100"}),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert "may have 512 open files, and 100 ranks" in done.stderr
