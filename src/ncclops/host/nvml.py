"""NVML, the driver's interface to its GPUs; the only module that starts it.

A machine without NVML, a GPU that it does not know and a query that this driver does not support
are values (``Unavailable`` and None), because all three are usual. Only a lost GPU is an error.
This module imports nothing of ncclops, so that ``ncclops.restart`` can use it alone.

Any thread may call; NVML counts its users. Each call may block for as long as a sick driver does:
callers bound it with a deadline.
"""

from __future__ import annotations

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
    """NVML, or one GPU, cannot be used here; ``reason`` says why. Not a sign of a sick GPU."""

    reason: str


@dataclass(frozen=True)
class Device:
    """One GPU, for as long as NVML stays started."""

    nvml: Nvml
    handle: Any

    def query(self, function: str, *arguments: Any) -> Any:
        """What NVML's ``function`` answers for this GPU. As ``Nvml.query``."""
        return self.nvml.query(function, self.handle, *arguments)


@dataclass(frozen=True)
class Nvml:
    """NVML, started. ``bindings`` is the module ``pynvml``, for its constants."""

    bindings: Any

    def query(self, function: str, *arguments: Any) -> Any:
        """What NVML's ``function`` answers; text as ``str``.

        None where this GPU, driver or release of the bindings does not offer the query. Raises
        ``GpuLostError``.
        """
        try:
            return text(getattr(self.bindings, function)(*arguments))
        except AttributeError:
            return None
        except self.bindings.NVMLError as error:
            if _is_lost(error):
                raise GpuLostError(f"the GPU does not answer: {error}") from error
            return None

    def device(self, selector: int | str) -> Device | Unavailable:
        """The GPU with NVML's number, or with a UUID. Raises ``GpuLostError``."""
        try:
            if isinstance(selector, int):
                return Device(self, self.bindings.nvmlDeviceGetHandleByIndex(selector))
            return Device(self, self.bindings.nvmlDeviceGetHandleByUUID(selector.encode()))
        except self.bindings.NVMLError as error:
            if _is_lost(error):
                raise GpuLostError(f"the GPU does not answer: {error}") from error
            return Unavailable(f"NVML does not know GPU {selector}: {error}")

    def stop(self) -> None:
        """End this use of NVML; its devices cannot be queried afterwards."""
        self.query("nvmlShutdown")


def start() -> Nvml | Unavailable:
    """NVML, until its ``stop`` or the end of the process. Takes some 50 ms with eight GPUs."""
    try:
        import pynvml
    except ImportError:
        return Unavailable("pynvml is not installed (package nvidia-ml-py)")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Unavailable(f"NVML is not available: {error}")
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
