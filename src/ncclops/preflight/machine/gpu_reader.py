"""What is read of GPUs, through ``ncclops.host.nvml``. Each call may block for ever."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from ncclops.host import nvml
from ncclops.preflight.machine import files
from ncclops.preflight.readings import Driver, Fabric, Gpu, ThrottleSample, device_file

_LOST = 15  # NVML_ERROR_GPU_IS_LOST
_LIBRARY = "libnvidia-ml.so.1"
# Where distributions and the container toolkit put it, below a root that is not this machine's.
_PLACES = (
    "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib", "lib64", "lib",
    "run/nvidia/driver/usr/lib/x86_64-linux-gnu",
)  # fmt: skip


class Session:
    """NVML, started once for a process that reads."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._started = nvml.start(_library(root) if root != Path("/") else None)

    def driver(self) -> Driver:
        """NVML as a whole."""
        found = self._started
        if isinstance(found, nvml.Unavailable):
            return Driver(problem=found.reason, error=found.error)
        try:
            return Driver(
                version=found.query("nvmlSystemGetDriverVersion"),
                cuda=found.query("nvmlSystemGetCudaDriverVersion_v2"),
                count=found.query("nvmlDeviceGetCount"),
            )
        except nvml.GpuLostError as error:  # of NVML as a whole it says: one of them is
            return Driver(problem=str(error))

    def gpu(self, index: int, samples: int, pause_s: float) -> Gpu:
        """One GPU; what changes by the moment ``samples`` times, ``pause_s`` apart."""
        found = self._started
        if isinstance(found, nvml.Unavailable):
            return Gpu(index=index, lost=found.reason, error=found.error)
        try:
            device = found.device(index)
            if isinstance(device, nvml.Unavailable):
                return Gpu(index=index, lost=device.reason, error=device.error)
            throttle, errors = [], []
            for number in range(samples):
                if number:
                    time.sleep(pause_s)  # a state of the hardware, which announces no change
                throttle.append(ThrottleSample(reasons=_throttle(device)))
                errors.append(_link_errors(device))
            gpu = _read(device, index, tuple(throttle), tuple(e for e in errors if e is not None))
            # Only now: NVML may have had the file made.
            return msgspec.structs.replace(gpu, missing_file=missing_file(self._root, gpu.pci))
        except nvml.GpuLostError as error:
            return Gpu(index=index, lost=str(error), error=_LOST)


def missing_file(root: Path, pci: str | None) -> str | None:
    """The device file of the GPU at ``pci`` by the driver's list, if it is not there."""
    name = device_file(files.read_text(root, f"proc/driver/nvidia/gpus/{pci}/information"))
    return name if name and not os.path.lexists(root / name) else None


def _read(
    device: nvml.Device, index: int, throttle: tuple[ThrottleSample, ...], errors: tuple[int, ...]
) -> Gpu:
    names, ask = device.nvml.bindings, device.query
    ecc, rows, memory = (
        ask("nvmlDeviceGetEccMode"),
        ask("nvmlDeviceGetRemappedRows"),
        ask("nvmlDeviceGetMemoryInfo"),
    )
    processes, mig = ask("nvmlDeviceGetComputeRunningProcesses"), ask("nvmlDeviceGetMigMode")
    persistence = ask("nvmlDeviceGetPersistenceMode")
    return Gpu(
        index=index,
        name=ask("nvmlDeviceGetName"),
        uuid=ask("nvmlDeviceGetUUID"),
        pci=device.pci,
        ecc_enabled=None if ecc is None else bool(ecc[0]),
        ecc_uncorrected=device.ecc_errors(corrected=False),
        sram_uncorrected=_memory_errors(device, "UNCORRECTED", "SRAM"),
        sram_corrected=_memory_errors(device, "CORRECTED", "SRAM"),
        dram_corrected=_memory_errors(device, "CORRECTED", "DRAM"),
        rows_uncorrected=None if rows is None else int(rows[1]),
        sram_exceeded=sram_exceeded(device),
        rows_pending=pages_pending(device) if rows is None else bool(rows[2]),
        rows_failed=None if rows is None else bool(rows[3]),
        recovery_action=device.recovery().action,
        throttle=throttle,
        temperature_c=ask("nvmlDeviceGetTemperature", names.NVML_TEMPERATURE_GPU),
        slowdown_c=_threshold(device, "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN"),
        memory_temperature_c=_field(device, "NVML_FI_DEV_MEMORY_TEMP"),
        memory_limit_c=_threshold(device, "NVML_TEMPERATURE_THRESHOLD_MEM_MAX"),
        sm_clock_max_mhz=ask("nvmlDeviceGetMaxClockInfo", names.NVML_CLOCK_SM),
        application_clock_mhz=ask("nvmlDeviceGetApplicationsClock", names.NVML_CLOCK_SM),
        default_clock_mhz=ask("nvmlDeviceGetDefaultApplicationsClock", names.NVML_CLOCK_SM),
        power_limit_mw=ask("nvmlDeviceGetEnforcedPowerLimit"),
        power_default_mw=ask("nvmlDeviceGetPowerManagementDefaultLimit"),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_max=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        links=_links(device),
        link_errors=errors,
        fabric=_fabric(device),
        persistence=None if persistence is None else bool(persistence),
        mig=None if mig is None else bool(mig[0]),
        processes=None if processes is None else tuple(int(each.pid) for each in processes),
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
    )


