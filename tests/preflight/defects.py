"""Defects that a machine can be given, each with the check that has to find it and where.

A defect changes a healthy machine as the fault would; ``where`` is the finding's subject.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import msgspec

from ncclops.preflight.model import Status
from ncclops.preflight.readings import Collective, Process, Space, Stuck
from tests.preflight.machines import GIB, KINDS, Machine, add_device, bond
from tests.preflight.planting import (
    Defect,
    counted,
    file,
    files,
    gpu_with,
    grown,
    limit,
    logged,
    port,
)

BOARDS = ("hgx-ib", "hgx-roce", "cloud-vm", "efa")
WITH_PORTS = ("hgx-ib", "hgx-roce", "cloud-vm")
METAL = ("hgx-ib", "hgx-roce", "pcie")
ALL = KINDS
WITH_GPUS = tuple(kind for kind in KINDS if kind != "cpu")


def _lost_gpu(machine: Machine, chance: random.Random) -> str:
    index = chance.randrange(len(machine.gpus))
    machine.gpus[index] = {
        "index": index, "lost": "the GPU does not answer: GPU is lost", "error": 15
    }  # fmt: skip
    return f"GPU {index}"


def _missing_gpu(machine: Machine, chance: random.Random) -> str:
    machine.gpus.pop()
    machine.driver["count"] -= 1
    return "host"


def _no_driver(machine: Machine, chance: random.Random) -> str:
    """As after an update of the kernel, for which no module was built."""
    machine.gpus.clear()
    machine.driver = {"problem": "NVML Shared Library Not Found", "error": 12}
    machine.needs = replace(machine.needs, gpus=8)
    for path in list(machine.files):
        is_of_driver = path.startswith(("proc/driver/nvidia/", "sys/module/nvidia", "dev/nvidia"))
        if is_of_driver or machine.files[path] == "/sys/bus/pci/drivers/nvidia":
            del machine.files[path]
    return "host"


def _no_driver_and_no_lane(machine: Machine, chance: random.Random) -> str:
    found = _no_driver(machine, chance)
    machine.needs = replace(machine.needs, gpus=None)
    return found


def _links_down(machine: Machine, chance: random.Random) -> str:
    index = chance.randrange(len(machine.gpus))
    links = [True] * 18
    for link in chance.sample(range(18), chance.randint(1, 17)):
        links[link] = False
    machine.gpus[index]["links"] = links
    return f"GPU {index}"


def _fabric(**values: object) -> Callable[[Machine, random.Random], str]:
    def plant(machine: Machine, chance: random.Random) -> str:
        index = chance.randrange(len(machine.gpus))
        healthy = {"state": 3, "status": 0, "cluster": "0" * 32, "clique": 0}
        machine.gpus[index]["fabric"] = healthy | values
        return f"GPU {index}"

    return plant


def _rack(machine: Machine, chance: random.Random) -> str:
    """A GPU of a rack, whose switches are on trays of their own."""
    for gpu in machine.gpus:
        gpu["fabric"] = {"state": 3, "status": 0, "cluster": "9c6f5af3", "clique": 4026}
    machine.files["dev/nvidia-caps-imex-channels/channel0"], machine.imex = "", (True,)
    machine.gpus[1]["fabric"] = machine.gpus[1]["fabric"] | {"health": 0x10}
    return "GPU 1"


def _cliques(machine: Machine, chance: random.Random) -> str:
    for gpu in machine.gpus:
        gpu["fabric"] = {"state": 3, "status": 0, "cluster": "0" * 32, "clique": 0}
    machine.gpus[-1]["fabric"]["clique"] = 7
    return "host"


def _xid(machine: Machine, chance: random.Random) -> str:
    gpu = chance.choice(machine.gpus)
    code = chance.choice([48, 62, 64, 79, 95, 119, 143, 145])
    pci = gpu["pci"].removesuffix(".0")
    machine.log = [*(machine.log or []), (600.0, f"NVRM: Xid (PCI:{pci}): {code}, pid=1, x")]
    return f"GPU {gpu['index']}"


def _xid_of_an_instance(machine: Machine, chance: random.Random) -> str:
    gpu = chance.choice(machine.gpus)
    pci = gpu["pci"].removesuffix(".0")
    text = f"NVRM: Xid (PCI:{pci} GPU-I:05): 95, pid=1, name=python, Uncontained: FBHUB"
    machine.log = [*(machine.log or []), (600.0, text)]
    return f"GPU {gpu['index']}"


def _mapped_root(machine: Machine, chance: random.Random) -> str:
    """As under enroot or rootless podman: all capabilities, of its own name space only."""
    found = limit("Max locked memory", "8388608")(machine, chance)
    status = machine.files["proc/self/status"]
    machine.files["proc/self/status"] = status.replace("a88425fb", "000001ffffffffff")
    machine.files["proc/self/uid_map"] = "         0       1000          1"
    return found


def _asks_for_a_reset(machine: Machine, chance: random.Random) -> str:
    """In the log alone: NVML of drivers before 570 does not say it."""
    gpu = chance.choice(machine.gpus)
    gpu["recovery_action"] = None
    changed = "154, GPU recovery action changed from"
    for age_s, what in ((700.0, "0x2 (Node) to 0x0 (None)"), (600.0, "0x0 (None) to 0x1 (Reset)")):
        text = f"NVRM: Xid (PCI:{gpu['pci'].removesuffix('.0')}): {changed} {what}"
        machine.log = [*(machine.log or []), (age_s, text)]
    return f"GPU {gpu['index']}"


def _switch_error(machine: Machine, chance: random.Random) -> str:
    text = "nvidia-nvswitch3: SXid (PCI:0000:C4:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"
    machine.log = [*(machine.log or []), (60.0, text)]
    return "NVSwitch 0000:c4:00.0"


def _off_the_bus(machine: Machine, chance: random.Random) -> str:
    gpu = chance.choice(machine.gpus)
    text = f"NVRM: The NVIDIA GPU {gpu['pci']} has fallen off the bus and is not responding."
    machine.log = [*(machine.log or []), (60.0, text)]
    return f"GPU {gpu['index']}"


def _two_drivers(machine: Machine, chance: random.Random) -> str:
    machine.files["proc/driver/nvidia/version"] = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb"
    )
    return "host"


def _module_of_before(machine: Machine, chance: random.Random) -> str:
    """All packages have been replaced; the kernel still has the module of before."""
    machine.files |= {
        "proc/driver/nvidia-nvswitch/devices/0000:05:00.0": "",
        "dpkg/nvidia-fabricmanager": machine.driver["version"],
    }
    machine.processes = [*(machine.processes or []), Process(1700, "nv-fabricmanage", "S")]
    return _two_drivers(machine, chance)


def _no_nvml(machine: Machine, chance: random.Random) -> str:
    machine.files["proc/driver/nvidia/version"] = "NVRM version: Kernel Module  550.54.14  Thu"
    machine.driver = {
        "problem": "NVML is not available: Driver/library version mismatch",
        "error": 18,
    }
    machine.gpus = []
    return "host"


def _no_fabric_manager(machine: Machine, chance: random.Random) -> str:
    machine.files["proc/driver/nvidia-nvswitch/devices/0000:05:00.0"] = ""
    return "host"


def _old_fabric_manager(machine: Machine, chance: random.Random) -> str:
    machine.files["proc/driver/nvidia-nvswitch/devices/0000:05:00.0"] = ""
    machine.files["var/log/fabricmanager.log"] = "525.60.13"
    machine.processes = [*(machine.processes or []), Process(77, "nv-fabricmanage", "S")]
    return "host"


def _switch_ports(machine: Machine, chance: random.Random) -> str:
    """A Blackwell board, whose switches are managed over InfiniBand; neither daemon runs."""
    for index in (20, 21):
        name = f"mlx5_{index}"
        add_device(machine, chance, index, name, efa=False, roce=False, virtual=False)
        machine.files[f"sys/class/infiniband/{name}/device/vpd"] = "NVLink Switch SMDL=SW_MNG"
    return "host"


def _no_subnet_manager(machine: Machine, chance: random.Random) -> str:
    machine.processes = [*(machine.processes or []), Process(77, "nv-fabricmanage", "S")]
    return _switch_ports(machine, chance)


def _no_imex(machine: Machine, chance: random.Random) -> str:
    found = _closed_channel(machine, chance)
    machine.imex = (True,)
    return found


def _seven(machine: Machine, chance: random.Random) -> str:
    """PCI has not found one at boot, so the driver knows of no more."""
    machine.files["proc/driver/nvidia-nvswitch/devices/0000:05:00.0"] = ""
    machine.processes = [*(machine.processes or []), Process(77, "nv-fabricmanage", "S")]
    pci = machine.gpus.pop()["pci"]
    machine.driver["count"] -= 1
    for path in [path for path in machine.files if pci in path]:
        del machine.files[path]
    return "host"


def _no_init(machine: Machine, chance: random.Random) -> str:
    gpu = chance.choice(machine.gpus)
    logged(f"NVRM: GPU {gpu['pci']}: RmInitAdapter failed! (0x62:0x65:1860)")(machine, chance)
    return f"GPU {gpu['index']}"


def _no_efa(machine: Machine, chance: random.Random) -> str:
    """Its driver has not started it."""
    for index in range(8):
        place = f"sys/bus/pci/devices/0000:{0xA0 + index:02x}:00.0"
        machine.files |= {f"{place}/class": "0x020000", f"{place}/vendor": "0x1d0f"}
        machine.files |= {f"{place}/device": "0xefa2", f"{place}/driver": "/sys/drivers/efa"}
        device = f"sys/class/infiniband/rdmap{index}s0/device"
        machine.files[device] = f"/sys/devices/pci/0000:{0xA0 + index:02x}:00.0"
    for path in [path for path in machine.files if "infiniband/rdmap5s0/" in path]:
        del machine.files[path]
    del machine.files["sys/bus/pci/devices/0000:a5:00.0/driver"]
    return "PCI 0000:a5:00.0"


def _bonds(mode: str) -> Callable[[Machine, random.Random], str]:
    """Each port has a bond of two members; the second of one of them has no link."""

    def plant(machine: Machine, chance: random.Random) -> str:
        bad = chance.randrange(8)
        for index in range(8):
            bond(machine, index, mode, "down" if index == bad else "up")
        return f"mlx5_{bad} port 1"

    return plant


def _slow_lanes(machine: Machine, chance: random.Random) -> str:
    for index in range(8):
        place = f"sys/class/infiniband/mlx5_{index}/device/current_link_speed"
        machine.files[place] = "16.0 GT/s PCIe" if index == 6 else "32.0 GT/s PCIe"
    return "mlx5_6"


def _large_pages(machine: Machine, chance: random.Random) -> str:
    """Of 1 GiB each, which /proc/meminfo does not count."""
    top = "sys/kernel/mm/hugepages/hugepages-1048576kB"
    machine.files[f"{top}/free_hugepages"] = "1500"
    return "host"


def _no_ports_left(machine: Machine, chance: random.Random) -> str:
    machine.environ["NCCL_IB_HCA"] = "=mlx5_bond_0"
    return "host"


def _roce_unplugged(machine: Machine, chance: random.Random) -> str:
    """RoCE calls a port without a cable Disabled, like one that somebody has switched off."""
    index = chance.randrange(8)
    top = f"sys/class/infiniband/mlx5_{index}"
    net = f"{top}/device/net/eth{index}"
    machine.files |= {
        f"{top}/ports/1/state": "1: DOWN",
        f"{top}/ports/1/phys_state": "3: Disabled",
        f"{net}/operstate": "down",
        f"{net}/carrier": "0",
        f"{net}/flags": "0x1003",
    }
    return f"mlx5_{index} port 1"


def _no_ip(machine: Machine, chance: random.Random) -> str:
    """Its interface has lost its address: what is left is made from the hardware's."""
    index = chance.randrange(8)
    port = f"sys/class/infiniband/mlx5_{index}/ports/1"
    machine.files[f"{port}/gids/1"] = "fe80:0000:0000:0000:0000:0000:0000:0001"
    machine.files[f"{port}/gids/3"] = "0000:0000:0000:0000:0000:0000:0000:0000"
    machine.files.pop(f"{port}/gid_attrs/types/3")
    return f"mlx5_{index} port 1"


