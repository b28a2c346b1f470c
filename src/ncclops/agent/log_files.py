"""The workers' files of a run on this node: made before the workers, and who follows which."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ncclops.agent.echo import Source
from ncclops.agent.layout import Shown
from ncclops.record.run_directory import RunDirectory


def make(run: RunDirectory, ranks: Sequence[int]) -> None:
    """Make the files that workers append to, so that they can be followed from the start."""
    for rank in ranks:
        own = run.paths.rank(rank)
        own.root.mkdir(parents=True, exist_ok=True)
        for path in (own.stdout_log, own.stderr_log, own.worker_events, own.receipt):
            path.touch()
        _begin_anew(own.nccl_log)


def _begin_anew(path: Path) -> None:
    """NCCL empties its file when it opens it; what is read before that is an earlier attempt's."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError):  # no file of ours, and no reason not to start
        os.close(os.open(path, flags, 0o666))


def output(run: RunDirectory, ranks: Sequence[int]) -> dict[Path, int]:
    """The output files with their ranks, for the classifier."""
    return {
        path: rank
        for rank in ranks
        for path in (run.paths.rank(rank).stdout_log, run.paths.rank(rank).stderr_log)
    }


def nccl(run: RunDirectory, ranks: Sequence[int]) -> dict[Path, int]:
    """The files of NCCL's own log, with their ranks; they stay empty where no plan names them."""
    return {run.paths.rank(rank).nccl_log: rank for rank in ranks}


def shown(
    run: RunDirectory, ranks: Sequence[int], choice: Shown, attached: int | None = None
) -> list[Source]:
    """What the terminal shows; ``choice`` is in local ranks, the positions in ``ranks``.

    ``attached``: the rank that has standard input.
    """
    sources = []
    for local_rank, rank in enumerate(ranks):
        if local_rank in choice.stdout:
            path, as_is = run.paths.rank(rank).stdout_log, rank == attached
            sources.append(Source(rank, path, to_stderr=False, as_is=as_is))
        if local_rank in choice.stderr:
            sources.append(Source(rank, run.paths.rank(rank).stderr_log, to_stderr=True))
    return sources
