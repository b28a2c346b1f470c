"""The terminal shows whole lines with the rank in front, in colour only where it helps."""

from __future__ import annotations

import os
import pty
import select
from pathlib import Path
from typing import BinaryIO

import pytest

from ncclops.agent.echo import Echo, Source
from ncclops.agent.screen import Screen


@pytest.fixture(autouse=True)
def no_colour_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def show(path: Path, content: bytes, stream: BinaryIO, notes: tuple[str, ...] = ()) -> None:
    path.write_bytes(content)
    echo = Echo(Screen(stream, stream))
    echo.follow([Source(3, path, to_stderr=False)])
    echo.start()
    for note in notes:
        echo.say(note)
    echo.finish()


def test_a_progress_bar_moves_in_place_on_a_terminal(tmp_path: Path) -> None:
    """Bars have no newline until they are done, hours later; a line of another kind clears them."""
    path = tmp_path / "log"
    path.write_bytes(b"")
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    with os.fdopen(slave, "wb", buffering=0) as terminal:
        echo = Echo(Screen(terminal, terminal))
        echo.follow([Source(3, path, to_stderr=False)])
        echo.start()
        with path.open("ab", buffering=0) as log:
            shown = b""
            for bar in (b"\r 10%|#", b"\r 20%|##"):
                log.write(bar)
                while bar.strip() not in shown:
                    shown += wait_and_read(master)
            log.write(b"\r100%|####\nend\n")
            echo.finish()
        shown += wait_and_read(master)
    os.close(master)
    assert b"\r\x1b[K" in shown
    assert shown.endswith(b"\x1b[32m[rank3]:\x1b[0m 100%|####\r\n\x1b[32m[rank3]:\x1b[0m end\r\n")


def wait_and_read(fd: int) -> bytes:
    ready, _, _ = select.select([fd], [], [], 30)
    assert ready, "the terminal got nothing"
    return os.read(fd, 1 << 16)


def test_a_bar_in_a_file_stays_as_it_was_written(tmp_path: Path) -> None:
    with (tmp_path / "shown").open("w+b") as stream:
        show(tmp_path / "log", b"\r 10%\r 20%\nend\n", stream)
        stream.seek(0)
        assert stream.read() == b"[rank3]: \r 10%\r 20%\n[rank3]: end\n"


