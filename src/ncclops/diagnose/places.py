"""Where a rank is, by line of the user's code; and ranks that are at the same place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncclops.rank_lists import ranks_named
from ncclops.record import snapshot_files, snapshot_records
from ncclops.record.regular_file import read_regular
from ncclops.record.snapshot_records import LastOperation
from ncclops.stacks.frame import Frame
from ncclops.stacks.ownership import (
    import_under_way,
    is_import,
    is_ours,
    is_users,
    out_of_script,
    user_frame,
)
from ncclops.stacks.parsing import main_thread, parse

_DISTRIBUTED = re.compile(r"/torch/distributed/(distributed_c10d|_functional_collectives)\.py$")
_ENTRY = re.compile(r"/ncclops/(worker/script|restart/wrap)\.py$")
_SHOWN_FRAMES = 12


@dataclass(frozen=True)
class RankView:
    """What a rank's snapshot says in short.

    ``frame`` is the innermost one of the user's code in the main thread (else of any), ``doing``
    the collective of torch.distributed that it is in or why it is not in the script, ``last`` the
    operation it entered last, ``reason`` why the rank did not answer.
    """

    rank: int
    host: str | None
    pid: int | None
    state: str | None
    frames: tuple[Frame, ...]
    frame: Frame | None
    doing: str | None
    last: LastOperation | None
    reason: str | None

    @property
    def place(self) -> str:
        """One line: where it is."""
        if self.frame is not None:
            within = self.doing or self._within
            return f"{self.frame}, in {within}" if within else str(self.frame)
        if self.doing is not None:
            return self.doing
        if (ours := next(filter(is_ours, self.frames), None)) is not None:
            return f"outside of the script, in {ours.function} of ncclops"
        if self.frames:
            return f"in {self.frames[0]}"
        return f"unknown: {self.reason or 'no stack'}"

    @property
    def _within(self) -> str | None:
        """The function that the line has led to, where that is of a package: a trainer's ranks are
        all in one line of the script, whatever they do there."""
        if not self.frames or self.frames[0] == self.frame:
            return None
        return import_under_way(self.frames) or self.frames[0].function


@dataclass(frozen=True)
class Cluster:
    """Ranks at the same place."""

    ranks: tuple[int, ...]
    place: str
    doing: str | None
    frame: Frame | None
    frames: tuple[Frame, ...]  # of the first rank: the main thread's, the innermost first

    def __str__(self) -> str:
        return f"{ranks_named(self.ranks)}: {self.place}"

    def to_json(self) -> dict[str, Any]:
        return {
            "ranks": list(self.ranks),
            "place": self.place,
            "doing": self.doing,
            "frame": None if self.frame is None else self.frame.to_json(),
            "frames": [frame.to_json() for frame in self.shown_frames],
        }

    @property
    def shown_frames(self) -> tuple[Frame, ...]:
        """The innermost ones, as far as the user's own at least."""
        mine = user_frame(self.frames)
        own = 0 if mine is None else self.frames.index(mine) + 1
        return self.frames[: max(_SHOWN_FRAMES, own)]


def read_rank(taken: Path, rank: int) -> RankView:
    """The snapshot of ``rank`` below ``taken``, in short; whatever is missing is None."""
    directory = snapshot_files.rank_dir(taken, rank)
    process = snapshot_records.process(directory)
    frames = _main_frames(directory / snapshot_files.STACKS)
    return RankView(
        rank=rank,
        host=process.host,
        pid=process.pid,
        state=process.state_name,
        frames=frames,
        frame=user_frame(frames),
        doing=doing(frames) or _other_program(process),
        last=snapshot_records.last_operation(directory),
        reason=snapshot_records.missing(directory).reason,
    )


def _other_program(process: snapshot_records.ProcessRecord) -> str | None:
    name = process.other_program
    return None if name is None else f"another program runs in its process (exec): {name}"


def _main_frames(path: Path) -> tuple[Frame, ...]:
    try:
        text = read_regular(path).decode(errors="replace")
    except OSError:
        return ()
    stack = main_thread(parse(text))
    return _inside_script(stack.frames) if stack is not None else ()


def _inside_script(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Without what the worker entry and the restart core have put below the script."""
    entry = next((i for i, frame in enumerate(frames) if _ENTRY.search(frame.file)), None)
    return frames[:entry] if entry else frames


def doing(frames: Sequence[Frame]) -> str | None:
    """The collective of torch.distributed that the innermost frames are in, or why a rank is not in
    its script; None where it runs code of its own.

    By the function that a script calls: ranks in one call may stand in different parts of it. One
    that has come from there to an import runs that, and does not wait for the others.
    """
    private = None
    for frame in frames:
        if is_users(frame) or is_import(frame):
            break
        if _DISTRIBUTED.search(frame.file):
            name = frame.function.rpartition(".")[2]
            if not name.startswith(("_", "<")):  # <module>: it is being imported
                return name
            private = private or (None if name.startswith("<") else name)
        elif (waits := out_of_script(frame)) is not None:
            return waits
    return private


def describe_operation(last: LastOperation) -> str:
    """``last``, for people."""
    return f"{last.op} number {last.seq} of {last.desc or last.name}"


def cluster(views: Iterable[RankView]) -> list[Cluster]:
    """``views`` by place, the largest first; among equals the one with the lowest rank."""
    together: dict[str, list[RankView]] = {}
    for view in views:
        together.setdefault(view.place, []).append(view)
    clusters = [
        Cluster(
            tuple(view.rank for view in members),
            place,
            members[0].doing,
            members[0].frame,
            members[0].frames,
        )
        for place, members in together.items()
    ]
    return sorted(clusters, key=lambda each: (-len(each.ranks), each.ranks[0]))
