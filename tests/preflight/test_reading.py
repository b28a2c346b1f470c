"""A machine read for real: made trees, NVML as a stand-in, and what does not answer."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from ncclops.preflight.machine import files, host_reader, nic_reader
from ncclops.preflight.machine.kernel_log_reader import read_log
from ncclops.preflight.machine.reading import read_node
from ncclops.preflight.model import Status
from ncclops.preflight.node import check_node, judge
from ncclops.profiles.model import PreflightNeeds
from tests.preflight import more_defects
from tests.preflight.defects import LOGGED
from tests.preflight.machines import KINDS, make

CompletedText = subprocess.CompletedProcess[str]
HGX = KINDS.index("hgx-ib")
SOON = timedelta(milliseconds=50)
slow = pytest.mark.slow


_NVML = """
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
"""
_COUNT = """
import sys
from pathlib import Path
from ncclops.preflight.machine.gpu_reader import Session
print(Session(Path(sys.argv[1])).driver().count)
"""


@slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("name", [[], ["-Wl,-soname,libnvidia-ml.so.1"]], ids=["bare", "named"])
def test_nvml_of_a_root_is_used_whatever_its_file_calls_itself(
    name: list[str], tmp_path: Path
) -> None:
    library = tmp_path / "usr/lib64/libnvidia-ml.so.1"
    library.parent.mkdir(parents=True)
    build = ["cc", "-shared", "-fPIC", "-xc", "-", *name, "-o", str(library)]
    subprocess.run(build, input=_NVML, text=True, check=True)
    done = subprocess.run(
        [sys.executable, "-c", _COUNT, tmp_path], capture_output=True, text=True, check=True
    )
    assert done.stdout == "3\n"


@slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_of_a_tree_is_judged_like_what_it_was_made_of(
    kind: str, tmp_path: Path
) -> None:
    machine = make(KINDS.index(kind))
    machine.write(tmp_path)
    node = read_node(tmp_path, {**os.environ, "LD_LIBRARY_PATH": ""}, window=SOON)
    assert node.late == {}
    assert node.broken == {}
    assert {path for path in machine.files if "infiniband" not in path} <= set(node.files.texts)
    assert [nic.device for nic in node.nics] == [nic.device for nic in machine.node().nics]
    found = [each for each in judge(node) if each.status in (Status.FAIL, Status.WARN)]
    assert found == []


@slow
def test_pipes_and_devices_in_a_tree_hold_nobody_up(tmp_path: Path) -> None:
    machine = make(HGX)
    machine.write(tmp_path)
    replaced = [
        "proc/self/limits",
        "proc/meminfo",
        "dev/kmsg",
        "sys/class/infiniband/mlx5_0/ports/1/state",
        "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed",
    ]
    for name in replaced:
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
    (tmp_path / "proc/sys/fs/file-max").unlink()
    (tmp_path / "proc/sys/fs/file-max").symlink_to("/dev/zero")
    report = check_node(PreflightNeeds(), root=tmp_path, environ=dict(os.environ), window=SOON)
    assert report.of(Status.FAIL) == []
    unknown = {each.check for each in report.of(Status.CANNOT_TELL)}
    assert {"host.memlock", "host.nofile", "host.hugepages", "host.file-max"} <= unknown


@pytest.mark.parametrize(
    ("cgroup", "written"),
    [
        ("0::/a/b", ["a/memory.max", "a/b/cpu.max", "memory.high", "pids.max"]),
        (
            "9:memory:/a/b\n4:cpu,cpuacct:/a\n2:pids:/a\n1:name=systemd:/c\n0::/c",
            ["memory/a/memory.limit_in_bytes", "cpu/a/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us",
             "pids/a/pids.max", "c/memory.max"],
        ),
    ],
    ids=["v2", "v1"],
)  # fmt: skip
def test_limits_of_control_groups_are_read_from_ours_upwards(
    cgroup: str, written: list[str], tmp_path: Path
) -> None:
    for name in (*written, "other/memory.max", "pids/c/pids.max"):
        place = tmp_path / "sys/fs/cgroup" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("4096\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/nvidia-modprobe").write_bytes(b"\x7fELF")
    read = host_reader.read_host(tmp_path).files
    assert dict(read.matching(r"sys/fs/cgroup/.*")) == {
        f"sys/fs/cgroup/{name}": "4096" for name in written
    }
    assert "usr/bin/nvidia-modprobe" in read


def test_partitions_of_a_port_are_read(tmp_path: Path) -> None:
    top = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/pkeys"
    top.mkdir(parents=True)
    for number in (0, 9, 10, 127):
        (top / str(number)).write_text("0x7fff\n")
    read = nic_reader.read_device(tmp_path, "mlx5_0")
    assert read.names("sys/class/infiniband/mlx5_0/ports/1/pkeys") == ["0", "9"]


def test_the_bond_above_a_port_is_read_as_the_kernel_links_it(tmp_path: Path) -> None:
    card, bond = tmp_path / "sys/devices/0000:18:00.0", tmp_path / "sys/devices/virtual/net/bond0"
    for name, state in (("eth0", "up"), ("eth1", "down")):
        (card / f"net/{name}/bonding_slave").mkdir(parents=True)
        (card / f"net/{name}/bonding_slave/mii_status").write_text(f"{state}\n")
        (card / f"net/{name}/master").symlink_to("../../../virtual/net/bond0")
        bond.mkdir(parents=True, exist_ok=True)
        (bond / f"lower_{name}").symlink_to(f"../../../0000:18:00.0/net/{name}")
    (bond / "bonding").mkdir()
    (bond / "bonding/mode").write_text("802.3ad 4\n")
    top = tmp_path / "sys/class/infiniband/mlx5_bond_0"
    top.mkdir(parents=True)
    (top / "device").symlink_to("../../../devices/0000:18:00.0")
    read = nic_reader.read_device(tmp_path, "mlx5_bond_0")
    master = "sys/class/infiniband/mlx5_bond_0/device/net/eth0/master"
    assert read.text(f"{master}/bonding/mode") == "802.3ad 4"
    assert read.text(f"{master}/lower_eth1/bonding_slave/mii_status") == "down"


def test_the_end_of_a_large_log_is_read(tmp_path: Path) -> None:
    place = tmp_path / "log"
    place.write_text("".join(f"line {number}\n" for number in range(1000)))
    text = files.tail_text(tmp_path, place.name, 100)
    assert text is not None
    assert text.splitlines()[-1] == "line 999"
    assert all(line.startswith("line ") for line in text.splitlines())


LOGS: dict[str, Callable[[float], str]] = {
    "dev/kmsg": lambda age: f"4,9,{int((9000 - age) * 1e6)},-;NVRM: Xid (PCI:0000:19:00): 79\n",
    "var/log/dmesg": lambda age: f"[{9000 - age:12.6f}] NVRM: Xid (PCI:0000:19:00): 79\n",
    "var/log/kern.log": lambda age: (
        time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - age))
        + " host kernel: NVRM: Xid (PCI:0000:19:00): 79\n"
    ),
    "var/log/messages": lambda age: (
        time.strftime("%b %e %H:%M:%S", time.localtime(time.time() - age))
        + " host kernel: NVRM: Xid (PCI:0000:19:00): 79\n"
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_a_line_of_the_log_has_an_age_in_each_form(name: str, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/uptime").write_text("9000.00 1.0\n")
    place = tmp_path / name
    place.parent.mkdir(parents=True)
    place.write_text("something else\n" + LOGS[name](60.0))
    log = read_log(tmp_path)
    assert log.source == f"/{name}"
    (line,) = log.lines
    assert line.text == "NVRM: Xid (PCI:0000:19:00): 79"
    assert line.age_s is not None
    assert abs(line.age_s - 60) < 59  # however slow the test is


def test_lines_of_other_devices_do_not_drive_out_what_convicts_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "var/log").mkdir(parents=True)
    others = "pcieport 0000:15:01.0: AER: Corrected error message received\n" * 5_000
    xid = "NVRM: Xid (PCI:0000:19:00): 79, pid=1, GPU has fallen off the bus.\n"
    (tmp_path / "var/log/dmesg").write_text(xid + others)
    lines = [line.text for line in read_log(tmp_path).lines]
    assert lines[0] == xid.strip()
    assert 2 < len(lines) < 5_000


def test_what_convicts_by_the_log_is_among_the_lines_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "var/log").mkdir(parents=True)
    planted = [*LOGGED.values(), *more_defects.LOGGED.values(), *more_defects.STORMS.values()]
    (tmp_path / "var/log/dmesg").write_text("".join(f"{line}\n" for line in planted))
    assert [line.text for line in read_log(tmp_path).lines] == planted


def test_a_line_that_is_newer_than_now_has_no_age(tmp_path: Path) -> None:
    """The uptime is a container's (lxcfs), the log its host's: an old Xid is not one of now."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/uptime").write_text("5000.00 1.0\n")
    (tmp_path / "var/log").mkdir(parents=True)
    text = "[900000.123456] NVRM: Xid (PCI:0000:19:00): 79\n"
    (tmp_path / "var/log/dmesg").write_text(text)
    assert [line.age_s for line in read_log(tmp_path).lines] == [None]


