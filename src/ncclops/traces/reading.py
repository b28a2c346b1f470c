"""A run directory as the trace needs it, without secrets: what is sent leaves the machine."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ncclops.errors import UsageError
from ncclops.record import event_log
from ncclops.record.paths import RunPaths
from ncclops.record.run_record import RUN, RunRecord
from ncclops.record.verdict_record import VERDICT
from ncclops.redaction.of_run import redactor_of
from ncclops.traces.model import Trace, trace_of


def read(path: Path) -> Trace:
    """The trace of the run in ``path``. Raises ``UsageError`` where its events show no time."""
    paths = RunPaths(path)
    redactor = redactor_of(paths)
    trace = trace_of(
        [redactor.record(event) for event in event_log.read(paths.events)],
        redactor.document(_about(paths)),
    )
    if trace is None:
        raise UsageError(
            f"{paths.events} shows nothing that took time: name a run that has started"
        )
    return trace


def _about(paths: RunPaths) -> dict[str, object]:
    """What run.json and the verdict say of the run; what cannot be read is left out."""
    try:
        run = RUN.read(paths.run) or RunRecord()
    except UsageError:
        run = RunRecord()
    try:
        verdict = VERDICT.read(paths.verdict)
    except UsageError:
        verdict = None
    about: dict[str, object] = {
        "run_id": run.run_id,
        "profile": None if run.profile is None else run.profile.name,
        "command": run.command,
        "restart": run.restart,
        "torch": run.stack.get("torch"),
        "nccl": run.stack.get("nccl"),
    }
    if run.nodes is not None and run.nodes.id is not msgspec.UNSET:
        about |= {"job_id": run.nodes.id, "nodes": run.nodes.count, "node_rank": run.nodes.rank}
    if verdict is not None:
        about["reason"] = verdict.reason
        if verdict.goodput is not None:
            about["goodput"] = verdict.goodput.ratio
        if verdict.classification is not None:
            about["class"] = verdict.classification.class_
    return {name: value for name, value in about.items() if value is not None}
