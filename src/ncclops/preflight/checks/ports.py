"""RDMA ports of a node by what the kernel shows of them: which the job uses, and which are meant to
work. Pure.

A port that is down may be meant to be: the second port of a card, a network for storage. So ports
of one kind are looked at together (one board, one link layer), and what the job names counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ncclops.preflight.readings import Files, Nic, Node
from ncclops.whole_numbers import whole_number

_IFF_UP = 1  # linux/if.h
# Addresses that an interface gives to itself, of IPv6 and (RFC 3927) of IPv4: DHCP has failed.
_LINK_LOCAL_GIDS = ("fe80:", "0000:0000:0000:0000:0000:ffff:a9fe:")
_UNREAD = "?"
EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


def function_of(nic: Nic) -> str:
    """The PCI function that a device is of; empty where that is not to be seen."""
    return (nic.files.text(f"sys/class/infiniband/{nic.device}/device") or "").rpartition("/")[2]


@dataclass(frozen=True)
class Port:
    """One port. ``top`` is its directory, ``layer`` InfiniBand, Ethernet or Unknown (EFA)."""

    nic: Nic
    number: str

    @property
    def top(self) -> str:
        return f"sys/class/infiniband/{self.nic.device}/ports/{self.number}"

    @property
    def name(self) -> str:
        return f"{self.nic.device} port {self.number}"

    def text(self, name: str) -> str | None:
        """A file of the port."""
        return self.nic.files.text(f"{self.top}/{name}")

    @property
    def state(self) -> str | None:
        """As the kernel writes it; None where it cannot be read, or is nothing that it writes."""
        text = self.text("state") or ""
        return text if re.fullmatch(r"\d: [A-Z_]+", text) else None

    @property
    def is_active(self) -> bool:
        return "ACTIVE" in (self.state or "")

    @property
    def layer(self) -> str:
        return self.text("link_layer") or ""

    @property
    def is_ethernet(self) -> bool:
        return self.layer == "Ethernet"

    @property
    def kind(self) -> tuple[str, ...]:
        """What ports have in common that should be alike: board, link layer, function."""
        board = self.device("board_id") or self.device("hca_type") or ""
        return (board, self.layer, self.driver, "virtual" if self.is_virtual else "")

    @property
    def is_virtual(self) -> bool:
        """Whether it is a virtual function beside its card: for a machine or pod to be given."""
        return f"sys/class/infiniband/{self.nic.device}/device/physfn" in self.nic.files

    @property
    def driver(self) -> str:
        """The name of the kernel's driver, empty where it is not to be seen."""
        return (self.device("device/driver") or "").rpartition("/")[2]

    @property
    def is_of_switch(self) -> bool:
        """Whether it leads to an NVSwitch, for its subnet manager: Blackwell boards have four.

        NVIDIA Fabric Manager User Guide: the vital product data, which root may read, say SW_MNG.
        """
        return "SW_MNG" in (self.device("device/vpd") or "")

    @property
    def is_efa(self) -> bool:
        return self.driver == "efa" or self.layer in ("Unknown", "Unspecified")

    @property
    def rate_gbps(self) -> float | None:
        match = re.match(r"(\d{1,5}(?:\.\d+)?) Gb/sec", self.text("rate") or "")
        return float(match[1]) if match and float(match[1]) else None

    def device(self, name: str) -> str | None:
        """A file of its device."""
        return self.nic.files.text(f"sys/class/infiniband/{self.nic.device}/{name}")

    def interfaces(self) -> list[str]:
        """The directories of its network interfaces. With several ports it is not known which."""
        top = f"sys/class/infiniband/{self.nic.device}/device/net"
        return [f"{top}/{name}" for name in self.nic.files.names(top)]

    def of_interface(self, name: str) -> str | None:
        """A file of its interface, if it has one."""
        found = self.interfaces()
        return self.nic.files.text(f"{found[0]}/{name}") if len(found) == 1 else None

    @property
    def is_unmanaged(self) -> bool:
        """Whether the link is there, and no subnet manager has made the port active."""
        return any(word in (self.state or "") for word in ("INIT", "ARMED"))

    @property
    def has_lost_carrier(self) -> bool:
        """Whether its interface is switched on and has no link: RoCE says Disabled then, too."""
        found = self.interfaces()
        flags = self.nic.files.number(f"{found[0]}/flags") if len(found) == 1 else None
        is_on = bool((flags or 0) & _IFF_UP)
        return self.is_ethernet and is_on and self.of_interface("carrier") == "0"

    def addresses(self) -> set[str]:
        """Its GIDs of type RoCE v2 that somebody has given to its interface."""
        found = {
            self.text(f"gids/{number}") or EMPTY_GID
            for number in self.nic.files.names(f"{self.top}/gid_attrs/types")
            if "v2" in (self.text(f"gid_attrs/types/{number}") or "")
        }
        return {g for g in found if g != EMPTY_GID and not g.startswith(_LINK_LOCAL_GIDS)}

    @property
    def has_master(self) -> bool:
        """Whether its interface is part of a bond or bridge, whose address all parts have."""
        files = self.nic.files
        return any(files.names(f"{i}/master") or f"{i}/master" in files for i in self.interfaces())

    @property
    def has_address(self) -> bool:
        return bool(self.addresses())

    @property
    def function(self) -> str:
        """The PCI function that it is of; empty where that is not to be seen."""
        return function_of(self.nic)

    @property
    def taken_gids(self) -> list[str]:
        """The indices of its addresses that are none of zeros."""
        top = f"{self.top}/gids"
        found = {name: self.nic.files.text(f"{top}/{name}") for name in self.nic.files.names(top)}
        return [name for name, text in found.items() if text and text != EMPTY_GID]

    def counts(self, sample: Files) -> dict[str, int]:
        """Its counters in one of the looks at them, by name."""
        found = {}
        folders = [f"{self.top}/counters", f"{self.top}/hw_counters"]
        if self.is_efa:  # what its driver counts of its commands is the device's
            folders.append(f"sys/class/infiniband/{self.nic.device}/hw_counters")
        for folder in folders:
            for name in sample.names(folder):
                value = sample.number(f"{folder}/{name}")
                if value is not None:
                    found[name] = value
        return found

    def bond_members(self) -> dict[str, str]:
        """The interfaces below the bond of its interface, with what the bond says of them.

        ``?`` of one that cannot be read: it is there, and nothing is known of it.
        """
        members = dict[str, str]()
        for interface in self.interfaces()[:1]:
            for name in self.nic.files.names(f"{interface}/master"):
                place = f"{interface}/master/{name}/bonding_slave/mii_status"
                if name.startswith("lower_"):
                    members[name.removeprefix("lower_")] = self.nic.files.text(place) or _UNREAD
        return members

    def width(self, name: str) -> int | None:
        """Lanes of its PCIe link, ``name`` as the kernel has it; None where that is not known."""
        text = self.device(f"device/{name}") or ""
        # 0 and 255 are what functions without a link of their own report.
        return whole_number(text, 254) or None

    def lane_gtps(self, name: str = "current_link_speed") -> float:
        """How fast each lane of its PCIe link runs; 0 where it is not known."""
        match = re.match(r"(\d{1,3}(?:\.\d)?) GT/s", self.device(f"device/{name}") or "")
        return float(match[1]) if match else 0.0


