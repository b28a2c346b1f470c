"""Checks of the host: what each finds, what it lets pass, and when it cannot tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from ncclops.preflight import hand_over, table
from ncclops.preflight.catalogue import catalogue
from ncclops.preflight.model import Finding, NodeReport, Status, worst
from ncclops.preflight.node import RULES, judge
from ncclops.preflight.readings import Process, Space, Stuck
from tests.preflight import checks_page
from tests.preflight.machines import GIB, KINDS, Machine, make

HGX = KINDS.index("hgx-ib")
CONTAINER = KINDS.index("container-v2")

Change = Callable[[Machine], object]


def found(machine: Machine, check: str) -> list[Finding]:
    return [each for each in judge(machine.node()) if each.check == check]


def status(machine: Machine, check: str) -> Status:
    return worst(each.status for each in found(machine, check))


def limit(label: str, value: str) -> Change:
    def change(machine: Machine) -> None:
        lines = machine.files["proc/self/limits"].splitlines()
        machine.files["proc/self/limits"] = "\n".join(
            f"{label:25} {value:20} {value:20} x" if line.startswith(label) else line
            for line in lines
        )

    return change


def file(path: str, text: str) -> Change:
    return lambda machine: machine.files.update({path: text})


def no_capabilities(machine: Machine) -> None:
    text = machine.files["proc/self/status"]
    machine.files["proc/self/status"] = text.replace("000001ffffffffff", "00000000a80425fb")


def processes(*running: Process) -> Change:
    return lambda machine: setattr(machine, "processes", [*running])


def stuck(*waiting: Stuck) -> Change:
    return lambda machine: setattr(machine, "stuck", waiting)


def unset_clock(machine: Machine) -> None:
    machine.clock = False


def both(*changes: Change) -> Change:
    return lambda machine: [change(machine) for change in changes]


FULL = Space(path="/scratch", size_bytes=GIB * 100, free_bytes=1 << 20, files=10, files_free=5)
WORSE: list[tuple[str, str, Change, Status]] = [
    (
        "host.memlock",
        "64 KiB without the capability",
        both(limit("Max locked memory", "65536"), no_capabilities),
        Status.FAIL,
    ),
    (
        "host.memlock",
        "an eighth of 128 GiB, as a distribution gives",
        both(limit("Max locked memory", str(16 * GIB)), no_capabilities),
        Status.WARN,
    ),
    ("host.memlock", "64 KiB with it", limit("Max locked memory", "65536"), Status.OK),
    (
        "host.shm",
        "docker's",
        file("proc/mounts", "shm /dev/shm tmpfs rw,size=65536k 0 0"),
        Status.FAIL,
    ),
    ("host.shm", "4 GiB", file("proc/mounts", "shm /dev/shm tmpfs rw,size=4g 0 0"), Status.WARN),
    ("host.shm", "no such mount", file("proc/mounts", "x / ext4 rw 0 0"), Status.CANNOT_TELL),
    ("host.nofile", "512", limit("Max open files", "512"), Status.FAIL),
    ("host.nofile", "1024", limit("Max open files", "1024"), Status.WARN),
    ("host.nofile", "nothing said", file("proc/self/limits", ""), Status.CANNOT_TELL),
    ("host.file-max", "small", file("proc/sys/fs/file-max", "100000"), Status.WARN),
    (
        "host.file-max",
        "nearly used up",
        both(
            file("proc/sys/fs/file-max", "3000000"),
            file("proc/sys/fs/file-nr", "2900000 0 3000000"),
        ),
        Status.FAIL,
    ),
    ("host.pids", "a group's limit", file("sys/fs/cgroup/user.slice/pids.max", "512"), Status.FAIL),
    ("host.pids", "pid_max", file("proc/sys/kernel/pid_max", "900"), Status.FAIL),
    (
        "host.pids",
        "RLIMIT_NPROC",
        both(limit("Max processes", "2000"), no_capabilities),
        Status.WARN,
    ),
    ("host.pids", "RLIMIT_NPROC, which root lacks", limit("Max processes", "2000"), Status.OK),
    (
        "host.removeipc",
        "yes",
        file("etc/systemd/logind.conf", "[Login]\nRemoveIPC=yes"),
        Status.WARN,
    ),
    (
        "host.removeipc",
        "a drop-in that says no",
        both(
            file("etc/systemd/logind.conf", "[Login]\nRemoveIPC=yes"),
            file("etc/systemd/logind.conf.d/50-slurm.conf", "[Login]\nRemoveIPC=no"),
        ),
        Status.OK,
    ),
    (
        "host.removeipc",
        "a comment",
        file("etc/systemd/logind.conf", "#RemoveIPC=no"),
        Status.CANNOT_TELL,
    ),
    (
        "host.stack",
        "unlimited with an old NCCL",
        both(limit("Max stack size", "unlimited"), lambda m: setattr(m, "nccl", "2.21.5")),
        Status.WARN,
    ),
    (
        "host.stack",
        "unlimited with a new one",
        both(limit("Max stack size", "unlimited"), lambda m: setattr(m, "nccl", "2.28.3")),
        Status.OK,
    ),
    (
        "host.stack",
        "unlimited with none known",
        both(limit("Max stack size", "unlimited"), lambda m: setattr(m, "nccl", None)),
        Status.CANNOT_TELL,
    ),
    (
        "host.numa",
        "bound to one socket",
        file("proc/self/status", "Cpus_allowed_list:\t0-7\nSeccomp:\t0"),
        Status.WARN,
    ),
    (
        "host.iommu",
        "translated",
        both(
            file("sys/bus/pci/devices/0000:19:00.0/iommu_group", "/sys/kernel/iommu_groups/4"),
            file("sys/kernel/iommu_groups/4/type", "DMA-FQ"),
        ),
        Status.WARN,
    ),
    (
        "host.iommu",
        "passed through",
        both(
            file("sys/bus/pci/devices/0000:19:00.0/iommu_group", "/sys/kernel/iommu_groups/4"),
            file("sys/kernel/iommu_groups/4/type", "identity"),
        ),
        Status.OK,
    ),
    ("host.acs", "a bridge", lambda m: setattr(m, "acs", ("0000:15:01.0",)), Status.WARN),
    (
        "host.hugepages",
        "half of the memory",
        file("proc/meminfo", "MemTotal: 1048576 kB\nHugePages_Free: 256\nHugepagesize: 2048 kB"),
        Status.WARN,
    ),
    (
        "host.stale-shm",
        "left over",
        lambda m: setattr(m, "stale", ("dev/shm/nccl-ab",)),
        Status.WARN,
    ),
    ("host.space", "full", lambda m: m.spaces.append(FULL), Status.FAIL),
    (
        "host.space",
        "read-only",
        lambda m: m.spaces.append(Space(path="/r", size_bytes=GIB, free_bytes=GIB, read_only=True)),
        Status.FAIL,
    ),
    (
        "host.space",
        "not there",
        lambda m: m.spaces.append(Space(path="/n", size_bytes=0, free_bytes=0, problem="gone")),
        Status.CANNOT_TELL,
    ),
    (
        "host.space",
        "room above it",
        lambda m: m.spaces.append(
            Space(path="/n/a", above="/n", size_bytes=100 * GIB, free_bytes=99 * GIB)
        ),
        Status.CANNOT_TELL,
    ),
    (
        "host.space",
        "no room above it",
        lambda m: m.spaces.append(Space(path="/n", above="/", size_bytes=GIB, free_bytes=1)),
        Status.FAIL,
    ),
    (
        "host.clock",
        "nobody sets it",
        both(unset_clock, processes(Process(1, "systemd", "S"))),
        Status.WARN,
    ),
    (
        "host.name",
        "localhost",
        file("proc/sys/kernel/hostname", "localhost.localdomain"),
        Status.FAIL,
    ),
    ("host.name", "the loopback", lambda m: setattr(m, "addresses", ("127.0.1.1",)), Status.WARN),
    ("host.name", "no address", lambda m: setattr(m, "addresses", ()), Status.WARN),
    (
        "host.d-state",
        "a stuck nvidia-smi",
        stuck(Stuck(pid=7, name="nvidia-smi")),
        Status.WARN,
    ),
    ("host.readable", "a GPU is late", lambda m: m.late.update({"gpu 3": 15.0}), Status.FAIL),
    (
        "host.readable",
        "a disk is late",
        lambda m: m.late.update({"space /ckpt": 15.0}),
        Status.FAIL,
    ),
    ("host.readable", "DNS is late", lambda m: m.late.update({"name": 15.0}), Status.WARN),
    (
        "host.readable",
        "the log is late",
        lambda m: m.late.update({"log": 15.0}),
        Status.CANNOT_TELL,
    ),
]


@pytest.mark.parametrize(
    ("check", "what", "change", "wanted"),
    [pytest.param(*row, id=f"{row[0]}, {row[1]}") for row in WORSE],
)
def test_what_is_wrong_with_a_host_is_found(
    check: str, what: str, change: Change, wanted: Status
) -> None:
    machine = make(HGX)
    machine.needs = dataclasses.replace(machine.needs, rdma=True)
    change(machine)
    assert status(machine, check) is wanted, found(machine, check)


@pytest.mark.parametrize("check", ["gpu.fabric-manager", "host.imex", "host.clock"])
def test_where_the_processes_of_others_are_hidden_none_is_missing(check: str) -> None:
    """/proc is mounted with hidepid: to a user it shows that user's own."""
    machine = make(KINDS.index("hgx-ib"))
    machine.files |= {f"dev/nvidia-nvswitch{number}": "" for number in range(4)}
    for gpu in machine.gpus:
        gpu["fabric"] = {"state": 3, "status": 0, "cluster": "1" * 32, "clique": 0}
    machine.files["dev/nvidia-caps-imex-channels/channel0"] = ""
    machine.imex, machine.clock = (True,), False
    machine.processes = [Process(1, "systemd", "S"), Process(4242, "python3", "R")]
    assert status(machine, check) in (Status.WARN, Status.FAIL)
    del machine.processes[0]
    assert status(machine, check) in (Status.CANNOT_TELL, Status.OK)


