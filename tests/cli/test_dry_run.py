"""What `launch --dry-run` says of restarts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ncclops.cli.launch import _restarts


@pytest.mark.parametrize(
    ("mode", "most", "says"),
    [
        ("in-process", 0, "in-process; another attempt only where the retry policy has one"),
        ("process", 3, "process; up to 3 more attempts, whatever failed"),
        ("none", 0, "none"),
    ],
)
def test_attempts_are_not_taken_for_restarts_in_place(mode: str, most: int, says: str) -> None:
    request: Any = SimpleNamespace(mode=mode, max_restarts=most)
    assert _restarts(request) == says
