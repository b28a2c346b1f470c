"""Defects as of ``defects``: of what the host leaves to a job, of rails, and of GPUs' use.

``DEFECTS`` are all of both.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from ncclops.preflight.model import Status
from tests.preflight import defects
from tests.preflight.defects import BOARDS, METAL, WITH_GPUS
from tests.preflight.machines import GIB, Machine, bond
from tests.preflight.planting import Defect, file, files, grown, logged, port

WARN = Status.WARN
GROUP = "sys/fs/cgroup"
V1 = {
    "proc/self/cgroup": "9:memory:/kubepods/pod1\n3:cpu,cpuacct:/kubepods/pod1\n0::/",
    f"{GROUP}/memory/kubepods/memory.limit_in_bytes": str(32 * GIB),
    f"{GROUP}/cpu/kubepods/pod1/cpu.cfs_quota_us": "50000",
    f"{GROUP}/cpu/kubepods/pod1/cpu.cfs_period_us": "100000",
}
ROUTE = "{}\t00001E0A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0"
LOGGED = {
    "an error of a CPU": "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: be00000000810400",
    "a file system that went read-only": "EXT4-fs (nvme0n1p2): Remounting filesystem read-only",
    "a disk's error": "I/O error, dev nvme3n1, sector 81920 op 0x1:(WRITE) flags 0x8800",
    "a queue that is stuck": "NETDEV WATCHDOG: eth3 (mlx5_core): transmit queue 5 timed out",
    "a table that was full": "nf_conntrack: nf_conntrack: table full, dropping packet",
    "a file system that shut down": "XFS (md1): Filesystem has been shut down due to log error",
    "a bad cable": "mlx5_core 0000:18:00.0: Port module event[error]: module 0, Cable error, "
    "Bad or unsupported cable",
    "a hot adapter": "mlx5_core 0000:18:00.0: temp_warn:140:(pid 5): High temperature on sensors "
    "with bit set 0 1",
    "a hot processor": "mce: CPU12: Package temperature is above threshold, cpu clock is throttled "
    "(total events = 812)",
    "an access that is refused": "nvidia 0000:1b:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT "
    "domain=0x0032 address=0xfff flags=0x0020]",
    "too many neighbours": "neighbour: arp_cache: neighbor table overflow!",
    "a processor that is stuck": "rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:",
}


def _few_cpus(machine: Machine, chance: random.Random) -> str:
    """As Slurm binds a task of which nobody has said how many CPUs it needs."""
    status = machine.files["proc/self/status"]
    machine.files["proc/self/status"] = status.replace("0-191", "0")
    return "host"


def _used_up(machine: Machine, chance: random.Random) -> str:
    machine.files["proc/meminfo"] = (
        "MemTotal:  1073741824 kB\nMemAvailable:  8388608 kB\nHugePages_Free: 0"
    )
    return "host"


def _on_grace(machine: Machine, chance: random.Random) -> str:
    for gpu in machine.gpus:
        gpu["name"] = "NVIDIA GH200 480GB"
    machine.files["proc/sys/kernel/numa_balancing"] = "1"
    return "host"


def _no_uvm(machine: Machine, chance: random.Random) -> str:
    machine.files["dev/nvidiactl"] = ""
    machine.files.pop("dev/nvidia-uvm", None)
    return "host"


def _no_uvm_in_docker(machine: Machine, chance: random.Random) -> str:
    status = machine.files["proc/self/status"]
    machine.files["proc/self/status"] = status.replace("000001ffffffffff", "00000000a80425fb")
    return _no_uvm(machine, chance)


def _split(gpus: int | None) -> Callable[[Machine, random.Random], str]:
    """One GPU of eight has instances; the lane needs ``gpus``."""

    def plant(machine: Machine, chance: random.Random) -> str:
        machine.needs = replace(machine.needs, gpus=gpus)
        index = chance.randrange(len(machine.gpus))
        for gpu in machine.gpus:
            gpu["mig"] = gpu["index"] == index
        machine.gpus[index]["links"] = None
        return f"GPU {index}"

    return plant


def _other_firmware(machine: Machine, chance: random.Random) -> str:
    for index in range(8):
        machine.files[f"sys/class/infiniband/mlx5_{index}/fw_ver"] = "28.43.2026"
    machine.files["sys/class/infiniband/mlx5_5/fw_ver"] = "28.39.1002"
    return "mlx5_5"


def _partitions(key: str) -> Callable[[Machine, random.Random], str]:
    """What one port has, where the others are full members of the default partition."""

    def plant(machine: Machine, chance: random.Random) -> str:
        for index in range(8):
            machine.files[f"sys/class/infiniband/mlx5_{index}/ports/1/pkeys/0"] = "0xffff"
        return port(pkeys__0=key)(machine, chance)

    return plant


def _member_taken_out(machine: Machine, chance: random.Random) -> str:
    for index in range(8):
        bond(machine, index, "802.3ad 4", "up")
    taken = chance.randrange(8)
    for path in [path for path in machine.files if f"/lower_eth{taken}b/" in path]:
        del machine.files[path]
    return f"mlx5_{taken} port 1"


def _one_subnet(machine: Machine, chance: random.Random) -> str:
    rows = [ROUTE.format(f"eth{index}") for index in range(8)]
    machine.files["proc/net/route"] = "\n".join(["Iface\tDestination\tGateway", *rows])
    for name in ("all", *(f"eth{index}" for index in range(8))):
        machine.files[f"proc/sys/net/ipv4/conf/{name}/arp_ignore"] = "0"
    return "host"


def _link_local(machine: Machine, chance: random.Random) -> str:
    """As after a DHCP server that has not answered."""
    return port(gids__3="0000:0000:0000:0000:0000:ffff:a9fe:1203")(machine, chance)


def _set_to_ethernet(machine: Machine, chance: random.Random) -> str:
    return port(link_layer="Ethernet", state="1: DOWN", phys_state="3: Disabled")(machine, chance)


def _no_rdma_driver(machine: Machine, chance: random.Random) -> str:
    """mlx5_ib has not been loaded: its functions are there, and no device is."""
    for path in [each for each in machine.files if "/infiniband" in each]:
        del machine.files[path]
    machine.files |= {
        "sys/bus/pci/devices/0000:18:00.0/class": "0x020700",
        "sys/bus/pci/devices/0000:18:00.0/driver": "/sys/bus/pci/drivers/mlx5_core",
    }
    machine.needs = replace(machine.needs, rdma=None)
    return "PCI 0000:18:00.0"


def _ethernet_adapter_off(machine: Machine, chance: random.Random) -> str:
    """One of nine of a model, which no driver has started."""
    for index in range(9):
        top = f"sys/bus/pci/devices/0000:a{index}:00.0"
        machine.files |= {f"{top}/vendor": "0x15b3", f"{top}/device": "0x1021"}
        if index < 8:
            device = f"sys/class/infiniband/mlx5_{index}/device"
            machine.files[device] = f"/sys/devices/0000:a{index}:00.0"
            machine.files[f"{top}/driver"] = "/sys/bus/pci/drivers/mlx5_core"
    return "PCI 0000:a8:00.0"


DEFECTS = (
    *defects.DEFECTS,
    Defect("an address of the link alone", "nic.gid", ("hgx-roce",), _link_local),
    Defect("an adapter set to Ethernet", "nic.port", ("hgx-ib",), _set_to_ethernet, WARN),
    Defect("no driver for RDMA", "nic.port", ("hgx-ib",), _no_rdma_driver, WARN),
    Defect("an adapter for RoCE that did not start", "nic.port", ("hgx-roce",),
           _ethernet_adapter_off, WARN),
    Defect("damaged packets", "nic.counters", ("hgx-roce",),
           grown("hw_counters/rx_icrc_encapsulated", 400), WARN),
    Defect("4 GiB for all", "host.memory", BOARDS, file(f"{GROUP}/memory.max", str(4 * GIB)), WARN),
    Defect("64 GiB for eight", "host.memory", BOARDS, file(f"{GROUP}/memory.high", str(64 * GIB)),
           WARN),
    Defect("32 GiB by version 1", "host.memory", BOARDS, files(V1), WARN),
    Defect("memory that others have", "host.memory", BOARDS, _used_up, WARN),
    Defect("half a CPU by version 1", "host.cpus", WITH_GPUS, files(V1), WARN),
    Defect("four CPUs' time", "host.cpus", BOARDS, file(f"{GROUP}/cpu.max", "400000 100000"), WARN),
    Defect("one CPU", "host.cpus", WITH_GPUS, _few_cpus, WARN),
    Defect("few ports to choose from", "host.ports", defects.ALL,
           file("proc/sys/net/ipv4/ip_local_port_range", "60000\t60100"), WARN),
    Defect("a table that is full", "host.conntrack", defects.ALL,
           files({"proc/sys/net/netfilter/nf_conntrack_count": "262100",
                  "proc/sys/net/netfilter/nf_conntrack_max": "262144"}), WARN),
    Defect("no programs in /tmp", "host.programs", defects.ALL,
           file("proc/self/mounts", "/dev/sda1 / ext4 rw 0 0\ntmpfs /tmp tmpfs rw,noexec 0 0\n"
                "tmpfs /dev/shm tmpfs rw,size=64g 0 0"), WARN),
    Defect("pages that move", "host.numa-balancing", ("pcie",), _on_grace, WARN),
    *(Defect(name, "host.kernel-log", METAL, logged(text), WARN) for name, text in LOGGED.items()),
    Defect("no device for CUDA in a container", "gpu.uvm", ("container-v1", "container-v2"),
           _no_uvm_in_docker),
    Defect("no device for CUDA", "gpu.uvm", (*METAL, "container-v2"), _no_uvm, WARN),
    Defect("a split GPU of eight", "gpu.mig", BOARDS, _split(8)),
    Defect("a split GPU beside whole ones", "gpu.mig", BOARDS, _split(None), WARN),
    Defect("an Xid of a kernel", "gpu.xid", METAL, lambda machine, chance: _logged_xid(machine, 69),
           WARN),
    Defect("an Xid after which the GPU was reset", "gpu.xid", WITH_GPUS,
           lambda machine, chance: _logged_xid(machine, 158, 0), WARN),
    Defect("an Xid that asks for a reset of the GPU", "gpu.xid", WITH_GPUS,
           lambda machine, chance: _logged_xid(machine, 158)),
    Defect("another firmware", "nic.firmware", defects.MELLANOX, _other_firmware, WARN),
    Defect("no partition", "nic.pkey", ("hgx-ib", "cloud-vm"), _partitions("0x0000")),
    Defect("a limited member", "nic.pkey", ("hgx-ib", "cloud-vm"), _partitions("0x7fff"), WARN),
    Defect("another partition", "nic.pkey", ("hgx-ib", "cloud-vm"), _partitions("0x8012"), WARN),
    Defect("a member that was taken out", "nic.bond", ("hgx-roce",), _member_taken_out),
    Defect("rails in one subnet", "nic.arp", ("hgx-roce",), _one_subnet, WARN),
)  # fmt: skip


def _logged_xid(machine: Machine, code: int, action: int | None = None) -> str:
    """On the first GPU, of which NVML says what it needs now: ``action``."""
    gpu = machine.gpus[0]
    gpu["recovery_action"] = action
    text = f"NVRM: Xid (PCI:{gpu['pci'].removesuffix('.0')}): {code}, pid=1, name=python, x"
    machine.log = [*(machine.log or []), (600.0, text)]
    return f"GPU {gpu['index']}"