def _no_fabric(machine: Machine, chance: random.Random) -> str:
    """A leaf switch is off, and the front end is up."""
    machine.needs = replace(machine.needs, rdma=True)
    for index in range(8):
        top = f"sys/class/infiniband/mlx5_{index}/ports/1"
        machine.files |= {f"{top}/state": "1: DOWN", f"{top}/phys_state": "2: Polling"}
    return "mlx5_0 port 1"


def _no_device(machine: Machine, chance: random.Random) -> str:
    """The function is on the bus, and its driver has not made it an RDMA device."""
    tops = sorted({p.split("/")[3] for p in machine.files if p.startswith("sys/class/infiniband/")})
    for number, name in enumerate(tops):
        address = f"0000:{0xA0 + number:02x}:00.0"
        machine.files[f"sys/class/infiniband/{name}/device"] = f"/sys/devices/pci/{address}"
        machine.files[f"sys/bus/pci/devices/{address}/class"] = "0x020700"
    lost = chance.choice(tops[:8])
    for path in [path for path in machine.files if f"infiniband/{lost}/" in path]:
        del machine.files[path]
    return f"PCI 0000:{0xA0 + tops.index(lost):02x}:00.0"


def _no_v2(machine: Machine, chance: random.Random) -> str:
    top = "sys/class/infiniband/mlx5_2/ports/1/gid_attrs/types"
    machine.files |= {f"{top}/{n}": "IB/RoCE v1" for n in (1, 3)}
    return "mlx5_2 port 1"


