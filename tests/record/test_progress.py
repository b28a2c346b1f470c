"""A rank's page of progress, whatever is written over it: agents and `status` read it."""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncclops.record import progress, shared_page
from ncclops.record.paths import RunPaths
from ncclops.record.progress import ProgressPage, Warmup
from ncclops.record.stop_point import Clock, StopPage

_EDGES = st.sampled_from([2**63 - 1, -(2**63), 1 << 62, -1, 0, 121])
_NUMBERS = st.one_of(_EDGES, st.integers(-(2**63), 2**63 - 1))
_POSITIONS = st.integers(progress.PID, progress.LEFT_NS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("run")
    yield directory
    shared_page.settle(RunPaths(directory).rank(0).progress)
    shared_page.settle(RunPaths(directory).stop_page)


def test_a_page_is_a_file_of_the_run_where_shared_memory_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the removal of a file that does not exist fails as well: no page was made at all."""
    read_only = tmp_path / "shm"

    def refuse(path: Path, *_: object, **__: object) -> None:
        if path.parent == read_only:
            raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(shared_page, "_SHARED_MEMORY", read_only)
    monkeypatch.setattr(Path, "unlink", refuse)
    path = RunPaths(tmp_path).stop_page
    StopPage.create(tmp_path).propose(7)
    assert path.is_file()
    assert not path.is_symlink()
    agreed = StopPage.attach(tmp_path)
    assert agreed is not None
    assert agreed.requested()


@settings(max_examples=50)
@given(st.dictionaries(_POSITIONS, _NUMBERS, max_size=21), st.binary(max_size=128))
def test_what_is_written_over_a_page_is_read_and_a_stop_is_agreed_upon(
    run: Path, numbers: dict[int, int], name: bytes
) -> None:
    path = RunPaths(run).rank(0).progress
    page = ProgressPage.create(path)
    for position, number in numbers.items():
        page.numbers[position] = number
    page.set_phase(name.decode(errors="surrogateescape"), 1, 1)
    seen = progress.read(path)
    assert seen is not None
    assert seen.warmup in Warmup
    for clock in Clock:
        stop = StopPage.create(run).by(clock)
        assert stop.ends_here(stop.agree([path]))


def test_a_phase_that_nobody_has_written_is_none(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    page = ProgressPage.create(path)
    page.numbers[progress.STEP] = 5
    page.numbers[progress.WARMUP] = Warmup.OVER
    shared_page.settle(path)
    content = bytearray(path.read_bytes())
    struct.pack_into("q", content, 8 * progress.WARMUP, 121)
    path.write_bytes(content)
    seen = progress.read(path)
    assert seen is not None
    assert (seen.step, seen.warmup) == (4, Warmup.NOT_BEGUN)
