"""Versions are those of what a worker would load, and unknown where that cannot be told."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclops.host import software
from ncclops.host.gpus import Gpus
from ncclops.host.software import find_plugin, find_software, link_layers, nccl_of


def library(directory: Path, name: str, content: bytes = b"") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_bytes(content)
    return path


def with_wheel(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    monkeypatch.setattr(software, "installed_nccl", lambda: version)
    monkeypatch.setattr(software, "nccl_version", lambda: version)


def test_the_wheels_nccl_counts_where_nothing_else_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_wheel(monkeypatch, "2.27.5")
    assert nccl_of({}) == ("2.27.5", "wheel")
    assert nccl_of({"LD_LIBRARY_PATH": str(tmp_path)}) == ("2.27.5", "wheel")
    with_wheel(monkeypatch, None)
    assert nccl_of({}) == (None, None)


def test_another_nccl_on_the_path_makes_it_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_wheel(monkeypatch, "2.27.5")
    real = library(tmp_path, "libnccl.so.2.28.9")
    (tmp_path / "libnccl.so.2").symlink_to(real.name)
    path = {"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}
    assert nccl_of(path) == (None, None)  # torch's library decides which of the two is taken
    assert nccl_of({"LD_PRELOAD": str(tmp_path / "libnccl.so.2")}) == ("2.28.9", "other")
    with_wheel(monkeypatch, "2.28.9")
    assert nccl_of(path) == ("2.28.9", "wheel")
    with_wheel(monkeypatch, None)
    assert nccl_of(path) == ("2.28.9", "other")


def test_a_preloaded_library_without_a_version_is_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_wheel(monkeypatch, "2.27.5")
    preloaded = library(tmp_path, "libnccl.so")
    assert nccl_of({"LD_PRELOAD": f"/x/libjemalloc.so {preloaded}"}) == (None, None)


OFI = b"\x00NET/OFI Initializing aws-ofi-nccl 1.16.2\x00"


def test_the_plugin_is_the_one_that_nccl_would_load(tmp_path: Path) -> None:
    lib = tmp_path / "opt" / "lib"
    library(lib, "libnccl-net-ofi.so", OFI)
    environ = {"LD_LIBRARY_PATH": str(lib)}
    assert find_plugin(environ, tmp_path) is None  # its name is not the default one
    found = find_plugin(environ | {"NCCL_NET_PLUGIN": "ofi"}, tmp_path)
    assert found is not None
    assert (found.name, found.version) == ("aws-ofi-nccl", "1.16.2")
    library(lib, "libnccl-net.so", OFI.replace(b"1.16.2", b"git-abc"))
    found = find_plugin(environ, tmp_path)
    assert found is not None
    assert (found.name, found.version) == ("aws-ofi-nccl", None)
    assert find_plugin(environ | {"NCCL_NET_PLUGIN": "none"}, tmp_path) is None


def test_a_plugin_is_found_through_the_loaders_settings(tmp_path: Path) -> None:
    library(tmp_path / "opt/gib/lib64", "libnccl-net.so", b"\x7fELF")
    settings = tmp_path / "etc/ld.so.conf.d"
    settings.mkdir(parents=True)
    (settings / "gib.conf").write_text("# plugins\n/opt/gib/lib64\n")
    found = find_plugin({}, tmp_path)
    assert found is not None
    assert (found.name, found.version) == ("gib", None)


def test_a_library_of_an_unknown_make_has_its_files_name(tmp_path: Path) -> None:
    library(tmp_path / "usr/lib64", "libnccl-net.so", b"\x7fELF")
    found = find_plugin({}, tmp_path)
    assert found is not None
    assert found.name == "libnccl-net.so"


def test_link_layers_are_the_kernels(tmp_path: Path) -> None:
    assert link_layers(tmp_path) == ()
    for device, layer in (("mlx5_0", "InfiniBand"), ("mlx5_1", "Ethernet"), ("mlx5_2", "Ethernet")):
        port = tmp_path / f"sys/class/infiniband/{device}/ports/1"
        port.mkdir(parents=True)
        (port / "link_layer").write_text(f"{layer}\n")
    assert link_layers(tmp_path) == ("Ethernet", "InfiniBand")


def test_a_node_without_a_fabric_manager_is_known_to_have_none(tmp_path: Path) -> None:
    found = find_software(Gpus(("NVIDIA H200",), "580.95.05"), {}, tmp_path)
    assert (found.fabric_manager, found.fabric_manager_known) == (None, True)
    assert (found.driver, found.gpus) == ("580.95.05", ("NVIDIA H200",))


@pytest.mark.slow
def test_the_fabric_manager_says_its_version(tmp_path: Path) -> None:
    program = library(tmp_path / "usr/bin", "nv-fabricmanager")
    program.write_text("#!/bin/sh\necho 'Fabric Manager version is : 550.54.15'\n")
    program.chmod(0o755)
    found = find_software(Gpus(), {}, tmp_path)
    assert (found.fabric_manager, found.fabric_manager_known) == ("550.54.15", True)
    program.write_text("#!/bin/sh\nexit 1\n")
    found = find_software(Gpus(), {}, tmp_path)
    assert (found.fabric_manager, found.fabric_manager_known) == (None, False)