def _throttle(device: nvml.Device) -> int | None:
    reasons = device.query("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # the name up to driver 535
        reasons = device.query("nvmlDeviceGetCurrentClocksThrottleReasons")
    return None if reasons is None else int(reasons)


def _memory_errors(device: nvml.Device, kind: str, place: str) -> int | None:
    names = device.nvml.bindings
    count = device.query(
        "nvmlDeviceGetMemoryErrorCounter",
        getattr(names, f"NVML_MEMORY_ERROR_TYPE_{kind}"),
        names.NVML_VOLATILE_ECC,
        getattr(names, f"NVML_MEMORY_LOCATION_{place}", None),
    )
    return None if count is None else int(count)


def pages_pending(device: nvml.Device) -> bool | None:
    """Whether a page of memory is to be retired, as before Ampere: since then rows are remapped."""
    pending = device.query("nvmlDeviceGetRetiredPagesPendingStatus")
    return None if pending is None else bool(pending)


def sram_exceeded(device: nvml.Device) -> bool | None:
    """Whether the GPU's SRAM has had more uncorrected errors than NVIDIA lets pass."""
    bindings = device.nvml.bindings
    kind = getattr(bindings, "c_nvmlEccSramErrorStatus_v1_t", None)  # older nvidia-ml-py
    if kind is None:
        return None
    status = kind()
    done = device.query("nvmlDeviceGetSramEccErrorStatus", ctypes.byref(status))
    return None if done is None else bool(status.bThresholdExceeded)


def _threshold(device: nvml.Device, name: str) -> int | None:
    kind = getattr(device.nvml.bindings, name, None)
    value = None if kind is None else device.query("nvmlDeviceGetTemperatureThreshold", kind)
    return None if value is None else int(value)


def _field(device: nvml.Device, name: str) -> int | None:
    bindings = device.nvml.bindings
    field = getattr(bindings, name, None)
    values = None if field is None else device.query("nvmlDeviceGetFieldValues", [field])
    if values is None or values[0].nvmlReturn != bindings.NVML_SUCCESS:
        return None
    return int(values[0].value.uiVal)


def _links(device: nvml.Device) -> tuple[bool, ...] | None:
    """Whether each link is up, as far as there are links; None where NVML knows of none."""
    states = []
    for link in range(getattr(device.nvml.bindings, "NVML_NVLINK_MAX_LINKS", 18)):
        state = device.query("nvmlDeviceGetNvLinkState", link)
        if state is None:
            break
        states.append(bool(state))
    return tuple(states) or None


def _link_errors(device: nvml.Device) -> int | None:
    """Replays and recoveries of all links since the driver was loaded."""
    counts = [
        _field(device, f"NVML_FI_DEV_NVLINK_{kind}_ERROR_COUNT_TOTAL")
        for kind in ("REPLAY", "RECOVERY")
    ]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _fabric(device: nvml.Device) -> Fabric | None:
    bindings = device.nvml.bindings
    kind = getattr(bindings, "c_nvmlGpuFabricInfo_v2_t", None)
    info: Any = None if kind is None else kind()
    if info is None or device.query("nvmlDeviceGetGpuFabricInfoV", ctypes.byref(info)) is None:
        return _first_fabric(device)
    return Fabric(
        state=int(info.state),
        status=int(info.status),
        cluster=bytes(bytearray(info.clusterUuid)).hex(),
        clique=int(info.cliqueId),
        health=int(info.healthMask),
    )


def _first_fabric(device: nvml.Device) -> Fabric | None:
    """As drivers before 545 say it, without its health."""
    kind = getattr(device.nvml.bindings, "c_nvmlGpuFabricInfo_t", None)
    info: Any = None if kind is None else kind()
    if info is None or device.query("nvmlDeviceGetGpuFabricInfo", ctypes.byref(info)) is None:
        return None
    return Fabric(
        state=int(info.state),
        status=int(info.status),
        cluster=bytes(bytearray(info.clusterUuid)).hex(),
        clique=int(info.cliqueId),
    )


def _library(root: Path) -> ctypes.CDLL | None:
    """NVML's library of ``root``; None where there is none that can be loaded."""
    for place in _PLACES:
        try:
            library = files.below(root, f"{place}/{_LIBRARY}")
            if not library.is_file():
                continue
            return ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        except OSError:
            continue
    return None
