"""``ncclops.restart`` under the import name of NVIDIA's in-process wrapper, if that is asked for.

``serve()`` puts two finders into ``sys.meta_path``: one that answers for
``nvidia_resiliency_ext.inprocess`` and its modules before any other, and one, behind all others,
that answers for the package above it where that is not installed. Whatever else the real package
has (checkpointing, straggler detection) comes from it, if it is there.

A module under the other name has no code of its own: its names are those of ours, looked up when
they are used. So classes are the same under both names, and nothing is imported before it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "nvidia_resiliency_ext"
SERVED = f"{PACKAGE}.inprocess"
_OURS = "ncclops.restart"

# What the other wrapper documents; further modules of ours are no part of its API.
_MODULES = frozenset(
    {
        "abort",
        "attribution",
        "completion",
        "compose",
        "exception",
        "finalize",
        "health_check",
        "initialize",
        "monitor_process",
        "monitor_thread",
        "nested_restarter",
        "param_utils",
        "progress_watchdog",
        "rank_assignment",
        "sibling_monitor",
        "state",
        "store",
        "terminate",
        "utils",
        "wrap",
    }
)


class ServedModule(ModuleType):
    """A module of ours under the other name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if self.__name__ == SERVED and name in _MODULES:
            return import_module(f"{SERVED}.{name}")
        try:
            return getattr(_ours(self.__name__), name)
        except AttributeError:
            raise AttributeError(_lacking(f"{self.__name__}.{name}")) from None

    def __dir__(self) -> list[str]:
        return dir(_ours(self.__name__))


def serve() -> None:
    """Serve ``nvidia_resiliency_ext.inprocess`` from now on, in this process; again is nothing.

    Call it before anything imports that name. Raises ``ImportError`` if the real package's has been
    imported: a process that has both would wrap with one and raise with the other.
    """
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith(f"{SERVED}.") and not isinstance(module, ServedModule):
            where = getattr(module, "__file__", None) or "an installed package"
            raise ImportError(
                f"{name} has been imported from {where}: ask for ncclops's before that, or not"
                " at all"
            )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        sys.meta_path.append(_PackageFinder())


def serve_or_exit() -> None:
    """:func:`serve`, for a process whose first act it is: refused, it prints the line and exits."""
    try:
        serve()
    except ImportError as error:
        print(f"ncclops: error: {error}", file=sys.stderr)
        sys.exit(2)  # as for a UsageError, which the restart core does not know


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None if spec.name == PACKAGE else ServedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ != PACKAGE:
            _ours(module.__name__)  # so that what it lacks, such as torch, is missing now


class _Finder:
    """Answers for the modules that we serve, before the real package does."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == SERVED:
            return ModuleSpec(name, _Loader(), origin=_OURS, is_package=True)
        above, _, own = name.rpartition(".")
        if above != SERVED:
            return None
        if own not in _MODULES:
            raise ModuleNotFoundError(_lacking(name), name=name)
        return ModuleSpec(name, _Loader(), origin=f"{_OURS}.{own}")


class _PackageFinder:
    """Answers for the package above, where no other finder has."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == PACKAGE:
            return ModuleSpec(name, _Loader(), origin=_OURS, is_package=True)
        loader = getattr(sys.modules.get(PACKAGE), "__loader__", None)
        if name.startswith(f"{PACKAGE}.") and isinstance(loader, _Loader):
            raise ModuleNotFoundError(_lacking(name), name=name)
        return None


def _ours(name: str) -> ModuleType:
    return import_module(_OURS + name.removeprefix(SERVED))


def _lacking(name: str) -> str:
    return (
        f"{name} is not there: ncclops serves {SERVED} in this process and has nothing of that"
        " name; install nvidia-resiliency-ext and run without the alias where it is needed"
    )
