"""Imports torch once and forks jobs: a line of JSON a job on stdin, a line back when it is done.

A job's ranks make a process group over its backend, run a function of `hang_script`, and are
looked at once all are as far as they get: snapshots as a run's incident has them in
`<out>/incidents/0`, torch's own pickles in `<out>/pickle` and its JSON in `<out>/json`. Then all
abort their groups, as a restart does, and the snapshots whose recorder was left for later are
completed, in `<out>/late/incidents/0`. Then they are killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import hang_script

from ncclops.capture import rank_snapshot as snapshots
from ncclops.capture.rank_snapshot import Identity, RankSnapshot
from ncclops.restart.abort import AbortTorchDistributed
from ncclops.restart.compiler_import import naming_frames
from ncclops.restart.state import State

snapshots._FEW_RECORDS = 0  # a handful would not be left for later
torch.set_num_threads(1)
# After every rank has said that it is about to get stuck: longer than what counts as in flight,
# on a busy machine too.
SETTLE_S = 3.0
LIMIT_S = 60


def main() -> None:
    threads = []
    lock = threading.Lock()
    for line in sys.stdin:
        job = json.loads(line)
        pids, pipes = _start(job)
        thread = threading.Thread(target=_finish, args=(job, pids, pipes, lock))
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()


def _start(job: dict[str, Any]) -> tuple[dict[int, int], dict[int, tuple[int, int]]]:
    """Fork the ranks; each has a pipe to say that it is ready and one for the command to look."""
    pids, pipes = {}, {}
    for rank in range(job["world"]):
        ready, ready_w = os.pipe()
        look_r, look = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()  # so that what it starts can be ended with it
            os.close(ready)
            os.close(look)
            _Rank(job, rank, ready_w, look_r).run()
        os.close(ready_w)
        os.close(look_r)
        pids[rank], pipes[rank] = pid, (ready, look)
    return pids, pipes


def _finish(
    job: dict[str, Any],
    pids: dict[int, int],
    pipes: dict[int, tuple[int, int]],
    lock: threading.Lock,
) -> None:
    out = Path(job["out"])
    for rank in pids:
        os.read(pipes[rank][0], 1)  # ready, or dead
    time.sleep(SETTLE_S)  # nothing announces that a rank has got stuck
    dead = {rank: how for rank, pid in pids.items() if (how := _ended(pid)) is not None}
    alive = set(pids) - set(dead)
    limit_s = 5 if job.get("silent") else LIMIT_S
    waiting = alive - _ask(alive, pipes, out, "done", limit_s)
    _ask(alive - waiting, pipes, out, "late", LIMIT_S)
    for rank in pids:
        folder = out / "incidents" / "0" / f"rank{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        if rank in dead:
            how = dead[rank]
            view = {
                "state": "Z",
                "state_name": "ended",
                "ended_by": how,
                "ended_well": how == "exit code 0",
                "ended_signal": how if how in signal.Signals.__members__ else None,
            }
            (folder / "process.json").write_text(json.dumps(view))
            reason = f"the process ended ({dead[rank]})"
            missing = {"reason": reason, "ended": True, "ended_signal": view["ended_signal"]}
            (folder / "missing.json").write_text(json.dumps(missing))
        elif rank in waiting:
            (folder / "missing.json").write_text(
                json.dumps({"reason": "it did not answer", "silent": True})
            )
        if rank in dead or rank in waiting:
            shutil.copytree(folder, out / "late" / "incidents" / "0" / folder.name)
    (out / "late" / "ranks").symlink_to(out / "ranks")
    for rank, pid in pids.items():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if rank not in dead:
            os.waitpid(pid, 0)
        for end in pipes[rank]:
            os.close(end)
    with lock:
        sys.stdout.write(json.dumps({"job": job["out"], "dead": dead}) + "\n")
        sys.stdout.flush()


def _ask(
    ranks: set[int], pipes: dict[int, tuple[int, int]], out: Path, what: str, limit_s: float
) -> set[int]:
    """Have ``ranks`` go on; those that did, and have left the file that says so."""
    for rank in ranks:
        with contextlib.suppress(BrokenPipeError):
            os.write(pipes[rank][1], b"x")
    deadline = time.monotonic() + limit_s
    done: set[int] = set()
    while done != ranks and time.monotonic() < deadline:
        done = {rank for rank in ranks if (out / f"{what}{rank}").exists()}
        time.sleep(0.05)  # ranks that hold their interpreter's lock can announce nothing
    return done


def _ended(pid: int) -> str | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    if not found:
        return None
    code = os.waitstatus_to_exitcode(status)
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


class _Rank:
    """One rank's process; never returns from :meth:`run`."""

    def __init__(self, job: dict[str, Any], rank: int, ready: int, look: int) -> None:
        self._scenario, self._world, self._out = job["scenario"], job["world"], Path(job["out"])
        self._backend, self._has_gpu = job["backend"], "nccl" in job["backend"]
        self._rank, self._ready, self._look = rank, ready, look
        self._folder = self._out / "incidents" / "0" / f"rank{rank}"

    def run(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            logs = self._out / "ranks" / str(self._rank)
            logs.mkdir(parents=True)
            faults = (logs / "stderr.log").open("w")
            os.dup2(faults.fileno(), 1)
            os.dup2(faults.fileno(), 2)
            if self._has_gpu:
                torch.cuda.set_device(self._rank)
                hang_script.device = f"cuda:{self._rank}"
            dist.init_process_group(
                self._backend,
                init_method=f"file://{self._out / 'store'}",
                rank=self._rank,
                world_size=self._world,
                timeout=timedelta(seconds=300),
            )
            threading.Thread(target=self._collect, daemon=True).start()
            for _ in range(2):
                hang_script.step()
            with contextlib.suppress(RuntimeError):
                getattr(hang_script, self._scenario)(self._rank, self._world, self._about_to)
                self._about_to()
                if self._has_gpu:
                    torch.cuda.synchronize()
            time.sleep(hang_script.FOREVER_S)
        except BaseException:  # noqa: BLE001 - into the log
            traceback.print_exc()
            time.sleep(hang_script.FOREVER_S)
        finally:
            os._exit(3)

    def _about_to(self) -> None:
        if self._scenario == "holding_the_gil" and self._rank == hang_script.odd_rank(self._world):
            stacks = (self._folder / "stacks.txt").open("w")
            faulthandler.dump_traceback_later(0.5, file=stacks)  # from C, without the lock
        os.write(self._ready, b"x")

    def _collect(self) -> None:
        os.read(self._look, 1)
        who = Identity(self._rank, None)
        snapshot, late = RankSnapshot(who, since_ns=0), RankSnapshot(who, since_ns=0)
        snapshot.take(LIMIT_S)
        late.take_before_abort(LIMIT_S)
        recorder = "nccl" if self._has_gpu else "fr"
        with naming_frames():
            dumps = (
                ("pickle", f"comm_lib_trace_rank_{self._rank}", _torchs_dump(recorder, "trace")),
                ("json", f"trace_{self._rank}.json", _torchs_dump(recorder, "trace_json")),
            )
        for kind, name, data in dumps:
            (self._out / kind).mkdir(exist_ok=True)
            whole = data if isinstance(data, bytes) else data.encode()
            (self._out / kind / name).write_bytes(whole)
        snapshot.write(self._folder)
        (self._out / f"done{self._rank}").touch()
        os.read(self._look, 1)  # all have been looked at
        AbortTorchDistributed()(State(self._rank, self._world).freeze())
        time.sleep(0.2)  # what was pending ends when it does
        late.take_rest(LIMIT_S)
        late.write(self._out / "late" / "incidents" / "0" / self._folder.name)
        (self._out / f"late{self._rank}").touch()


def _torchs_dump(recorder: str, form: str) -> Any:
    return getattr(torch._C._distributed_c10d, f"_dump_{recorder}_{form}")()


if __name__ == "__main__":
    main()
