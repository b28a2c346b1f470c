"""Time `ncclops classify` on ordinary training logs, next to grep and other public tools.

    python scripts/bench_classify.py [--gigabytes 1] [--runs 3] [--keep DIR]

Writes a log of ordinary training output, then runs each tool on it as its own process, pinned
to one core, and prints the best of the runs with its peak memory (never below that of this
script, from which the tools are started). `grep -E` searches for the
same literals that the prefilter has. ripgrep and drain3 (a public log-template miner, fed a
part of the log) are timed where they are installed. Then a log of 1 MB end to end.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ncclops.classify import load_signatures

_GB, _MB = 1_000_000_000, 1_000_000
_DRAIN3_BYTES = 20 * _MB
_DRAIN3 = """
import sys
from drain3 import TemplateMiner
miner = TemplateMiner()
with open(sys.argv[1], errors="replace") as log:
    for line in log:
        miner.add_log_message(line.rstrip())
"""


@dataclass(frozen=True)
class Timing:
    """The best of some runs of one tool on one input."""

    tool: str
    input_bytes: int
    seconds: float
    peak_mib: float

    def __str__(self) -> str:
        rate = self.input_bytes / _MB / self.seconds
        return f"{self.tool:34} {self.seconds:8.3f} s {rate:9.0f} MB/s {self.peak_mib:8.0f} MiB"


def training_lines(seed: int) -> Iterator[str]:
    """Ordinary output of a healthy job of 64 ranks, without end."""
    rng = random.Random(seed)
    step = 0
    while True:
        step += 1
        clock = (
            f"2026-01-{1 + step // 86400 % 28:02d} {step // 3600 % 24:02d}:{step // 60 % 60:02d}"
        )
        yield (
            f"[{clock}:{step % 60:02d}] iteration {step:8d}/ 500000 | consumed samples: "
            f"{step * 1024:12d} | elapsed time per iteration (ms): {rng.uniform(900, 1000):.1f} | "
            f"learning rate: 1.500E-04 | global batch size:  1024 | lm loss: {rng.random():.6E} | "
            f"grad norm: {rng.random():.3f} | number of skipped iterations:   0 |"
        )
        for rank in rng.sample(range(64), 4):
            rate = rng.uniform(1e4, 2e4)
            yield f"[rank{rank}]: step {step} {rate:.1f} tok/s memory {rng.random():.2f} GiB"
        yield f"DEBUG data.loader: prefetched shard {step} in {rng.random():.3f}s"
        yield f"n{step % 8}:1234:1299 [{step % 8}] NCCL INFO Channel {step % 16:02d}/16 : 0 1 2 3"
        if step % 100 == 0:
            yield f"INFO:trainer:saving checkpoint to /checkpoints/run/global_step{step}"


def write_log(path: Path, size: int) -> None:
    """Fill ``path`` up to ``size`` bytes; blocks repeat, as only their bytes are to be read."""
    lines = training_lines(seed=1)
    block = "".join(next(lines) + "\n" for _ in range(10_000)).encode()
    with path.open("wb") as log:
        for written in range(0, size, len(block)):
            log.write(block[: size - written])


def run_once(command: Sequence[str]) -> tuple[float, float]:
    """(seconds, peak MiB) of one run; exit codes 0 and 1 (no match) are fine."""
    began = time.perf_counter()
    # A pipe, not /dev/null: grep stops at the first match when nobody can read its output.
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - began
    if os.waitstatus_to_exitcode(status) not in (0, 1):
        raise SystemExit(f"{command[0]} failed with status {status}")
    return seconds, usage.ru_maxrss / 1024


def best_of(tool: str, command: Sequence[str], size: int, runs: int) -> Timing:
    seconds, peak = min(run_once(command) for _ in range(runs))
    return Timing(tool, size, seconds, peak)


def tools(log: Path, part: Path, literals: Sequence[str]) -> Iterator[tuple[str, list[str], Path]]:
    """(name, command, input) of every tool that is installed here."""
    alternatives = "|".join(re.sub(r"([\\.^$*+?()\[\]{}|])", r"\\\1", text) for text in literals)
    yield "ncclops classify", [sys.executable, "-m", "ncclops", "classify", str(log)], log
    yield (
        "grep -c -E, same literals",
        ["env", "LC_ALL=C", "grep", "-c", "-E", alternatives, str(log)],
        log,
    )
    if shutil.which("rg"):
        yield "rg -c, same literals", ["rg", "-c", "-j1", alternatives, str(log)], log
    if importlib.util.find_spec("drain3"):
        yield "drain3, first 20 MB", [sys.executable, "-c", _DRAIN3, str(part)], part


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="leave the logs in this directory")
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # children inherit it
    folder = options.keep or Path(tempfile.mkdtemp(prefix="bench-classify-"))
    folder.mkdir(parents=True, exist_ok=True)
    log, part, small = folder / "train.log", folder / "part.log", folder / "small.log"
    try:
        write_log(log, int(options.gigabytes * _GB))
        write_log(part, _DRAIN3_BYTES)
        write_log(small, _MB)
        literals = load_signatures().literals
        print(
            f"{len(literals)} literals, one core, best of {options.runs} runs, file in page cache"
        )
        for tool, command, source in tools(log, part, literals):
            print(best_of(tool, command, source.stat().st_size, options.runs))
        end_to_end = [sys.executable, "-m", "ncclops", "classify", str(small), "--json"]
        print(best_of("ncclops classify, 1 MB", end_to_end, _MB, max(5, options.runs)))
        version = [sys.executable, "-m", "ncclops", "--version"]
        print(best_of("ncclops --version, for comparison", version, 1, max(5, options.runs)))
    finally:
        if options.keep is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
