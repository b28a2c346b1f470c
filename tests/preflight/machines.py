"""Machines made up: nodes as they are found in the field, healthy, each as files and GPUs.

``make(seed)`` gives a machine of one of several kinds: bare metal with InfiniBand or RoCE, a
cloud's virtual machine, a container with control groups of either version, EFA, PCIe cards
without NVLink, MIG, no GPU at all. Nothing is wrong with any of them, however little some show.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ncclops.host.software import Software
from ncclops.preflight.readings import (
    Collective,
    Driver,
    Files,
    Gpu,
    Host,
    KernelLog,
    LogLine,
    Name,
    Nic,
    Node,
    Process,
    Space,
    Stuck,
)
from ncclops.profiles.model import PreflightNeeds

GIB = 1 << 30
KINDS = (
    "hgx-ib", "hgx-roce", "cloud-vm", "container-v1", "container-v2", "efa", "pcie", "mig", "cpu",
)  # fmt: skip
UPTIME_S = 500_000.0
_COUNTERS = (
    "link_downed", "symbol_error", "link_error_recovery", "port_rcv_errors",
    "local_link_integrity_errors", "excessive_buffer_overrun_errors",
)  # fmt: skip


@dataclass
class Machine:
    """A machine: files by path below its root, GPUs as NVML shows them, and the kernel log."""

    kind: str
    files: dict[str, str] = field(default_factory=dict)
    gpus: list[dict[str, Any]] = field(default_factory=list)
    driver: dict[str, Any] = field(default_factory=dict)
    log: list[tuple[float, str]] | None = None  # ages in seconds
    later: dict[str, str] = field(default_factory=dict)  # counters at the end of the window
    processes: list[Process] | None = None
    spaces: list[Space] = field(default_factory=list)
    addresses: tuple[str, ...] | None = ("10.1.2.3",)
    clock: bool | None = True
    stale: tuple[str, ...] = ()
    acs: tuple[str, ...] | None = None
    imex: tuple[bool, ...] = ()
    stuck: tuple[Stuck, ...] = ()
    modules: tuple[int, ...] | None = None
    late: dict[str, float] = field(default_factory=dict)
    needs: PreflightNeeds = field(default_factory=PreflightNeeds)
    nccl: str | None = "2.27.3"
    torch_cuda: str | None = None
    environ: dict[str, str] = field(default_factory=dict)
    collective: Collective | None = None

    def node(self) -> Node:
        """What the readers would have read of it."""
        files = Files(dict(self.files))
        names = sorted(
            {p.split("/")[3] for p in self.files if p.startswith("sys/class/infiniband/")}
        )
        shared = {p: t for p, t in self.files.items() if p.startswith(_SHARED)}
        nics = []
        for name in names:
            top = f"sys/class/infiniband/{name}/"
            own = {p: t for p, t in self.files.items() if p.startswith(top)}
            nics.append(
                Nic(
                    device=name,
                    files=Files({**own, **shared}),
                    samples=(Files(own), Files({**own, **self.later})),
                    window_s=2.0,
                )
            )
        return Node(
            time=1.7e9,
            host=Host(
                files=files,
                processes=None if self.processes is None else tuple(self.processes),
                clock_synchronised=self.clock,
                stale_shm=self.stale,
                acs_redirects=self.acs,
                imex_writable=self.imex,
                stuck=self.stuck,
                modules=self.modules,
            ),
            name=Name(host=self.files.get("proc/sys/kernel/hostname"), addresses=self.addresses),
            log=KernelLog()
            if self.log is None
            else KernelLog(source="made", lines=tuple(LogLine(t, a) for a, t in self.log)),
            driver=msgspec.convert(self.driver, Driver),
            gpus=tuple(msgspec.convert(gpu, Gpu) for gpu in self.gpus),
            nics=tuple(nics),
            spaces=tuple(self.spaces),
            late=self.late,
            environ=self.environ,
            needs=self.needs,
            software=Software(nccl=self.nccl),
            torch_cuda=self.torch_cuda,
            real=False,
            collective=self.collective,
        )

    def write(self, root: Path) -> None:
        """The files below ``root``, and the kernel log as ``dev/kmsg`` shows it."""
        for path, text in self.files.items():
            place = root / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text + "\n")
        for process in self.processes or ():
            place = root / f"proc/{process.pid}/stat"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(f"{process.pid} ({process.name}) {process.state} 1 1 1\n")
        if self.log is not None:
            lines = [f"4,7,{int((UPTIME_S - age) * 1e6)},-;{text}\n" for age, text in self.log]
            (root / "dev").mkdir(exist_ok=True)
            (root / "dev/kmsg").write_text("".join(lines))


_SHARED = ("sys/class/infiniband_verbs", "sys/class/infiniband_mad", "dev/infiniband")


def make(seed: int) -> Machine:
    """The healthy machine of ``seed``; kinds take turns."""
    chance = random.Random(seed)
    machine = Machine(KINDS[seed % len(KINDS)])
    _host(machine, chance)
    if machine.kind != "cpu":
        _gpus(machine, chance)
    if machine.kind in ("hgx-ib", "hgx-roce", "cloud-vm", "efa"):
        _nics(machine, chance)
        machine.needs = PreflightNeeds(nodes="many", rdma=chance.choice([True, None]))
    else:
        machine.needs = PreflightNeeds(
            nodes=chance.choice(["one", "any"]), rdma=chance.choice([False, None])
        )
    return machine


def _host(machine: Machine, chance: random.Random) -> None:
    container = machine.kind.startswith("container")
    virtual = machine.kind in ("cloud-vm", "efa")
    files = machine.files
    memory_kib = chance.choice([512, 1024, 2048]) << 20
    files |= {
        "proc/self/limits": _limits(chance),
        "proc/self/status": "Name:\tpython\nCapEff:\t000001ffffffffff\nSeccomp:\t0\n"
        "Cpus_allowed_list:\t0-191\nMems_allowed_list:\t0-1",
        "proc/mounts": "sysfs /sys sysfs rw 0 0\n"
        + chance.choice(
            [
                f"tmpfs /dev/shm tmpfs rw,nosuid,size={memory_kib // 2}k 0 0",
                "tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0",
                "shm /dev/shm tmpfs rw,size=64g 0 0",
            ]
        ),
        "proc/meminfo": f"MemTotal:       {memory_kib} kB\nMemAvailable: {memory_kib - 999} kB\n"
        "HugePages_Total:       0\nHugePages_Free:        0\nHugepagesize:       2048 kB",
        "proc/uptime": f"{UPTIME_S} 9e6",
        "proc/loadavg": f"0.1 0.2 0.3 1/{chance.randint(900, 4000)} 4242",
        "proc/sys/fs/file-max": chance.choice(["9223372036854775807", "26234859"]),
        "proc/sys/fs/file-nr": f"{chance.randint(1000, 90000)}\t0\t26234859",
        "proc/sys/kernel/pid_max": chance.choice(["4194304", "1048576"]),
        "proc/sys/kernel/threads-max": "8254321",
        "proc/sys/kernel/hostname": f"node{chance.randint(1, 999):03}",
        "proc/sys/kernel/random/boot_id": f"{chance.getrandbits(128):032x}",
        "proc/modules": "nvidia_uvm 1 0 - Live 0x0\nnvidia_peermem 1 0 - Live 0x0",
    }
    flags = "fpu vme sse2" + (" hypervisor" if virtual else "")
    files["proc/cpuinfo"] = (
        f"processor\t: 0\nvendor_id\t: {chance.choice(['GenuineIntel', 'AuthenticAMD'])}\n"
        f"flags\t\t: {flags}"
    )
    if container:
        files[".dockerenv"] = ""
        old = machine.kind == "container-v1"
        files["proc/self/cgroup"] = "8:pids:/kubepods/pod1\n0::/" if old else "0::/"
        place = "sys/fs/cgroup/pids/kubepods/pod1" if old else "sys/fs/cgroup"
        files[f"{place}/pids.max"] = chance.choice(["max", "65536"])
        files[f"{place}/pids.current"] = str(chance.randint(1, 300))
        machine.addresses, machine.clock = chance.choice([(("10.2.0.7",), None), (None, None)])
        for name in chance.sample(["proc/modules", "proc/loadavg", "proc/uptime"], k=2):
            del files[name]
        machine.processes = [Process(1, "bash", "S"), Process(22, "python", "R")]
    else:
        files["etc/systemd/logind.conf"] = chance.choice(["[Login]\nRemoveIPC=no", "[Login]\n#"])
        machine.processes = [
            Process(1, "systemd", "S"),
            Process(812, chance.choice(["chronyd", "ntpd", "systemd-timesyn"]), "S"),
            Process(990, "nvidia-persiste", "S"),
        ]
        machine.log = [(UPTIME_S - 9, "nvidia: loading out-of-tree module taints kernel.")]
        if chance.random() < 0.5:
            # An application's own error, and one that has long passed.
            machine.log += [
                (50_000.0, "NVRM: Xid (PCI:0000:19:00): 79, pid=7, GPU has fallen off the bus."),
                (900.0, "NVRM: Xid (PCI:0000:19:00): 13, pid=77, Graphics Exception"),
            ]
        machine.clock = chance.choice([True, None])
        if not virtual:
            machine.acs = chance.choice([None, ()])
            gib = memory_kib >> 20
            machine.modules = chance.choice([None, (*[gib * 64] * 16, *[0] * 16)])
    machine.spaces = [
        Space(
            path="runs", size_bytes=900 * GIB, free_bytes=300 * GIB, files=10**7, files_free=10**6
        )
    ]
    machine.nccl = chance.choice(["2.27.3", "2.29.7", None])


def _limits(chance: random.Random) -> str:
    rows = [
        ("Max stack size", "8388608", "unlimited", "bytes"),
        ("Max processes", "4125423", "4125423", "processes"),
        ("Max open files", chance.choice(["1048576", "131072"]), "1048576", "files"),
        ("Max locked memory", chance.choice(["unlimited", str(64 * GIB)]), "unlimited", "bytes"),
    ]
    head = "Limit                     Soft Limit           Hard Limit           Units"
    return "\n".join([head, *(f"{a:25} {b:20} {c:20} {d}" for a, b, c, d in rows)])


def _gpus(machine: Machine, chance: random.Random) -> None:
    board = machine.kind in ("hgx-ib", "hgx-roce", "cloud-vm", "efa")
    name = {
        "pcie": chance.choice(["NVIDIA L40S", "NVIDIA A100 80GB PCIe", "NVIDIA H100 NVL"]),
        "mig": "NVIDIA A100-SXM4-80GB",
    }.get(machine.kind, chance.choice(["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200"]))
    count = 8 if board else chance.choice([1, 2, 4, 8])
    version = chance.choice(["535.161.08", "570.86.15", "580.95.05"])
    machine.driver = {"version": version, "cuda": 12080, "count": count}
    machine.torch_cuda = chance.choice(["12.4", "12.8", "12.9", None])
    open_modules = chance.random() < 0.5
    kind = "Open Kernel Module for x86_64" if open_modules else "Kernel Module"
    container = machine.kind.startswith("container")
    if not container or chance.random() < 0.5:
        machine.files["proc/driver/nvidia/version"] = (
            f"NVRM version: NVIDIA UNIX {kind}  {version}  Release Build"
        )
    quiet = machine.kind in ("cloud-vm", "mig", "pcie") or container
    for index in range(count):
        pci = f"0000:{0x19 + 0x11 * index:02x}:00.0"
        gpu: dict[str, Any] = {
            "index": index,
            "name": name,
            "uuid": f"GPU-{index:08d}",
            "pci": pci,
            "temperature_c": chance.randint(25, 60),
            "throttle": [{"reasons": chance.choice([0x1, 0x0, 0x4])} for _ in range(3)],
            "persistence": True,
            "processes": [],
            "memory_used_bytes": chance.randint(1, 900) << 20,
            "memory_total_bytes": 80 * GIB,
            "ecc_enabled": True,
            "ecc_uncorrected": 0,
            "sram_uncorrected": 0,
            "sram_corrected": chance.randint(0, 5),
            "dram_corrected": chance.randint(0, 900),
            "rows_uncorrected": chance.choice([0, 0, 1, 3]),
            "rows_pending": False,
            "rows_failed": False,
            "recovery_action": 0,
            "slowdown_c": 89,
            "memory_temperature_c": 50,
            "memory_limit_c": 95,
            "sm_clock_max_mhz": 1980,
            "application_clock_mhz": 1980,
            "default_clock_mhz": 1980,
            "power_limit_mw": 700_000,
            "power_default_mw": 700_000,
            "pcie_width": 16,
            "pcie_width_max": 16,
        }
        if board or container:
            gpu["links"] = [True] * 18
            gpu["link_errors"] = [0, 0, 0]
            # Before registration was needed (A100) there was nothing to report.
            gpu["fabric"] = {"state": 3, "status": 0, "cluster": "0" * 32, "clique": 0}
        if machine.kind == "pcie":
            gpu["links"] = {"NVIDIA H100 NVL": [True] * 12 + [False] * 6}.get(
                name, [False] * 12 if "A100" in name else None
            )
        if quiet:
            # What virtual functions, MIG and old drivers answer with NOT_SUPPORTED.
            for hidden in chance.sample(
                ["recovery_action", "sram_uncorrected", "sram_corrected", "dram_corrected",
                 "memory_temperature_c", "memory_limit_c", "slowdown_c", "power_limit_mw",
                 "power_default_mw", "application_clock_mhz", "default_clock_mhz", "fabric",
                 "rows_uncorrected", "rows_pending", "rows_failed", "processes"],
                k=chance.randint(3, 10),
            ):  # fmt: skip
                gpu[hidden] = None
        if machine.kind == "mig":
            gpu |= {"mig": True, "throttle": [{"reasons": None}] * 3, "links": None}
        machine.gpus.append(gpu)
        top = f"sys/bus/pci/devices/{pci}"
        if machine.kind != "cloud-vm":
            half = index * 2 // max(count, 1)
            machine.files |= {
                f"{top}/class": "0x030200",
                f"{top}/vendor": "0x10de",
                f"{top}/numa_node": str(half),
                f"{top}/local_cpulist": f"{half * 96}-{half * 96 + 95}",
                f"{top}/driver": "/sys/bus/pci/drivers/nvidia",
            }
        else:
            machine.files |= {
                f"{top}/class": "0x030200",
                f"{top}/vendor": "0x10de",
                f"{top}/numa_node": "-1",
            }
        if not container:
            machine.files[f"proc/driver/nvidia/gpus/{pci}/information"] = f"Model: {name}"


def _nics(machine: Machine, chance: random.Random) -> None:
    efa, roce = machine.kind == "efa", machine.kind == "hgx-roce"
    virtual = machine.kind in ("cloud-vm", "efa")
    for index in range(8):
        name = f"rdmap{index}s0" if efa else f"mlx5_{index}"
        add_device(machine, chance, index, name, efa=efa, roce=roce, virtual=virtual)
    if machine.kind == "hgx-ib":
        # Two ports of a storage card of another kind, one without a cable: as on many nodes.
        for index in (8, 9):
            name = f"mlx5_{index}"
            add_device(machine, chance, index, name, efa=False, roce=True, virtual=False)
            top = f"sys/class/infiniband/{name}"
            machine.files[f"{top}/board_id"] = "MT_0000000359"
        top = "sys/class/infiniband/mlx5_9"
        machine.files |= {
            f"{top}/ports/1/state": "1: DOWN",
            f"{top}/ports/1/phys_state": "3: Disabled",
            f"{top}/device/net/eth9/operstate": "down",
        }
        machine.files.pop(f"{top}/device/net/eth9/carrier")  # EINVAL while it is down


def bond(machine: Machine, index: int, mode: str, second: str) -> None:
    """Put the interface of RoCE device ``index`` into a bond of two; how the ``second`` is."""
    net = f"sys/class/infiniband/mlx5_{index}/device/net/eth{index}/master"
    machine.files |= {
        f"{net}/bonding/mode": mode,
        f"{net}/lower_eth{index}/bonding_slave/mii_status": "up",
        f"{net}/lower_eth{index}b/bonding_slave/mii_status": second,
    }


def add_device(
    machine: Machine,
    chance: random.Random,
    index: int,
    name: str,
    *,
    efa: bool,
    roce: bool,
    virtual: bool,
) -> None:
    """Add an RDMA device with one port that works: EFA, RoCE or InfiniBand."""
    top, files = f"sys/class/infiniband/{name}", machine.files
    port = f"{top}/ports/1"
    layer = "Unspecified" if efa else "Ethernet" if roce else "InfiniBand"
    files |= {
        f"{top}/node_type": "4: <unspecified>" if efa else "1: CA",
        f"{port}/state": "4: ACTIVE",
        f"{port}/phys_state": "5: LinkUp",
        f"{port}/link_layer": layer,
        f"{port}/rate": "100 Gb/sec (4X EDR)" if efa else "400 Gb/sec (4X NDR)",
        f"{top}/device/driver": f"/sys/bus/pci/drivers/{'efa' if efa else 'mlx5_core'}",
        f"sys/class/infiniband_verbs/uverbs{index}/ibdev": name,
        f"dev/infiniband/uverbs{index}": "",
    }
    if not efa:
        files |= {
            f"{top}/hca_type": "MT4129",
            f"{top}/board_id": "MT_0000000838",
            f"{port}/gids/0": f"fe80:0000:0000:0000:0000:0000:0000:{index:04x}",
        }
        for counter in _COUNTERS:
            files[f"{port}/counters/{counter}"] = str(chance.choice([0, 0, 0, 1]))
        files[f"{port}/hw_counters/rnr_nak_retry_err"] = "0"
        files[f"{port}/hw_counters/local_ack_timeout_err"] = str(chance.choice([0, 3]))
    if roce:
        net = f"{top}/device/net/eth{index}"
        files |= {
            f"{port}/gid_attrs/types/0": "IB/RoCE v1",
            f"{port}/gid_attrs/types/1": "RoCE v2",
            f"{port}/gid_attrs/types/3": "RoCE v2",
            f"{port}/gids/3": f"0000:0000:0000:0000:0000:ffff:0a01:{index:02x}03",
            f"{net}/operstate": "up",
            f"{net}/carrier": "1",
            f"{net}/carrier_changes": str(chance.choice([1, 2])),
            f"{net}/mtu": "9000",
            f"{net}/flags": "0x1003",
        }
    elif not efa:
        files |= {
            f"sys/class/infiniband_mad/umad{index}/ibdev": name,
            f"sys/class/infiniband_mad/umad{index}/port": "1",
            f"dev/infiniband/umad{index}": "",
        }
    if not virtual:
        files |= {
            f"{top}/device/numa_node": str(index // 4 % 2),
            f"{top}/device/current_link_width": "16",
            f"{top}/device/max_link_width": "16",
        }
