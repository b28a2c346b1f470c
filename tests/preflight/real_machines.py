"""Healthy machines as people have shown theirs: made after public listings, each with its source.

What they have in common with those of ``machines`` is taken from there. Nothing is wrong with any
of them, however odd some look: a tool that convicts one of them is not used a second time.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from ncclops.preflight.readings import Process, Stuck
from ncclops.profiles.model import PreflightNeeds
from tests.preflight.machines import GIB, KINDS, Machine, add_device, bond, make

HGX = PreflightNeeds(nodes="many", rdma=True)


def bare_infiniband(chance: random.Random) -> Machine:
    """IP over InfiniBand is off; a card for Ethernet with one port of two in use.

    imbue-ai/cluster-health#4: the eight ibp*s0 are Down, their ports ACTIVE.
    """
    machine = _of("hgx-ib", chance)
    for index in range(8):
        net = f"sys/class/infiniband/mlx5_{index}/device/net/ibp{index}s0"
        machine.files |= {
            f"{net}/operstate": "down",
            f"{net}/mtu": "4092",
            f"{net}/flags": "0x1002",
        }
    for index in (10, 11, 12, 13):
        _ethernet(machine, index, speed="100 Gb/sec (4X EDR)", board="MT_0000000359")
        if index % 2:
            _no_cable(machine, index)
            # Its link came up once, while somebody tried the cable.
            port = f"sys/class/infiniband/mlx5_{index}/ports/1"
            machine.files[f"{port}/counters/link_downed"] = "1"
    machine.needs = replace(HGX, rdma_ports=8, rdma_gbps=400)
    return machine


def azure_nd(chance: random.Random) -> Machine:
    """A virtual machine whose front end is an RDMA device as well, of 40 Gb/s and without address.

    Azure/azhpc-diagnostics#59 (mlx5_an0), Azure/azhpc-images#154 (40, not a fault).
    """
    machine = _of("cloud-vm", chance)
    _ethernet(machine, 8, speed="40 Gb/sec (4X QDR)", board="MT_0000000010")
    top = "sys/class/infiniband/mlx5_8/ports/1"
    for path in [p for p in machine.files if p.startswith((f"{top}/gid", f"{top}/gids"))]:
        del machine.files[path]
    machine.files[f"{top}/gids/0"] = "0000:0000:0000:0000:0000:0000:0000:0000"
    machine.files[f"{top}/gid_attrs/types/0"] = ""
    machine.needs = replace(HGX, rdma_ports=8, rdma_gbps=400)
    return machine


def two_networks_on_one_card(chance: random.Random) -> Machine:
    """Storage at 200 Gb/s on one port, the front end at 25 on the other, of one board."""
    machine = _of("hgx-roce", chance)
    _ethernet(machine, 8, speed="200 Gb/sec (4X HDR)", board="MT_0000000540")
    _ethernet(machine, 9, speed="25 Gb/sec (1X EDR)", board="MT_0000000540")
    machine.files["sys/class/infiniband/mlx5_9/device/net/eth9/mtu"] = "9000"
    machine.needs = replace(HGX, rdma_gbps=400)
    return machine


def aws_p5(chance: random.Random) -> Machine:
    """Thirty-two EFA devices of 100 Gb/s; no umad, no addresses with types, few counters."""
    machine = _of("efa", chance)
    for index in range(8, 32):
        add_device(machine, chance, index, f"rdmap{index}s0", efa=True, roce=False, virtual=True)
    machine.needs = HGX
    return machine


def gcp_a3(chance: random.Random) -> Machine:
    """No RDMA device: GPUDirect-TCPX goes over gVNIC."""
    machine = _of("cloud-vm", chance)
    for path in [p for p in machine.files if "infiniband" in p]:
        del machine.files[path]
    machine.needs = PreflightNeeds(nodes="many", rdma=False)
    return machine


def grace_hopper(chance: random.Random) -> Machine:
    """One GPU beside an ARM processor: no NVLink to others, no fabric, no x86 flags.

    leptonai/gpud#1206: GH200 has two forms, and its name holds that of another GPU.
    """
    machine = _grace(chance, "NVIDIA GH200 480GB", 1)
    machine.gpus[0] |= {"links": [False] * 18, "fabric": {"state": 0, "status": 0}}
    machine.gpus[0] |= {"pcie_width": 1, "pcie_width_max": 16}
    if chance.random() < 0.5:
        machine.gpus[0]["name"] = "NVIDIA GH200 144G HBM3e"
    return machine


def grace_blackwell(chance: random.Random) -> Machine:
    """Four GPUs of a rack: one cluster and clique, no fabric manager here (leptonai/gpud#1106)."""
    machine = _grace(chance, "NVIDIA GB200", 4)
    fabric = {
        "state": 3,
        "status": 0,
        "cluster": "9c6f5af353bf49b5a436b66766c413c3",
        "clique": 4026,
    }
    for gpu in machine.gpus:
        gpu |= {"links": [True] * 18, "fabric": fabric}
    machine.files["dev/nvidia-caps-imex-channels/channel0"] = ""
    machine.imex = (True,)
    return machine


def workstation(chance: random.Random) -> Machine:
    """Two cards that share the lanes of one slot, a screen, no ECC, no persistence, few files."""
    machine = _of("pcie", chance, count=2)
    for gpu in machine.gpus:
        gpu |= {
            "name": "NVIDIA GeForce RTX 4090",
            "links": None,
            "fabric": None,
            "ecc_enabled": None,
            "ecc_uncorrected": None,
            "sram_uncorrected": None,
            "sram_corrected": None,
            "dram_corrected": None,
            "rows_uncorrected": None,
            "rows_pending": None,
            "rows_failed": None,
            "persistence": False,
            "pcie_width": 8,
            "pcie_width_max": 16,
            "processes": [1733],
        }
    limits = machine.files["proc/self/limits"]
    machine.files["proc/self/limits"] = re.sub(
        r"Max open files\s+\d+", f"{'Max open files':25} 1024", limits
    )
    machine.needs = PreflightNeeds()
    return machine


def small_vm(chance: random.Random) -> Machine:
    """2 GiB, one processor, nothing of NVIDIA, half of the memory for /dev/shm."""
    machine = _of("cpu", chance)
    machine.files |= {
        "proc/meminfo": "MemTotal:        1970376 kB\nMemAvailable: 1500000 kB\n"
        "HugePages_Total:       0\nHugePages_Free:        0\nHugepagesize:       2048 kB",
        "proc/mounts": "tmpfs /dev/shm tmpfs rw,nosuid,nodev,inode64 0 0",
        "proc/cpuinfo": "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu hypervisor",
        "proc/sys/fs/file-max": "196041",
        "proc/sys/kernel/pid_max": "32768",
        "proc/sys/kernel/threads-max": "15219",
        "proc/self/limits": machine.files["proc/self/limits"].replace("4125423", "7609"),
    }
    machine.needs = PreflightNeeds()
    return machine


def pod_with_one_port(chance: random.Random) -> Machine:
    """A pod that was given one device: /sys shows those of the host nevertheless."""
    machine = _of("hgx-roce", chance)
    machine.files[".dockerenv"] = ""
    for index in range(1, 8):
        del machine.files[f"dev/infiniband/uverbs{index}"]
    machine.addresses = ("10.2.0.7",)
    return machine


def pod_of_containerd(chance: random.Random) -> Machine:
    """A pod below control groups of version 2, which leave no mark: one GPU of eight, by CDI.

    /proc/driver and /sys show the host's GPUs, switches and ports; the fabric manager runs outside.
    """
    machine = _of("hgx-ib", chance)
    machine.gpus = machine.gpus[:1]
    machine.driver["count"] = 1
    machine.files |= {"proc/1/comm": "python3", "proc/1/cgroup": "0::/", "proc/self/cgroup": "0::/"}
    machine.processes = [Process(1, "python3", "S")]
    machine.needs = PreflightNeeds()
    return _without_verbs(machine, memlock="8388608")


def container_of_one_host(chance: random.Random) -> Machine:
    """All GPUs, and no RDMA device: what may be locked does not matter to it."""
    machine = _of("hgx-roce", chance)
    machine.files[".dockerenv"] = ""
    machine.needs = PreflightNeeds()
    return _without_verbs(machine, memlock="65536")


def job_of_pbs(chance: random.Random) -> Machine:
    """Four of eight GPUs, as PBS, LSF or HTCondor hand them out by control groups."""
    machine = _of("hgx-ib", chance)
    machine.gpus = machine.gpus[:4]
    machine.driver["count"] = 4
    machine.files["proc/self/cgroup"] = chance.choice(
        ["0::/pbs_jobs.service/jobid/12.srv", "0::/lsf/c/job.5.1", "0::/htcondor/slot1_2@n"]
    )
    return machine


def spare_virtual_functions(chance: random.Random) -> Machine:
    """Two functions that no pod has been given yet, beside the eight ports of their cards."""
    machine = _of("hgx-roce", chance)
    for index in (8, 9):
        _ethernet(machine, index, speed="40 Gb/sec (4X QDR)", board="MT_0000000838")
        _no_cable(machine, index)
        top = f"sys/class/infiniband/mlx5_{index}"
        machine.files[f"{top}/device/physfn"] = "/sys/devices/pci0000:15/0000:18:00.0"
        machine.files[f"{top}/board_id"] = machine.files["sys/class/infiniband/mlx5_0/board_id"]
    machine.needs = HGX
    return machine


def bonds_with_one_cable(chance: random.Random) -> Machine:
    """All ports in bonds of two, of which the second has no cable on most."""
    machine = _of("hgx-roce", chance)
    for index in range(8):
        bond(machine, index, "802.3ad 4", "up" if index == 3 else "down")
    machine.needs = HGX
    return machine


def adapters_of_an_older_board(chance: random.Random) -> Machine:
    """Slots of the fourth generation for adapters that know the fifth."""
    machine = _of("hgx-ib", chance)
    for index in range(10):
        top = f"sys/class/infiniband/mlx5_{index}/device"
        machine.files[f"{top}/current_link_speed"] = "16.0 GT/s PCIe"
        machine.files[f"{top}/max_link_speed"] = "32.0 GT/s PCIe"
    machine.needs = HGX
    return machine


def noisy_log(chance: random.Random) -> Machine:
    """Corrected errors, a cable that was plugged, an interrupt that took long; a lockup of old."""
    machine = _of("hgx-ib", chance)
    machine.log = [
        (100.0, "pcieport 0000:15:01.0: AER: Corrected error message received from 0000:18:00.0"),
        (100.0, "mlx5_core 0000:18:00.0: Port module event: module 0, Cable plugged"),
        (100.0, "EDAC MC0: Giving out device to module skx_edac controller Skylake Socket#0"),
        (100.0, "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0"),
        (100.0, "NMI watchdog: Enabled. Permanently consumes one hw-PMU counter."),
        (99_000.0, "watchdog: BUG: soft lockup - CPU#17 stuck for 26s! [python3:4711]"),
    ]
    machine.needs = HGX
    return machine


def card_that_was_unplugged(chance: random.Random) -> Machine:
    """A card of another board whose cable somebody has taken out: its link was up once."""
    machine = _of("hgx-roce", chance)
    _ethernet(machine, 8, speed="40 Gb/sec (4X QDR)", board="MT_0000000080")
    _no_cable(machine, 8)
    machine.files["sys/class/infiniband/mlx5_8/ports/1/counters/link_downed"] = "2"
    machine.needs = HGX
    return machine


def links_that_recovered(chance: random.Random) -> Machine:
    """NVLink errors that the driver itself calls nonfatal (Xid 144 to 150), minutes ago."""
    machine = grace_blackwell(chance)
    machine.log = [
        (60.0, "NVRM: Xid (PCI:0008:01:00): 149, NETIR_LINK_EVT Nonfatal XC0 i0 Link 05 (0x004f)"),
        (90.0, "NVRM: Xid (PCI:0009:01:00): 145, RLW_REMAP Nonfatal XC0 i0 Link 03 (0x0)"),
    ]
    return machine


def cards_with_one_bridge(chance: random.Random) -> Machine:
    """Four PCIe cards of which two have an NVLink bridge, and two have none.

    NVIDIA H100 NVL Product Brief: bridges connect two neighbouring cards, and are optional.
    """
    machine = _of("pcie", chance, count=4)
    for gpu in machine.gpus:
        gpu |= {"name": "NVIDIA H100 NVL", "links": [gpu["index"] < 2] * 12 + [False] * 6}
    return machine


def part_of_a_board(chance: random.Random) -> Machine:
    """A virtual machine with four V100 of eight: two links of each lead to GPUs of others.

    The hybrid cube mesh of a DGX-1V: four of six links stay within one half, as on AWS p3.8xlarge.
    """
    machine = _of("cloud-vm", chance)
    machine.gpus = machine.gpus[:4]
    machine.driver["count"] = 4
    listed = sorted(p for p in machine.files if p.startswith("proc/driver/nvidia/gpus/"))
    for path in listed[4:]:
        del machine.files[path]
    for gpu in machine.gpus:
        links = {"links": [True] * 4 + [False] * 2, "fabric": None}
        gpu |= {"name": "Tesla V100-SXM2-16GB", **links}
    machine.needs = PreflightNeeds()
    return machine


def slots_of_a_desktop(chance: random.Random) -> Machine:
    """One card in a slot with all lanes, one in a slot of the chipset with four."""
    machine = workstation(chance)
    machine.gpus[0]["pcie_width"], machine.gpus[1]["pcie_width"] = 16, 4
    return machine


def adapters_in_two_slots(chance: random.Random) -> Machine:
    """Two adapters of one kind; the second slot has half of the lanes."""
    machine = _of("hgx-roce", chance)
    for index in range(2, 8):
        for path in [p for p in machine.files if re.search(rf"mlx5_{index}/|uverbs{index}\b", p)]:
            del machine.files[path]
    machine.files["sys/class/infiniband/mlx5_1/device/current_link_width"] = "8"
    machine.needs = HGX
    return machine


def root_in_a_container(chance: random.Random) -> Machine:
    """RLIMIT_NPROC, which the kernel does not apply to root (fork(2), EAGAIN)."""
    machine = _of("container-v2", chance)
    limits = machine.files["proc/self/limits"]
    machine.files["proc/self/limits"] = re.sub(r"(Max processes\s+)\d+", r"\g<1>512", limits)
    machine.files["proc/self/status"] += "\nUid:\t0\t0\t0\t0"
    machine.files["proc/self/uid_map"] = "         0          0 4294967295"
    return machine


def lanes_of_a_virtual_machine(chance: random.Random) -> Machine:
    """As on Amazon's g5: each A10G shows half of its lanes, and no slot can be looked at."""
    machine = _of("cloud-vm", chance)
    for gpu in machine.gpus:
        gpu |= {"name": "NVIDIA A10G", "pcie_width": 8, "pcie_width_max": 16, "links": None}
    return machine


def part_of_a_node(chance: random.Random) -> Machine:
    """A Slurm job with two of eight GPUs: the others are in the driver's list all the same."""
    machine = _of("hgx-ib", chance)
    machine.gpus = machine.gpus[:2]
    machine.driver["count"] = 2
    machine.files["proc/self/cgroup"] = "0::/system.slice/slurmstepd.scope/job_812/step_0/user"
    return machine


def after_jobs_with_bugs(chance: random.Random) -> Machine:
    """What NVIDIA's Xid catalogue has the application restarted for, or nothing done about."""
    machine = _of("hgx-roce", chance)
    pci = machine.gpus[2]["pci"].removesuffix(".0")
    machine.log = [
        (300.0, f"NVRM: Xid (PCI:{pci}): {code}, pid=77, name=python, Ch 00000008")
        for code in (13, 31, 43, 45, 63, 68, 69, 80, 92, 94, 137)
    ]
    return machine


def rails_without_ipv4(chance: random.Random) -> Machine:
    """Each port has an address of IPv6, in a subnet of its own."""
    machine = _of("hgx-roce", chance)
    for index in range(8):
        gid = f"sys/class/infiniband/mlx5_{index}/ports/1/gids/3"
        machine.files[gid] = f"fd00:{index:04x}:0000:0000:0000:0000:0000:000c"
    machine.files["proc/net/route"] = "Iface\tDestination\tGateway\tFlags"
    return machine


def an_eighth_of_a_node(chance: random.Random) -> Machine:
    """A Slurm job with one of eight GPUs, and as much of memory and processors."""
    machine = part_of_a_node(chance)
    machine.gpus = machine.gpus[:1]
    group = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_812"
    machine.files |= {f"{group}/memory.max": str(60 * GIB), f"{group}/cpu.max": "800000 100000"}
    return machine


def job_beside_a_broken_gpu(chance: random.Random) -> Machine:
    """As ``part_of_a_node``; a GPU of another job's has an error."""
    machine = part_of_a_node(chance)
    listed = [path for path in machine.files if path.startswith("proc/driver/nvidia/gpus/")]
    pci = listed[-1].split("/")[4].removesuffix(".0")
    machine.log = [(60.0, f"NVRM: Xid (PCI:{pci}): 48, pid=1, name=python, DBE")]
    return machine


def hgx_b200(chance: random.Random) -> Machine:
    """InfiniBand functions of the NVSwitches beside the ports, of which some wait for no manager.

    As in siderolabs/extensions#895 and NVIDIA's Fabric Manager User Guide (SW_MNG in the vital
    product data).
    """
    machine = _of("hgx-ib", chance)
    machine.needs = HGX
    for number in range(4):
        name = f"mlx5_{20 + number}"
        add_device(machine, chance, 20 + number, name, efa=False, roce=False, virtual=False)
        top = f"sys/class/infiniband/{name}"
        machine.files[f"{top}/device/vpd"] = "\ufffd\x20NVLink Switch SMDL=SW_MNG LPF"
        machine.files[f"{top}/device/current_link_width"] = "2"
        if number % 2:
            machine.files[f"{top}/ports/1/state"] = "2: INIT"
    daemons = (Process(77, "nv-fabricmanage", "S"), Process(78, "nvlsm", "S"))
    machine.processes = [*(machine.processes or ()), *daemons]
    return machine


def slots_in_pairs(chance: random.Random) -> Machine:
    """Six adapters, of which two are in slots with half of the lanes."""
    machine = _of("hgx-roce", chance)
    for index in (6, 7):
        for path in [p for p in machine.files if re.search(rf"mlx5_{index}/|uverbs{index}\b", p)]:
            del machine.files[path]
    for index in (4, 5):
        machine.files[f"sys/class/infiniband/mlx5_{index}/device/current_link_width"] = "8"
    machine.needs = HGX
    return machine


def cards_of_one_name(chance: random.Random) -> Machine:
    """The GeForce RTX 3080 comes with 10 GiB and with 12."""
    machine = workstation(chance)
    for gpu, gib in zip(machine.gpus, (10, 12), strict=True):
        gpu |= {"name": "NVIDIA GeForce RTX 3080", "memory_total_bytes": gib * GIB}
    return machine


def bonds_without_lag(chance: random.Random) -> Machine:
    """Two adapters below one bond, of which each is an RDMA device with the bond's address."""
    machine = _of("hgx-roce", chance)
    gid = "sys/class/infiniband/mlx5_{}/ports/1/gids/3"
    for index in range(8):
        machine.files[gid.format(index)] = machine.files[gid.format(index // 2 * 2)]
        bond(machine, index, "802.3ad 4", "up")
    machine.needs = HGX
    return machine


def reset_by_hand(chance: random.Random) -> Machine:
    """The driver asked for a reset, and NVML says that it does so no more."""
    machine = _of("hgx-ib", chance)
    gpu = machine.gpus[2]
    gpu["recovery_action"] = 0
    said = f"NVRM: Xid (PCI:{gpu['pci'].removesuffix('.0')}): "
    machine.log = [
        (4000.0, f"{said}119, pid=7, name=python, Timeout after 45s of waiting for RPC response"),
        (3999.0, f"{said}154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset)"),
        (3900.0, f"{said}119, pid=7, name=python, Timeout after 45s of waiting for RPC response"),
    ]
    machine.needs = HGX
    return machine


def disks_at_work(chance: random.Random) -> Machine:
    """Loaders that read, a job that the freezer of control groups holds, a parent in vfork."""
    machine = _of("hgx-ib", chance)
    machine.stuck = (
        Stuck(pid=11, name="pt_data_worker", moved=True, place="folio_wait_bit_common"),
        Stuck(pid=12, name="python3", moved=False, place="__refrigerator", gpus=("/dev/nvidia0",)),
        Stuck(pid=13, name="make", moved=False, place="kernel_clone"),
    )
    machine.needs = HGX
    return machine


MACHINES: Mapping[str, Callable[[random.Random], Machine]] = {
    made.__name__.replace("_", " "): made
    for made in (
        bare_infiniband,
        azure_nd,
        two_networks_on_one_card,
        aws_p5,
        gcp_a3,
        grace_hopper,
        grace_blackwell,
        workstation,
        small_vm,
        pod_with_one_port,
        pod_of_containerd,
        container_of_one_host,
        part_of_a_node,
        job_of_pbs,
        spare_virtual_functions,
        bonds_with_one_cable,
        adapters_of_an_older_board,
        noisy_log,
        card_that_was_unplugged,
        links_that_recovered,
        cards_with_one_bridge,
        part_of_a_board,
        slots_of_a_desktop,
        adapters_in_two_slots,
        root_in_a_container,
        after_jobs_with_bugs,
        rails_without_ipv4,
        an_eighth_of_a_node,
        job_beside_a_broken_gpu,
        hgx_b200,
        lanes_of_a_virtual_machine,
        slots_in_pairs,
        cards_of_one_name,
        bonds_without_lag,
        reset_by_hand,
        disks_at_work,
    )
}


def _of(kind: str, chance: random.Random, count: int | None = None) -> Machine:
    """A machine of ``kind``, of ``machines``; with so many GPUs."""
    while True:
        machine = make(KINDS.index(kind) + len(KINDS) * chance.randrange(1000))
        if count is None or len(machine.gpus) == count:
            return machine


def _grace(chance: random.Random, name: str, count: int) -> Machine:
    """GPUs beside ARM processors."""
    machine = _of("pcie", chance, 4)
    machine.gpus = machine.gpus[:count]
    machine.driver |= {"version": "580.95.05", "cuda": 13000, "count": count}
    machine.files |= {
        "proc/cpuinfo": "processor\t: 0\nBogoMIPS\t: 2000.00\nFeatures\t: fp asimd sve\n"
        "CPU implementer\t: 0x41\nCPU part\t: 0xd4f",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64"
        "  580.95.05  Release Build",
    }
    listed = sorted(p for p in machine.files if p.startswith("proc/driver/nvidia/gpus/"))
    for path in listed[count:]:
        del machine.files[path]
    for gpu in machine.gpus:
        gpu |= {"name": name, "memory_total_bytes": 186 * GIB}
    machine.needs = PreflightNeeds()
    return machine


def _ethernet(machine: Machine, index: int, *, speed: str, board: str) -> None:
    add_device(
        machine, random.Random(index), index, f"mlx5_{index}", efa=False, roce=True, virtual=False
    )
    top = f"sys/class/infiniband/mlx5_{index}"
    machine.files |= {f"{top}/board_id": board, f"{top}/ports/1/rate": speed}


def _without_verbs(machine: Machine, *, memlock: str) -> Machine:
    """A container without the files of RDMA devices, and without capabilities."""
    for path in [p for p in machine.files if p.startswith("dev/infiniband")]:
        del machine.files[path]
    limits, status = machine.files["proc/self/limits"], machine.files["proc/self/status"]
    machine.files |= {
        "proc/self/limits": re.sub(r"(Max locked memory\s+)\S+", rf"\g<1>{memlock}", limits),
        "proc/self/status": re.sub(r"CapEff:\t\w+", "CapEff:\ta80425fb", status),
    }
    return machine


def _no_cable(machine: Machine, index: int) -> None:
    top = f"sys/class/infiniband/mlx5_{index}"
    machine.files |= {
        f"{top}/ports/1/state": "1: DOWN",
        f"{top}/ports/1/phys_state": "2: Polling",
        f"{top}/device/net/eth{index}/operstate": "down",
    }
    machine.files.pop(f"{top}/device/net/eth{index}/carrier", None)
