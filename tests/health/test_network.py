"""The network is the one that NCCL's own lines name, of whichever release."""

from __future__ import annotations

import pytest

from ncclops.health.network import KINDS, NetworkReading, NetworkSeen, meets, shown_by

HEAD = "gpu17:4711:4890 [3] NCCL INFO "


def last(*texts: str) -> NetworkSeen | None:
    """What the last of these lines completes; the others complete nothing."""
    reading = NetworkReading()
    found = [reading.feed(HEAD + text) for text in texts]
    assert not any(found[:-1])
    return found[-1]


def seen(*texts: str) -> NetworkSeen:
    found = last(*texts)
    assert found is not None
    return found


IB = "NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_1:1/IB/SHARP [RO]; OOB eth0:10.0.0.7<0>"
ROCE = "NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_2:1/RoCE [RO]; OOB eth0:10.0.0.7<0>"
SOCKET = "NET/Socket : Using [0]eth0:10.0.0.7<0> [1]eth1:10.1.0.7<0>"


@pytest.mark.parametrize(
    ("lines", "name", "kinds", "devices"),
    [
        ((IB, "Using network IB"), "IB", ("ib",), ("mlx5_0:1/IB/SHARP", "mlx5_1:1/IB/SHARP")),
        ((ROCE, "Using network IB"), "IB", ("roce",), ("mlx5_0:1/RoCE", "mlx5_2:1/RoCE")),
        ((IB, "Using network IBext_v8"), "IBext_v8", ("ib", "plugin"), None),
        (("Using network AWS Libfabric",), "AWS Libfabric", ("plugin",), ()),
        (("Using network gIB",), "gIB", ("plugin",), ()),
        ((SOCKET, "Using network Socket"), "Socket", ("socket",),
         ("eth0:10.0.0.7<0>", "eth1:10.1.0.7<0>")),
        ((IB, "Assigned NET plugin IB to comm"), "IB", ("ib",), None),
        # A transport that found devices and was not chosen.
        ((IB, SOCKET, "Using network Socket"), "Socket", ("socket",), None),
    ],
)  # fmt: skip
def test_the_network_and_its_devices(
    lines: tuple[str, ...], name: str, kinds: tuple[str, ...], devices: tuple[str, ...] | None
) -> None:
    found = seen(*lines)
    assert (found.name, found.kinds) == (name, kinds)
    assert devices is None or found.devices == devices
    assert found.reasons == ()


@pytest.mark.parametrize(
    "reason",
    [
        "NET/IB : No device found.",
        "NCCL_IB_DISABLE set by environment to 1.",
        "NCCL_NET set by environment to Socket.",
        "NET/Plugin: Could not find: libnccl-net.so.",
        "NET/Plugin : dlerror=libfabric.so.1: version `FABRIC_1.7' not found",
        "Failed to open libibverbs.so[.1]",
        "NCCL_NET_PLUGIN set by environment to none.",
    ],
)
def test_the_reason_is_quoted_where_sockets_are_used(reason: str) -> None:
    assert seen(reason, reason, SOCKET, "Using network Socket").reasons == (reason,)
    assert seen(reason, IB, "Using network IB").reasons == ()


@pytest.mark.parametrize(
    "text", ["NCCL_IB_DISABLE set by environment to 0.", "NCCL_NET set by environment to IB."]
)
def test_a_setting_for_the_network_is_no_reason_against_it(text: str) -> None:
    assert seen(text, SOCKET, "Using network Socket").reasons == ()


@pytest.mark.parametrize("form", ["Bootstrap : Using {}", "Bootstrap: Using {}"])
def test_the_interface_of_the_bootstrap(form: str) -> None:
    found = seen(form.format("bond0:10.0.0.7<0>"), "Using network Socket")
    assert found.interface == "bond0"


def test_each_further_communicator_with_the_same_network_says_nothing() -> None:
    reading = NetworkReading()
    assert reading.feed(HEAD + "Using network IB") is not None
    assert reading.feed(HEAD + "Assigned NET plugin IB to comm") is None
    assert reading.feed(HEAD + "Using network IB") is None
    other = reading.feed(HEAD + "Using network Socket")
    assert other is not None


@pytest.mark.parametrize(
    "line",
    [
        "Using network Socket",  # not NCCL's
        HEAD + "Using non-device net plugin version 0",
        HEAD + "Channel 00/0 : 8[0] -> 0[0] [receive] via NET/Socket/0",
        "",
    ],
)
def test_other_lines_say_nothing(line: str) -> None:
    assert NetworkReading().feed(line) is None


def test_what_is_wanted_is_a_kind_or_a_name() -> None:
    plain, efa = seen(ROCE, "Using network IB"), seen("Using network AWS Libfabric")
    assert meets(plain, ["roce"])
    assert meets(plain, ["ib", "roce"])
    assert not meets(plain, ["ib2", "socket", "plugin"])
    assert meets(efa, ["aws libfabric"])
    assert meets(efa, ["plugin"])
    assert not meets(efa, ["ib"])
    assert set(plain.kinds) <= set(KINDS)


def test_only_where_nothing_else_is_open_are_sockets_left() -> None:
    sockets = shown_by([], [])
    assert sockets is not None
    assert meets(sockets, ["socket"])
    assert not meets(sockets, ["ib", "roce", "plugin"])
    assert shown_by(["uverbs0"], []) is None
    assert shown_by([], ["libnccl-net.so"]) is None


def test_what_is_kept_of_a_rank_has_an_end() -> None:
    """A script may print lines like NCCL's without end."""
    reading = NetworkReading()
    for number in range(20_000):
        reading.feed(f"{HEAD}NET/IB : No device found. {number}")
        reading.feed(f"{HEAD}NET/A{number} : Using [0]eth0:10.0.0.7<0>")
    found = reading.feed(f"{HEAD}Using network Socket")
    assert found is not None
    assert len(found.reasons) == 20


def test_changes_without_end_say_nothing_more() -> None:
    """Each is an event of the run."""
    reading = NetworkReading()
    told = [
        reading.feed(f"{HEAD}Using network {name}")
        for _ in range(1000)
        for name in ("IB", "Socket")
    ]
    assert sum(each is not None for each in told) == 20
