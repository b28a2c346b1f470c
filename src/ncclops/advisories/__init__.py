"""Known-bad versions and combinations: one table, and which of its entries concern a job.

    from ncclops.advisories import advisories, concerning

    found = concerning(advisories(), case)   # a ``Case``: what is installed, and what runs

The table is data, ``advisories.toml``. An entry concerns a job only where all its conditions are
known to hold; where one cannot be known it says so. Nothing here imports torch.
"""

from __future__ import annotations

from ncclops.advisories.matching import Case, Finding, concerning, in_a_line
from ncclops.advisories.table import SEVERITIES, Advisory, advisories

__all__ = [
    "SEVERITIES",
    "Advisory",
    "Case",
    "Finding",
    "advisories",
    "concerning",
    "in_a_line",
]
