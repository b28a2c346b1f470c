"""Durations that are only to be read."""

from __future__ import annotations

from datetime import timedelta

from ncclops.durations import format_rounded


def test_what_is_only_to_be_read_has_whole_seconds() -> None:
    """A pause was told as "attempt 2 in 29550ms"."""
    told = {0.2: "1s", 29.55: "30s", 59.2: "1m", 3600.0: "1h"}
    assert {s: format_rounded(timedelta(seconds=s)) for s in told} == told
