"""The rank that ``bench_restart.py`` measures; the same function for every peer.

    bench_restart_worker.py zygote PEER     import once, then fork a rank for each line on stdin
    bench_restart_worker.py rank GIVEN      one rank (JSON), as a process of its own

It leaves marks in a directory, each a file with the time: ``called``, ``entered-<k>``,
``reduced-<k>`` and ``fault-<k>``, with the initial rank behind.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Optional

# Everybody has to be in place before the fault.
# By then all that the start has put off is up, and what follows is what it costs for good.
STARTED_S = 2.0
SETTLE_S = 0.3
# The timeouts of a wrapper, where a hang is the fault.
HANG = {"soft_timeout": timedelta(seconds=4), "hard_timeout": timedelta(seconds=10)}


def main() -> None:
    """See the module."""
    role, argument = sys.argv[1:]
    if role == "zygote":
        serve(argument)
    else:
        given = json.loads(argument)
        Rank(given, *peer_of(given["peer"])).run()


def serve(peer: str) -> None:
    """Fork a rank for each line, ``{"env", "given"}``; imports are paid for once."""
    module, _ = peer_of(peer)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(os.open(os.environ.get("BENCH_LOG", os.devnull), os.O_WRONLY | os.O_APPEND), 1)
            os.dup2(1, 2)
            os.environ.update(request["env"])
            with contextlib.suppress(BaseException):
                Rank(request["given"], *peer_of(request["given"]["peer"])).run()
            os._exit(0)
        print(pid, flush=True)
    del module


def peer_of(peer: str) -> tuple[Any, dict[str, Any]]:
    """The wrapper's module and its parameters; ``None`` where nothing is wrapped."""
    import torch.distributed  # noqa: F401 - part of what the zygote imports

    if peer in ("torchrun", "no-wrapper"):
        return None, {}
    if peer == "ncclops":
        restart = importlib.import_module("ncclops.restart")
        restart.Wrapper  # noqa: B018 - loads it
        return restart, {}
    nvrx = importlib.import_module("nvidia_resiliency_ext.inprocess")
    if peer == "nvrx-default":
        return nvrx, {}
    interval = timedelta(milliseconds=float(peer.removeprefix("nvrx-best-").removesuffix("ms")))
    return nvrx, {
        "monitor_thread_interval": interval,
        "monitor_process_interval": interval,
        "progress_watchdog_interval": interval,
        "heartbeat_interval": timedelta(milliseconds=100),
        "last_call_wait": timedelta(0),
    }


