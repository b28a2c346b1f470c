"""Defects as of ``defects``: of what the host leaves to a job, of rails, and of GPUs' use.

``DEFECTS`` are all of both.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ncclops.preflight.model import Status
from ncclops.preflight.readings import Stuck
from tests.preflight import defects
from tests.preflight.defects import BOARDS, METAL, WITH_GPUS
from tests.preflight.machines import GIB, UPTIME_S, Machine, bond
from tests.preflight.planting import Defect, file, files, gpu_with, grown, logged, port

WARN = Status.WARN
Plant = Callable[[Machine, random.Random], str]
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
    "a file server that is gone": "nfs: server 10.20.0.1 not responding, still trying",
    "a Lustre target that is gone": "Lustre: fs1-OST0003-osc-ff1e: Connection to fs1-OST0003 (at "
    "10.1.1.3@o2ib) was lost; in progress operations using this service will wait for recovery",
    "a command that nobody answered": "mlx5_core 0000:5e:00.0: wait_func:1153:(pid 4242): "
    "MODIFY_QP(0x503) timeout. Will cause a leak of a command resource",
    "an issue of an adapter": "mlx5_core 0000:5e:00.0: print_health_info:429:(pid 0): Health issue "
    "observed, irisc not responding, severity(3) ERROR:",
    "an adapter that was given up": "mlx5_core 0000:5e:00.0: mlx5_health_try_recover:335:(pid 231):"
    " handling bad device here",
    "a queue that is stuck again": "mlx5_core 0000:aa:00.0 eth3: TX timeout detected",
    "a GPU whose firmware does not start": "NVRM: _kgspBootGspRm: unexpected WPR2 already up, "
    "cannot proceed with booting GSP",
    "an error of PCIe that was reported": "mlx5_core 0000:18:00.0: PCIe Bus Error: "
    "severity=Uncorrectable (Non-Fatal), type=Transaction Layer, (Requester ID)",
    "a device that did not come back": "pcieport 0000:15:01.0: AER: device recovery failed",
    "a device that was cut off": "pcieport 0000:15:01.0: DPC: containment event, status:0x1f01 "
    "source:0x0000",
    "a slot whose link is down": "pcieport 0000:15:01.0: pciehp: Slot(12): Link Down",
    "a device without power": "nvidia 0000:2c:00.0: Unable to change power state from D3cold to "
    "D0, device inaccessible",
    "an adapter's firmware of Broadcom": "bnxt_en 0000:18:00.0 ens0np0: Detected firmware fatal "
    "condition, initiating reset",
    "a command that Broadcom's did not answer": "bnxt_en 0000:18:00.0 ens0np0: Error (timeout: "
    "5000015) msg {0x23 0x1a2b} len:0",
    "an adapter of Intel": "infiniband irdma0: Requesting a reset",
    "an EFA that does not answer": "infiniband rdmap79s0: The device didn't send any completion "
    "for admin cmd CREATE_QP(1) status 0",
    "an ENA that does not answer": "ena 0000:00:05.0 ens5: Keep alive watchdog timeout.",
    "a MANA that does not answer": "mana 7870:00:00.0: HWC: Request timed out!",
    "an error that the firmware reports": "{3}[Hardware Error]: event severity: recoverable",
    "an error of an AMD processor": "[Hardware Error]: Uncorrected, software restartable error.",
    "btrfs that went read-only": "BTRFS info (device nvme0n1p2: state E): forced readonly",
    "an oops": "BUG: kernel NULL pointer dereference, address: 0000000000000008",
    "an oops of ARM": "Internal error: Oops: 0000000096000004 [#1] SMP",
    "a name space that does not go": "unregister_netdevice: waiting for eth0 to become free. "
    "Usage count = 2",
    "memory that is all used": "Out of memory: Killed process 812 (nv-fabricmanage) total-vm:1kB",
    "a clock that was given up": "clocksource: timekeeping watchdog on CPU3: Marking clocksource "
    "'tsc' as unstable because the skew is too large:",
    "Lustre that has put it out": "LustreError: 167-0: fs1-OST0003-osc-ff1e: This client was "
    "evicted by fs1-OST0003; in progress operations using this service will fail.",
    "no monitor of Ceph": "libceph: mon1 (1)10.0.0.2:6789 session lost, hunting for new mon",
    "files of Ceph that do not answer": "ceph: mds0 hung",
    "a client that Ceph does not take back": "ceph: mds0 reconnect denied",
    "a file server that timed out": "nfs: server filer.example timed out",
    "a block that cannot be read": "critical medium error, dev nvme2n1, sector 999 op 0x0:(READ)",
    "a file system's own block": 'XFS (md1): metadata I/O error in "xfs_da_read_buf" at daddr 2',
    "an array that lost a disk": "md/raid0:md1: Disk failure on nvme4n1 detected, failing array.",
    "a block of an array": "Buffer I/O error on dev md1, logical block 0, async page read",
    "a disk that does not answer": "nvme nvme2: I/O 214 QID 12 timeout, aborting",
    "a disk that does not answer, of newer kernels": "nvme nvme2: I/O tag 214 (10d6) opcode 0x2 "
    "(Read) QID 12 timeout, aborting req_op:READ(0) size:4096",
}


STORMS = {
    "a link that corrects errors all the time": "pcieport 0000:15:01.0: AER: Corrected error "
    "message received from 0000:18:00.0",
    "memory that corrects errors all the time": "EDAC MC0: 1 CE memory read error on "
    "CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x1a offset:0x0 grain:32)",
    "a device whose accesses are refused": "DMAR: [DMA Write NO_PASID] Request device [2c:00.0] "
    "fault addr 0x7f0000 [fault reason 0x05] PTE Write access is not set",
}


def _storm(text: str) -> Plant:
    def plant(machine: Machine, chance: random.Random) -> str:
        machine.log = [*(machine.log or []), *[(600.0, text)] * 240]
        return "host"

    return plant


def _efa_counts(counter: str, by: int) -> Plant:
    def plant(machine: Machine, chance: random.Random) -> str:
        place = f"sys/class/infiniband/rdmap3s0/{counter}"
        machine.files[place], machine.later[place] = "4", str(4 + by)
        return "rdmap3s0 port 1"

    return plant


def _aer(**counted: str) -> Plant:
    def plant(machine: Machine, chance: random.Random) -> str:
        top = "sys/bus/pci/devices/0000:{}:00.0/aer_dev_{}"
        for kind in ("fatal", "correctable"):
            machine.files[top.format("17", kind)] = "RxErr 7\nTOTAL_ERR_COR 7"
        for kind, text in counted.items():
            machine.files[top.format("18", kind)] = text
        return "PCI 0000:18:00.0"

    return plant


def _efa_down(machine: Machine, chance: random.Random) -> str:
    """Its driver says ACTIVE nevertheless; not all have an interface."""
    for index in range(8):
        net = f"sys/class/infiniband/rdmap{index}s0/device/net/ens{index}"
        machine.files[f"{net}/operstate"] = "down" if index == 3 else "up"
    return "rdmap3s0 port 1"


def _efa_disabled(machine: Machine, chance: random.Random) -> str:
    port = "sys/class/infiniband/rdmap3s0/ports/1"
    machine.files |= {f"{port}/state": "1: DOWN", f"{port}/phys_state": "3: Disabled"}
    return "rdmap3s0 port 1"


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


def _no_uvm_without_root(machine: Machine, chance: random.Random) -> str:
    """As of rootless podman: all capabilities, of its own name space only."""
    machine.files["proc/self/uid_map"] = "         0       1000          1"
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


def _small_gpu(machine: Machine, chance: random.Random) -> str:
    machine.gpus[5]["memory_total_bytes"] = 64 * GIB
    return "GPU 5"


def _no_device_file(machine: Machine, chance: random.Random) -> str:
    machine.files["dev/nvidiactl"] = machine.files["dev/nvidia-uvm"] = ""
    listed = f"proc/driver/nvidia/gpus/{machine.gpus[0]['pci']}/information"
    machine.files[listed] = "Model: x\nDevice Minor: \t 0"
    machine.gpus[0]["missing_file"] = "dev/nvidia0"
    return "GPU 0"


def _unopened(machine: Machine, chance: random.Random) -> str:
    """NVML, which cannot open it, leaves it out."""
    pci = machine.gpus.pop()["pci"]
    machine.driver["count"] -= 1
    machine.files["dev/nvidiactl"] = machine.files["dev/nvidia-uvm"] = ""
    machine.files[f"proc/driver/nvidia/gpus/{pci}/information"] = "Device Minor: \t 7"
    return f"PCI {pci}"


def _held(driver: str) -> Callable[[Machine, random.Random], str]:
    """The last GPU has been given to another driver; NVIDIA's lists it no more."""

    def plant(machine: Machine, chance: random.Random) -> str:
        top = "sys/bus/pci/devices"
        for gpu in machine.gpus:
            machine.files[f"{top}/{gpu['pci']}/device"] = "0x2330"
        pci = machine.gpus.pop()["pci"]
        machine.driver["count"] -= 1
        machine.files.pop(f"proc/driver/nvidia/gpus/{pci}/information", None)
        machine.files[f"{top}/{pci}/driver"] = f"/sys/bus/pci/drivers/{driver}" if driver else ""
        return f"PCI {pci}"

    return plant


