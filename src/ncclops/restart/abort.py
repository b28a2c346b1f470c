"""Aborting what the main thread may be blocked in. Called from the monitor thread."""

from __future__ import annotations

import logging
import multiprocessing
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from torch import distributed

from ncclops import flight_recorders
from ncclops.restart._groups import kept_beside, recorder
from ncclops.restart._groups.aborting import abort_groups
from ncclops.restart._groups.gloo_sockets import shut_down_gloo_connections
from ncclops.restart.log import logged
from ncclops.restart.state import FrozenState

log = logging.getLogger("ncclops.restart")


class Abort(ABC):
    """Called in the monitor thread after a fault, while the main thread may still be running.

    Its exceptions are logged and ignored: the restart goes on.
    """

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Abort; return ``state``, which a ``Compose`` passes on."""


class AbortTorchDistributed(Abort):
    """Aborts all process groups, whatever their backend, and destroys them.

    But for those of ``CallWrapper.new_group`` of which no operation is under way.

    ``torch_fr_trace_path``: where to leave torch's flight-recorder trace before, for
    ``torchfrtrace``: a directory, which gets ``nccl_trace_rank_<rank>``, or a prefix, which the
    rank is appended to.
    """

    def __init__(self, torch_fr_trace_path: str | None = None) -> None:
        self.torch_fr_trace_path = torch_fr_trace_path

    def __call__(self, state: FrozenState) -> FrozenState:
        """Abort every group."""
        if not distributed.is_available():
            return state
        if self.torch_fr_trace_path is not None and distributed.is_initialized():
            with logged("writing the flight-recorder trace"):
                _dump_trace(self.torch_fr_trace_path, state)
        with logged("looking which groups can be kept"):
            kept_beside.spare()
        # Also when no group is initialised: the main thread may be blocked in making the first.
        with logged("shutting down Gloo's connections"):
            shut_down_gloo_connections()
        abort_groups(sys._current_frames().get(threading.main_thread().ident or 0))
        return state


class AbortTransformerEngine(Abort):
    """Releases Transformer Engine's user buffers, where it is in use.

    In a ``Compose`` list it before ``AbortTorchDistributed``, so that it runs after it.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        """Destroy the user buffers."""
        module = sys.modules.get("transformer_engine.pytorch.module.base")
        destroy = getattr(module, "destroy_ub", None)
        if destroy is not None:
            destroy()
        return state


class AbortPersistentCheckpointProcesses(Abort):
    """Ends checkpoint writers that persist over iterations, so that none writes a state that is
    being abandoned.

    ``is_writer`` selects which of this process's ``multiprocessing`` children to end; by default
    those whose target or class comes from a checkpointing module. Megatron's own worker is reset
    through its own function where that is loaded.
    """

    def __init__(
        self, is_writer: Callable[[multiprocessing.process.BaseProcess], bool] | None = None
    ) -> None:
        self.is_writer = is_writer or _is_checkpoint_writer

    def __call__(self, state: FrozenState) -> FrozenState:
        """End the writers."""
        reset = getattr(
            sys.modules.get("megatron.training.async_utils"), "reset_persistent_async_worker", None
        )
        if reset is not None:
            with logged("resetting Megatron's checkpoint worker"):
                reset()
        for child in multiprocessing.active_children():
            if self.is_writer(child):
                child.kill()
                child.join()
        return state


def _is_checkpoint_writer(child: multiprocessing.process.BaseProcess) -> bool:
    target = getattr(child, "_target", None)
    modules = (getattr(target, "__module__", None) or "", type(child).__module__)
    return any("checkpoint" in module or "async_ckpt" in module for module in modules)


def _dump_trace(path: str, state: FrozenState) -> None:
    dumps = flight_recorders.dumps()
    if not dumps:
        log.info("this build of torch has no flight recorder")
        return
    # An engine of NCCL that is not in use has one, too.
    used = (dump for name, dump in dumps.items() if recorder.recorded(name).get("pg_config"))
    dump = next(used, next(iter(dumps.values())))
    target = Path(path)
    name = str(target / "nccl_trace_rank_") if target.is_dir() else path
    Path(f"{name}{state.active_rank if state.active_rank is not None else state.rank}").write_bytes(
        dump()
    )
