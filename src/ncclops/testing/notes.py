"""``note``: what a rank sends to the test. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_send: Callable[[str, dict[str, Any]], None] | None = None


def note(name: str, /, **fields: Any) -> None:
    """Send ``fields`` to the test under ``name``; nothing where no harness has started this rank.

    The values have to be picklable. From any thread.
    """
    if _send is not None:
        _send(name, fields)


def install(send: Callable[[str, dict[str, Any]], None] | None) -> None:
    """Have ``send`` called with each note from now on."""
    global _send
    _send = send
