"""The backends of torch's process groups, and what NCCL reports of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

# Makes the backends of a group, for all of torch's functions that make one but ``split_group``.
MAKER = "_new_process_group_helper"
# Those of torch's second engine of NCCL, which makes a communicator in the backend's constructor.
_MAKERS_OF_NCCL = ("_create_nccl2_process_group", "_create_nccl_lazy_process_group")

# Not TIMEOUT: how long a rank may wait is what the soft timeout says.
_NCCL_ERRORS = ("COMM_ERROR", "REMOTE_ERROR")


def has_watchdog(backend: Any) -> bool:
    return type(backend).__name__.startswith("ProcessGroupNCCL")


def is_of_second_engine(backend: Any) -> bool:
    """Whether it is of torch's second engine of NCCL, which is the usual one from torch 2.15 on."""
    return type(backend).__name__ == "ProcessGroupNCCL2"


def all_backends() -> list[Any]:
    """Each backend object of each group once; groups may share them."""
    found: dict[int, Any] = {}
    for group in list(distributed_c10d._world.pg_map):
        found |= {id(backend): backend for backend in backends_of(group)}
    return list(found.values())


def backends_of(group: Any) -> Iterator[Any]:
    """The backend objects of ``group``, one for each kind of device."""
    for device in getattr(group, "_device_types", ()):
        with contextlib.suppress(RuntimeError):
            backend = group._get_backend(torch.device(device))
            # TORCH_DISTRIBUTED_DEBUG=DETAIL puts one around it that passes no abort on.
            yield getattr(backend, "wrapped_pg", backend)


def nccl_library() -> ctypes.CDLL:
    """NCCL as torch is linked with it. Raises ``OSError``: this torch has none."""
    return ctypes.CDLL("libtorch_cuda.so", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)


def nccl_error() -> str | None:
    """What NCCL has reported of a communicator outside of any call; None: nothing.

    torch's watchdog asks for it. With ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0`` it only prints what it
    finds, and the ranks wait. Before torch 2.7 nothing else says so.
    """
    for group in list(distributed_c10d._world.pg_map):
        for backend in backends_of(group):
            if (error := error_of(backend)) is not None:
                return f"NCCL reports an error of group {group.group_desc} ({error})"
    return None


def error_of(backend: Any) -> str | None:
    """Likewise, of one backend."""
    if has_watchdog(backend) and hasattr(backend, "get_error"):
        error: str = backend.get_error().name
        return error if error in _NCCL_ERRORS else None
    return None


def is_making_nccl(frame: FrameType | None) -> bool:
    """Whether the thread of ``frame`` makes a communicator that no backend shows yet."""
    frames = traceback.walk_stack(frame) if frame is not None else ()
    return any(each.f_code.co_name in _MAKERS_OF_NCCL for each, _ in frames)


def backends_in_the_making(main_thread: FrameType | None) -> list[Any]:
    """Those that ``init_process_group`` or ``new_group`` has made, and not yet put on record."""
    found: dict[int, Any] = {}
    for frame, _ in traceback.walk_stack(main_thread) if main_thread is not None else ():
        if frame.f_code.co_name == MAKER:
            variables = frame.f_locals
            for name in ("backend_class", "eager_backend"):
                if (backend := variables.get(name)) is not None:
                    found[id(backend)] = backend
    return list(found.values())


def is_wrapped() -> bool:
    """Whether torch puts a wrapper around each backend."""
    return distributed.get_debug_level() is distributed.DebugLevel.DETAIL
