"""What of a node is compared with others of its make, between hosts. Pure."""

from __future__ import annotations

import re

from ncclops.preflight.checks.gpu_facts import answering_gpus, count_on_bus
from ncclops.preflight.checks.look import memory_bytes
from ncclops.preflight.checks.ports import used
from ncclops.preflight.checks.rails import identities
from ncclops.preflight.model import Traits
from ncclops.preflight.readings import Node


def traits(node: Node) -> Traits:
    """Those of the machine itself: what a job has been given of it is the scheduler's."""
    files = node.files
    gpus = [gpu for gpu in answering_gpus(node) if gpu.name]
    names = sorted({str(gpu.name) for gpu in gpus})
    product = files.text("sys/class/dmi/id/product_name") or ""
    cpu = re.search(r"^model name\s*:\s*(.+)", files.text("proc/cpuinfo") or "", re.MULTILINE)
    return Traits(
        # Without a product or a GPU, machines of one processor may be of any make.
        make=", ".join(filter(None, [product, cpu[1] if cpu else "", *names]))
        if product or names
        else "",
        memory_mib=(memory_bytes(files) or 0) >> 20,
        gpus=count_on_bus(node),
        gpu_mib=min((gpu.memory_total_bytes or 0 for gpu in gpus), default=0) >> 20,
        ports=sum(port.is_active for port in used(node)),
        driver=node.driver.version or "",
        nccl=node.nccl or "",
        rdma=tuple(dict.fromkeys(value for port in used(node) for _, value in identities(port))),
    )