@pytest.mark.parametrize("zone", ["UTC-9", "UTC+5"])  # as POSIX writes them: east is negative
def test_dates_are_in_the_zone_of_the_machine_that_wrote_them(zone: str, tmp_path: Path) -> None:
    ahead_s = -3600 * int(zone.removeprefix("UTC"))
    (tmp_path / "var/log").mkdir(parents=True)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/localtime").write_bytes(_zone_file(ahead_s))
    written = time.gmtime(time.time() - 6 * 3600 + ahead_s)
    line = f"{time.strftime('%b %d %H:%M:%S', written)} n kernel: NVRM: Xid (PCI:0000:19:00): 79\n"
    (tmp_path / "var/log/syslog").write_text(line)
    (read,) = read_log(tmp_path).lines
    assert read.age_s is not None
    assert abs(read.age_s - 6 * 3600) < 300


def _zone_file(ahead_s: int) -> bytes:
    """A zone without summer time (RFC 8536)."""
    head = b"TZif2" + bytes(15)
    counts = struct.pack(">6l", 0, 0, 0, 0, 1, 4)
    kind = struct.pack(">lBB", ahead_s, 0, 0) + b"LOC\0"
    return (head + counts + kind) * 2 + b"\n\n"


def test_what_was_logged_before_the_boot_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/uptime").write_text("600.00 1.0\n")
    (tmp_path / "var/log").mkdir(parents=True)
    (tmp_path / "var/log/kern.log").write_text(LOGS["var/log/kern.log"](3600.0))
    assert read_log(tmp_path).lines == ()


