"""Health checks: may this rank take part in the next iteration?

Each runs in the main thread, local to its rank: before the function in every iteration, and
after ``finalize`` on the way to a restart. Raising means "no".
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import Any

from ncclops.host.nvml import GpuLostError, visible_device
from ncclops.restart._deadline import current_cuda_device, run_within
from ncclops.restart._devices import (
    Finding,
    Health,
    NotAvailableError,
    describe_gpu,
    gpu_pci_path,
    judge_gpu,
    judge_links,
    judge_ports,
    learn_name,
    nics_near,
    read_gpu,
    read_links,
    read_ports,
)
from ncclops.restart.exception import (
    CudaContextLost,
    GpuUnusable,
    HealthCheckError,
    RestartError,
)
from ncclops.restart.state import FrozenState

__all__ = [
    "ChainedGPUHealthCheck",
    "ChainedNVLHealthCheck",
    "ChainedNicHealthCheck",
    "CudaContextCheck",
    "CudaHealthCheck",
    "FaultCounter",
    "FaultCounterExceeded",
    "Finding",
    "Health",
    "HealthCheck",
]

_log = logging.getLogger(__name__)

# An NVML query answers within a second even on a busy host; one that takes this long is stuck in
# the driver. The same as CudaHealthCheck's documented default.
_DEVICE_TIMEOUT = timedelta(seconds=30)


class HealthCheck(ABC):
    """Raise any exception to say that this rank is unfit to go on."""

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Check this rank; return ``state``, which a ``Compose`` passes on."""


class FaultCounterExceeded(HealthCheckError):
    """This rank has faulted more often than ``FaultCounter`` allows."""


class FaultCounter(HealthCheck):
    """Takes a rank out after more than ``max_rank_faults`` faults of its own in one job.

    Faults of other ranks do not count (``state.fn_exception`` is ``None`` then). ``None``: no
    limit. The count starts anew with every call of the wrapped function.
    """

    def __init__(self, max_rank_faults: int | None = None) -> None:
        self.max_rank_faults = max_rank_faults
        self.faults = 0

    def __call__(self, state: FrozenState) -> FrozenState:
        """Count, and raise ``FaultCounterExceeded`` when it was one too many."""
        if state.fn_exception is None:
            if state.iteration == 0:
                self.faults = 0
            return state
        self.faults += 1
        if self.max_rank_faults is not None and self.faults > self.max_rank_faults:
            raise FaultCounterExceeded(
                f"this rank has faulted {self.faults} times, max_rank_faults="
                f"{self.max_rank_faults}; the last fault was {state.fn_exception!r}"
            ) from state.fn_exception
        return state