def _wrong_gid(machine: Machine, chance: random.Random) -> str:
    machine.environ["NCCL_IB_GID_INDEX"] = "0"
    return "mlx5_0 port 1"


def _no_uverbs(machine: Machine, chance: random.Random) -> str:
    del machine.files["dev/infiniband/uverbs3"]
    return "mlx5_3"


def _no_uverbs_class(machine: Machine, chance: random.Random) -> str:
    del machine.files["sys/class/infiniband_verbs/uverbs3/ibdev"]
    return "mlx5_3"


def _narrow_nic(machine: Machine, chance: random.Random) -> str:
    machine.files["sys/class/infiniband/mlx5_6/device/current_link_width"] = "8"
    return "mlx5_6"


def _net_down(machine: Machine, chance: random.Random) -> str:
    machine.files["sys/class/infiniband/mlx5_1/device/net/eth1/operstate"] = "down"
    return "mlx5_1 port 1"


def _small_mtu(machine: Machine, chance: random.Random) -> str:
    machine.files["sys/class/infiniband/mlx5_4/device/net/eth4/mtu"] = "1500"
    return "mlx5_4 port 1"


def _lost_carrier(machine: Machine, chance: random.Random) -> str:
    place = "sys/class/infiniband/mlx5_4/device/net/eth4/carrier_changes"
    machine.later[place] = "9"
    return "mlx5_4 port 1"