@slow
def test_the_command_prints_what_schedulers_take(
    ncclops_in_process: Callable[..., CompletedText], tmp_path: Path
) -> None:
    root, listed = tmp_path / "root", tmp_path / "excluded"
    machine = make(HGX)
    machine.files["proc/mounts"] = "shm /dev/shm tmpfs rw,size=65536k 0 0"
    machine.write(root)
    listed.write_text("node9\n")
    common = ("preflight", "--root", root, "--window", "50ms", "--node-name", "n7")

    done = ncclops_in_process(*common, "--json", "--exclude-file", listed)
    assert done.returncode == 3, done.stderr
    document = json.loads(done.stdout)
    assert (document["schema"], document["status"]) == ("ncclops.preflight/1", "FAIL")
    (node,) = document["hosts"]
    bad = [each for each in node["findings"] if each["status"] == "FAIL"]
    assert [(each["check"], each["read"]) for each in bad] == [("host.shm", "64 MiB")]
    assert bad[0]["remedy"]
    assert listed.read_text() == "node9\nn7\n"

    assert ncclops_in_process(*common, "--reason").stdout == "ncclops: host.shm host: 64 MiB\n"
    text = ncclops_in_process(*common, "--prometheus").stdout
    assert 'ncclops_preflight_check{check="host.shm",host="n7",subject="host"} 3.0' in text
    table = ncclops_in_process(*common, "--no-exit-code")
    assert table.returncode == 0
    assert "FAIL  host.shm  host  64 MiB (wanted: at least 8 GiB" in table.stdout
    assert "-> give the container more" in table.stdout

    done = ncclops_in_process(*common, "--skip", "host.shm", "--exclude-file", listed, "--reason")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert listed.read_text() == "node9\n"


