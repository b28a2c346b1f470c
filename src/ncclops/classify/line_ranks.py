"""Which rank wrote a line: rank prefixes, processes, file names.

Three sources, the most reliable first: the line names its rank; the line names its process, whose
rank another line shows; the file belongs to a rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePath

# torch >= 2.2 writes [rank3]:, and ours is the same; c10d adds [Rank 3] and [PG ... Rank 3].
_NAMED = re.compile(
    r"\[[Rr]ank ?(?P<a>\d{1,9})\]|\[PG [^\]]*?Rank (?P<b>\d{1,9})\]"
    r"|^\W{0,6}[Rr]ank[ =:]?(?P<c>\d{1,9})[\]:>]"
)
# torchrun's --tee puts the role and the local rank; the local rank is all it knows.
_ROLE_PREFIX = re.compile(r"\[(?:default|trainer|worker|train)(?P<rank>\d{1,9})\]:")
# srun --label: the task id, which is the rank in every job that starts one task per GPU.
_SRUN = re.compile(r"^\s*(?P<rank>\d{1,5}): ")
# mpirun --tag-output: [job, rank].
_MPIRUN = re.compile(r"\[\d+,(?P<rank>\d{1,9})\]<std(?:out|err)>:")
_SRUN_TASK = re.compile(r"srun: error: .*?: task (?P<rank>\d{1,9}):")
_NCCL = re.compile(r"(?P<host>[\w.-]+):(?P<pid>\d{1,9}):(?:\d+ )?\d* ?\[-?\d+\]")
_NCCL_RANK = re.compile(r"\bcomm 0x[0-9a-f]+ rank (?P<rank>\d{1,9}) n[Rr]anks (?P<size>\d{1,9})")
_SUMMARY_RANK = re.compile(r"^\W*rank\s*:\s*(?P<rank>\d{1,9}) \(local_rank: \d+\)")
_ATTEMPT = re.compile(r"(?:^|/)attempt_(\d+)/")
# A log a node of so many nodes, named for ranks, is rarer than a log a rank.
_MANY_FILES = 8
_FILE_RANK = re.compile(
    r"rank[-_.]?(\d+)|(?<![a-z0-9])(?:process|proc|task)[-_.]?(\d+)(?!\d)|^r(\d+)(?=\.|$)",
    re.IGNORECASE,
)


def rank_of_line(line: str) -> int | None:
    """The rank that the line itself names as its writer."""
    head = line[:400]
    if found := _NAMED.search(head):
        return int(found["a"] or found["b"] or found["c"])
    for form in (_ROLE_PREFIX, _SRUN_TASK, _MPIRUN, _SRUN):
        if found := form.search(head):
            return int(found["rank"])
    return None


def process_of_line(line: str) -> tuple[str, int] | None:
    """(host, pid) where NCCL's ``host:pid:tid [device]`` stands in the line."""
    found = _NCCL.search(line[:400])
    return (found["host"], int(found["pid"])) if found else None


def rank_in_communicator(line: str) -> tuple[int, int] | None:
    """(rank, size) that an NCCL line gives for the communicator it speaks of."""
    found = _NCCL_RANK.search(line)
    return (int(found["rank"]), int(found["size"])) if found else None


def rank_of_summary(line: str) -> int | None:
    """The rank in a line of torchelastic's failure summary."""
    found = _SUMMARY_RANK.search(line)
    return int(found["rank"]) if found else None


def rank_of_path(path: PurePath) -> int | None:
    """The rank a log file belongs to, by the layouts of run directories and of torchrun.

    ``ranks/<rank>/stdout.log`` is ours, ``…/attempt_0/<local rank>/stderr.log`` is torchrun's
    (on one node the local rank is the rank), ``rank_3.log`` is common, and so are ``task_3.out``,
    ``process3.log`` and ``r3.log``.
    """
    parent, grandparent = path.parent.name, path.parent.parent.name
    if parent.isdecimal() and (grandparent == "ranks" or grandparent.startswith("attempt_")):
        return int(parent)
    found = _FILE_RANK.search(path.name) or _FILE_RANK.fullmatch(parent)
    return int(found[found.lastindex or 1]) if found else None


def files_are_ranks(
    files: Sequence[tuple[str, int | None]], lines: Iterable[tuple[int, int | None]]
) -> bool:
    """Whether the rank that a file is named for is the one of the job, and not a local or a node's.

    ``files`` are (path, rank by its name), ``lines`` (index of the file, rank that a line names as
    its writer). Then a line that names another rank was copied there, and the file is right.
    """
    named = {number: rank for number, (_, rank) in enumerate(files) if rank is not None}
    places = [(PurePath(files[number][0]).name, rank) for number, rank in named.items()]
    if len(named) < 2 or len(set(places)) < len(places):
        return False
    agree: set[int] = set()
    contradict: set[int] = set()
    ranks = set(named.values())
    for number, rank in lines:
        if rank is None or number not in named:
            continue
        if rank == named[number]:
            agree.add(number)
        elif rank not in ranks:
            contradict.add(number)
    if len(contradict - agree) > len(agree):
        return False
    return bool(agree) or (not contradict and len(named) >= _MANY_FILES)


def attempt_of_path(path: str) -> int:
    """The attempt that a file in torchrun's layout is of; 0 elsewhere."""
    found = _ATTEMPT.search(path)
    return int(found[1]) if found else 0
