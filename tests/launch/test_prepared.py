"""What was asked for, resolved."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from ncclops.agent.layout import Target
from ncclops.launch.prepared import Resolved


@pytest.mark.parametrize(
    ("kind", "asked", "applies"),
    [
        ("script", "in-process", "in-process"),
        ("module", "in-process", "in-process"),
        ("program", "in-process", "process"),
        ("program", "process", "process"),
        ("program", "none", "none"),
        ("script", "none", "none"),
    ],
)
def test_what_is_not_python_restarts_in_new_processes(kind: Any, asked: str, applies: str) -> None:
    given: dict[str, Any] = {field.name: None for field in fields(Resolved)}
    given |= {"target": Target(kind=kind, name="x", arguments=()), "restart": asked}
    assert Resolved(**given).mode == applies
