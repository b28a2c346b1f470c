"""A main thread that no abort frees: where it is, and for how long."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

import pytest

from ncclops.restart import _groups
from ncclops.restart._monitor_link import Page, create_page_fd

C10D = "/venv/torch/distributed/distributed_c10d.py"


def frames(*calls: tuple[str, str]) -> FrameType:
    """The innermost frame of a stack of (file, function), the outermost first."""
    found: dict[str, Any] = {"look": sys._getframe}
    for number, (file, name) in reversed(list(enumerate(calls))):
        inner = f"call{number + 1}" if number + 1 < len(calls) else "look"
        code = f"def {name}():\n    return {inner}()\ncall{number} = {name}"
        exec(compile(code, file, "exec"), found)
    frame = found["call0"]()
    assert isinstance(frame, FrameType)
    return frame


@pytest.mark.parametrize(
    ("calls", "blocked"),
    [
        ([("/work/train.py", "main"), (C10D, "all_reduce")], True),
        ([("/work/train.py", "main"), (C10D, "_new_process_group_helper")], True),
        ([("/work/train.py", "main"), ("/venv/torch/nn/linear.py", "forward")], False),
        ([(C10D, "destroy_process_group")], False),
        ([("/venv/torch/distributed/checkpoint/filesystem.py", "write")], False),
    ],
)
def test_only_a_call_of_torch_distributed_that_nccl_holds(
    monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, str]], *, blocked: bool
) -> None:
    frame = frames(*calls)
    monkeypatch.setattr(_groups, "_without_communicator", True)
    assert _groups.is_blocked_in_nccl(frame) == blocked
    monkeypatch.setattr(_groups, "_without_communicator", False)
    assert not _groups.is_blocked_in_nccl(frame), "an abort frees it"


def test_a_main_thread_that_has_moved_since_is_not_blocked() -> None:
    descriptor = create_page_fd()
    page = Page(descriptor)
    page.main_beat = 100.0
    assert page.blocked_s(150.0) == 0.0
    page.blocked_since = 102.0
    assert page.blocked_s(109.0) == 7.0
    page.main_beat = 103.0
    assert page.blocked_s(109.0) == 0.0
    page.close()
    os.close(descriptor)
