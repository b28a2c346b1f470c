"""TOML files that people hand over: what is refused, and how it is said."""

from __future__ import annotations

import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclops.classify.loader import standing_directories
from ncclops.env.origins import conf_files
from ncclops.preflight.site_checks import standing_checks
from ncclops.profiles import list_profiles
from ncclops.toml_files import MOST_BYTES, load_toml, user_directories, with_home
from tests.conftest import CompletedText


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
        (
            b'[watch]\nhang = "5s"\nquiet = 1\nhang = "6s"\nstartup = 1\n',
            ValueError,
            "line 4 sets hang,",
        ),
        (b"a.b = 1\n'c d' = 2\n'c d' = [\n 1,\n]", ValueError, "line 3 sets 'c d', which is set"),
        (b"a.b = 1\na = 2", ValueError, "line 2 sets a, "),
        (b"#" * (MOST_BYTES + 1), OSError, "larger"),
    ],
)
def test_what_is_refused(tmp_path: Path, content: bytes, kind: type[Exception], says: str) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(content)
    with pytest.raises(kind, match=says):
        load_toml(path)


@pytest.fixture
def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number of which the password database knows nothing."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("without_home")
def test_without_a_home_there_is_what_the_site_has() -> None:
    assert user_directories("profiles") == []
    assert "local-cpu" in {profile.name for profile in list_profiles()}
    assert standing_checks() == ()
    assert standing_directories() == []
    assert conf_files({}, Path("/etc")) == [Path("/etc/nccl.conf")]
    assert with_home("~/own.toml") == Path("~/own.toml")


def test_a_relative_directory_of_settings_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CONFIG_HOME", "settings")
    assert user_directories("checks") == [Path("/home/me/.config/ncclops/checks")]


def test_a_profile_of_an_unknown_user_is_not_there(
    ncclops_in_process: Callable[..., CompletedText],
) -> None:
    done = ncclops_in_process("profile", "show", "~nobody-of-this-name/own.toml")
    assert done.returncode == 2
    assert "~nobody-of-this-name/own.toml: there is no such file" in done.stderr
