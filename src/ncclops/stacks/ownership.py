"""Whose code a frame is: the user's own, an installed package's, or the framework's.

The framework is Python's library, torch and what comes with it, and this package. The innermost
frame outside of it is where the user's code stands; where all are of installed packages, the
innermost of those stands in (a trainer that is installed is user code to those who wrote it).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import lru_cache
from pathlib import Path

from ncclops.stacks.frame import Frame


class Owner(IntEnum):
    """The owner of a file."""

    USER = 0
    PACKAGE = 1
    FRAMEWORK = 2


_INSTALLED = re.compile(r"/(?:site|dist)-packages/([^/]+)")
_STDLIB = re.compile(r"/lib/python3\.\d+/|/lib/python3\d+\.zip/|/lib/python3/(?!dist-|site-)")
_FRAMEWORK_PACKAGES = {
    "torch", "ncclops", "torchdata", "hta", "triton", "functorch", "typing_extensions",
}  # fmt: skip
# Code without a file that people type; all other (<frozen …>, <string>, torch's) is made by code.
_TYPED = re.compile(r"<(?:stdin|ipython-input)")
# Files of this package wherever it is installed. A user's script may be in a checkout of it.
_OURS = re.compile(
    r"(?:^|/)ncclops/(?:(?:{})/|(?:__main__|receipt)\.py$)".format(
        "|".join(sorted(path.parent.name for path in Path(__file__).parents[1].glob("*/*.py")))
    )
)
# py-spy shortens files to what can be imported.
_SHORTENED = re.compile(r"^(?:torch/|(\w+)(?:/\w+)*\.py$)")
# A torch that is not installed as a package.
_BUILT = re.compile(r"/torch/(?:distributed|csrc|nn|utils/data|autograd|_\w+)/")

_BY_EXCEPTION = "out of the script, by an exception"
# Functions of ours, by their file, that run once the script has been left: what has become of it.
_AFTER_SCRIPT = {
    "restart/loop.py": {
        "_await_abort": _BY_EXCEPTION,
        "_await_outcome": "done with the script, waiting for the others",
    },
    "worker/printed.py": {"explain": _BY_EXCEPTION},
}
_OUR_FILE = re.compile(r"(?:^|/)ncclops/({})$".format("|".join(map(re.escape, _AFTER_SCRIPT))))


@lru_cache(maxsize=65536)
def owner(file: str) -> Owner:
    """The owner of ``file``, on whatever machine the stack was taken."""
    if package := _INSTALLED.search(file):
        name = package.group(1).removesuffix(".py")
        return Owner.FRAMEWORK if name in _FRAMEWORK_PACKAGES else Owner.PACKAGE
    if file.startswith("<"):
        return Owner.USER if _TYPED.match(file) else Owner.FRAMEWORK
    if any(pattern.search(file) for pattern in (_STDLIB, _OURS, _BUILT)):
        return Owner.FRAMEWORK
    short = _SHORTENED.match(file)
    if short and (short.group(1) is None or short.group(1) in sys.stdlib_module_names):
        return Owner.FRAMEWORK
    return Owner.USER


def package_of(file: str) -> str | None:
    """The installed package that ``file`` is part of, Python's library as one; None: the user's."""
    if package := _INSTALLED.search(file):
        return package.group(1).removesuffix(".py")
    if owner(file) is Owner.USER:
        return None
    if _OURS.search(file):
        return "ncclops"
    return "torch" if _BUILT.search(file) or file.startswith("torch/") else "Python"


def is_framework(file: str) -> bool:
    """Whether ``file`` belongs to Python, torch or this package."""
    return owner(file) is Owner.FRAMEWORK


def is_ours(frame: Frame) -> bool:
    """Whether ``frame`` is in code of this package."""
    return package_of(frame.file) == "ncclops"


def is_users(frame: Frame) -> bool:
    """Whether ``frame`` is in code that is neither installed nor the framework's."""
    return owner(frame.file) is Owner.USER


def user_frame(frames: Iterable[Frame]) -> Frame | None:
    """The innermost frame that is the user's; ``frames`` come innermost first."""
    best: Frame | None = None
    for frame in frames:
        whose = owner(frame.file)
        if whose is Owner.USER:
            return frame
        if whose is Owner.PACKAGE and best is None:
            best = frame
    return best


def user_frames(frames: Iterable[Frame], most: int = 8) -> tuple[Frame, ...]:
    """Frames from :func:`user_frame`'s outwards, without the framework's."""
    found = [frame for frame in frames if not is_framework(frame.file)]
    mine = user_frame(found)
    return tuple(found[found.index(mine) :][:most]) if mine is not None else ()


def out_of_script(frame: Frame) -> str | None:
    """How a rank has left its script that is in this function of ours; None in any other."""
    ours = _OUR_FILE.search(frame.file)
    return None if ours is None else _AFTER_SCRIPT[ours[1]].get(frame.function.rpartition(".")[2])


def import_under_way(frames: Sequence[Frame]) -> str | None:
    """Where the line of :func:`user_frame` has led to an import: ``an import``, with the file of
    the module that is asked for where it runs already. ``frames`` come innermost first.

    A rank that imports reads files: it waits for a disk or a file server, not for its peers.
    """
    mine = user_frame(frames)
    below = frames if mine is None else frames[: frames.index(mine)]
    imports = [i for i, frame in enumerate(below) if is_import(frame)]
    if not imports:
        return None
    inside = next((each for each in reversed(below[: imports[-1]]) if not is_import(each)), None)
    return "an import" if inside is None else f"an import ({inside.file})"


def is_import(frame: Frame) -> bool:
    """Whether ``frame`` is Python's own, and runs a statement ``import``."""
    return frame.file.startswith("<frozen importlib.")
