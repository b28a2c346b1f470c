"""The result of torch's own analyser, which runs in a separate process, as it may crash.

It loads pickles by executing them, stops at dumps that do not say who is in a group (Gloo's),
and at names it does not know. So it is not given the files: this process reads them as plain data,
fills in the members that we know, and calls it on that. Run as
``python -m ncclops.flight.torch_opinion``, with a JSON request on stdin; imports torch only there.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from ncclops.flight.groups import Group
from ncclops.flight.model import FlightEvidence

PATIENCE = timedelta(minutes=10)
_SHOWN_LINES = 60


def analyse(
    evidence: FlightEvidence, groups: list[Group], patience: timedelta = PATIENCE
) -> dict[str, Any]:
    """``{"ok", "says": [lines], "problem"}``: what torch's analyser logs, or how it failed."""
    request = {
        "files": {
            str(rank): about.record.file
            for rank, about in sorted(evidence.ranks.items())
            if about.record is not None
        },
        "members": [
            [group.name.name, group.name.desc, list(group.members)]
            for group in groups
            if group.members
        ],
    }
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "ncclops.flight.torch_opinion"],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=patience.total_seconds(),
        )
    except subprocess.TimeoutExpired:
        return _failed(f"it took longer than {patience.total_seconds():g} s")
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return _failed(f"it ended with code {done.returncode}: {' '.join(last)[:200]}")
    return answer


def _failed(problem: str) -> dict[str, Any]:
    return {"ok": False, "says": [], "problem": problem}


def main() -> None:
    request = json.load(sys.stdin)
    lines = _Lines()
    try:
        _analyze(request, lines)
        answer: dict[str, Any] = {"ok": True, "problem": None}
    except ImportError:
        answer = _failed("this torch has no analyser: it is part of torch 2.9 and later")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever torch's raises is its answer
        answer = _failed(f"{type(error).__name__}: {error}"[:300])
    print(json.dumps(answer | {"says": lines.kept[:_SHOWN_LINES]}))


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept += [line for line in record.getMessage().splitlines() if line.strip()]


def _analyze(request: dict[str, Any], lines: logging.Handler) -> None:
    from torch.distributed.flight_recorder.components import builder, config_manager, fr_logger

    logger = fr_logger.FlightRecorderLogger().logger
    logger.handlers = [lines]
    logger.propagate = False
    args = config_manager.JobConfig().parse_args(["unused", "--allow-incomplete-ranks"])
    details, version = _details(request)
    builder.build_db(details, args, version)


def _details(request: dict[str, Any]) -> tuple[dict[str, Any], str]:
    from ncclops.flight.decode import decode

    details: dict[str, Any] = {}
    version = ""
    for rank, file in request["files"].items():
        loaded = decode(Path(file).read_bytes())
        dump = loaded["dump"] if "dump" in loaded and "entries" not in loaded else loaded
        config = {
            name: {"name": name, "desc": desc, "ranks": json.dumps(ranks)}
            for name, desc, ranks in request["members"]
            if int(rank) in ranks
        }
        version = version or str(dump["version"])
        details[file] = {
            "host_name": f"host_rank{rank}",
            "rank": int(rank),
            "entries": [dict(entry) for entry in dump["entries"]],
            "version": str(dump["version"]),
            "pg_config": config,
        }
    return details, version


if __name__ == "__main__":
    main()
