"""Gloo's connections are found among all others, and a rank blocked on them gets free."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ncclops.restart._groups.gloo_sockets import _pointer_registration
from ncclops.restart._process import duplicate_socket

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("how", "end"), [("collective", "raised"), ("rendezvous", "")])
def test_a_rank_blocked_in_gloo_gets_free_at_once(how: str, end: str) -> None:
    """Gloo's own timeout is longer than the test may take; the store goes on working."""
    script = str(Path(__file__).with_name("gloo_victim.py"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, how], capture_output=True, text=True, timeout=80
    )
    assert end in done.stdout, done.stderr
    assert "store works True" in done.stdout
    assert "listeners 1" in done.stdout


def test_no_rank_is_forgotten_by_gloo_when_its_group_is_aborted_in_full_flight() -> None:
    """Gloo never wakes a waiter whose send it could not write. Shutting connections down in both
    directions, or closing them while peers still write, did that to some rank in one of four.
    """
    script = str(Path(__file__).with_name("gloo_storm.py"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, "3", "60"],
        capture_output=True,
        text=True,
        timeout=80,
    )
    assert done.stdout.splitlines()[-1:] == ["rounds 60 forgotten 0"], done.stderr


def test_registrations_with_the_number_as_data_are_not_gloos() -> None:
    line = "tfd:       {fd} events:       19 data:     {data}  pos:0 ino:1 sdev:9"
    assert _pointer_registration(line.format(fd=24, data="5615ae9834e0")) == 24
    assert _pointer_registration(line.format(fd=24, data="18")) is None
    assert _pointer_registration(line.format(fd=24, data="7fff00000018")) is None
    assert _pointer_registration("pos:\t0") is None


def test_looking_at_a_descriptor_that_is_no_socket_leaves_nothing_open() -> None:
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208
    assert duplicate_socket(0) is None
    assert duplicate_socket(9999) is None
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET])
def test_a_handle_changes_nothing_of_the_socket_whatever_the_default_timeout_is(
    kind: socket.SocketKind,
) -> None:
    """All handles share whether it blocks: torch's store took its connections for broken."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with ours, theirs:
        socket.setdefaulttimeout(10)
        try:
            handle = duplicate_socket(ours.fileno())
        finally:
            socket.setdefaulttimeout(None)
        assert handle is not None
        with handle:
            assert (handle.family, handle.type) == (ours.family, ours.type)
            assert os.get_blocking(handle.fileno())