def test_a_seccomp_filter_wants_a_capability() -> None:
    machine = make(CONTAINER)
    machine.files["proc/self/status"] = "CapEff:\t00000000a80425fb\nSeccomp:\t2"
    assert status(machine, "host.capabilities") is Status.WARN
    machine.files["proc/self/status"] = "CapEff:\t00000000a88425fb\nSeccomp:\t2"
    assert status(machine, "host.capabilities") is Status.OK


def test_locked_memory_does_not_matter_without_rdma() -> None:
    machine = make(CONTAINER)
    limit("Max locked memory", "65536")(machine)
    no_capabilities(machine)
    assert status(machine, "host.memlock") is Status.OK


def test_a_host_of_which_nothing_is_known_is_not_convicted() -> None:
    found = judge(Machine("empty", processes=None, clock=None, addresses=None).node())
    assert {each.status for each in found} <= {Status.OK, Status.CANNOT_TELL}


def test_a_check_can_be_left_out() -> None:
    machine = make(HGX)
    machine.needs = dataclasses.replace(machine.needs, ignore=("host.shm",))
    assert found(machine, "host.shm") == []


GONE = "nfs: server {} not responding, still trying"
LOST = "Lustre: fs1-{}-osc-ff1e: Connection to fs1-{} (at 10.1.1.3@o2ib) was lost; in progress"
EVICTED = "LustreError: 167-0: fs1-OST1-osc-ff1e: This client was evicted by fs1-OST1; in progress"
RESTORED = "Lustre: fs1-OST1-osc-ff1e: Connection restored to fs1-OST1 (at 10.1.1.3@o2ib)"
AER = "pcieport 0000:15:01.0: AER: {} error message received from 0000:{}:00.0"


