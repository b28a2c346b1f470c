"""What this process has open and loaded of networks, which shows NCCL's choice without its log.

NCCL opens every RDMA device that it may use when it makes its first communicator, and keeps it open
(``ncclIbInit`` in nccl src/transport/net_ib); a network plugin is a library. Where there is
neither, its own sockets are left.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ncclops.receipts.collectives import CollectiveCounter
from ncclops.record import worker_record
from ncclops.record.events import NetworkOpenEvent

_PROC = Path("/proc/self")
_DEVICES = "/dev/infiniband/uverbs"
_PLUGIN = "libnccl-net"
_NAMED = "NCCL_NET_PLUGIN"  # also names libraries of other names


def follow(counter: CollectiveCounter) -> None:
    """Report it to the agent once NCCL has completed a collective."""
    counter.on_nccl_in_use(lambda: worker_record.report(look()))


def look(proc: Path = _PROC, environ: Mapping[str, str] = os.environ) -> NetworkOpenEvent:
    """What the process under ``proc`` has. Raises ``OSError`` where the kernel does not show it."""
    devices, plugins = set[str](), set[str]()
    for descriptor in (proc / "fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith(_DEVICES):
            devices.add(Path(target).name)
    for line in (proc / "maps").read_text(errors="replace").splitlines():
        file = line.rpartition("/")[2]
        if file.startswith(_PLUGIN):
            plugins.add(file)
    if (named := environ.get(_NAMED, "none")).lower() not in ("none", ""):
        plugins.add(named)
    return NetworkOpenEvent(rdma_devices=sorted(devices), plugins=sorted(plugins))
