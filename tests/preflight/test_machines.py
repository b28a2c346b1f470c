"""Machines with and without a defect: no healthy one is convicted, every defect is found.

``scripts/preflight_machines.py`` looks at a thousand; here is a share of them.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from ncclops.preflight.catalogue import catalogue
from ncclops.preflight.checks.counted import over
from ncclops.preflight.model import Finding, Status
from ncclops.preflight.node import judge
from ncclops.preflight.traits import traits
from tests.preflight.machines import KINDS, Machine, make
from tests.preflight.more_defects import DEFECTS
from tests.preflight.planting import Defect
from tests.preflight.real_machines import MACHINES


def grave(findings: tuple[Finding, ...], *statuses: Status) -> set[str]:
    return {each.check for each in findings if each.status in statuses}


@pytest.mark.parametrize("seed", range(90))
def test_a_healthy_machine_is_not_convicted_nor_warned_of(seed: int) -> None:
    found = judge(make(seed).node())
    assert grave(found, Status.FAIL, Status.WARN) == set()
    assert grave(found, Status.OK)


@pytest.mark.parametrize("name", MACHINES)
def test_a_healthy_machine_as_people_have_shown_theirs_is_not_convicted(name: str) -> None:
    for seed in range(8):
        found = judge(MACHINES[name](random.Random(seed)).node())
        said = [(each.check, each.subject, each.read) for each in found if each.status == "FAIL"]
        assert not said, seed
        assert grave(found, Status.OK)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_is_found_where_it_is_and_nothing_else(defect: Defect) -> None:
    for number, kind in enumerate(defect.kinds):
        seed = KINDS.index(kind) + len(KINDS) * number
        machine = make(seed)
        subject = defect.plant(machine, random.Random(seed))
        found = judge(machine.node())
        said = {(each.check, each.subject) for each in found if each.status is defect.status}
        assert (defect.check, subject) in said, (kind, seed, said)
        convicted = grave(found, Status.FAIL)
        wanted = {defect.check} if defect.status is Status.FAIL else set()
        assert wanted <= convicted <= wanted | defect.also, (kind, seed)


def test_a_defect_is_planted_for_every_check() -> None:
    assert {*catalogue()} == {defect.check for defect in DEFECTS}


def test_each_remedy_is_for_something_that_is_found() -> None:
    told = set[str]()
    for defect in DEFECTS:
        machine = make(KINDS.index(defect.kinds[0]))
        defect.plant(machine, random.Random(0))
        told |= {each.remedy for each in judge(machine.node())}
    for code in ("64,", "74,", "79,", "149, NETIR_LINK_EVT Nonfatal"):
        machine = make(0)
        machine.log = [(60.0, f"NVRM: Xid (PCI:0000:19:00): {code} pid=1, x")]
        told |= {each.remedy for each in judge(machine.node())}
    told |= {each.remedy for each in judge(_without_fabric_manager().node())}
    assert {text for each in catalogue().values() for text in each.remedies.values()} <= told


def test_a_link_that_has_recovered_needs_no_reset() -> None:
    machine = MACHINES["links that recovered"](random.Random(0))
    said = [each for each in judge(machine.node()) if each.check == "gpu.xid"]
    assert {each.status for each in said} == {Status.WARN}
    assert {each.remedy for each in said} == {catalogue()["gpu.xid"].remedies["recovered"]}


def test_the_fabric_manager_of_a_rack_is_not_looked_for_on_its_hosts() -> None:
    machine = MACHINES["grace blackwell"](random.Random(0))
    for gpu in machine.gpus:
        gpu["fabric"] |= {"health": 1}
    for path in [path for path in machine.files if "nvswitch" in path]:
        del machine.files[path]
    (remedy,) = {each.remedy for each in judge(machine.node()) if each.check == "gpu.fabric"} - {""}
    assert remedy == catalogue()["gpu.fabric"].remedies["rack"]


def _without_fabric_manager() -> Machine:
    """GPU 0's registration has failed, the others' are under way."""
    machine = make(KINDS.index("hgx-ib"))
    machine.files["proc/driver/nvidia-nvswitch/devices/0000:05:00.0"] = ""
    machine.processes = [each for each in machine.processes or [] if "fabric" not in each.name]
    for number, gpu in enumerate(machine.gpus):
        gpu["fabric"] = {"state": 2, "status": 0} if number else {"state": 3, "status": 15}
    return machine


def test_gpus_that_wait_for_a_fabric_manager_refer_to_it() -> None:
    """Not one whose registration has failed: that is another cause."""
    machine = _without_fabric_manager()
    findings = [each for each in judge(machine.node()) if each.status is Status.FAIL]
    remedies = {each.subject: each.remedy for each in findings if each.check == "gpu.fabric"}
    fabric = catalogue()["gpu.fabric"]
    assert remedies.pop("GPU 0") == fabric.remedy
    assert {*remedies.values()} == {fabric.remedies["stopped"]}
    assert "gpu.fabric-manager" in fabric.remedies["stopped"]
    assert "gpu.fabric-manager" in {each.check for each in findings}


@pytest.mark.parametrize(("rate", "said"), [("200", set()), ("400", {"nic.pcie"})])
def test_a_slot_is_narrow_where_it_carries_less_than_the_ports(rate: str, said: set[str]) -> None:
    machine = make(KINDS.index("hgx-roce"))
    for index in range(8):
        top = f"sys/class/infiniband/mlx5_{index}"
        machine.files |= {
            f"{top}/ports/1/rate": f"{rate} Gb/sec",
            f"{top}/device/current_link_width": "8",
            f"{top}/device/../max_link_width": "8",
            f"{top}/device/current_link_speed": "32.0 GT/s PCIe",
        }
    assert grave(judge(machine.node()), Status.WARN, Status.FAIL) == said


def test_the_lanes_of_a_gpu_beside_grace_say_nothing() -> None:
    """They are as narrow as an idle one makes them; NVLink-C2C leads to the processor."""
    machine = MACHINES["grace blackwell"](random.Random(0))
    for gpu, width in zip(machine.gpus, (1, 16, 1, 16), strict=True):
        gpu |= {"pcie_width": width, "pcie_width_max": 16}
    assert "gpu.pcie" not in grave(judge(machine.node()), Status.WARN, Status.FAIL)


def test_a_line_of_the_kernel_log_is_told_with_its_age() -> None:
    machine = make(0)
    machine.log = [(600.0, "NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 5 timed out")]
    (said,) = (e.read for e in judge(machine.node()) if e.check == "host.kernel-log")
    assert said.endswith("transmit queue 5 timed out, 10 min ago")


@pytest.mark.parametrize(
    ("kind", "value"), [("hgx-roce", "10.1.7.3"), ("hgx-ib", "0000:0000:0000:0007")]
)
def test_hosts_are_told_each_other_s_rdma_addresses(kind: str, value: str) -> None:
    machine = make(KINDS.index(kind))
    assert value in traits(machine.node()).rdma


def test_many_events_over_a_long_time_are_told_of_few() -> None:
    """28,800 are usual in ten days; chance explains some more, and no more than that."""
    ten_days_s, limits = 864_000.0, {"symbol_error": 1 / 30}
    assert over({"symbol_error": 29_000}, limits, ten_days_s) == []
    assert over({"symbol_error": 30_000}, limits, ten_days_s) != []


def test_a_gpu_that_a_virtual_machine_has_been_given_is_translated() -> None:
    machine = make(KINDS.index("pcie"))
    place = "sys/bus/pci/devices/0000:e1:00.0"
    machine.files |= {
        f"{place}/class": "0x030200",
        f"{place}/driver": "/sys/bus/pci/drivers/vfio-pci",
        f"{place}/iommu_group": "/sys/kernel/iommu_groups/77",
        "sys/kernel/iommu_groups/77/type": "DMA-FQ",
    }
    assert grave(judge(machine.node()), Status.WARN, Status.FAIL) == set()
    machine.files[f"{place}/driver"] = "/sys/bus/pci/drivers/nvidia"
    assert "host.iommu" in grave(judge(machine.node()), Status.WARN)


@pytest.mark.parametrize("kind", ["bare infiniband", "azure nd"])
def test_networks_beside_the_lane_s_ports_are_not_warned_of(kind: str) -> None:
    """Unless the lane's own are too few, when they may be what is left of them."""
    machine = MACHINES[kind](random.Random(1))
    said = grave(judge(machine.node()), Status.WARN, Status.FAIL)
    assert not said & {"nic.rate", "nic.gid"}
    machine.needs = replace(machine.needs, rdma_ports=32)
    assert "nic.rate" in grave(judge(machine.node()), Status.WARN)