HARMLESS = [
    "mlx5_core 0000:18:00.0: cmd_work_handler: cmd[0]: MODIFY_QP(0x503) recovered after timeout",
    "mlx5_core 0000:18:00.0: print_health_info:429:(pid 0): Health issue observed, x, severity(5)",
    "critical target error, dev sda, sector 8 op 0x3:(DISCARD)",
    "I/O error, dev loop3, sector 0",
    "Buffer I/O error on dev sr0, logical block 0",
    "nvme nvme2: I/O 214 QID 12 timeout, completion polled",
    "{1}[Hardware Error]: event severity: corrected",
    "mce: [Hardware Error]: Machine check events logged",
    "Memory cgroup out of memory: Killed process 999 (python3) total-vm:1kB",
    "traps: python3[4711] general protection fault ip:7f1 sp:7ff error:0 in libc.so.6",
    "clocksource: Switched to clocksource hpet",
    "tsc: Marking TSC unstable due to TSCs unsynchronized",
    "pcieport 0000:15:01.0: pciehp: Slot(12): Card present",
    "pcieport 0000:15:01.0: DPC: error containment capabilities: Int Msg #0, RPExt+",
    "bnxt_en 0000:18:00.0 ens0np0: NIC Link is Up, 400000 Mbps (PAM4) full duplex",
    "libceph: osd12 (1)10.1.1.1:6800 socket closed (con state OPEN)",
    "infiniband rdmap79s0: Failed to process command CREATE_QP (opcode 1) comp_status 7 err -12",
    "BTRFS info (device nvme0n1p2): using crc32c (crc32c-intel) checksum algorithm",
]


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ([GONE.format("a"), "nfs: server a OK"], Status.OK),
        ([GONE.format("a"), GONE.format("b"), "nfs: server b OK"], Status.WARN),
        ([GONE.format("a"), "nfs: server a OK", "nfs: server a not responding, timed out"],
         Status.WARN),
        ([LOST.format("OST1", "OST1"),
          "Lustre: fs1-OST1-osc-ff1e: Connection restored to fs1-OST1 (at 10.1.1.3@o2ib)"],
         Status.OK),
        ([LOST.format("OST1", "OST1"),
          "Lustre: fs1-OST2-osc-ff1e: Connection restored to 10.1.1.4@o2ib (at 10.1.1.4@o2ib)"],
         Status.WARN),
        ([AER.format("Corrected", 18)] * 239, Status.OK),
        ([AER.format("Corrected", 18), AER.format("Corrected", 19)] * 200, Status.OK),
        ([AER.format("Multiple Correctable", 18)] * 240, Status.WARN),
        ([LOST.format("OST1", "OST1"), EVICTED, RESTORED], Status.OK),
        ([EVICTED], Status.WARN),
        (["libceph: mon2 (1)10.0.0.3:6789 session lost, hunting for new mon",
          "libceph: mon0 (1)10.0.0.1:6789 session established"], Status.OK),
        (["ceph: mds0 hung", "ceph: mds0 came back"], Status.OK),
        (["ceph: [3f0f4d1e-8a0e 4711]: mds1 hung", "ceph: mds0 came back"], Status.WARN),
        (HARMLESS, Status.OK),
    ],
    ids=["back", "another is back", "gone again", "target back", "another target back", "few",
         "few of each", "many", "evicted and back", "evicted", "another monitor",
         "files back", "other files back", "what nobody has to mend"],
)  # fmt: skip
def test_what_the_kernel_says_of_servers_links_and_disks(lines: list[str], wanted: Status) -> None:
    machine = make(HGX)
    machine.log = [(600.0, line) for line in lines]
    assert status(machine, "host.kernel-log") is wanted


