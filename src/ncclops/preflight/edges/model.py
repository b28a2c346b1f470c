"""What hosts tell each other, and what is concluded: values, each of them JSON both ways."""

from __future__ import annotations

import ipaddress
from typing import Literal

import msgspec

from ncclops import host_name
from ncclops.preflight.model import Finding, Traits

# How one connection failed. What the kernel said, or what was missing:
#   timeout      nothing came back: packets are dropped
#   refused      a reset instead of a connection: nobody listens, or a firewall rejects
#   unreachable  no route, no answer on the link, or a router says so
#   forbidden    this host's own firewall or routes refuse to send
#   reset        connected, then cut before the answer
#   silent       connected, and no answer
#   foreign      something answered that is no host of this meeting
#   other        another host of this meeting answered
#   large-out    small messages pass, data towards the other host does not arrive
#   large-in     small messages pass, data from the other host does not arrive
#   own          this host lacked what a connection needs (descriptors, ports): no word on others
How = Literal[
    "timeout",
    "refused",
    "unreachable",
    "forbidden",
    "reset",
    "silent",
    "foreign",
    "other",
    "large-out",
    "large-in",
    "own",
]
# What is wrong with an edge, or with all edges of a cause.
Symptom = Literal["dead", "ports", "large", "loss", "bandwidth", "slow", "flaky", "collective"]
# Which edges a cause is about. ``in`` and ``out``: connections that the host accepts, opens.
Shape = Literal["everything", "host", "host-in", "host-out", "group", "pair", "edge", "several"]
Severity = Literal["FAIL", "WARN", "CANNOT-TELL"]


# Descriptors that the listener and the probes of one host take at most, with what Python has open.
FILES = 256


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """One address of a host. ``family`` is 4 or 6, ``prefix`` the length of the network's part."""

    interface: str
    address: str
    prefix: int
    family: int
    running: bool = True

    def __post_init__(self) -> None:
        ipaddress.ip_interface(f"{self.address}/{self.prefix}")  # other hosts say it: ValueError


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where NCCL would listen. ``mtu`` in bytes, 0 if unknown; ``mac`` of the interface."""

    interface: str
    address: str
    prefix: int
    family: int
    mtu: int = 0
    mac: str = ""

    def __post_init__(self) -> None:
        ipaddress.ip_interface(f"{self.address}/{self.prefix}")


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a host offers for a collective with another: ``ranks`` processes over ``backend``, each
    with a GPU of ``model`` where that is NCCL. ``least_gbps``: with less bus bandwidth, in GB/s, it
    is worth a warning; 0: nothing says how much there should be.
    """

    backend: Literal["nccl", "gloo"]
    ranks: int
    model: str = ""
    least_gbps: float = 0.0


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a host says of itself.

    ``uid`` is random, and what its listener answers with. ``ports`` are those it listens on, by
    slot; slot 0 is the store's port (0: not listening), the others are spread over ``port_range``.
    ``own_name`` is what its name stands for there. ``macs`` are those of all
    its interfaces: any of them may answer for any of its addresses. ``conflict`` is the hardware
    address of another machine that claims ``place``'s address. ``gloo``: a variable
    names Gloo's interface. ``findings`` are those of
    its own checks that are not well. ``named_port``: MASTER_PORT names slot 0's port. ``files``:
    how many descriptors a process of it may have (0: not known). ``offer`` is for a collective with
    another host; None where it takes part in none. ``traits`` are compared with those of others.
    """

    name: str
    uid: str
    rank: int | None = None
    boot_id: str = ""
    place: Place | None = None
    rule: str = ""
    addresses: tuple[Address, ...] = ()
    ports: tuple[int, ...] = ()
    port_range: tuple[int, int] = (0, 0)
    own_name: tuple[str, ...] = ()
    macs: tuple[str, ...] = ()
    conflict: str = ""
    gloo: bool = False
    named_port: bool = False
    files: int = 0
    nccl: dict[str, str] = {}
    findings: tuple[Finding, ...] = ()
    offer: Offer | None = None
    traits: Traits | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "name", host_name.clean(self.name))

    @property
    def too_few_files(self) -> bool:
        """Whether the host cannot take part in connecting, for lack of descriptors."""
        return 0 < self.files < FILES


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All hosts that came, in the order in which everybody counts them."""

    hosts: tuple[Facts, ...]

    def numbers(self) -> dict[str, int]:
        """How everybody counts the hosts, by their ``uid``."""
        return {each.uid: number for number, each in enumerate(self.hosts)}

    def may_say(self, number: int, said: Outcome) -> bool:
        """Whether host ``number`` can have ``said`` that: of itself, hosts and ports there are."""

        def is_other(host: int) -> bool:
            return 0 <= host < len(self.hosts) and host != number

        def is_slot(host: int, slot: int) -> bool:
            return 0 <= slot < len(self.hosts[host].ports)

        return (
            said.src == number
            and all(map(is_other, (*said.skipped, *said.names, *(each.dst for each in said.seen))))
            and all(
                is_slot(each.dst, slot)
                for each in said.seen
                for slot in (*each.failed, *each.passed, *each.sources)
            )
            and all(each.other < len(self.hosts) for each in said.seen)
        )


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What a host saw of its edge to ``dst``. Hosts report these where something is not as it
    should be, and no others.

    ``failed`` and ``passed`` are slots, the failed ones with how; ``sources`` are the local ports
    of both, by slot, where one timed out. ``passed_mtu``:
    the largest packet, in bytes, that arrived (0: not looked at) and ``beyond_mtu`` the next size
    that did not. ``rtt_ms`` is the smallest round trip, -1 if there was none; ``out_s``
    and ``in_s`` how long the data took each way, -1 if it did not arrive. ``source`` is the
    address from which it connected, ``mac`` what the link gave for ``dst``, ``other`` which
    host answered instead, ``says`` the kernel's words. ``lost``: how many connections, of all
    slots, failed and passed when they were repeated, from and to the same ports (``repeated``: all
    of them were); with ``stalled``, data did not arrive though packets of each size do.
    ``sent``: packets of the connections that passed, ``resent``: how many of these were lost,
    ``opening``: of those, to open them.
    ``by_source``: most of what fails does so from one local port, again and again, and passes from
    another. ``unanswered``: the failed slots whose requests arrived there, as the kernel there has
    said: it is the process that has not answered.
    """

    dst: int
    failed: dict[int, How] = {}
    passed: tuple[int, ...] = ()
    sources: dict[int, int] = {}
    rtt_ms: float = -1.0
    out_s: float = -1.0
    in_s: float = -1.0
    passed_mtu: int = 0
    beyond_mtu: int = 0
    source: str = ""
    mac: str = ""
    other: int = -1
    says: str = ""
    lost: int = 0
    repeated: bool = False
    stalled: bool = False
    by_source: bool = False
    sent: int = 0
    resent: int = 0
    opening: int = 0
    unanswered: tuple[int, ...] = ()


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What host ``src`` reports of a round.

    ``skipped``: not tried, for lack of time. ``rtt_ms`` is the lower quartile of its round trips,
    ``data_s`` that of the times that the data took, the longer way, ``rate`` its connections per
    second. ``names`` are the hosts whose names stand for other addresses
    here: which. ``macs_agree``: how many hosts' hardware addresses here are those that
    they told.
    """

    src: int
    seen: tuple[Seen, ...] = ()
    skipped: tuple[int, ...] = ()
    rtt_ms: float = -1.0
    data_s: float = -1.0
    rate: float = 0.0
    names: dict[int, tuple[str, ...]] = {}
    macs_agree: int = 0


