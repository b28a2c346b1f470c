"""Decides for the script how process groups come up: their timeout, eager or lazy, the barrier.

No variable sets the timeout of a collective or the moment at which NCCL communicators are made:
torch takes both from the arguments of ``init_process_group`` and ``new_group`` alone. So those
get defaults of ours, put in place when torch.distributed is imported; a script that never imports
it pays nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

from ncclops.worker import bootstrap_barrier, record
from ncclops.worker.variables import BOOTSTRAP_BARRIER, GROUP_TIMEOUT_S, NCCL_INIT

_MODULE = "torch.distributed.distributed_c10d"
# Each makes a group and takes `timeout`; what is built on them (DeviceMesh, FSDP2) calls them.
_MAKERS = ("init_process_group", "new_group")
# torch's own default for NCCL groups.
_BARRIER_LIMIT = timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True)
class GroupRules:
    """What the agent wants of process groups; see ``variables``.

    ``timeout`` is for groups that the script makes without one. ``init`` eager or lazy gives or
    withholds ``device_id``; None leaves it to the script. ``barrier``: whether all ranks meet
    once the default group is up, so that a failure to start is told from a later one.
    """

    timeout: timedelta | None
    init: str | None
    barrier: bool

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> GroupRules:
        limit_s = environ.get(GROUP_TIMEOUT_S)
        return cls(
            timeout=None if limit_s is None else timedelta(seconds=float(limit_s)),
            init=environ.get(NCCL_INIT),
            barrier=environ.get(BOOTSTRAP_BARRIER) != "skipped",
        )


def apply(rules: GroupRules) -> None:
    """Have groups made by ``rules`` from now on. Call before torch is imported."""
    after_import(_MODULE, lambda module: _patch(module, rules))


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Run ``action`` on the module ``name`` as soon as it has been imported."""
    sys.meta_path.insert(0, _AfterImport(name, action))


def _patch(module: ModuleType, rules: GroupRules) -> None:
    module.init_process_group = _bootstrapping(module.init_process_group, rules)  # type: ignore[attr-defined]
    if rules.timeout is not None:
        for name in _MAKERS:
            setattr(module, name, _with_default(getattr(module, name), rules.timeout))


def _bootstrapping(init: Callable[..., Any], rules: GroupRules) -> Callable[..., Any]:
    @functools.wraps(init)
    def bootstrap(*args: Any, **kwargs: Any) -> Any:
        if rules.init == "lazy":
            kwargs.pop("device_id", None)
        elif rules.init == "eager" and kwargs.get("device_id") is None:
            kwargs |= _own_device(kwargs.get("backend", args[0] if args else None))
        result = init(*args, **kwargs)
        if rules.barrier:
            own = kwargs.get("timeout", args[2] if len(args) > 2 else None)
            bootstrap_barrier.meet(own or rules.timeout or _BARRIER_LIMIT)
        record.tell("bootstrapped")
        return result

    return bootstrap


def _own_device(backend: str | None) -> dict[str, Any]:
    """``device_id`` for eager NCCL: this rank's GPU, where there is one and NCCL is used."""
    import torch

    if not torch.cuda.is_available() or (backend is not None and "nccl" not in str(backend)):
        return {}
    return {"device_id": torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))}


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
