"""What leaves the machine is without the secrets that are known of a run: its values, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from ncclops.errors import NcclopsError
from ncclops.record.environment_record import ENVIRONMENT
from ncclops.record.paths import RunPaths, numbered
from ncclops.redaction.marks import Mark
from ncclops.redaction.redactor import Redactor, marks_here


def redactor_of(paths: RunPaths) -> Redactor:
    """One that knows the secrets in the environments of the run's ranks, and of this process.

    Those of other nodes as well, where these share the run's directory.
    """
    nodes = (RunPaths(each) for each in paths.nodes.glob("*"))
    marks = (mark for each in (paths, *nodes) for mark in _marks_of_ranks(each))
    return Redactor((*marks_here(), *marks))


def _marks_of_ranks(paths: RunPaths) -> Iterator[Mark]:
    for rank in numbered(paths.ranks):
        with suppress(NcclopsError, OSError):
            snapshot = ENVIRONMENT.read(paths.rank(rank).environment)
            yield from () if snapshot is None else snapshot.marks
