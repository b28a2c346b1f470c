"""How a function is named, so that another process finds the same one.

A rank is forked from a process that has not imported the test: what it is to run travels as the
name of a module, its file and a name in it. Test modules often cannot be imported by name (pytest
loads them by path); the file is then loaded under that name.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ncclops.errors import UsageError


@dataclass(frozen=True)
class Target:
    """A function by name. ``file`` is ``None`` where the module is found by name alone."""

    module: str
    name: str
    file: str | None

    @classmethod
    def of(cls, function: Callable[..., Any] | str) -> Target:
        """The target of a function of a module, or of ``module:name`` or ``file.py:name``.

        Raises ``UsageError`` for what another process could not find.
        """
        if isinstance(function, str):
            return cls._spelled(function)
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        name = _name_in(module, function) if module is not None else None
        if module is None or name is None:
            label = getattr(function, "__qualname__", None) or repr(function)
            raise UsageError(
                f"{label} cannot be found by name, and ranks are processes of their own: define it "
                "at the top level of a module, and hand over what differs as args"
            )
        file = getattr(module, "__file__", None)
        called = Path(file).stem if module.__name__ == "__main__" and file else module.__name__
        return cls(called, name, file)

    @classmethod
    def _spelled(cls, text: str) -> Target:
        place, _, name = text.rpartition(":")
        if not place or not name:
            raise UsageError(f"{text!r} names no function: write module:name or file.py:name")
        if not place.endswith(".py"):
            return cls(place, name, None)
        path = Path(place).resolve()
        if not path.exists():
            raise UsageError(f"{text!r}: there is no file {path}")
        return cls(path.stem, name, str(path))

    def load(self) -> Callable[..., Any]:
        """The function, in the process that is to run it. Raises what its module raises."""
        function: Any = self._module()
        for part in self.name.split("."):
            function = getattr(function, part)
        found: Callable[..., Any] = function
        return found

    def _module(self) -> ModuleType:
        if self.file is None:
            return importlib.import_module(self.module)
        if not _found_by_name(self.module, self.file):
            _make_importable(self.module, Path(self.file))
        if _found_by_name(self.module, self.file):
            return importlib.import_module(self.module)
        spec = importlib.util.spec_from_file_location(self.module, self.file)
        if spec is None or spec.loader is None:
            raise UsageError(f"{self.file} is no Python file that could be loaded")
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module  # pickle looks classes up there
        spec.loader.exec_module(module)
        return module


def _name_in(module: ModuleType, function: object) -> str | None:
    """The name that leads to ``function``: a decorator's result keeps the name of what it wraps."""
    qualified = getattr(function, "__qualname__", "")
    names = [qualified, *(name for name, value in vars(module).items() if value is function)]
    for name in names:
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is function:
            return name
    return None


def _found_by_name(module: str, file: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    origin = spec.origin if spec is not None else None
    return origin is not None and Path(origin).exists() and Path(origin).samefile(file)


def _make_importable(module: str, file: Path) -> None:
    """Put the directory on the path below which ``file`` lies as the name ``module`` has it.

    Last, so that nothing else is found there first: pickle imports the packages around a module.
    """
    *packages, name = module.split(".")
    parts = file.with_suffix("").parts
    if name == parts[-1] and tuple(packages) == parts[-1 - len(packages) : -1]:
        sys.path.append(str(file.parents[len(packages)]))
        importlib.invalidate_caches()
