"""The job of the self-check: the way a user's job takes, with a fault in it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

from ncclops.errors import NcclopsError
from ncclops.launch import LaunchRequest, start
from ncclops.preflight.catalogue import Check
from ncclops.preflight.model import Finding
from ncclops.record import event_log
from ncclops.record.events import RestartEvent
from ncclops.record.paths import RunPaths
from ncclops.record.variables import NOTIFY

_SCRIPT = Path(__file__).with_name("probe.py")
_SUBJECT = "2 ranks"
_LOG = "launch.log"


def restarts(check: Check, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Start it, and judge its verdict. Its run is removed where all is well, else kept.

    Starts processes; returns within the check's ``seconds`` and what it takes to end them.
    """
    place = Path(tempfile.mkdtemp(prefix="ncclops-self-check-"))
    run_dir = place / "run"
    began = time.monotonic()
    why = _failure(run_dir, environ, timedelta(seconds=check.limit("seconds")))
    if why is not None:
        kept = run_dir if run_dir.exists() else place / _LOG
        yield check.bad(_SUBJECT, f"{why}: {kept}")
        return
    shutil.rmtree(place, ignore_errors=True)
    yield check.ok(_SUBJECT, f"restarted in place and ended well, {time.monotonic() - began:.1f} s")


def _failure(run_dir: Path, environ: Mapping[str, str], limit: timedelta) -> str | None:
    """What is wrong with the job that is now run in ``run_dir``; None: nothing."""
    request = LaunchRequest(
        target=_SCRIPT,
        profile="local-cpu",
        nproc_per_node=2,
        standalone=True,  # whatever a scheduler says of this machine
        run_dir=run_dir,
        env={"OMP_NUM_THREADS": "1"},
    )
    said = run_dir.parent / _LOG
    # It is nobody's job, and its fault is meant: it pages nobody, and needs no channel's secrets.
    environ = {**environ, NOTIFY: "off"}
    try:
        with (
            said.open("wb") as log,
            start(request, environ=environ, stdout=log, stderr=subprocess.STDOUT) as run,
        ):
            verdict = run.wait(limit)
    except TimeoutError:
        return f"no end within {limit.total_seconds():.0f} s"
    except (NcclopsError, OSError) as error:
        last = said.read_text(errors="replace").strip().rpartition("\n")[2]
        return last or str(error)
    if not verdict.ok or verdict.ranks_lost or verdict.attempts != 1:
        return f"{verdict.outcome}: {verdict.reason}"
    if not any(
        isinstance(event, RestartEvent) for event in event_log.read(RunPaths(run_dir).events)
    ):
        return "it ended well without a restart in place"
    return None
