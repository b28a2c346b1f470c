"""A rank in a process of its own: ``python lost_hosts.py DIRECTORY``; see rank_processes.py."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch.distributed as dist

from ncclops import restart as inprocess
from ncclops.restart._inbox import Inbox
from ncclops.restart.loop import RestartLoop

WAIT = Inbox._get
FOR_OTHERS = {Inbox.agreement.__code__, RestartLoop._await_outcome.__code__}


def main(directory: Path) -> None:
    """All meet, and work until the file ``go`` is there; with ``fail-<rank>`` one raises once.

    Once the clock has been set, by the file ``clock``, rank 0 leaves iteration *k* when the file
    ``leave-<k>`` is there, and the others say whether they wait for it each time it is set again.
    """
    rank = int(os.environ["RANK"])
    fails = directory / f"fail-{rank}"
    main_thread = threading.get_ident()

    def train(call: inprocess.CallWrapper) -> None:
        try:
            work(call)
        finally:
            if not (directory / "clock").exists():
                pass
            elif rank == 0:
                while not (directory / f"leave-{call.iteration}").exists():
                    with contextlib.suppress(inprocess.exception.RankShouldRestart):
                        time.sleep(0.05)
            else:
                threading.Thread(target=say_that_it_waits, args=(call.iteration,)).start()

    def say_that_it_waits(iteration: int) -> None:
        while (frame := waiting()) is None:
            time.sleep(0.01)
        ahead_s = time.time() - time.monotonic()
        sys.stderr.write(f"waits in {iteration}\n")
        while not (directory / f"leave-{iteration}").exists():
            time.sleep(0.01)
            before_s, ahead_s = ahead_s, time.time() - time.monotonic()
            if abs(ahead_s - before_s) > 60:
                time.sleep(0.1)  # the stand-in of the clock looks every 5 ms if a wait is over
                sys.stderr.write(f"the clock is set in {iteration}: waits {waiting() is frame}\n")

    def waiting() -> FrameType | None:
        """Of the main thread, where it waits for the other rank."""
        frame = sys._current_frames()[main_thread]
        stack = [caller.f_code for caller, _ in walk_stack(frame)]
        return frame if stack[0] is WAIT.__code__ and not FOR_OTHERS.isdisjoint(stack) else None

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