def _lost_carrier_often(machine: Machine, chance: random.Random) -> str:
    machine.files["sys/class/infiniband/mlx5_4/device/net/eth4/carrier_changes"] = "842"
    return "mlx5_4 port 1"


def _no_port_active(machine: Machine, chance: random.Random) -> str:
    for path in machine.files:
        if path.endswith("/state"):
            machine.files[path] = "1: DOWN"
        if path.endswith("/phys_state"):
            machine.files[path] = "2: Polling"
    machine.needs = replace(machine.needs, rdma=True)
    return "host"


def _full_disk(machine: Machine, chance: random.Random) -> str:
    machine.spaces.append(Space(path="/ckpt", size_bytes=GIB << 10, free_bytes=GIB // 2))
    return "/ckpt"


def _late(part: str, subject: str) -> Callable[[Machine, random.Random], str]:
    def plant(machine: Machine, chance: random.Random) -> str:
        machine.late[part] = 15.0
        return subject

    return plant


def _bound_elsewhere(machine: Machine, chance: random.Random) -> str:
    status = machine.files["proc/self/status"]
    machine.files["proc/self/status"] = status.replace("0-191", "0-7")
    return f"GPU {len(machine.gpus) - 1}"


def _named(name: str) -> Callable[[Machine, random.Random], str]:
    def plant(machine: Machine, chance: random.Random) -> str:
        machine.files["proc/sys/kernel/hostname"] = name
        machine.needs = replace(machine.needs, nodes="many")
        return "host"

    return plant


def _lost_link(machine: Machine, chance: random.Random) -> str:
    """Of two ports of a kind: neither is the usual one, but this one has been up."""
    for index in (0, 1):
        machine.files[f"sys/class/infiniband/mlx5_{index}/board_id"] = "MT_0000000223"
    machine.files["sys/class/infiniband/mlx5_1/ports/1/counters/link_downed"] = "2"
    machine.files["sys/class/infiniband/mlx5_1/ports/1/state"] = "1: DOWN"
    machine.files["sys/class/infiniband/mlx5_1/ports/1/phys_state"] = "2: Polling"
    return "mlx5_1 port 1"


def _named_and_off(machine: Machine, chance: random.Random) -> str:
    machine.environ["NCCL_IB_HCA"] = "=mlx5_0,mlx5_1:1"
    machine.files["sys/class/infiniband/mlx5_1/ports/1/state"] = "1: DOWN"
    machine.files["sys/class/infiniband/mlx5_1/ports/1/phys_state"] = "3: Disabled"
    return "mlx5_1 port 1"


def _newer_torch(machine: Machine, chance: random.Random) -> str:
    machine.torch_cuda = "13.0"
    return "host"


def _known_bad(machine: Machine, chance: random.Random) -> str:
    machine.nccl = "2.25.1"
    return "host"


def _made(**values: object) -> Callable[[Machine, random.Random], str]:
    """Fields of the machine, on a host that is no container and not virtual."""

    def plant(machine: Machine, chance: random.Random) -> str:
        for name, value in values.items():
            setattr(machine, name, value)
        return "host"

    return plant


def _old_stack(machine: Machine, chance: random.Random) -> str:
    machine.nccl = "2.27.3"
    return limit("Max stack size", "unlimited")(machine, chance)


def _translated(machine: Machine, chance: random.Random) -> str:
    for number, gpu in enumerate(machine.gpus):
        place = f"sys/bus/pci/devices/{gpu['pci']}/iommu_group"
        machine.files[place] = f"../../../kernel/iommu_groups/{number}"
        machine.files[f"sys/kernel/iommu_groups/{number}/type"] = "DMA-FQ"
    return "host"


def _no_clock(machine: Machine, chance: random.Random) -> str:
    machine.clock, machine.processes = None, [Process(1, "systemd", "S")]
    return "host"


def _filtered(machine: Machine, chance: random.Random) -> str:
    status = machine.files["proc/self/status"]
    status = re.sub(r"CapEff:\t\w+", "CapEff:\ta80425fb", status)
    machine.files["proc/self/status"] = status.replace("Seccomp:\t0", "Seccomp:\t2")
    return "host"


def _closed_channel(machine: Machine, chance: random.Random) -> str:
    for gpu in machine.gpus:
        gpu["fabric"] = {"state": 3, "status": 0, "cluster": "9c6f5af3", "clique": 4026}
    machine.files["dev/nvidia-caps-imex-channels/channel0"], machine.imex = "", (False,)
    return "host"


def _no_peer_memory(machine: Machine, chance: random.Random) -> str:
    machine.files["proc/modules"] = "nvidia_uvm 1 0 - Live 0x0"
    version = machine.driver["version"]
    machine.files["proc/driver/nvidia/version"] = (
        f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Release Build"
    )
    return "host"


def _few_ports(machine: Machine, chance: random.Random) -> str:
    machine.needs = replace(machine.needs, rdma=True, rdma_ports=12)
    return "host"


def _no_umad(machine: Machine, chance: random.Random) -> str:
    del machine.files["sys/class/infiniband_mad/umad2/ibdev"]
    return "mlx5_2 port 1"


def _reduced(**values: object) -> Callable[[Machine, random.Random], str]:
    """An all_reduce with 418 GB/s, as eight H200 have it, but for ``values``."""

    def plant(machine: Machine, chance: random.Random) -> str:
        for gpu in machine.gpus:
            gpu["name"] = "NVIDIA H200"
        healthy = Collective(gpus=8, bytes=4 << 30, seconds=0.018, diagnostics=DIAGNOSED)
        machine.collective = msgspec.structs.replace(healthy, **values)
        return "host"

    return plant


DIAGNOSED = ("[OK]   p2p: verified P2P access in both directions between every GPU pair",)
PAIRS = ("[INFO] p2p: only 52/56 GPU-to-GPU peer accesses passed verification",)
WARN = Status.WARN
HUGE = (
    "MemTotal:       1073741824 kB\nHugePages_Total:  262144\nHugePages_Free:   262144\n"
    "Hugepagesize:       2048 kB"
)
SMALL_SHM = "shm /dev/shm tmpfs rw,size=65536k 0 0"
MELLANOX = ("hgx-ib", "hgx-roce")
LOGGED = {
    "pcie": "pcieport 0000:15:01.0: AER: Uncorrected (Fatal) error received: 0000:1b:00.0",
    "memory": "EDAC MC3: 1 UE memory scrubbing error on CPU_SrcID#0_MC#3_Chan#0_DIMM#0",
    "firmware": "mlx5_core 0000:4f:00.0: poll_health:955:(pid 0): device's health compromised - x",
    "lockup": "watchdog: BUG: soft lockup - CPU#17 stuck for 26s! [python3:4711]",
}
SLOWED_ONCE = [{"reasons": 8}, {"reasons": 1}, {"reasons": 0}]
DEFECTS = (
    Defect("docker's /dev/shm", "host.shm", ALL, file("proc/mounts", SMALL_SHM)),
    Defect(
        "8 MiB of locked memory",
        "host.memlock",
        (*WITH_PORTS, "efa"),
        limit("Max locked memory", "8388608"),
    ),
    Defect("root by name only", "host.memlock", (*WITH_PORTS, "efa"), _mapped_root),
    Defect("few open files", "host.nofile", ALL, limit("Max open files", "256")),
    Defect("1024 open files", "host.nofile", ALL, limit("Max open files", "1024"), WARN),
    Defect("a group of 128 processes", "host.pids", ALL, file("sys/fs/cgroup/pids.max", "128")),
    Defect(
        "nearly all descriptors of the host in use",
        "host.file-max",
        ALL,
        files({"proc/sys/fs/file-max": "2097152", "proc/sys/fs/file-nr": "2090000\t0\t2097152"}),
    ),
    Defect(
        "segments go with their user",
        "host.removeipc",
        METAL,
        file("etc/systemd/logind.conf", "[Login]\nRemoveIPC=yes"),
        WARN,
    ),
    Defect("unlimited stacks with an old NCCL", "host.stack", WITH_GPUS, _old_stack, WARN),
    Defect("an IOMMU that translates", "host.iommu", METAL, _translated, WARN),
    Defect("bridges that validate", "host.acs", METAL, _made(acs=("0000:15:01.0",)), WARN),
    Defect("half of it huge pages", "host.hugepages", ALL, file("proc/meminfo", HUGE), WARN),
    Defect("half of it large pages", "host.hugepages", ALL, _large_pages, WARN),
    Defect("a fatal error of PCIe", "host.kernel-log", METAL, logged(LOGGED["pcie"]), WARN),
    Defect("memory that fails", "host.kernel-log", METAL, logged(LOGGED["memory"]), WARN),
    Defect("an adapter's firmware", "host.kernel-log", METAL, logged(LOGGED["firmware"]), WARN),
    Defect("a processor that hangs", "host.kernel-log", METAL, logged(LOGGED["lockup"]), WARN),
    Defect("segments that were left", "host.stale-shm", ALL, _made(stale=("nccl-a1b2c3",)), WARN),
    Defect("nobody keeps the clock", "host.clock", METAL, _no_clock, WARN),
    Defect("a filter without CAP_SYS_NICE", "host.capabilities", WITH_GPUS, _filtered, WARN),
    Defect("a channel without its daemon", "host.imex", ("hgx-ib", "efa"), _no_imex, WARN),
    Defect("a channel that is closed", "host.imex", ("hgx-ib", "efa"), _closed_channel),
    Defect("no peer memory", "host.peer-memory", MELLANOX, _no_peer_memory, WARN),
    Defect("a host called localhost", "host.name", ALL, _named("localhost")),
    Defect("a full disk", "host.space", ALL, _full_disk),
    Defect("a disk that hangs", "host.readable", ALL, _late("space /ckpt", "/ckpt")),
    Defect("a GPU that hangs", "host.readable", WITH_GPUS, _late("gpu 0", "GPU 0")),
    Defect("NVML hangs", "host.readable", WITH_GPUS, _late("driver", "NVML")),
    Defect(
        "a stuck nvidia-smi",
        "host.d-state",
        ALL,
        _made(stuck=(Stuck(pid=4711, name="nvidia-smi"),)),
        WARN,
    ),
    Defect("CPUs of the other socket", "host.numa", (*MELLANOX, "efa"), _bound_elsewhere, WARN),
    Defect("a lost GPU", "gpu.lost", WITH_GPUS, _lost_gpu),
    Defect("a GPU that is not there", "gpu.count", METAL, _missing_gpu),
    Defect("one of a board that PCI lacks", "gpu.count", MELLANOX, _seven, WARN),
    Defect("no driver", "gpu.count", (*METAL, "cloud-vm", "cpu"), _no_driver),
    Defect("no driver, no lane", "gpu.driver", METAL, _no_driver_and_no_lane, WARN),
    Defect("the driver asks for a reset", "gpu.recovery", WITH_GPUS, gpu_with(recovery_action=1)),
    Defect("an uncorrected error", "gpu.ecc", WITH_GPUS, gpu_with(ecc_uncorrected=2)),
    Defect("an uncorrected error in SRAM", "gpu.ecc", WITH_GPUS, gpu_with(sram_uncorrected=1)),
    Defect("many corrected errors", "gpu.ecc", WITH_GPUS, gpu_with(sram_corrected=20_000)),
    Defect("ECC off", "gpu.ecc-mode", WITH_GPUS, gpu_with(ecc_enabled=False), WARN),
    Defect("a pending row", "gpu.rows", WITH_GPUS, gpu_with(rows_pending=True)),
    Defect("a failed row", "gpu.rows", WITH_GPUS, gpu_with(rows_failed=True)),
    Defect("600 rows", "gpu.rows", WITH_GPUS, gpu_with(rows_uncorrected=600)),
    Defect("an Xid", "gpu.xid", WITH_GPUS, _xid),
    Defect("an Xid of a MIG instance", "gpu.xid", ("mig",), _xid_of_an_instance),
    Defect("an Xid that asks for a reset", "gpu.xid", WITH_GPUS, _asks_for_a_reset),
    Defect("a fatal error of a switch", "gpu.xid", WITH_GPUS, _switch_error),
    Defect("a GPU that does not start", "gpu.xid", WITH_GPUS, _no_init),
    Defect("off the bus without an Xid", "gpu.xid", WITH_GPUS, _off_the_bus),
    Defect(
        "thermal slowdown", "gpu.throttle", WITH_GPUS, gpu_with(throttle=[{"reasons": 0x40}] * 3)
    ),
    Defect("a power brake", "gpu.throttle", WITH_GPUS, gpu_with(throttle=[{"reasons": 0x81}] * 3)),
    Defect("slowed for a moment", "gpu.throttle", WITH_GPUS, gpu_with(throttle=SLOWED_ONCE), WARN),
    Defect("a hot GPU", "gpu.temperature", WITH_GPUS, gpu_with(temperature_c=93)),
    Defect(
        "hot memory",
        "gpu.temperature",
        WITH_GPUS,
        gpu_with(memory_temperature_c=99, memory_limit_c=95),
    ),
    Defect(
        "a lowered clock",
        "gpu.clocks",
        WITH_GPUS,
        gpu_with(application_clock_mhz=1200, default_clock_mhz=1980),
        WARN,
    ),
    Defect(
        "a power cap",
        "gpu.clocks",
        WITH_GPUS,
        gpu_with(power_limit_mw=500_000, power_default_mw=700_000),
        WARN,
    ),
    Defect("links down", "gpu.nvlink", BOARDS, _links_down),
    Defect("fabric not registered", "gpu.fabric", BOARDS, _fabric(state=1)),
    Defect("registration under way", "gpu.fabric", BOARDS, _fabric(state=2)),
    Defect("registration failed", "gpu.fabric", BOARDS, _fabric(status=999)),
    Defect("degraded bandwidth", "gpu.fabric", BOARDS, _fabric(health=1)),
    Defect("an unhealthy route of a rack", "gpu.fabric", ("cloud-vm",), _rack),
    Defect("two cliques", "gpu.fabric", BOARDS, _cliques),
    Defect("no fabric manager", "gpu.fabric-manager", MELLANOX, _no_fabric_manager),
    Defect("no fabric manager for Blackwell", "gpu.fabric-manager", ("hgx-ib",), _switch_ports),
    Defect("no nvlsm", "gpu.fabric-manager", ("hgx-ib",), _no_subnet_manager, WARN),
    Defect("an old fabric manager", "gpu.fabric-manager", MELLANOX, _old_fabric_manager),
    Defect("no persistence", "gpu.persistence", WITH_GPUS, gpu_with(persistence=False), WARN),
    Defect("somebody else's process", "gpu.processes", WITH_GPUS, gpu_with(processes=[4242]), WARN),
    Defect(
        "memory without a process",
        "gpu.processes",
        WITH_GPUS,
        gpu_with(processes=[], memory_used_bytes=60 * GIB),
        WARN,
    ),
    Defect("torch for a newer CUDA", "software.cuda", WITH_GPUS, _newer_torch),
    Defect("an NCCL that hangs in abort", "software.advisories", WITH_GPUS, _known_bad, WARN),
    Defect("an all_reduce that hangs", "gpu.all-reduce", BOARDS, _reduced(problem="no end")),
    Defect("wrong sums", "gpu.all-reduce", BOARDS, _reduced(right=False)),
    Defect("a fifth of the bandwidth", "gpu.bandwidth", BOARDS, _reduced(seconds=0.1)),
    Defect("pairs that fail", "gpu.nccl-diagnostics", BOARDS, _reduced(diagnostics=PAIRS)),
    Defect("half of the lanes", "gpu.pcie", (*BOARDS, "mig"), gpu_with(pcie_width=8)),
    Defect("driver and library differ", "gpu.driver", WITH_GPUS, _two_drivers),
    Defect("a module of before all packages", "gpu.driver", MELLANOX, _module_of_before),
    Defect("NVML refuses the driver", "gpu.driver", WITH_GPUS, _no_nvml),
    Defect("no subnet manager", "nic.port", WITH_PORTS, port(state="2: INIT")),
    Defect("one port down", "nic.port", WITH_PORTS, port(state="1: DOWN", phys_state="2: Polling")),
    Defect("a link that was lost", "nic.port", WITH_PORTS, _lost_link),
    Defect("a port that the job names, switched off", "nic.port", WITH_PORTS, _named_and_off),
    Defect("no InfiniBand beside Ethernet", "nic.port", ("hgx-ib",), _no_fabric),
    Defect("an adapter that did not start", "nic.port", ("hgx-ib",), _no_device, WARN),
    Defect("an EFA that did not start", "nic.port", ("efa",), _no_efa, WARN),
    Defect("a member of a bond is down", "nic.bond", ("hgx-roce",), _bonds("802.3ad 4")),
    Defect("a spare is down", "nic.bond", ("hgx-roce",), _bonds("active-backup 1"), WARN),
    Defect("a cable that was pulled", "nic.port", ("hgx-roce",), _roce_unplugged),
    Defect("an interface down", "nic.port", ("hgx-roce",), _net_down),
    Defect(
        "no port active", "nic.selector", WITH_PORTS, _no_port_active, also=frozenset({"nic.port"})
    ),
    Defect("too few ports for the lane", "nic.ports", WITH_PORTS, _few_ports),
    Defect("no umad", "nic.umad", ("hgx-ib", "cloud-vm"), _no_umad, WARN),
    Defect("half of the speed", "nic.rate", WITH_PORTS, port(rate="200 Gb/sec (2X NDR)")),
    Defect("NCCL_IB_HCA names nothing", "nic.selector", (*WITH_PORTS, "efa"), _no_ports_left),
    Defect("RoCE v1 only", "nic.gid", ("hgx-roce",), _no_v2),
    Defect("a port without an IP address", "nic.gid", ("hgx-roce",), _no_ip),
    Defect("a GID of the wrong type", "nic.gid", ("hgx-roce",), _wrong_gid),
    Defect("no device file", "nic.verbs", WITH_PORTS, _no_uverbs),
    Defect("no verbs device", "nic.verbs", WITH_PORTS, _no_uverbs_class),
    Defect("a narrow adapter", "nic.pcie", MELLANOX, _narrow_nic),
    Defect("slow lanes", "nic.pcie", MELLANOX, _slow_lanes),
    Defect("another MTU", "nic.mtu", ("hgx-roce",), _small_mtu, WARN),
    Defect("a carrier that goes", "nic.carrier", ("hgx-roce",), _lost_carrier),
    Defect("a carrier that went often", "nic.carrier", ("hgx-roce",), _lost_carrier_often, WARN),
    *(
        Defect(
            f"{name} since boot", "nic.counters", WITH_PORTS, counted(f"counters/{name}", n), WARN
        )
        for name, n in (
            ("symbol_error", 40),
            ("link_error_recovery", 20),
            ("local_link_integrity_errors", 400),
            ("excessive_buffer_overrun_errors", 12),
            ("port_rcv_errors", 65535),
        )
    ),
    Defect("a link that goes", "nic.counters", WITH_PORTS, grown("counters/link_downed", 1)),
    Defect(
        "retries used up", "nic.counters", WITH_PORTS, grown("hw_counters/rnr_nak_retry_err", 4)
    ),
    Defect("symbol errors", "nic.counters", WITH_PORTS, grown("counters/symbol_error", 40)),
    Defect(
        "receive errors", "nic.counters", WITH_PORTS, grown("counters/port_rcv_errors", 99), WARN
    ),
)
