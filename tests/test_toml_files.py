"""TOML files that people hand over: what is refused, and how it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclops.toml_files import MOST_BYTES, load_toml


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('name = "é"\n[watch]\nstartup = "5m"\n')
    assert load_toml(path) == {"name": "é", "watch": {"startup": "5m"}}


def test_the_mark_and_the_line_ends_of_windows_are_read_over(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(b'\xef\xbb\xbfname = "x"\r\nsize = 1\r\n')
    assert load_toml(path) == {"name": "x", "size": 1}


@pytest.mark.parametrize(
    ("content", "kind", "says"),
    [
        (b"a = \n", ValueError, "line 1"),
        (b"a = '\xff'", OSError, "not UTF-8"),
        (b"\n" + b"a." * 301 + b"a = 1", ValueError, "line 2 has more than 300 dots"),
        (b"a = " + b"[" * 50_000, ValueError, "nested too deeply"),
        (b"#" * (MOST_BYTES + 1), OSError, "larger"),
    ],
)
def test_what_is_refused(tmp_path: Path, content: bytes, kind: type[Exception], says: str) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(content)
    with pytest.raises(kind, match=says):
        load_toml(path)
