"""What a machine, a run or a prepared launch is, as a ``Case``: the edge that looks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from ncclops.advisories.matching import Case
from ncclops.errors import UsageError
from ncclops.host.gpus import find_gpus
from ncclops.host.software import Software, find_software
from ncclops.record.environment_record import ENVIRONMENT
from ncclops.record.paths import RunPaths
from ncclops.record.run_record import RUN, RunRecord
from ncclops.whole_numbers import MOST_WORKERS_OF_A_NODE, whole_number


def of_machine(
    environ: Mapping[str, str], *, nodes: int | None = None, restart: str | None = None
) -> Case:
    """This machine, for a job that gets ``environ``; the number of ranks follows from its GPUs."""
    gpus = find_gpus(environ)
    software = find_software(gpus, environ)
    ranks = None if nodes is None else nodes * gpus.count
    return Case(software=software, environ=environ, nodes=nodes, ranks=ranks, restart=restart)


def of_run(run_dir: Path) -> Case:
    """A run, from its record: what its launcher saw, and the environment of its first rank here.

    Raises ``UsageError`` where there is no record, or it is damaged.
    """
    paths = RunPaths(run_dir)
    record = RUN.read(paths.run)
    if record is None:
        raise UsageError(f"{run_dir} has no run.json: name another run, or none for this machine")
    return Case(
        software=_of_record(record, paths.run),
        environ=_environment(paths),
        nodes=None if record.nodes is None else record.nodes.count,
        ranks=record.world_size,
        restart=record.restart,
    )


def _of_record(record: RunRecord, path: Path) -> Software:
    if record.software is not msgspec.UNSET:
        try:
            return msgspec.convert(record.software, Software)
        except ValueError as error:
            raise UsageError(f"{path} is damaged (software: {error}): {RUN.advice}") from error
    # An older run, of which the stack line is all that there is.
    stack = record.stack
    counted = [part.partition(" × ") for part in (stack.get("gpu") or "").split(", ") if part]
    names = [
        name
        for count, _, name in counted
        for _ in range(whole_number(count, MOST_WORKERS_OF_A_NODE) or 1)
    ]
    return Software(
        torch=stack.get("torch"),
        nccl=stack.get("nccl"),
        driver=stack.get("driver"),
        gpus=tuple(names),
    )


def _environment(paths: RunPaths) -> Mapping[str, str] | None:
    for rank in paths.rank_numbers():
        taken = ENVIRONMENT.read(paths.rank(rank).environment)
        if taken is not None:
            return taken.effective
    return None
