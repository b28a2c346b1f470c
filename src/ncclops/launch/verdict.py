"""How a run ended, for Python: ``verdict.json`` as a typed value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from ncclops.errors import UsageError
from ncclops.record.paths import RunPaths

Outcome = Literal["completed", "no-receipt", "failed", "interrupted", "stopped"]
_SCHEMA = "ncclops.verdict/1"


@dataclass(frozen=True, kw_only=True)
class RunVerdict:
    """What a run came to; ``ncclops.verdict/1`` in the contracts describes ``document``.

    ``failed_rank``, ``failure_class`` and ``remedy`` are of the first failure of a run that failed;
    ``failure_class`` is one of ``ncclops classify --list``. ``receipt`` is the judgement of the
    five rules (``"healthy"`` or what is missing), None where none could be made. ``goodput`` is the
    share of the time that went into training, from 0 to 1, None where the run does not show it.
    """

    run_dir: Path
    run_id: str
    outcome: Outcome
    exit_code: int
    reason: str
    attempts: int
    duration: timedelta
    failed_rank: int | None
    failure_class: str | None
    remedy: tuple[str, ...]
    receipt: str | None
    goodput: float | None
    document: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        """Whether the job completed, with its receipt where one was required."""
        return self.outcome == "completed"


def read_verdict(run_dir: str | PathLike[str]) -> RunVerdict:
    """The verdict of the run in ``run_dir``; any thread.

    Raises ``UsageError`` where there is none: the run has not ended, or its agent was killed.
    """
    path = Path(run_dir)
    try:
        document = json.loads(RunPaths(path).verdict.read_bytes())
        if document["schema"] != _SCHEMA:
            raise UsageError(f"{path}/verdict.json is {document['schema']}, not {_SCHEMA}")
        return _of_document(path.resolve(), document)
    except FileNotFoundError:
        raise UsageError(
            f"{path} has no verdict: `ncclops status {path}` shows whether the run goes on"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read the verdict of {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}/verdict.json is damaged: {error!r}") from error


def _of_document(run_dir: Path, document: Mapping[str, Any]) -> RunVerdict:
    found = document.get("classification") or {}
    return RunVerdict(
        run_dir=run_dir,
        run_id=document["run_id"],
        outcome=document["outcome"],
        exit_code=document["exit_code"],
        reason=document["reason"],
        attempts=document["attempts"],
        duration=timedelta(seconds=document["seconds"]),
        failed_rank=(document.get("first_failure") or {}).get("rank"),
        failure_class=found.get("class"),
        remedy=tuple(found.get("remedy") or ()),
        receipt=(document.get("receipt") or {}).get("verdict"),
        goodput=(document.get("goodput") or {}).get("ratio"),
        document=document,
    )
