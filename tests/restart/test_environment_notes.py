"""What is said at the start about an environment in which ranks cannot restart."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest

from ncclops.restart.environment_notes import environment_notes

FINE = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "NCCL_NVLS_ENABLE": "0",
}
NEW: dict[str, Any] = {
    "nccl_version": (2, 27, 3),
    "nccl_timeout": timedelta(minutes=10),
    "hard_timeout": timedelta(seconds=90),
}


def test_nothing_is_said_where_nothing_is_in_the_way() -> None:
    assert environment_notes(FINE, (2, 13), True, **NEW) == []


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
        ({}, (2, 7), {}, "pytorch#150690"),
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


def test_an_old_nccl_without_plugins_is_still_too_old() -> None:
    env = {**FINE, "NCCL_NET_PLUGIN": "none"}
    (note,) = environment_notes(env, (2, 13), True, **{**NEW, "nccl_version": (2, 21, 5)})
    assert "2.26.2" in note
    assert "NCCL_NET_PLUGIN" not in note
