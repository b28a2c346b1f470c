"""Which rungs a table of advisories rules out for the versions of a rank."""

from __future__ import annotations

import pytest

from ncclops.restart._groups.advised import ruled_out, ruled_out_here
from ncclops.restart.regroup import Rung

TABLE = """
[[advisory]]
id = "nccl-shrinks-badly"
title = "shrinking hangs"
rules_out = ["shrunk"]
when = { nccl = ["==2.28.9", ">=2.30,<2.30.4"], restart = ["in-process"] }

[[advisory]]
id = "both"
title = "two at once"
rules_out = ["kept", "shrunk"]
when = { nccl = ["==2.30.3"], torch = [">=2.14,<2.15"], restart = ["in-process"] }

[[advisory]]
id = "says-nothing-of-rungs"
title = "it crashes"
when = { nccl = [">=2"] }
"""
SHRUNK = "advisory nccl-shrinks-badly: shrinking hangs"


@pytest.mark.parametrize(
    ("torch", "nccl", "found"),
    [
        ("2.13.0+cu130", "2.28.9", {Rung.SHRUNK: SHRUNK}),
        ("2.13.0", "2.28.8", {}),
        ("2.13.0", "2.30.4", {}),
        ("2.13.0", None, {}),  # no NCCL, so none that is bad
        ("2.13.0", "ours", {}),
        # both entries: the first one says why
        ("2.14.1", "2.30.3", {Rung.SHRUNK: SHRUNK, Rung.KEPT: "advisory both: two at once"}),
        ("2.15.0", "2.30.3", {Rung.SHRUNK: SHRUNK}),
    ],
)
def test_versions_decide(torch: str, nccl: str | None, found: dict[Rung, str]) -> None:
    assert ruled_out(TABLE, {"torch": torch, "nccl": nccl}) == found


def test_the_shipped_table_is_read_once() -> None:
    assert ruled_out_here() is ruled_out_here()
