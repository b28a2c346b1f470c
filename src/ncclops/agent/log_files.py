"""The workers' files of a run on this node: made before the workers, and who follows which."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ncclops.agent.echo import Source
from ncclops.agent.layout import Shown
from ncclops.record.regular_file import append_regular
from ncclops.record.run_directory import RunDirectory

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
# For the first some hundred lines of a rank.
_RESERVED_BYTES = 32 << 10


def make(run: RunDirectory, ranks: Sequence[int]) -> None:
    """Make the files that workers append to, so that they can be followed from the start."""
    for rank in ranks:
        own = run.paths.rank(rank)
        own.root.mkdir(parents=True, exist_ok=True)
        for path in (own.stdout_log, own.stderr_log, own.worker_events, own.receipt):
            path.touch()
        for path in (own.worker_events, own.receipt):
            _reserve(path)
        _begin_anew(own.nccl_log)


def _reserve(path: Path) -> None:
    """Space behind the end of ``path`` for what the agent has to be told, whoever fills the disk:
    without it no rank is known to have begun, and the loss of one ends all."""
    with suppress(OSError), append_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        # Python's own would make the file larger. A file system that cannot is none the worse.
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
        fallocate(file.fileno(), _KEEP_SIZE, size, _RESERVED_BYTES)


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