@pytest.mark.parametrize(("every_s", "wanted"), [(7.0, Status.WARN), (8.0, Status.OK)])
def test_corrected_errors_warn_from_eight_a_minute_on(every_s: float, wanted: Status) -> None:
    machine = make(HGX)
    ages = [7000.0 - number * every_s for number in range(300)]
    machine.log = [(age, AER.format("Corrected", 18)) for age in ages]
    assert status(machine, "host.kernel-log") is wanted


def test_every_check_of_the_catalogue_has_a_rule_and_every_rule_a_check() -> None:
    assert set(RULES) == set(catalogue())


def test_the_page_lists_all_checks() -> None:
    """``python -m tests.preflight.checks_page`` writes the table."""
    assert checks_page.table() in checks_page.PAGE.read_text()


def test_the_table_shows_what_is_wrong_first_and_the_rest_when_asked() -> None:
    machine = make(HGX)
    limit("Max open files", "512")(machine)
    file("proc/sys/fs/file-max", "1000000")(machine)
    report = NodeReport(host="n1", time=1.5, findings=judge(machine.node()), seconds=1.25)
    head, *rows = table.lines(report)
    assert head.startswith("host n1: 1 FAIL, 1 WARN, ")
    assert head.endswith(f"(1.2 s); {len(report.findings) - 2} not shown (--all)")
    assert [row.split()[0] for row in rows] == ["FAIL", "->", "WARN", "->"]
    everything = table.lines(report, everything=True)
    assert len(everything) == 1 + len(report.findings) + 2
    assert everything[0].endswith("(1.2 s)")
    assert table.lines(NodeReport(host="n1", time=1.5, findings=())) == [
        "host n1: nothing to check"
    ]


def test_the_reason_names_the_other_checks_as_far_as_there_is_room() -> None:
    def bad(check: str, read: str) -> Finding:
        return Finding(check=check, status=Status.FAIL, subject="host", read=read, wanted="")

    found = [bad("host.shm", "64 MiB"), bad("nic.port", "DOWN"), bad("nic.port", "INIT")]
    assert hand_over.reason(found) == "ncclops: host.shm host: 64 MiB (+2 more: nic.port)"
    assert hand_over.reason([found[1], found[2]]) == "ncclops: nic.port host: DOWN (+1 more)"
    long = hand_over.reason([bad("host.shm", "x" * 300), found[1]])
    assert len(long) == 200
    assert long.endswith("… (+1 more)")


def test_a_report_survives_json() -> None:
    machine = make(HGX)
    report = NodeReport(host="n1", time=1.5, findings=judge(machine.node()), boot_id="x")
    document = report.to_json()
    assert NodeReport.from_json(document) == report
    assert NodeReport.from_json({**document, "added": 1}) == report
    broken: object
    for broken in ({}, [], None, {**document, "findings": 3}, {**document, "time": "now"}):
        with pytest.raises(ValueError, match="preflight-node"):
            NodeReport.from_json(broken)
