"""Gives process groups the profile's timeout, where the script does not name one itself.

No variable sets the timeout of a collective: torch takes it from ``init_process_group`` and
``new_group`` alone. So the two get a default of ours, put in place when torch.distributed is
imported; a script that never imports it pays nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

_MODULE = "torch.distributed.distributed_c10d"
# Each makes a group and takes `timeout`; what is built on them (DeviceMesh, FSDP2) calls them.
_MAKERS = ("init_process_group", "new_group")


def set_default_timeout(timeout: timedelta) -> None:
    """From now on groups made without a ``timeout`` get this one. Call before torch is imported."""
    sys.meta_path.insert(0, _AfterImport(_MODULE, lambda module: _patch(module, timeout)))


def _patch(module: ModuleType, timeout: timedelta) -> None:
    for name in _MAKERS:
        setattr(module, name, _with_default(getattr(module, name), timeout))


def _with_default(make_group: Callable[..., Any], timeout: timedelta) -> Callable[..., Any]:
    import inspect  # torch has loaded it by now; a script without torch need not

    signature = inspect.signature(make_group)

    @functools.wraps(make_group)
    def with_default(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("timeout") is None:  # None is torch's own word for "the default"
            given.arguments["timeout"] = timeout
        return make_group(*given.args, **given.kwargs)

    return with_default


class _AfterImport:
    """Runs ``action`` on one module right after its code has run, then gets out of the way."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
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
    def __init__(self, loader: Any, action: Callable[[ModuleType], None]) -> None:
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
