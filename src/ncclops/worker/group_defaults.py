"""Decides for the script how process groups come up: their timeout, eager or lazy, the barrier.

No variable sets the timeout of a collective or the moment at which NCCL communicators are made:
torch takes both from the arguments of ``init_process_group`` and ``new_group`` alone. So those
get defaults of ours, put in place when torch.distributed is imported; a script that never imports
it pays nothing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

from ncclops.record import worker_record
from ncclops.record.events import BootstrappedEvent
from ncclops.record.variables import BOOTSTRAP_BARRIER, NCCL_INIT
from ncclops.worker import after_import, bootstrap_barrier
from ncclops.worker.group_timeouts import GroupTimeouts

_MODULE = "torch.distributed.distributed_c10d"
# Each makes a group and takes `timeout`; what is built on them (DeviceMesh, FSDP2) calls them.
_MAKERS = ("init_process_group", "new_group", "split_group", "_new_group_with_tag")
_WORLD = "default_pg"  # torch's description of the default group
# torch's own default for NCCL groups.
_BARRIER_LIMIT = timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True)
class GroupRules:
    """What the agent wants of process groups; see ``variables``.

    ``init`` eager or lazy gives or withholds ``device_id``; None leaves it to the script.
    ``barrier``: whether all ranks meet once the default group is up, so that a failure to start
    is distinguished from a later one.
    """

    init: str | None
    barrier: bool

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> GroupRules:
        return cls(
            init=environ.get(NCCL_INIT),
            barrier=environ.get(BOOTSTRAP_BARRIER) != "skipped",
        )


def apply(rules: GroupRules, timeouts: GroupTimeouts | None) -> None:
    """Have groups made by ``rules``, with ``timeouts``. Call before torch is imported."""
    after_import.act(_MODULE, lambda module: _patch(module, rules, timeouts))


def _patch(module: ModuleType, rules: GroupRules, timeouts: GroupTimeouts | None) -> None:
    module.init_process_group = _bootstrapping(module.init_process_group, rules, timeouts)  # type: ignore[attr-defined]
    if timeouts is None:
        return
    for name in _MAKERS:
        if hasattr(module, name):
            setattr(module, name, _with_default(getattr(module, name), timeouts))


def _bootstrapping(
    init: Callable[..., Any], rules: GroupRules, timeouts: GroupTimeouts | None
) -> Callable[..., Any]:
    @functools.wraps(init)
    def bootstrap(*args: Any, **kwargs: Any) -> Any:
        if rules.init == "lazy":
            kwargs.pop("device_id", None)
        elif rules.init == "eager" and kwargs.get("device_id") is None:
            kwargs |= _own_device(kwargs.get("backend", args[0] if args else None))
        result = init(*args, **kwargs)
        if rules.barrier:
            own = kwargs.get("timeout", args[2] if len(args) > 2 else None)
            usual = None if timeouts is None else timeouts.default(_WORLD)
            bootstrap_barrier.meet(own or usual or _BARRIER_LIMIT)
        worker_record.report(BootstrappedEvent())
        return result

    return bootstrap


def _own_device(backend: str | None) -> dict[str, Any]:
    """``device_id`` for eager NCCL: this rank's GPU, where there is one and NCCL is used."""
    import torch

    if not torch.cuda.is_available() or (backend is not None and "nccl" not in str(backend)):
        return {}
    return {"device_id": torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))}


def _with_default(make_group: Callable[..., Any], timeouts: GroupTimeouts) -> Callable[..., Any]:
    import inspect  # torch has loaded it by now; a script without torch need not

    signature = inspect.signature(make_group)
    described = _WORLD if make_group.__name__ == "init_process_group" else None

    @functools.wraps(make_group)
    def with_default(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("timeout") is None:  # None is torch's own word for "the default"
            default = timeouts.default(given.arguments.get("group_desc") or described)
            if default is not None:
                given.arguments["timeout"] = default
        group = make_group(*given.args, **given.kwargs)
        timeouts.note_made()
        return group

    return with_default