class Rank:
    """One rank: enter, reduce, be idle for a while, fault, and the same again."""

    def __init__(self, given: dict[str, Any], module: Any, parameters: dict[str, Any]) -> None:
        self.given = given
        self.module = module
        self.parameters = parameters | (HANG if given["fault"] == "hang" else {})
        self.bare = given["peer"] == "no-wrapper"
        self.rank = int(os.environ.get("BENCH_RANK", os.environ["RANK"]))
        self.directory = Path(given["directory"])

    def run(self) -> None:
        """Until somebody ends the process."""
        if self.module is None and not self.bare:
            self.iterate(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
            return

        def function(call: Any = None) -> None:
            self.iterate(call.iteration)

        if not self.bare:
            # NVRx looks for the annotation as an object
            function.__annotations__["call"] = Optional[self.module.CallWrapper]  # noqa: UP045
        self.note("ready")
        while not (self.directory / "go").exists():
            time.sleep(0.001)  # the file of another process announces nothing
        self.note("called")
        if self.bare:
            self.restart_without_wrapper()
        else:
            self.module.Wrapper(**self.parameters)(function)()

    def restart_without_wrapper(self) -> None:
        """What torch alone needs: all ranks abort as soon as the fault is there, and begin anew."""
        from torch.distributed.distributed_c10d import _abort_process_group

        for iteration in range(self.given["rounds"] + 1):
            with contextlib.suppress(ValueError):
                self.iterate(iteration)
            _abort_process_group()
            if self.given["fault"] != "exception":  # there is one fault then, and its rank is lost
                os.environ["RANK"] = str(self.rank - (self.rank > self.victim))
                os.environ["WORLD_SIZE"] = str(int(os.environ["WORLD_SIZE"]) - 1)

    def note(self, name: str) -> None:
        """Leave a mark, complete as soon as it is there."""
        draft = self.directory / f".{name}-{self.rank}"
        draft.write_text(repr(time.time()))
        draft.rename(self.directory / f"{name}-{self.rank}")

    def iterate(self, iteration: int) -> None:
        """The wrapped function."""
        import torch.distributed as dist

        self.note(f"entered-{iteration}")
        store = dist.TCPStore(
            "127.0.0.1", self.given["rendezvous"], None, False, wait_for_workers=False
        )
        dist.init_process_group(
            self.given["backend"],
            store=dist.PrefixStore(str(iteration), store),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=20),
        )
        work, ones = self.all_reduce()
        work.wait()
        if ones.item() != dist.get_world_size():
            raise RuntimeError(f"iteration {iteration}: all_reduce did not add up")
        self.note(f"reduced-{iteration}")
        if iteration == 0 and self.given["idle_s"]:
            self.be_idle(self.given["idle_s"])
        if iteration < self.given["rounds"]:
            dist.barrier()
            self.fault(iteration)
        else:
            time.sleep(600)

    def all_reduce(self) -> tuple[Any, Any]:
        """A collective of ones that has begun: its work, and the tensor, which waits for it."""
        import torch
        import torch.distributed as dist

        device = torch.device("cpu")
        if self.given["backend"] == "nccl":
            gpus = torch.cuda.device_count()
            if gpus < self.given["ranks"]:  # NCCL takes two on one GPU only from different hosts
                os.environ["NCCL_HOSTID"] = f"rank-{self.rank}"
            device = torch.device("cuda", self.rank % gpus)
            torch.cuda.set_device(device)
        ones = torch.ones(1, device=device)
        return dist.all_reduce(ones, async_op=True), ones

    @property
    def victim(self) -> int:
        return 0 if self.given["fault"] == "kill0" else 1

    def fault(self, iteration: int) -> None:
        """One rank faults; the others are in a collective, or in Python. ``bare``: return then."""
        kind = self.given["fault"]
        if self.rank == self.victim:
            if kind != "hang":  # timeouts count from the barrier
                time.sleep(SETTLE_S)
            self.note(f"fault-{iteration}")
            if kind == "exception":
                raise ValueError("the fault")
            if kind == "hang":
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGKILL)
        if kind in ("blocked", "hang"):
            work, ones = self.all_reduce()
            if not self.bare:
                work.wait()
                ones.item()  # with NCCL it is this that waits
        while not (self.bare and (self.directory / f"fault-{iteration}-{self.victim}").exists()):
            time.sleep(0.001 if self.bare else 0.005)

    def be_idle(self, duration_s: float) -> None:
        """Measure what the wrapper costs while nothing happens."""
        self.note("idle")
        time.sleep(STARTED_S)
        before = cpu_ns()
        time.sleep(duration_s)
        cost = {
            "cpu_ms_per_s": (cpu_ns() - before) / 1e6 / duration_s,
            "helper_mib": helper_mib(),
        }
        (self.directory / f".cost-{self.rank}").write_text(json.dumps(cost))
        (self.directory / f".cost-{self.rank}").rename(self.directory / f"cost-{self.rank}")


def helpers() -> list[int]:
    """The processes that the wrapper has started for this rank: they share its environment."""
    mine = {f"{name}={os.environ[name]}".encode() for name in ("BENCH_JOB", "BENCH_RANK")}
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            other = entry.name.isdigit() and int(entry.name) != os.getpid()
            if other and mine <= set((entry / "environ").read_bytes().split(b"\0")):
                found.append(int(entry.name))
    return found


def cpu_ns() -> int:
    """CPU time of this process and its helpers so far."""
    total = 0
    for pid in [os.getpid(), *helpers()]:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                total += int((task / "schedstat").read_text().split()[0])
    return total


def helper_mib() -> float:
    """Memory of the helpers, shared pages divided among those that share them."""
    total_kib = 0
    for pid in helpers():
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total_kib += int(line.split()[1])
    return total_kib / 1024


if __name__ == "__main__":
    main()