def ports(node: Node) -> list[Port]:
    """All ports of all devices."""
    return [
        Port(nic, name)
        for nic in node.nics
        for name in nic.files.names(f"sys/class/infiniband/{nic.device}/ports")
    ]


def used(node: Node) -> list[Port]:
    """The ports that ``NCCL_IB_HCA`` leaves; all without it. Those of NVSwitches lead nowhere."""
    setting = node.environ.get("NCCL_IB_HCA", "")
    found = [p for p in ports(node) if selects(setting, p.nic.device, p.number)]
    return [p for p in found if not p.is_of_switch]


def selects(setting: str, device: str, port: str) -> bool:
    """Whether ``NCCL_IB_HCA`` leaves the port: names with ``^`` (all but these) and ``=`` (exact).

    As the NCCL User Guide has it: a name is a prefix unless ``=`` is given, ``:N`` names a port.
    """
    excludes, rest = setting.startswith("^"), setting.removeprefix("^")
    exact, rest = rest.startswith("="), rest.removeprefix("=")
    names = [part.strip() for part in rest.split(",") if part.strip()]
    if not names:
        return True

    def matches(entry: str) -> bool:
        name, _, wanted = entry.partition(":")
        is_name = device == name if exact else device.startswith(name)
        return is_name and (not wanted.isdecimal() or wanted == port)

    return any(map(matches, names)) != excludes


def is_aside(port: Port, node: Node) -> bool:
    """Whether a port is of another network than the job's: storage, or the front end.

    One of Ethernet beside InfiniBand, or of a kind that is slower than another, or of which no port
    is active while those of a kind with more ports are; not one that somebody has named.
    """
    if node.environ.get("NCCL_IB_HCA"):
        return False
    others = used(node)
    if port.is_ethernet and any(each.layer == "InfiniBand" for each in others):
        return True
    fastest: dict[tuple[str, ...], float] = {}
    for each in others:
        if each.is_active and each.rate_gbps:
            fastest[each.kind] = max(fastest.get(each.kind, 0.0), each.rate_gbps)
    if port.kind in fastest:
        return fastest[port.kind] < max(fastest.values())
    counts = Counter(each.kind for each in others)
    return any(counts[kind] > counts[port.kind] for kind in fastest)


def by_kind(found: Sequence[Port]) -> dict[tuple[str, ...], list[Port]]:
    kinds: dict[tuple[str, ...], list[Port]] = {}
    for each in found:
        kinds.setdefault(each.kind, []).append(each)
    return kinds


def is_meant_to_work(each: Port, alike: Sequence[Port], node: Node, share: float) -> bool:
    """Whether a port that is not active should be."""
    setting = node.environ.get("NCCL_IB_HCA", "")
    if setting and not setting.startswith("^"):
        return True  # somebody has named it
    if each.is_virtual:
        return False  # nobody may have been given it
    if each.is_unmanaged:
        return True
    phys = each.text("phys_state")
    if phys is None or not re.match(r"\d: \w", phys):
        return False
    if "Disabled" in phys and not each.has_lost_carrier and not each.is_efa:
        return False  # somebody may have switched it off
    latest = each.nic.samples[-1] if each.nic.samples else Files()
    if each.counts(latest).get("link_downed", 0) > 0:
        return True  # it has worked since the driver was loaded
    fabric = [other for other in used(node) if other.layer == "InfiniBand"]
    if node.needs.rdma and each in fabric and not any(other.is_active for other in fabric):
        return True  # the lane needs some, and Ethernet that is up beside them is none
    active = sum(other.is_active for other in alike)
    return active >= share * len(alike) and active > 1