def test_wrong_use_is_one_line(ncclops_in_process: Callable[..., CompletedText]) -> None:
    for arguments, said in (
        (("--skip", "host.smh"), "there is no check 'host.smh': did you mean host.shm?"),
        (("--root", "nowhere"), "--root nowhere: there is no such directory"),
        (("--json", "--reason"), "give one"),
        (("--window", "2"), "--window: '2' is not a duration"),
        (("--limit", "10ms"), "--limit: at least 1s, not 10ms"),
        (("--param", "a=1"), "name it with --profile"),
    ):
        done = ncclops_in_process("preflight", *arguments)
        assert done.returncode == 2
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_links_below_a_root_are_those_of_that_machine(tmp_path: Path) -> None:
    """A tree of another machine has absolute links; followed here they show files of this one."""
    (tmp_path / "secret").write_text("of this machine")
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "usr/lib").mkdir(parents=True)
    (root / "usr/lib/os-release").write_text("of that machine")
    (root / "etc/os-release").symlink_to("/usr/lib/os-release")
    (root / "etc/hostname").symlink_to("../../../../../secret")
    (root / "etc/hosts").symlink_to(tmp_path / "secret")
    (root / "etc/circle").symlink_to("circle")
    devices = root / "sys/devices/mlx5_0"
    devices.mkdir(parents=True)
    (devices / "fw_ver").write_text("28.1")
    (devices / "hca_type").symlink_to(tmp_path / "secret")
    (root / "sys/class/infiniband").mkdir(parents=True)
    (root / "sys/class/infiniband/mlx5_0").symlink_to("/sys/devices/mlx5_0")
    (root / "sys/class/infiniband/here").symlink_to(tmp_path)
    found = files.read(
        root, ["etc/*", "sys/class/infiniband/*/fw_ver", "sys/class/infiniband/*/*", "etc/gone"]
    )
    assert found == {
        "etc/os-release": "of that machine",
        "etc/hostname": None,
        "etc/hosts": None,
        "etc/circle": None,
        "sys/class/infiniband/mlx5_0/fw_ver": "28.1",
        "sys/class/infiniband/mlx5_0/hca_type": None,
    }


@pytest.mark.parametrize("name", ["a/../../../../../etc/passwd", "up/etc/passwd", "/etc/passwd"])
def test_nothing_above_a_root_is_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "up").symlink_to("../../../../../../..")
    assert files.read_text(tmp_path, name) is None


def test_corrected_errors_do_not_drive_out_a_disk_nor_a_file_server(tmp_path: Path) -> None:
    (tmp_path / "var/log").mkdir(parents=True)
    storm = "nvme 0000:c1:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer\n" * 5_000
    said = [
        "critical medium error, dev sda, sector 9",
        "md/raid1:md0: Disk failure on sda, disabling device.",
        "nfs: server a not responding, still trying",
        "Lustre: a-OST1-osc-ff: Connection to a-OST1 (at 10.1.1.3@o2ib) was lost; in progress",
    ]
    (tmp_path / "var/log/dmesg").write_text("\n".join([*said, storm]))
    assert [line.text for line in read_log(tmp_path).lines][:4] == said