class _DeviceCheck(HealthCheck):
    """A check that may find out nothing; ``last`` holds its latest ``Finding``."""

    name = "device"

    def __init__(self, timeout: timedelta = _DEVICE_TIMEOUT) -> None:
        self.timeout = timeout
        self.last: Finding | None = None

    @abstractmethod
    def check(self) -> Finding:
        """Measure and judge; may block. Raise ``NotAvailableError`` where it cannot look."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """Raise ``HealthCheckError`` when unhealthy, ``exception.TimeoutError`` when stuck."""
        finding = run_within(self.timeout, f"{self.name} health check", self._finding)
        if finding != self.last and finding.health is not Health.UNHEALTHY:
            # Machines that cannot be looked at are told of by every check of every process.
            level = logging.DEBUG if finding.health is Health.NOT_CHECKED else logging.INFO
            _log.log(
                level, "%s health check: %s: %s", self.name, finding.health.value, finding.detail
            )
        self.last = finding
        if finding.health is Health.UNHEALTHY:
            raise self._error(finding.detail)
        return state

    def _error(self, detail: str) -> HealthCheckError:
        return HealthCheckError(f"{self.name}: {detail}")

    def _finding(self) -> Finding:
        try:
            return self.check()
        except NotAvailableError as reason:
            return Finding(Health.NOT_CHECKED, str(reason))
        except GpuLostError as reason:
            return Finding(Health.UNHEALTHY, str(reason))


class CudaHealthCheck(_DeviceCheck):
    """Waits until all work on this rank's GPU is done, which fails on a corrupted CUDA context.

    Raises ``exception.TimeoutError`` when the GPU is not done within ``timeout``, and whatever
    CUDA reports. A process without a CUDA context has nothing to check.
    """

    name = "CUDA"

    def check(self) -> Finding:
        """See ``_DeviceCheck.check``."""
        device = current_cuda_device()
        if device is None:
            return Finding(Health.NOT_CHECKED, "this process has no CUDA context")
        import torch

        torch.cuda.synchronize(device)
        return Finding(Health.HEALTHY, f"all work on cuda:{device} is done")


class _LocalGpuCheck(_DeviceCheck):
    """A check of the GPU with CUDA's number ``device_index``; by default this rank's own."""

    def __init__(self, device_index: int | None = None) -> None:
        super().__init__()
        self.device_index = device_index

    def _selector(self) -> int | str | None:
        """The GPU as NVML knows it; ``None`` where it is not known which one is this rank's."""
        index = self.device_index
        if index is None:
            index = current_cuda_device()
        if index is None:
            local_rank = os.environ.get("LOCAL_RANK", "")
            index = int(local_rank) if local_rank.isdecimal() else None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return None if index is None else visible_device(index, visible)

    def _baseline(self, measure: Any) -> Any:
        """What ``measure`` finds now, to compare with later; ``None`` where it cannot look."""
        try:
            return run_within(self.timeout, f"{self.name} baseline", measure)
        except (NotAvailableError, GpuLostError, RestartError) as reason:
            _log.debug("%s health check has no baseline: %s", self.name, reason)
            return None


class ChainedGPUHealthCheck(_LocalGpuCheck):
    """Fails when NVML reports that this rank's GPU is lost or needs recovery."""

    name = "GPU"

    def check(self) -> Finding:
        """See ``_DeviceCheck.check``."""
        return judge_gpu(read_gpu(self._selector()))

    def _error(self, detail: str) -> HealthCheckError:
        return GpuUnusable(describe_gpu(self._selector()), detail)


class CudaContextCheck(_LocalGpuCheck):
    """Fails when an earlier CUDA error has left this process without a usable context.

    Unlike ``CudaHealthCheck`` it does not wait for work on the GPU.
    """

    name = "CUDA context"

    def check(self) -> Finding:
        """See ``_DeviceCheck.check``."""
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return Finding(Health.NOT_CHECKED, "this process has no CUDA context")
        try:
            torch.cuda.mem_get_info()
        except RuntimeError as error:
            with contextlib.suppress(NotAvailableError, GpuLostError):
                learn_name(self._selector())
            return Finding(Health.UNHEALTHY, str(error).partition("\n")[0])
        return Finding(Health.HEALTHY, "CUDA answers")

    def _error(self, detail: str) -> HealthCheckError:
        return CudaContextLost(describe_gpu(self._selector()), detail)


class ChainedNVLHealthCheck(_LocalGpuCheck):
    """Fails when an NVLink of this rank's GPU is down that was active when this was made."""

    name = "NVLink"

    def __init__(self, device_index: int | None = None) -> None:
        super().__init__(device_index)
        self._links = self._baseline(lambda: read_links(self._selector()))

    def check(self) -> Finding:
        """See ``_DeviceCheck.check``."""
        return judge_links(self._links, read_links(self._selector()))


class ChainedNicHealthCheck(_LocalGpuCheck):
    """Fails when a port of the nearest RDMA NIC is down that was active when this was made."""

    name = "NIC"

    def __init__(self, device_index: int | None = None, *, sysfs: Path = Path("/sys")) -> None:
        super().__init__(device_index)
        self._sysfs = sysfs
        self._nics: list[str] = []
        self._ports = self._baseline(self._find_ports)

    def check(self) -> Finding:
        """See ``_DeviceCheck.check``."""
        return judge_ports(self._ports, read_ports(self._nics, self._sysfs))

    def _find_ports(self) -> Any:
        self._nics = nics_near(gpu_pci_path(self._selector(), self._sysfs), self._sysfs)
        return read_ports(self._nics, self._sysfs)
