"""What the environment plan needs to know about this host, read without torch and NVML."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path


def installed_torch() -> str | None:
    """The version of the torch that is installed here, None when there is none."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def installed_nccl() -> str | None:
    """The version of NCCL's wheel, as torch's CUDA builds bring it; None without one."""
    for cuda in ("cu13", "cu12", "cu11"):
        try:
            return metadata.version(f"nvidia-nccl-{cuda}")
        except metadata.PackageNotFoundError:
            continue
    return None


def gpu_count(root: Path = Path("/")) -> int:
    """NVIDIA GPUs that the driver shows, 0 without a driver."""
    listed = root / "proc/driver/nvidia/gpus"
    if listed.is_dir():
        return len(list(listed.iterdir()))
    # Containers may hide /proc/driver while they hand in the devices.
    return len(list((root / "dev").glob("nvidia[0-9]*")))


def has_rdma(root: Path = Path("/")) -> bool:
    """Whether there is an InfiniBand or RoCE device."""
    devices = root / "sys/class/infiniband"
    return devices.is_dir() and any(devices.iterdir())
