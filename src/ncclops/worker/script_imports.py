"""Tells when a script imports something, before the code of it runs and after that.

Told are imports in the main thread that no other import is part of.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ncclops.restart.log import logged

# Python's own note in a module's spec: true from before the module's code runs until after it.
_IN_PROGRESS = "_initializing"


def watch(before: Callable[[], Any], after: Callable[[Any], object]) -> Callable[[], None]:
    """Call ``before`` when an import begins, and ``after`` at its end, with what that returned.

    Returns what ends that.
    """
    finder = _Finder(before, after)
    sys.meta_path.insert(0, finder)

    def stop() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)

    return stop


class _Finder:
    def __init__(self, before: Callable[[], Any], after: Callable[[Any], object]) -> None:
        self._before, self._after = before, after
        self._under_way: ModuleSpec | None = None
        self._state: Any = None
        self._main_thread = threading.main_thread().ident

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._under_way is not None or threading.get_ident() != self._main_thread:
            return None
        spec = next((spec for f in self._others() if (spec := f(fullname, path, target))), None)
        if type(spec) is ModuleSpec:
            spec.__class__ = _Told
            vars(spec)[_FINDER] = self
        return spec

    def _others(self) -> list[Callable[..., ModuleSpec | None]]:
        finders = [finder for finder in sys.meta_path if finder is not self]
        return [finder.find_spec for finder in finders if hasattr(finder, "find_spec")]

    def begins(self, spec: ModuleSpec) -> None:
        if self._under_way is None and threading.get_ident() == self._main_thread:
            self._under_way = spec
            with logged("looking at the process before an import"):
                self._state = self._before()

    def has_ended(self, spec: ModuleSpec) -> None:
        if self._under_way is spec:
            self._under_way, state, self._state = None, self._state, None
            if state is not None:
                with logged("looking at the process after an import"):
                    self._after(state)


_FINDER = "_ncclops_finder"


class _Told(ModuleSpec):
    """A spec as Python uses it, until its module is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name != _IN_PROGRESS:
            return
        finder: _Finder = vars(self)[_FINDER]
        if value:
            finder.begins(self)
        else:
            super().__setattr__("__class__", ModuleSpec)
            del vars(self)[_FINDER]
            finder.has_ended(self)