@pytest.mark.parametrize("seed", range(60))
def test_what_is_not_shown_convicts_nobody(seed: int) -> None:
    """Whatever files and readings of a healthy machine are missing."""
    machine, chance = make(seed), random.Random(seed)
    for path in list(machine.files):
        # That a device has no file is a finding; that none is shown is not.
        if chance.random() < 0.3 and not re.search("uverbs|gid", path):
            del machine.files[path]
    for gpu in machine.gpus:
        for name in list(gpu):
            if name not in ("index", "throttle", "link_errors") and chance.random() < 0.3:
                gpu[name] = None
    if chance.random() < 0.3:
        machine.driver = {}
    assert grave(judge(machine.node()), Status.FAIL) == set()


def test_an_xid_is_told_where_nvml_does_not_start() -> None:
    """But for a container, whose job may have no use for a GPU."""
    for kind, wanted in (("hgx-ib", {"gpu.xid"}), ("container-v2", set())):
        machine = make(KINDS.index(kind))
        pci = machine.gpus[0]["pci"].removesuffix(".0")
        machine.log = [(60.0, f"NVRM: Xid (PCI:{pci}): 79, pid=1, GPU has fallen off the bus.")]
        machine.gpus, machine.driver = [], {"problem": "GPU is lost", "error": None}
        assert grave(judge(machine.node()), Status.FAIL) == wanted


JUNK = ("", "\0", "-1", "garbage", "9" * 30, "é", "0x", "1e9", "max", "0", "a b\nc", "unlimited")


@pytest.mark.parametrize("seed", range(60))
def test_junk_in_files_is_no_error(seed: int) -> None:
    machine, chance = make(seed), random.Random(seed)
    for path in list(machine.files):
        if chance.random() < 0.2 and not re.search(r"ibdev|pids\.max", path):
            machine.files[path] = chance.choice(JUNK)
    assert grave(judge(machine.node()), Status.FAIL) == set()
