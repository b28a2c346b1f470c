"""A rank in a process of its own: ``python lost_hosts.py DIRECTORY``; see rank_processes.py."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ncclops import restart as inprocess


def main(directory: Path) -> None:
    """All meet, and work until the file ``go`` is there; with ``fail-<rank>`` one raises once.

    Rank 0 moves the file ``clock-is-set`` to ``clock`` when the other one waits for it: in the
    barrier, when it is interrupted, and when it is the last to return.
    """
    fails = directory / f"fail-{os.environ['RANK']}"

    def train(call: inprocess.CallWrapper) -> None:
        try:
            work(call)
        except inprocess.exception.RankShouldRestart:
            set_clock()
            raise
        set_clock()

    def set_clock() -> None:
        if os.environ["RANK"] == "0" and (directory / "clock-is-set").exists():
            time.sleep(0.5)  # nothing shows that the other one waits, nor that it goes on waiting
            (directory / "clock-is-set").replace(directory / "clock")
            time.sleep(0.5)

    def work(call: inprocess.CallWrapper) -> None:
        dist.init_process_group("gloo")
        dist.barrier()
        sys.stderr.write(f"entered {call.iteration}\n")
        while not (directory / "go").exists():
            if call.iteration == 0 and fails.exists():
                raise ValueError("boom")
            time.sleep(0.05)
        dist.barrier()
        dist.destroy_process_group()

    def on_incident(incident: Any) -> None:
        sys.stderr.write(f"incident: {incident.summary}; lost {incident.ranks_lost}\n")
        sys.stderr.write(f"phases: {json.dumps(dict(incident.phases_ms))}\n")

    inprocess.Wrapper(
        soft_timeout=timedelta(seconds=60),
        hard_timeout=timedelta(seconds=90),
        heartbeat_timeout=timedelta(seconds=8),
        heartbeat_interval=timedelta(seconds=0.5),
        monitor_process_logfile=str(directory / "monitor-log-{rank}"),
        monitor_process_pidfile=str(directory / "monitor-{rank}.pid"),
        on_incident=on_incident,
    )(train)()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main(Path(sys.argv[1]))