def _kept_adapter(machine: Machine, chance: random.Random) -> str:
    """As ``_ethernet_adapter_off``, and vfio-pci has it."""
    found = _ethernet_adapter_off(machine, chance)
    machine.files["sys/bus/pci/devices/0000:a8:00.0/driver"] = "/sys/bus/pci/drivers/vfio-pci"
    return found


def _one_address(machine: Machine, chance: random.Random) -> str:
    top = "sys/class/infiniband/mlx5_{}/ports/1/gids/3"
    machine.files[top.format(6)] = machine.files[top.format(2)]
    return "mlx5_2 port 1, mlx5_6 port 1"


def _one_guid(machine: Machine, chance: random.Random) -> str:
    top = "sys/class/infiniband/mlx5_{}/ports/1/gids/0"
    machine.files[top.format(5)] = machine.files[top.format(1)]
    return "mlx5_1 port 1, mlx5_5 port 1"


def _slot(index: int, lanes: int, of_slot: int | None) -> Callable[[Machine, random.Random], str]:
    """Adapter ``index`` has so many lanes, and the bridge above it can do ``of_slot``."""

    def plant(machine: Machine, chance: random.Random) -> str:
        top = f"sys/class/infiniband/mlx5_{index}/device"
        machine.files[f"{top}/current_link_width"] = str(lanes)
        if of_slot is not None:
            machine.files[f"{top}/../max_link_width"] = str(of_slot)
        return f"mlx5_{index}"

    return plant


