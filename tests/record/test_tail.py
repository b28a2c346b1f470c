"""Lines of growing files: each once, whole, in order, however it was written."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncclops.record import tail
from ncclops.record.tail import GrowthWatch, LineReader, last_lines, read_lines


def read_all(reader: LineReader) -> list[bytes]:
    """Everything there is by now; empty pieces only mean "call again"."""
    lines: list[bytes] = []
    while batch := list(reader.read()):
        lines += [line for line in batch if line]
    return lines


@given(pieces=st.lists(st.binary(max_size=40), max_size=20), chunk=st.integers(1, 64))
@settings(max_examples=200)
def test_lines_come_out_as_they_were_written_whatever_the_cuts(
    pieces: list[bytes], chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("tail") / "log"
    path.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail, "_CHUNK", chunk)
        reader = LineReader(path)
        seen: list[bytes] = []
        with path.open("ab", buffering=0) as file:
            for piece in pieces:
                file.write(piece)
                seen += read_all(reader)
        rest = list(reader.rest())
        reader.close()
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in seen)
    assert b"".join(seen + rest) == b"".join(pieces)
    assert all(b"\n" not in piece for piece in rest)


def test_a_line_without_an_end_is_handed_on_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "_LONGEST_LINE", 1000)
    monkeypatch.setattr(tail, "_CHUNK", 100)
    path = tmp_path / "log"
    path.write_bytes(b"x" * 5000)
    reader = LineReader(path)
    pieces = read_all(reader)
    assert len(pieces) > 1
    assert b"".join([*pieces, *reader.rest()]) == b"x" * 5000
    reader.close()


@pytest.mark.parametrize("inotify", [True, False])
def test_the_watch_wakes_for_growth_and_for_a_caller(
    tmp_path: Path, inotify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no inotify instance is to be had, which is common in containers."""
    path = tmp_path / "log"
    path.touch()
    watch = GrowthWatch()
    if not inotify:
        watch._give_up_inotify()
    watch.add(path)
    woken = threading.Event()

    def wait() -> None:
        watch.wait()
        woken.set()

    for wake in (lambda: path.write_bytes(b"more\n"), watch.wake):
        woken.clear()
        thread = threading.Thread(target=wait)
        thread.start()
        wake()
        assert woken.wait(30)
        thread.join()
    watch.close()


def test_last_lines_survive_bad_bytes_and_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n\xff two\nthree")
    assert last_lines(path, 2) == ["\ufffd two", "three"]
    assert last_lines(tmp_path / "missing", 2) == []


def test_what_is_passed_over_ends_with_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a line\nan unfini")
    reader = LineReader(path)
    assert read_all(reader) == [b"a line\n"]
    with path.open("ab") as file:
        file.write(b"shed line\n" + b"0123456789\n" * 10)
    assert reader.pass_over(1000) == 0  # there is less
    assert reader.pass_over(30) == 10 + 8 * 11
    assert read_all(reader) == [b"0123456789\n"] * 2
    reader.close()


def test_holes_cost_nothing_and_join_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(b"one\ntwo")
        file.seek(1 << 40)
        file.write(b"three\nfour\n")
        file.truncate(1 << 41)
    first, second, third, rest = read_lines(path)
    assert (first, third) == (b"one\n", b"four\n")
    assert second.startswith(b"two\0") and second.endswith(b"\0three\n")
    assert (
        rest.strip(b"\0") == b"" and len(second + rest) < 1 << 20
    )  # a read that begins in data may reach into a hole


def test_a_watch_that_is_closed_is_not_woken() -> None:
    """A signal may have the agent wake its terminal when that has been closed."""
    watch = GrowthWatch()
    watch.wake()
    watch.close()
    watch.wake()


def test_nothing_of_what_is_written_while_it_is_read_is_lost(tmp_path: Path) -> None:
    """Between the look that finds no more data and the one for the end."""
    path = tmp_path / "log"
    path.touch()
    written, over = 20_000, threading.Event()

    def write() -> None:
        with path.open("ab", buffering=0) as log:
            for number in range(written):
                log.write(b"%d\n" % number)
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    reader, found = LineReader(path), list[bytes]()
    while True:
        last = over.is_set()
        lines = list(reader.read())
        found += filter(None, lines)
        if last and not lines:
            break
    writer.join()
    reader.close()
    assert found == [b"%d\n" % number for number in range(written)]
