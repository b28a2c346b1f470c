"""What a process has open and loaded of networks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclops.worker.network_open import look

MAPS = """\
7f0000000000-7f0000001000 r-xp 00000000 08:01 11 /usr/lib/libibverbs.so.1
7f0000002000-7f0000003000 r-xp 00000000 08:01 12 /opt/plugins/libnccl-net-ofi.so
7f0000004000-7f0000005000 rw-p 00000000 00:00 0 [heap]
"""


def process(tmp_path: Path, *targets: str, maps: str = "") -> Path:
    (tmp_path / "fd").mkdir()
    for number, target in enumerate(targets):
        (tmp_path / "fd" / str(number)).symlink_to(target)
    (tmp_path / "maps").write_text(maps)
    return tmp_path


def test_devices_and_plugins_are_found_among_all_that_is_open(tmp_path: Path) -> None:
    targets = ("socket:[17]", "/dev/infiniband/uverbs1", "/dev/infiniband/rdma_cm", "/dev/nvidia0")
    found = look(process(tmp_path, *targets, "/dev/infiniband/uverbs1", maps=MAPS), {})
    assert found.rdma_devices == ["uverbs1"]
    assert found.plugins == ["libnccl-net-ofi.so"]


@pytest.mark.parametrize(("named", "plugins"), [("none", []), ("", []), ("tcpx", ["tcpx"])])
def test_a_plugin_that_is_named_may_be_loaded_under_another_name(
    tmp_path: Path, named: str, plugins: list[str]
) -> None:
    assert look(process(tmp_path), {"NCCL_NET_PLUGIN": named}).plugins == plugins


def test_what_the_kernel_does_not_show_is_not_taken_for_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        look(tmp_path)


def test_this_process_has_neither() -> None:
    found = look(environ={})
    assert (found.rdma_devices, found.plugins) == ([], [])