def _waits(**values: Any) -> Callable[[Machine, random.Random], str]:
    def plant(machine: Machine, chance: random.Random) -> str:
        machine.stuck = (Stuck(pid=4711, name="python3", **values),)
        return "host"

    return plant


def _modules(*sizes: int) -> Callable[[Machine, random.Random], str]:
    """Modules that the firmware lists, in parts of the memory that the kernel has."""

    def plant(machine: Machine, chance: random.Random) -> str:
        kib = int(machine.files["proc/meminfo"].split()[1])
        machine.modules = tuple(kib // 1024 * each // 1000 for each in sizes)
        return "host"

    return plant


def _again(*lines: str) -> Callable[[Machine, random.Random], str]:
    """Xid 119 twenty minutes ago, then ``lines``; a GPU of which NVML does not say its needs."""

    def plant(machine: Machine, chance: random.Random) -> str:
        gpu = machine.gpus[0]
        gpu["recovery_action"] = None
        texts = [line.format(pci=gpu["pci"].removesuffix(".0"), uuid=gpu["uuid"]) for line in lines]
        xid = f"NVRM: Xid (PCI:{gpu['pci'].removesuffix('.0')}): 119, pid=1, name=python, Timeout"
        aged = [(1200.0 - 60 * n, text) for n, text in enumerate([xid, *texts])]
        machine.log = [*(machine.log or []), *aged]
        return "GPU 0"

    return plant


CHANGED = "NVRM: Xid (PCI:{pci}): 154, GPU recovery action changed from "
DEFECTS = (
    *defects.DEFECTS,
    Defect("less memory than the others", "gpu.memory", BOARDS, _small_gpu),
    Defect("no device file", "gpu.device-file", METAL, _no_device_file),
    Defect("no device file in a container", "gpu.device-file", ("container-v2",), _no_device_file),
    Defect("a GPU that NVML cannot open", "gpu.device-file", defects.MELLANOX, _unopened),
    Defect("a GPU of vfio-pci", "gpu.bound", defects.MELLANOX, _held("vfio-pci"), WARN),
    Defect("a GPU of nouveau", "gpu.bound", defects.MELLANOX, _held("nouveau"), WARN),
    Defect("a GPU of no driver", "gpu.bound", defects.MELLANOX, _held(""), WARN),
    Defect("an adapter of vfio-pci", "nic.port", ("hgx-roce",), _kept_adapter, WARN),
    Defect("one address on two ports", "nic.unique", ("hgx-roce",), _one_address),
    Defect("one GUID on two ports", "nic.unique", ("hgx-ib", "cloud-vm"), _one_guid),
    Defect("fewer lanes than the slot has", "nic.pcie", defects.MELLANOX, _slot(6, 8, 16)),
    Defect("a slot with fewer lanes", "nic.pcie", defects.MELLANOX, _slot(6, 8, 8), WARN),
    Defect("killed, and it holds a GPU", "host.d-state", defects.ALL,
           _waits(gpus=("/dev/nvidia3",)), WARN),
    Defect("a server that does not answer", "host.d-state", defects.ALL,
           _waits(moved=False, place="rpc_wait_bit_killable"), WARN),
    Defect("a program that stands still", "host.d-state", defects.ALL, _waits(moved=False), WARN),
    Defect("a module that is not used", "host.modules", METAL, _modules(*[67] * 16), WARN),
    Defect("a module that is not listed", "host.modules", METAL, _modules(*[67] * 15, 0), WARN),
    Defect("CPUs that are offline", "host.cpus", METAL,
           files({"sys/devices/system/cpu/offline": "96-191",
                  "sys/devices/system/cpu/smt/control": "on"}), WARN),
    Defect("reset since, by Xid 154", "gpu.xid", WITH_GPUS,
           _again(f"{CHANGED}0x1 (GPU Reset Required) to 0x0 (None)"), WARN),
    Defect("the driver was loaded since", "gpu.xid", WITH_GPUS,
           _again("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.230.02"), WARN),
    Defect("reset since, by NVSentinel", "gpu.xid", WITH_GPUS,
           _again("GPU reset executed: {uuid}, success: true"), WARN),
    Defect("a reset that failed", "gpu.xid", WITH_GPUS,
           _again("GPU reset executed: {uuid}, success: false")),
    Defect("an Xid after the reset", "gpu.xid", WITH_GPUS,
           _again(f"{CHANGED}0x1 (GPU Reset Required) to 0x0 (None)",
                  "NVRM: Xid (PCI:{pci}): 119, pid=1, name=python, Timeout")),
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
    *(Defect(name, "host.kernel-log", METAL, _storm(text), WARN) for name, text in STORMS.items()),
    Defect("fatal errors of PCIe", "host.pcie-errors", METAL,
           _aer(fatal="Undefined 0\nTOTAL_ERR_FATAL 2"), WARN),
    Defect("corrected errors of PCIe", "host.pcie-errors", METAL,
           _aer(correctable=f"RxErr 0\nTOTAL_ERR_COR {int(UPTIME_S / 7)}"), WARN),
    Defect("a slow clock", "host.clocksource", defects.ALL,
           file("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet"), WARN),
    Defect("SRAM that NVIDIA replaces", "gpu.ecc", WITH_GPUS, gpu_with(sram_exceeded=True)),
    Defect("an EFA without link", "nic.port", ("efa",), _efa_down),
    Defect("an EFA that is off", "nic.port", ("efa",), _efa_disabled),
    Defect("an EFA that leaves commands", "nic.counters", ("efa",),
           _efa_counts("hw_counters/no_completion_cmds", 1)),
    Defect("an EFA that refuses commands", "nic.counters", ("efa",),
           _efa_counts("hw_counters/cmds_err", 40), WARN),
    Defect("an EFA whose peers do not answer", "nic.counters", ("efa",),
           _efa_counts("ports/1/hw_counters/unresponsive_remote_events", 40), WARN),
    Defect("an adapter of Broadcom that repeats", "nic.counters", ("hgx-roce",),
           grown("hw_counters/to_retransmits", 400), WARN),
    Defect("no device for CUDA in a container", "gpu.uvm", ("container-v1", "container-v2"),
           _no_uvm_in_docker),
    Defect("no device for CUDA without root", "gpu.uvm", ("container-v2",), _no_uvm_without_root),
    Defect("no device for CUDA", "gpu.uvm", (*METAL, "container-v2"), _no_uvm, WARN),
    Defect("a split GPU of eight", "gpu.mig", BOARDS, _split(8)),
    Defect("a split GPU beside whole ones", "gpu.mig", BOARDS, _split(None), WARN),
    Defect("an Xid of a kernel", "gpu.xid", METAL, lambda machine, chance: _logged_xid(machine, 69),
           WARN),
    Defect("a contained error of the memory", "gpu.xid", METAL,
           lambda machine, chance: _logged_xid(machine, 94), WARN),
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
