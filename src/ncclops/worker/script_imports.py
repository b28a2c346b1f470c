"""Tells what the process was like before the code of a script's import ran, and after that.

Told are imports in the main thread whose modules stay imported, each as a whole. Of one that fails,
Python drops the module, and the next run imports it again; but modules that it has imported itself
stay, so of it those are told.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ncclops.restart.log import logged

# Python's own note in a module's spec: true from before the module's code runs until after it.
_IN_PROGRESS = "_initializing"
# Imports within imports are looked at to this depth: each look takes as long as a small import.
_DEPTH = 2


class Watch:
    """Calls ``look`` around each import, and ``tell`` at its end with what that returned."""

    def __init__(self, look: Callable[[], Any], tell: Callable[[Any, Any], object]) -> None:
        global _watch
        self._look, self._tell = look, tell
        self._under_way: list[_Import] = []  # each within the one before it
        self._main_thread = threading.main_thread().ident
        _watch = self
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Tell of no more imports."""
        global _watch
        _watch = None
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def begin_run(self) -> None:
        """No import is under way: an interruption may have left one in the books."""
        self._under_way.clear()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self._looks():
            return None
        spec = next((spec for f in self._others() if (spec := f(fullname, path, target))), None)
        if type(spec) is ModuleSpec:
            spec.__class__ = _Told
        return spec

    def _others(self) -> list[Callable[..., ModuleSpec | None]]:
        finders = [finder for finder in sys.meta_path if finder is not self]
        return [finder.find_spec for finder in finders if hasattr(finder, "find_spec")]

    def _looks(self) -> bool:
        return len(self._under_way) < _DEPTH and threading.get_ident() == self._main_thread

    def begins(self, spec: ModuleSpec) -> None:
        if self._looks():
            with logged("looking at the process before an import"):
                self._under_way.append(_Import(spec, self._look()))

    def has_ended(self, spec: ModuleSpec) -> None:
        if (this := next((each for each in self._under_way if each.spec is spec), None)) is None:
            return
        del self._under_way[self._under_way.index(this) :]
        with logged("looking at the process after an import"):
            told = [(this.state, self._look())] if spec.name in sys.modules else this.told
            if self._under_way:
                self._under_way[-1].told += told
                return
            for before, after in told:
                self._tell(before, after)


_watch: Watch | None = None


@dataclass(eq=False)
class _Import:
    spec: ModuleSpec
    state: Any  # before it
    told: list[tuple[Any, Any]] = field(default_factory=list)  # of the imports within it


class _Told(ModuleSpec):
    """A spec as Python uses it, until its module is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name != _IN_PROGRESS:
            return
        if not value:
            super().__setattr__("__class__", ModuleSpec)
        if _watch is not None:
            (_watch.begins if value else _watch.has_ended)(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is as Python makes specs: it may be for another process."""
        return ModuleSpec, (self.name, self.loader), dict(vars(self))