class Again(msgspec.Struct, frozen=True, kw_only=True):
    """The second round: which host tries which again."""

    edges: dict[int, tuple[int, ...]] = {}


class PairTried(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a collective of hosts ``a`` and ``b``: whether it ended well; None where that
    cannot be told. ``gbps`` is its bus bandwidth in GB/s, 0 where it has none; ``says`` what was
    wrong.
    """

    a: int
    b: int
    well: bool | None = None
    gbps: float = 0.0
    says: str = ""


class PairsTried(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one round of collectives."""

    tried: tuple[PairTried, ...] = ()


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One cause, and the edges that it explains.

    ``kind`` names it (``docs/preflight.md`` has the list). From hosts ``a`` to hosts ``b``; for
    ``host`` shapes ``a`` is the host. ``ports``: sentences use ``blocked`` (lowest and highest
    port that failed) and ``open``. ``hosts`` are those that a scheduler should leave out: only
    hosts that are convicted themselves. ``facts`` are figures and words for the sentence.
    """

    kind: str
    severity: Severity
    shape: Shape
    symptom: Symptom
    a: tuple[int, ...]
    b: tuple[int, ...] = ()
    edges: int = 0
    how: str = ""
    both_ways: bool = False
    blocked: tuple[int, ...] = ()
    open: tuple[int, ...] = ()
    hosts: tuple[int, ...] = ()
    facts: dict[str, str] = {}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What all hosts print. ``missing`` are hosts that did not come, by name or place, ``pairs``
    the collectives of two hosts that were tried, in their order."""

    hosts: tuple[Facts, ...]
    causes: tuple[Cause, ...] = ()
    missing: tuple[str, ...] = ()
    expected: int = 0
    edges: int = 0
    failed_edges: int = 0
    unknown_edges: int = 0
    rtt_ms: float = -1.0
    seconds: float = 0.0
    matrix: tuple[str, ...] = ()
    pairs: tuple[PairTried, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether something is wrong that would end a job."""
        return any(each.severity == "FAIL" for each in self.causes)

    @property
    def excluded(self) -> list[str]:
        """The names of the hosts to leave out: those that are convicted themselves."""
        numbers = {each for cause in self.causes for each in cause.hosts}
        return [self.hosts[each].name for each in sorted(numbers)]
