"""Acts on a module right after any code imports it, and not before."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, cast

Action = Callable[[ModuleType], None]


def act(name: str, action: Action) -> None:
    """Call ``action`` with the module ``name`` once its code has run; now, if it has already.

    A function that it replaces is replaced in all modules that had taken it from there before, as
    those have that a fork server has imported.
    """
    if name in sys.modules:
        _act_on_imported(sys.modules[name], action)
    else:
        sys.meta_path.insert(0, _Finder(name, action))


def look_ahead(name: str) -> None:
    """Find now what ``act`` on the imported module ``name`` would look for in all modules.

    For a fork server. Who looks at an object writes to it, so that each worker would copy most of
    the memory that it shares.
    """
    module = sys.modules[name]
    places = _found_ahead[module] = _Places(_functions(module).values())
    places.look()


class _Places:
    """Where in all modules functions of one are, under whatever names."""

    def __init__(self, functions: Iterable[FunctionType]) -> None:
        self._wanted = set(map(id, functions))
        self._found: list[tuple[dict[str, Any], str]] = []
        self._looked_at = set[str]()

    def replace(self, replaced: Mapping[int, Any]) -> None:
        """Put values in the place of functions, which are given by their ``id``."""
        self.look()
        for names, name in self._found:
            if (old := id(names.get(name))) in replaced:
                names[name] = replaced[old]
        self._wanted |= set(map(id, replaced.values()))

    def look(self) -> None:
        """Look into the modules that have been imported since the last time."""
        new = {name: module for name, module in sys.modules.items() if name not in self._looked_at}
        self._looked_at |= new.keys()
        for module in new.values():
            names = getattr(module, "__dict__", {})
            self._found += [
                (names, name) for name, value in names.items() if id(value) in self._wanted
            ]


_found_ahead: dict[ModuleType, _Places] = {}


def _functions(module: ModuleType) -> dict[str, FunctionType]:
    # Not isinstance: it asks for __class__, and torch.distributed.reduce_op warns of being asked.
    return {n: value for n, value in vars(module).items() if type(value) is FunctionType}


def _act_on_imported(module: ModuleType, action: Action) -> None:
    before = _functions(module)
    action(module)
    replaced = {
        id(old): vars(module)[n] for n, old in before.items() if vars(module).get(n, old) is not old
    }
    if replaced:
        places = _found_ahead.get(module) or _Places(before.values())
        places.replace(replaced)


class _Finder:
    """Runs ``action`` on one module right after its code has run, then removes itself."""

    def __init__(self, name: str, action: Action) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = cast("Any", _ActingLoader(spec.loader, self._action))
        return spec


class _ActingLoader:
    def __init__(self, loader: Any, action: Action) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # What reads source lines (inspect, torch.compile) asks the module's own loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action(module)