def test_one_stream_may_go_and_the_other_stays(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    out, err = tmp_path / "out", tmp_path / "err"
    out.write_bytes(b"one\n")
    err.write_bytes(b"two\n")
    with os.fdopen(writer, "wb", buffering=0) as gone, (tmp_path / "shown").open("w+b") as stream:
        sources = [Source(0, out, to_stderr=False), Source(0, err, to_stderr=True)]
        echo = Echo(Screen(gone, stream))
        echo.follow(sources)
        echo.start()
        echo.finish()
        stream.seek(0)
        first, second = stream.read().splitlines()
    assert b"no longer shown" in first
    assert second == b"[rank0]: two"


def on_terminal(path: Path, content: bytes) -> bytes:
    """What a terminal receives."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "wb", buffering=0) as terminal:
        show(path, content, terminal)
        shown = os.read(master, 1 << 16)
    os.close(master)
    return shown


def test_a_file_gets_no_colour(tmp_path: Path) -> None:
    with (tmp_path / "shown").open("w+b") as stream:
        show(tmp_path / "log", b"one\ntwo", stream)
        stream.seek(0)
        assert stream.read() == b"[rank3]: one\n[rank3]: two\n"


def test_a_terminal_gets_colour_unless_it_is_unwanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert b"\x1b[" in on_terminal(tmp_path / "log", b"one\n")
    monkeypatch.setenv("NO_COLOR", "1")
    assert on_terminal(tmp_path / "log", b"one\n") == b"[rank3]: one\r\n"


def test_torchs_own_rank_prefix_is_not_repeated(tmp_path: Path) -> None:
    with (tmp_path / "shown").open("w+b") as stream:
        show(tmp_path / "log", b"[rank3]: Traceback\n[rank4]: odd\n", stream)
        stream.seek(0)
        assert stream.read() == b"[rank3]: Traceback\n[rank3]: [rank4]: odd\n"


def test_our_own_lines_stand_between_workers_lines(tmp_path: Path) -> None:
    with (tmp_path / "shown").open("w+b") as stream:
        show(tmp_path / "log", b"x" * 100_000 + b"\n", stream, notes=("first", "second"))
        stream.seek(0)
        lines = stream.read().splitlines()
    assert [line for line in lines if line.startswith(b"ncclops")] == [
        b"ncclops: first",
        b"ncclops: second",
    ]
    assert len(lines) == 3


@pytest.mark.parametrize("as_is", [False, True])
def test_at_the_end_the_last_part_of_a_flood_is_shown_and_how_much_is_not(
    as_is: bool, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    with path.open("wb") as log:
        log.truncate(1 << 30)
        log.seek(0, os.SEEK_END)
        log.write(b"\nlast\n")
    with (tmp_path / "shown").open("w+b") as stream:
        echo = Echo(Screen(stream, stream))
        echo.follow([Source(3, path, to_stderr=False, as_is=as_is)])
        echo._finishing.set()  # the run is over before anything of it could be shown
        echo.start()
        echo.finish()
        assert stream.seek(0, os.SEEK_END) < 65 << 20
        stream.seek(0)
        told = stream.readline()
        stream.seek(-20, os.SEEK_END)
        assert stream.read().endswith(b"last\n")
    assert told == (
        f"ncclops: rank 3: 960 MiB of log are not shown here (they are in {path})\n".encode()
    )


def test_a_line_of_our_own_stands_at_the_bottom_until_something_else_is_shown(
    tmp_path: Path,
) -> None:
    """A worker's bar takes its place, and it takes no worker's."""
    path = tmp_path / "log"
    path.write_bytes(b"")
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    with os.fdopen(slave, "wb", buffering=0) as terminal:
        echo = Echo(Screen(terminal, terminal))
        echo.follow([Source(3, path, to_stderr=False)])
        echo.start()
        shown = b""
        for text in ("waiting (1s)", "waiting (2s)"):
            echo.progress(text)
            while text.encode() not in shown:
                shown += wait_and_read(master)
        echo.say("a note")
        with path.open("ab", buffering=0) as log:
            log.write(b"\r 10%|#")
            while b"10%" not in shown:
                shown += wait_and_read(master)
            echo.progress("waiting (3s)")
            log.write(b"\r 20%|##\nend\n")
            echo.progress(None)
            echo.finish()
        shown += wait_and_read(master)
    os.close(master)
    bar = b"\r\x1b[K\x1b[32m[rank3]:\x1b[0m "
    clear = b"\r\x1b[K"
    assert shown.startswith(b"ncclops: waiting (1s)" + clear + b"ncclops: waiting (2s)" + clear)
    assert b"ncclops: a note\r\n" in shown
    assert b"(3s)" not in shown
    assert bar.removeprefix(clear) + b" 10%|#" in shown
    assert shown.endswith(b" 20%|##\r\n\x1b[32m[rank3]:\x1b[0m end\r\n")


def test_a_line_of_our_own_is_for_terminals(tmp_path: Path) -> None:
    with (tmp_path / "shown").open("w+b") as stream:
        echo = Echo(Screen(stream, stream))
        echo.start()
        echo.progress("waiting (1s)")
        echo.say("a note")
        echo.finish()
        stream.seek(0)
        assert stream.read() == b"ncclops: a note\n"


def test_a_bar_below_another_one_is_no_line_each_time_it_moves(tmp_path: Path) -> None:
    """As tqdm draws nested ones: down, the bar, up again."""
    inner = b"".join(b"\n\rbatch: %d%%|#\x1b[A" % done for done in range(10, 100, 10))
    content = b"\repoch: 0%|" + inner + b"\n\r        \r\x1b[A\repoch: 50%|#\n"
    shown = on_terminal(tmp_path / "log", content)
    prefix = b"\x1b[32m[rank3]:\x1b[0m "
    assert shown.split(b"\r\n") == [prefix + b"epoch: 0%|", prefix + b"epoch: 50%|#", b""]


def test_the_file_that_a_rotated_log_makes_way_for_is_shown_once_it_is_followed_again(
    tmp_path: Path,
) -> None:
    """A new process opens its log anew, and finds none at its place."""
    log = tmp_path / "log"
    log.write_bytes(b"of the first process\n")
    source = Source(3, log, to_stderr=False)
    with (tmp_path / "shown").open("w+b") as stream:
        echo = Echo(Screen(stream, stream))
        echo.follow([source])
        log.rename(tmp_path / "log.1")
        log.write_bytes(b"of the second one\n")
        for _ in range(2):
            echo.follow([source])
        echo.start()
        echo.finish()
        stream.seek(0)
        assert stream.read() == b"[rank3]: of the first process\n[rank3]: of the second one\n"
