"""Score which rank began a failure, on jobs of many ranks made from labelled excerpts.

    python scripts/score_first_failure.py ../shared/corpus/*.jsonl [--jobs 200] [--skew 1]

Each job is a directory of one log a rank. One rank, drawn by the seed, has an excerpt: what failed
first. The others have steps, and then what such a failure looks like from elsewhere: a watchdog's
time-out, a connection closed by the peer, NCCL's remote error, a lost store, SIGTERM from the
launcher; or nothing more. Clocks differ by up to --skew seconds, and some ranks print no times.
Excerpts of which no rank can be told (healthy ones, victims, schedulers' cancellations) are left
out, as are those marked ``hard``, whose text contradicts its own cause.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from ncclops.classify import classify_paths, load_signatures

# A rank's own failures: of the other classes the first rank is not a fact of one rank's log.
_OF_ONE_RANK = {
    "cuda-error", "gpu-hardware", "gpu-oom", "host-oom", "user-error", "process-crash",
    "driver-version", "invalid-usage", "coalesced-unsupported", "nvls-multicast",
    "network-transport", "plugin-env",
}  # fmt: skip
_BEGAN = datetime(2026, 3, 4, 9, 0)
_STAMP = re.compile(r"\d{4}[-/]\d\d[-/]\d\d[T _]\d\d:\d\d:\d\d|[IWEF]\d{3,4} \d\d:\d\d:\d\d")


@dataclass(frozen=True)
class Job:
    """One generated job: its logs by rank, and the rank whose log has the excerpt."""

    excerpt: dict[str, Any]
    culprit: int
    logs: dict[int, str]


def make_job(excerpt: dict[str, Any], ranks: int, skew_s: float, rng: random.Random) -> Job:
    """A job in which a rank fails as ``excerpt`` shows, and the others notice."""
    culprit = rng.randrange(ranks)
    failed_at = _BEGAN + timedelta(minutes=20)
    logs = {}
    for rank in range(ranks):
        skew = timedelta(seconds=rng.uniform(-skew_s, skew_s))
        dated = rng.random() < 0.8
        lines = list(_steps(skew, dated, rng))
        if rank == culprit:
            at = failed_at + skew
            lines.append(f"{at:%Y-%m-%d %H:%M:%S} INFO rank {rank}: next batch")
            # Times of the day on which the excerpt was written would put it years away.
            lines += _STAMP.sub(f"{at:%Y-%m-%d %H:%M:%S}", excerpt["text"]).splitlines()
        else:
            delay = timedelta(seconds=rng.uniform(2, 40))
            lines += _aftermath(rank, culprit, failed_at + delay + skew, rng)
        logs[rank] = "\n".join(lines) + "\n"
    return Job(excerpt, culprit, logs)


def _steps(skew: timedelta, dated: bool, rng: random.Random) -> Iterator[str]:
    for step in range(rng.randrange(3, 12)):
        at = _BEGAN + timedelta(minutes=step) + skew
        stamp = f"{at:%Y-%m-%d %H:%M:%S} " if dated else ""
        yield f"{stamp}step {step} loss {rng.uniform(1, 3):.3f} tok/s {rng.randrange(800, 1000)}"


def _aftermath(rank: int, culprit: int, at: datetime, rng: random.Random) -> list[str]:
    """What a failure of ``culprit`` looks like on another rank, by one of several ways."""
    where = f"[rank{rank}]:[E{at:%m%d %H:%M:%S}.{rng.randrange(1_000_000):06d} ProcessGroupNCCL.cpp"
    group = f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
    nccl = f"[{at:%Y-%m-%d %H:%M:%S}] n{rank // 8}:{4000 + rank}:{4100 + rank} [{rank % 8}]"
    time_out = [
        f"{where}:629] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={rng.randrange(400, 500)}, OpType=ALLREDUCE, NumelIn=1024, "
        "NumelOut=1024, Timeout(ms)=600000) ran for 600012 milliseconds before timing out.",
        f"{where}:684] [Rank {rank}] Some NCCL operations have failed or timed out.",
    ]
    closed = [
        f"{nccl} misc/socket.cc:880 NCCL WARN socketProgress: Connection closed by remote "
        f"peer n{culprit // 8}.local<40112>",
        f"{where}:2057] {group} Process group watchdog thread terminated with exception: "
        "NCCL error: remote process exited or there was a network error, NCCL version 2.27.5",
    ]
    store = [
        f'{where}:1682] {group} Failed to check the "should dump" flag on TCPStore, (maybe '
        "TCPStore server has shut down too early), with error: failed to recv, got 0 bytes"
    ]
    dump = [
        f"{where}:1796] {group} Received a dump signal due to a collective timeout from  rank "
        f"{rng.randrange(64)} and we will try our best to dump the debug info."
    ]
    reset = [f"[rank{rank}]: torch.distributed.DistNetworkError: Connection reset by peer"]
    ended = [f"W{at:%m%d %H:%M:%S}.000000 1 torch/distributed/elastic: Received 15 death signal"]
    ways: list[list[str]] = [time_out, closed, store, dump, reset, ended, []]
    return rng.choice(ways)


def first_failing(job: Job, folder: Path, layout: str) -> tuple[int | None, str]:
    """(rank, signature) by the classifier, on the job's logs in ``folder``."""
    for rank, text in job.logs.items():
        path = folder / layout.format(rank=rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    verdict = classify_paths([folder], _SIGNATURES).verdict
    return verdict.rank, f"{verdict.class_} {verdict.signature}"


_SIGNATURES = load_signatures()
_LAYOUTS = ("ranks/{rank}/stderr.log", "rank_{rank}.log", "attempt_0/{rank}/stderr.log")


def usable(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The excerpts that show a failure of one rank."""
    excerpts = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [
        x
        for x in excerpts
        if x["label"] in _OF_ONE_RANK and x.get("decidable", True) and not x.get("hard")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", type=Path, nargs="+", help="labelled excerpts, JSON lines")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--skew", type=float, default=1.0, help="seconds by which clocks differ")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--misses", action="store_true", help="print each wrong rank")
    options = parser.parse_args()
    excerpts = usable(options.paths)
    right: Counter[str] = Counter()
    for number in range(options.jobs):
        rng = random.Random(options.seed * 100_003 + number)
        job = make_job(excerpts[number % len(excerpts)], options.ranks, options.skew, rng)
        with tempfile.TemporaryDirectory() as folder:
            rank, found = first_failing(job, Path(folder), rng.choice(_LAYOUTS))
        right[job.excerpt["label"]] += rank == job.culprit
        right["all"] += rank == job.culprit
        if options.misses and rank != job.culprit:
            print(f"  job {number}, {job.excerpt['id']}: rank {job.culprit} -> {rank} ({found})")
    print(f"first failing rank right in {right['all']} of {options.jobs} jobs: "
          f"{right['all'] / options.jobs:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
