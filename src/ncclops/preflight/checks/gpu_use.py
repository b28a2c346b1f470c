"""Checks of whether CUDA gets at all GPUs, at whole ones, and at all of their memory. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ncclops.preflight.catalogue import Check
from ncclops.preflight.checks.gpu_facts import (
    is_bound,
    is_given_some,
    of_other_drivers,
    without_file,
)
from ncclops.preflight.checks.look import (
    HOST,
    Rule,
    has_capability,
    in_container,
    is_mapped,
    size,
)
from ncclops.preflight.model import Finding
from ncclops.preflight.readings import Node

_SYS_ADMIN = 21  # of linux/capability.h; a container that has it may load modules of the host


def uvm(check: Check, node: Node) -> Iterator[Finding]:
    """NVML does without it, CUDA does not."""
    files = node.files
    if not node.gpus:
        return
    if "dev/nvidiactl" not in files:
        yield check.unknown(HOST, "the driver's device files are not to be seen")
    elif "dev/nvidia-uvm" in files:
        yield check.ok(HOST, "/dev/nvidia-uvm")
    # In a user namespace nobody makes devices, whatever capabilities there are.
    elif in_container(files) and (is_mapped(files) or not has_capability(files, _SYS_ADMIN)):
        yield check.bad(HOST, "/dev/nvidia-uvm is not in this container", "container")
    elif "usr/bin/nvidia-modprobe" in files:
        yield check.ok(HOST, "none yet: nvidia-modprobe makes it when CUDA starts")
    else:
        yield check.warn(HOST, "/dev/nvidia-uvm is not there, nor nvidia-modprobe, which makes it")


def mig(check: Check, node: Node) -> Iterator[Finding]:
    """GPUs that are split, beside whole ones or where the lane needs whole ones."""
    known = [gpu for gpu in node.gpus if gpu.lost is None and gpu.mig is not None]
    whole, wanted = sum(not gpu.mig for gpu in known), node.needs.gpus
    for gpu in known:
        subject = f"GPU {gpu.index}"
        if not gpu.mig:
            yield check.ok(subject, "off")
        elif wanted and whole < wanted:
            yield check.bad(subject, f"on: {whole} whole GPUs, and the lane needs {wanted}")
        elif whole:
            yield check.warn(subject, f"on; off on {whole} others")
        else:
            yield check.ok(subject, "on, as on all")


def file(check: Check, node: Node) -> Iterator[Finding]:
    """Of each GPU of the driver's list; those that NVML does not show may be of other jobs."""
    files, missing = node.files, without_file(node)
    if not node.gpus and not missing:
        return
    if "dev/nvidiactl" not in files or not files.names("proc/driver/nvidia/gpus"):
        yield check.unknown(HOST, "the driver's list or its device files are not to be seen")
        return
    of_others = in_container(files) or is_given_some(node)
    told = {p: name for p, name in missing.items() if not (of_others and p.startswith("PCI"))}
    for place, name in told.items():
        yield check.bad(place, f"/{name} is not there", "container" if in_container(files) else "")
    if not told:
        yield check.ok(HOST, "those of all GPUs that are shown")


def bound(check: Check, node: Node) -> Iterator[Finding]:
    """GPUs beside those that NVIDIA's driver has; a container may not change it."""
    if in_container(node.files) or not is_bound(node):
        return
    held = of_other_drivers(node)
    for address, driver in held.items():
        who = f"{driver} has it" if driver else "no driver has it"
        yield check.warn(f"PCI {address}", f"{who}; NVIDIA's has others of its model")
    if not held:
        yield check.ok(HOST, "NVIDIA's driver has all of its models")


def memory(check: Check, node: Node) -> Iterator[Finding]:
    """Against others of its model, in the same mode: ECC of some takes a part of the memory."""
    known = [(gpu, total) for gpu in node.gpus if (total := gpu.memory_total_bytes)]
    for gpu, total in known:
        mode = (gpu.name, gpu.ecc_enabled, gpu.mig)
        alike = [n for other, n in known if (other.name, other.ecc_enabled, other.mig) == mode]
        larger = sum(total < check.limit("share") * each for each in alike)
        said = f"{size(total)}, others of its model {size(max(alike))}"
        if not larger:
            yield check.ok(f"GPU {gpu.index}", size(total))
        elif any(re.search(name, gpu.name or "") for name in check.words("several")):
            yield check.unknown(f"GPU {gpu.index}", f"{said}; its name is that of several sizes")
        elif larger > len(alike) // 2:
            yield check.bad(f"GPU {gpu.index}", said)
        else:
            yield check.warn(f"GPU {gpu.index}", said)


RULES: Mapping[str, Rule] = {
    "gpu.uvm": uvm,
    "gpu.mig": mig,
    "gpu.device-file": file,
    "gpu.bound": bound,
    "gpu.memory": memory,
}
