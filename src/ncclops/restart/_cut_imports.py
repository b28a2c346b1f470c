"""A package whose import an interruption has cut can be imported again.

Python forgets the package then, and not those of its modules that were whole by that time. The next
import of it finds these, and does not make them attributes of the new package, nor does it import
packages between: ``torch._dynamo`` had no ``utils`` from then on, in each iteration. So they are
put aside, and found again when they are imported the next time, as if from a file, without being
run once more: what they have registered elsewhere (operators of torch) is there already.

An interruption waits for imports, but not for ever (``_interrupt.delicate``).
"""

from __future__ import annotations

import contextlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class _Again(Loader):
    """Gives the import system ``module``, which was whole, as it is."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        # Python has set another one; modules such as torch's configurations refuse either.
        with contextlib.suppress(AttributeError):
            module.__spec__ = self._spec


class _Aside(MetaPathFinder):
    """Finds modules that were whole when their package was forgotten."""

    def __init__(self) -> None:
        self.modules: dict[str, ModuleType] = {}
        self.never_there: frozenset[str] | None = None  # packages that some libraries do without

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        module = self.modules.get(name)
        if module is None:
            return None
        return ModuleSpec(name, _Again(module), is_package=hasattr(module, "__path__"))


_aside = _Aside()


def let_import_again() -> None:
    """Put modules aside whose package was cut since the last call, if any. No import is under way.

    The first call only looks: some libraries have modules without a package at all times.
    """
    for name in [each for each in _aside.modules if each in sys.modules]:
        del _aside.modules[name]
    names = frozenset(sys.modules)
    cut = frozenset(name.rpartition(".")[0] for name in names if "." in name) - names
    if _aside.never_there is None:
        _aside.never_there = cut
    cut = frozenset(filter(_is_to_be_found, cut - _aside.never_there))
    if not cut:
        return
    within = tuple(f"{package}." for package in cut)
    for name in names:
        if name.startswith(within):
            _aside.modules[name] = sys.modules.pop(name)
    if _aside not in sys.meta_path:
        sys.meta_path.insert(0, _aside)


def _is_to_be_found(package: str) -> bool:
    """Whether an import would find it; not of one within another that has been forgotten."""
    above = package.rpartition(".")[0]
    if above and above not in sys.modules:
        return False
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        return find_spec(package) is not None
    return False
