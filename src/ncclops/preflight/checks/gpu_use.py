"""Checks of whether CUDA gets at GPUs that NVML shows, and at whole ones. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ncclops.preflight.catalogue import Check
from ncclops.preflight.checks.look import HOST, Rule, has_capability, in_container
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
    elif in_container(files) and not has_capability(files, _SYS_ADMIN):
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


RULES: Mapping[str, Rule] = {"gpu.uvm": uvm, "gpu.mig": mig}
