"""Names are read out of libraries by the zero byte behind them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ncclops.env.audit import audit, audit_nccl, audit_torch, constants, find_libnccl
from ncclops.env.catalogue import LIBNCCL, catalogue
from ncclops.errors import UsageError


def library(path: Path, *names: bytes, version: bytes = b"2.32.3") -> Path:
    """A file with strings as a linker leaves them: the zero byte is behind, not before."""
    text = b"\x7fELF\x02NCCL version " + version + b"+cuda13.4\0"
    path.write_bytes(text + b"".join(name + b"\0" for name in names) + b"end\0")
    return path


EVERY = [
    name.encode()
    for name, variable in catalogue().items()
    if variable.component in LIBNCCL and variable.libnccl and variable.libnccl[1] == "2.32.3"
]


def test_a_library_that_reads_the_whole_catalogue(tmp_path: Path) -> None:
    found = audit_nccl(library(tmp_path / "libnccl.so.2", *EVERY))
    assert found.version == "2.32.3"
    assert found.unknown == found.claimed == frozenset()
    assert "NCCL_NVLS_ENABLE" in found.read


def test_names_that_the_catalogue_lacks_and_claims(tmp_path: Path) -> None:
    rest = [name for name in EVERY if name != b"NCCL_NVLS_ENABLE"]
    found = audit_nccl(library(tmp_path / "l", b"NCCL_BRAND_NEW", b"NCCL_LOG_WARN", *rest))
    assert found.unknown == {"NCCL_BRAND_NEW"}
    assert found.claimed == {"NCCL_NVLS_ENABLE"}


def test_an_older_library_is_held_to_its_own_time(tmp_path: Path) -> None:
    """NCCL_CHECK_MODE came in 2.29: 2.21.5 is not expected to read it."""
    assert catalogue()["NCCL_CHECK_MODE"].libnccl == ("2.29.7", "2.32.3")
    found = audit_nccl(library(tmp_path / "l", b"NCCL_DEBUG", version=b"2.21.5"))
    assert "NCCL_CHECK_MODE" not in found.claimed
    assert "NCCL_NVLS_ENABLE" in found.claimed


def test_a_name_in_a_message_or_inside_another_name_does_not_count(tmp_path: Path) -> None:
    found = audit_nccl(
        library(tmp_path / "l", b"NCCL_P2P_LEVEL set by environment", b"TORCH_NCCL_BLOCKING_WAIT")
    )
    assert not {"NCCL_P2P_LEVEL", "NCCL_BLOCKING_WAIT"} & (found.read | found.unknown)


def test_a_file_that_is_no_libnccl_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    with pytest.raises(UsageError, match="is no libnccl"):
        audit_nccl(tmp_path / "train.py")


@pytest.mark.slow  # reads hundreds of megabytes of libraries
def test_what_is_set_and_read_by_nothing(tmp_path: Path) -> None:
    environ = {
        "NCCL_DEBUG": "WARN",
        "NCCL_TIMEOUT": "1800",
        "NCCL_IB_TIMOUT": "22",
        "NCCL_ROOT": "/opt/nccl",
        "TORCH_DISTRIBUTED_DEBUG": "OFF",
        "HOME": "/root",
    }
    result = audit(environ, nccl=library(tmp_path / "l", b"NCCL_DEBUG"))
    assert result.set_but_unread == ("NCCL_IB_TIMOUT", "NCCL_TIMEOUT")


@pytest.mark.parametrize("make", ["missing", "empty", "directory"])
def test_a_file_that_cannot_be_looked_into(tmp_path: Path, make: str) -> None:
    path = tmp_path / "libnccl.so"
    if make == "empty":
        path.touch()
    if make == "directory":
        path.mkdir()
    with pytest.raises(UsageError, match=r"libnccl\.so: cannot be read"):
        audit_nccl(path)


@pytest.mark.slow  # reads hundreds of megabytes of libraries
def test_the_installed_torch_reads_what_the_catalogue_says() -> None:
    found = audit_torch()
    assert found is not None
    assert found.version
    expected = {"TORCH_DISTRIBUTED_DEBUG", "GLOO_SOCKET_IFNAME", "TORCH_CPP_LOG_LEVEL"}
    assert expected <= found.read | {"TORCH_CPP_LOG_LEVEL"}
    unread = {name for name, v in catalogue().items() if v.status == "unread"}
    assert not unread & found.read
    assert found.unknown == frozenset()


def test_the_newest_libnccl_and_the_catalogue_agree() -> None:
    """The acceptance check of the catalogue, where a libnccl is at hand."""
    path = find_libnccl() or os.environ.get("NCCLOPS_TEST_LIBNCCL")
    if path is None:
        pytest.skip("no libnccl here (pip install nvidia-nccl-cu13, or NCCLOPS_TEST_LIBNCCL)")
    found = audit_nccl(Path(path))
    assert found.unknown == frozenset()
    assert found.claimed == frozenset()
    assert len(found.read) > 100
    assert constants()


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "libnccl.so.2"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="it is no regular file"):
        audit_nccl(pipe)
