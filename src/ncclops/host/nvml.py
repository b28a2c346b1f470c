"""NVML, the driver's interface to its GPUs; the only module that starts it.

A machine without NVML, a GPU that it does not know and a query that this driver does not support
are values (``Unavailable`` and None), because all three are usual. Only a lost GPU is an error.
This module imports nothing of ncclops, so that ``ncclops.restart`` can use it alone.

Any thread may call; NVML counts its users. Each call may block for as long as a sick driver does:
callers bound it with a deadline.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# NVML_ERROR_GPU_IS_LOST and NVML_ERROR_RESET_REQUIRED of nvml.h: these speak of the GPU itself, all
# other errors of what it can answer.
_LOST = (15, 16)


class GpuLostError(Exception):
    """NVML cannot reach the GPU any more, or refuses to before a reset."""


@dataclass(frozen=True)
class Unavailable:
    """NVML, or one GPU, cannot be used here; ``reason`` says why. Not a sign of a sick GPU.

    ``error`` is NVML's number for it, None where NVML was not reached.
    """

    reason: str
    error: int | None = None


@dataclass(frozen=True)
class GpuName:
    """What people find a GPU by: NVML's number, its UUID and its PCI address, as far as known."""

    index: int | None = None
    uuid: str | None = None
    pci: str | None = None

    @classmethod
    def of_selector(cls, selector: int | str) -> GpuName:
        """What NVML's number or a UUID alone says."""
        return cls(index=selector) if isinstance(selector, int) else cls(uuid=selector)

    def __str__(self) -> str:
        """Such as ``GPU 3 (GPU-1f2e…, PCI 0000:5e:00.0)``."""
        number = "GPU" if self.index is None else f"GPU {self.index}"
        known = ", ".join(filter(None, (self.uuid, self.pci and f"PCI {self.pci}")))
        return f"{number} ({known})" if known else number


# nvmlDeviceGpuRecoveryAction_t of nvml.h
_RECOVERY = {
    1: "GPU reset",
    2: "node reboot",
    3: "drain peer-to-peer traffic",
    4: "drain and GPU reset",
    5: "recovery of the IMEX domain",
    6: "PCIe bus reset",
    7: "system reboot",
}


@dataclass(frozen=True)
class Recovery:
    """What NVML says of a GPU's need for repair; ``None`` where this driver or GPU does not report
    it.

    ``action``: ``nvmlDeviceGpuRecoveryAction_t``. ``remap_failed``: a memory row could not be
    remapped.
    """

    action: int | None = None
    remap_failed: bool | None = None

    @property
    def need(self) -> str | None:
        """Why the GPU should not be used, in words; ``None``: nothing speaks against it.

        Error counters are no reason: contained errors cost the process that met them, and the
        driver's recovery action already says whether the GPU can be used again.
        """
        if self.action:
            action = _RECOVERY.get(self.action, f"action {self.action}")
            return f"the driver asks for recovery of the GPU: {action}"
        return "a GPU memory row could not be remapped" if self.remap_failed else None


@dataclass(frozen=True)
class Device:
    """One GPU, for as long as NVML stays started."""

    nvml: Nvml
    handle: Any
    selector: int | str

    def query(self, function: str, *arguments: Any) -> Any:
        """What NVML's ``function`` answers for this GPU. As ``Nvml.query``."""
        return self.nvml.query(function, self.handle, *arguments)

    @property
    def pci(self) -> str | None:
        """The PCI address as Linux writes it, such as ``0000:5e:00.0``. Raises as ``query``."""
        info = self.query("nvmlDeviceGetPciInfo")
        if info is None:
            return None
        # NVML writes the domain with 8 digits, the kernel with 4.
        domain, rest = text(info.busId).lower().split(":", 1)
        return f"{int(domain, 16):04x}:{rest}"

    def ecc_errors(self, *, corrected: bool) -> int | None:
        """ECC errors since the driver was loaded. Raises as ``query``."""
        names = self.nvml.bindings
        kind = (
            names.NVML_MEMORY_ERROR_TYPE_CORRECTED
            if corrected
            else names.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        )
        count: int | None = self.query("nvmlDeviceGetTotalEccErrors", kind, names.NVML_VOLATILE_ECC)
        return count

    def recovery(self) -> Recovery:
        """Whether the driver asks for repair. Raises as ``query``."""
        rows = self.query("nvmlDeviceGetRemappedRows")
        return Recovery(self._recovery_action(), None if rows is None else bool(rows[3]))

    def _recovery_action(self) -> int | None:
        bindings = self.nvml.bindings
        field = getattr(bindings, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)  # older nvidia-ml-py
        values = None if field is None else self.query("nvmlDeviceGetFieldValues", [field])
        if values is None or values[0].nvmlReturn != bindings.NVML_SUCCESS:
            return None
        return int(values[0].value.uiVal)

    @property
    def name(self) -> GpuName:
        """What people find it by. Raises as ``query``."""
        known = GpuName.of_selector(self.selector)
        index, uuid = self.query("nvmlDeviceGetIndex"), self.query("nvmlDeviceGetUUID")
        return GpuName(known.index if index is None else index, uuid or known.uuid, self.pci)


