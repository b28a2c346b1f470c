"""Which of many stack frames is the user's own.

The innermost frame outside torch, this package, the standard library and installed packages is
where the user's code stands; with none, an installed package's stands in (a trainer that is
installed is user code to those who wrote it).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import lru_cache

from ncclops.flight.model import DATA_LOADER, Frame, Place

_USER, _PACKAGE, _MACHINERY = range(3)
_INSTALLED = re.compile(r"/(?:site|dist)-packages/([^/]+)")
_STDLIB = re.compile(r"/lib/python3\.\d+/|^<frozen |/lib/python3\d+\.zip/")
_MACHINERY_PACKAGES = {
    "torch", "ncclops", "torchdata", "hta", "triton", "functorch", "typing_extensions",
}  # fmt: skip
_OURS = re.compile(
    r"(?:^|/)ncclops/(?:agent|capture|classify|cli|cluster|control|env|flight|health|launch|receipts|record|restart|worker)/"
)
_DISTRIBUTED = re.compile(r"(?:^|/)torch/(?:distributed/|nn/parallel/|_C/_distributed)")
# py-spy shortens files to what can be imported.
_SHORTENED = re.compile(r"^(?:torch/|(\w+)(?:/\w+)*\.py$)")
_BUILT = re.compile(r"/torch/(?:distributed|csrc|nn|utils/data|autograd|_inductor|_dynamo)/")
_C10D = "torch/distributed/distributed_c10d.py"
_LOADER = re.compile(r"(?:^|/)torch/utils/data/")
_OUR_LOOP = re.compile(r"(?:^|/)ncclops/restart/loop\.py$")
_FINISHED = "done with the script"
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
# Functions of distributed_c10d.py in which a rank waits for others. Wrappers stand in c10d_logger.
_NOT_COLLECTIVE = {
    "wrapper", "init_process_group", "_get_default_group", "destroy_process_group", "<module>",
}  # fmt: skip


@lru_cache(maxsize=65536)
def _kind(file: str) -> int:
    if package := _INSTALLED.search(file):
        name = package.group(1).removesuffix(".py")
        return _MACHINERY if name in _MACHINERY_PACKAGES else _PACKAGE
    if file.startswith("<") or _STDLIB.search(file) or _OURS.search(file):
        return _MACHINERY
    if _BUILT.search(file):
        return _MACHINERY  # a torch that is not installed as a package
    short = _SHORTENED.match(file)
    if short and (short.group(1) is None or short.group(1) in sys.stdlib_module_names):
        return _MACHINERY
    return _USER


def is_machinery(file: str) -> bool:
    """Whether a file belongs to Python, torch or this package."""
    return _kind(file) == _MACHINERY


def user_frame(frames: Iterable[Frame]) -> Frame | None:
    """The innermost frame that is the user's; ``frames`` come innermost first."""
    best: Frame | None = None
    for frame in frames:
        kind = _kind(frame.file)
        if kind == _USER:
            return frame
        if kind == _PACKAGE and best is None:
            best = frame
    return best


def user_frames(frames: Iterable[Frame], most: int = 8) -> tuple[Frame, ...]:
    """Frames from :func:`user_frame`'s outwards, without the machinery's."""
    found = [frame for frame in frames if _kind(frame.file) != _MACHINERY]
    mine = user_frame(found)
    return tuple(found[found.index(mine) :][:most]) if mine is not None else ()


def place_of(frames: tuple[Frame, ...]) -> Place:
    """Where a thread with these frames, innermost first, stands."""
    mine = user_frame(frames)
    below = frames[: frames.index(mine)] if mine is not None else frames
    what = _about(below)
    if what is None and any(_LOADER.search(frame.file) for frame in frames):
        what = DATA_LOADER  # a dataset of the user's, read in the main process
    if mine is None and any(map(_waits_for_the_end, frames)):
        what = _FINISHED
    return Place(mine, inside=_inside(below), what=what, frames=frames[:32])


def _waits_for_the_end(frame: Frame) -> bool:
    """Whether our loop waits there until the other ranks have finished as well."""
    name = frame.function.rpartition(".")[2]
    return name == "_await_outcome" and _OUR_LOOP.search(frame.file) is not None


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
    return "a collective" if waits and _about(below) is None else None


def _about(below: tuple[Frame, ...]) -> str | None:
    for frame in below:
        for pattern, words in _ABOUT:
            if pattern.search(frame.file):
                return words
    return None
