"""Where a rank's main thread stands: the user's line, and what it is about below that."""

from __future__ import annotations

import re

from ncclops.flight.model import DATA_LOADER, SOME_COLLECTIVE, RankPlace
from ncclops.stacks.frame import Frame
from ncclops.stacks.ownership import out_of_script, user_frame
from ncclops.stacks.parsing import main_thread, parse

_DISTRIBUTED = re.compile(r"(?:^|/)torch/(?:distributed/|nn/parallel/|_C/_distributed)")
_C10D = "torch/distributed/distributed_c10d.py"
_LOADER = re.compile(r"(?:^|/)torch/utils/data/")

# What frames below the user's are about, innermost first.
_ABOUT = (
    (_LOADER, DATA_LOADER),
    (re.compile(r"(?:^|/)torch/distributed/checkpoint/"), "saving or loading a checkpoint"),
    (re.compile(r"(?:^|/)torch/serialization\.py"), "saving or loading a file"),
    (re.compile(r"(?:^|/)torch/_(?:inductor|dynamo)/"), "compiling"),
    (re.compile(r"(?:^|/)torch/autograd/"), "the backward pass"),
    (re.compile(r"(?:/lib/python3[^/]*/|^)(?:ssl|socket|http/|urllib/)"), "the network"),
    (re.compile(r"(?:/lib/python3[^/]*/|^)subprocess\.py"), "a subprocess"),
    (re.compile(r"(?:/lib/python3[^/]*/|^)threading\.py"), "a lock or another thread"),
)
# Functions of distributed_c10d.py in which no rank waits for others.
_NOT_COLLECTIVE = {
    "wrapper", "_get_default_group", "destroy_process_group", "<module>",
}  # fmt: skip


def place_in(text: str) -> RankPlace | None:
    """Where the main thread is, or the first other one in user code; None without any frame."""
    threads = [thread for thread in parse(text) if thread.frames]
    main = main_thread(threads)
    if main is None:
        return None
    place = place_of(main.frames)
    if place.frame is not None or place.what is not None:
        return place
    # A main thread without user code (an embedding interpreter, a launcher that joins).
    others = (place_of(thread.frames) for thread in threads)
    return next((other for other in others if other.frame is not None), place)


def place_of(frames: tuple[Frame, ...]) -> RankPlace:
    """Where a thread with these frames, innermost first, stands."""
    mine = user_frame(frames)
    below = frames[: frames.index(mine)] if mine is not None else frames
    what = _about(below)
    if what is None and any(_LOADER.search(frame.file) for frame in frames):
        what = DATA_LOADER  # a dataset of the user's, read in the main process
    if mine is None:
        what = next(filter(None, map(out_of_script, frames)), what)
    return RankPlace(mine, inside=_inside(below), what=what, frames=frames[:32])


def _inside(below: tuple[Frame, ...]) -> str | None:
    """The outermost torch.distributed function between the user's frame and the machine."""
    found = None
    for frame in below:
        if frame.file.endswith(_C10D) and frame.function not in _NOT_COLLECTIVE:
            found = frame.function
    if found is not None:
        return found
    # DDP, FSDP, DTensor and functional collectives: somewhere below the user's frame.
    waits = any(_DISTRIBUTED.search(frame.file) for frame in below)
    return SOME_COLLECTIVE if waits and _about(below) is None else None


def _about(below: tuple[Frame, ...]) -> str | None:
    for frame in below:
        for pattern, words in _ABOUT:
            if pattern.search(frame.file):
                return words
    return None