@dataclass(frozen=True)
class Nvml:
    """NVML, started. ``bindings`` is the module ``pynvml``, for its constants."""

    bindings: Any

    def query(self, function: str, *arguments: Any) -> Any:
        """What NVML's ``function`` answers; text as ``str``.

        None where this GPU, driver or release of the bindings does not offer the query. Raises
        ``GpuLostError``.
        """
        # Raised where an old driver lacks what the bindings' newest form of a query is made of.
        mismatch = getattr(self.bindings, "NVMLLibraryMismatchError", AttributeError)
        try:
            return text(getattr(self.bindings, function)(*arguments))
        except (AttributeError, mismatch):
            return None
        except self.bindings.NVMLError as error:
            if _is_lost(error):
                raise GpuLostError(f"the GPU does not answer: {error}") from error
            return None

    def device(self, selector: int | str) -> Device | Unavailable:
        """The GPU with NVML's number, or with a UUID. Raises ``GpuLostError``."""
        try:
            if isinstance(selector, int):
                handle = self.bindings.nvmlDeviceGetHandleByIndex(selector)
            else:
                handle = self.bindings.nvmlDeviceGetHandleByUUID(selector.encode())
            return Device(self, handle, selector)
        except self.bindings.NVMLError as error:
            if _is_lost(error):
                raise GpuLostError(f"the GPU does not answer: {error}") from error
            number = getattr(error, "value", None)
            return Unavailable(f"NVML does not know GPU {selector}: {error}", number)

    def stop(self) -> None:
        """End this use of NVML; its devices cannot be queried afterwards."""
        self.query("nvmlShutdown")


def start(library: ctypes.CDLL | None = None) -> Nvml | Unavailable:
    """NVML, until its ``stop`` or the end of the process. Takes some 50 ms with eight GPUs.

    ``library`` is used in place of the one that the loader finds.
    """
    try:
        import pynvml
    except ImportError:
        return Unavailable("pynvml is not installed (package nvidia-ml-py)")
    if library is not None:
        pynvml.nvmlLib = library  # where it keeps the one that it loads by name
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Unavailable(f"NVML is not available: {error}", getattr(error, "value", None))
    return Nvml(pynvml)


@contextmanager
def session() -> Iterator[Nvml | Unavailable]:
    """NVML, for the length of a ``with`` block."""
    nvml = start()
    try:
        yield nvml
    finally:
        if isinstance(nvml, Nvml):
            nvml.stop()


def visible_devices(setting: str | None) -> tuple[int | str, ...] | None:
    """What NVML calls the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves visible, in CUDA's order.

    None where it is not set: all are visible. NVML itself ignores the variable. CUDA ends the list
    at the first entry that is no device, such as -1.
    """
    if setting is None:
        return None
    visible: list[int | str] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdecimal():
            visible.append(int(entry))
        elif entry.startswith(("GPU-", "MIG-")):
            visible.append(entry)
        else:
            break
    return tuple(visible)


def visible_device(index: int, setting: str | None) -> int | str | None:
    """What NVML calls CUDA's device ``index``: its number or UUID; None where there is none.

    ``setting`` is ``CUDA_VISIBLE_DEVICES``. Where a single device is visible it is meant whatever
    the index, because launchers that bind one GPU to each rank still count the ranks of a node.
    """
    visible = visible_devices(setting)
    if visible is None:
        return index
    if setting is not None and "," not in setting:
        index = 0
    return visible[index] if 0 <= index < len(visible) else None


def text(value: Any) -> Any:
    """``value``, as ``str`` where it is the ``bytes`` of older bindings."""
    return value.decode() if isinstance(value, bytes) else value


def _is_lost(error: Any) -> bool:
    return getattr(error, "value", None) in _LOST
