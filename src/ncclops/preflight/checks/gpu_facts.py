"""What several checks of GPUs ask: names, the driver, and whose GPUs there are. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ncclops.preflight.checks.look import HOST, in_container, is_virtual
from ncclops.preflight.readings import Gpu, Node, device_file

# How schedulers call their control groups, and what they set in a job: Slurm, PBS, LSF,
# HTCondor, Flux, Grid Engine.
_SCHEDULERS = ("slurm", "pbs", "/lsf", "condor", "flux", "/sge", "/uge")
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "_CONDOR_SLOT", "FLUX_JOB_ID", "SGE_TASK_ID")
_PCI_PLACE = "PCI "  # before the address of a GPU that NVML does not show


def answering_gpus(node: Node) -> Iterator[Gpu]:
    return (gpu for gpu in node.gpus if gpu.lost is None)


def nvswitches(node: Node) -> list[str]:
    """The NVSwitches that the driver has."""
    return node.files.names("proc/driver/nvidia-nvswitch/devices") or [
        path for path, _ in node.files.matching(r"dev/nvidia-nvswitch\d+")
    ]


def runs(node: Node, name: str) -> bool:
    return any(each.name.startswith(name) for each in node.host.processes or ())


def name_of(gpu: Gpu) -> str:
    return f"GPU {gpu.index}"


def by_pci(node: Node, address: str) -> str:
    """The GPU at a PCI address as the driver's log writes it, with or without the function."""
    wanted = address.lower().partition(".")[0]
    for gpu in node.gpus:
        if wanted and (gpu.pci or "").startswith(f"{wanted}."):
            return name_of(gpu)
    return f"{_PCI_PLACE}{wanted}" if wanted else HOST


def loaded_version(node: Node) -> str | None:
    """The version of the driver's kernel module."""
    text = node.files.text("proc/driver/nvidia/version") or ""
    match = re.search(r"NVRM version:.*?(\d+\.\d+(?:\.\d+)*)\s", f"{text} ")
    return match[1] if match else node.files.text("sys/module/nvidia/version") or None


def is_bound(node: Node) -> bool:
    """Whether a PCI function is in the driver's hands."""
    found = node.files.matching(r"sys/bus/pci/devices/[^/]+/driver")
    return any((text or "").endswith("/nvidia") for _, text in found)


def has_no_driver(node: Node) -> bool:
    """Whether nothing shows a driver where one would show: its module, devices, PCI functions.

    Without NVML alone a job may find its GPUs: a container can be given CUDA's library only.
    """
    shown = node.files.matching(r"dev/(?:nvidia.*|dxg)")  # dxg: Linux within Windows
    is_read = "proc/meminfo" in node.files
    return is_read and loaded_version(node) is None and not is_bound(node) and not any(shown)


def count_on_bus(node: Node) -> int:
    """How many GPUs of NVIDIA PCI has."""
    return len(_on_bus(node))


def _on_bus(node: Node) -> list[str]:
    """The directories of NVIDIA's GPUs among the PCI functions."""
    top, files = "sys/bus/pci/devices", node.files
    return [
        path
        for path in (f"{top}/{name}" for name in files.names(top))
        if files.text(f"{path}/vendor") == "0x10de"
        and (files.text(f"{path}/class") or "").startswith(("0x0300", "0x0302"))
    ]


def of_other_drivers(node: Node) -> dict[str, str]:
    """Functions of the model of GPUs that NVIDIA's driver has, and who has these; empty: nobody.

    A vendor's older card for a screen is of another model, and virtual functions are handed out.
    """
    files, drivers = node.files, dict[str, dict[str, str]]()
    for path in _on_bus(node):
        model = files.text(f"{path}/device")
        if model and f"{path}/physfn" not in files:
            held_by = (files.text(f"{path}/driver") or "").rpartition("/")[2]
            drivers.setdefault(model, {})[path.rpartition("/")[2]] = held_by
    return {
        name: held_by
        for alike in drivers.values()
        if "nvidia" in alike.values()
        for name, held_by in alike.items()
        if held_by != "nvidia"
    }


def without_file(node: Node) -> dict[str, str]:
    """GPUs of the driver's list whose device file is not there, with its name."""
    files, shown = node.files, {gpu.pci for gpu in node.gpus}
    if "dev/nvidiactl" not in files:
        return {}
    # Of those that NVML shows it was looked for after NVML had started, which may have it made.
    missing = {name_of(gpu): gpu.missing_file for gpu in node.gpus if gpu.missing_file}
    for address in files.names("proc/driver/nvidia/gpus"):
        place = f"proc/driver/nvidia/gpus/{address}/information"
        name = device_file(files.text(place))
        if address not in shown and name and name not in files:
            missing[f"{_PCI_PLACE}{address}"] = name
    return missing


def may_be_of_others(node: Node, place: str) -> bool:
    """Whether a GPU that this job has not been given may be the one at ``place``."""
    everything = max(count_on_bus(node), len(node.files.names("proc/driver/nvidia/gpus")))
    has_some = 0 < (node.driver.count or 0) < everything and not any(g.lost for g in node.gpus)
    may_have = is_given_some(node) or in_container(node.files)
    return place.startswith(_PCI_PLACE) and has_some and may_have


def is_given_some(node: Node) -> bool:
    """Whether this runs in a scheduler's job, which may see some of the GPUs only.

    Such as by ConstrainDevices in Slurm's cgroup.conf; the driver's list has all of them
    nevertheless.
    """
    own = node.files.text("proc/self/cgroup") or ""
    return any(word in own for word in _SCHEDULERS) or any(name in node.environ for name in _JOBS)


def may_lack_switches(node: Node) -> bool:
    """Whether GPUs of a board may have been handed out without their switches."""
    return is_virtual(node.files) or in_container(node.files)
