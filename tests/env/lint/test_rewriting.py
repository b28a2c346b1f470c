"""A repaired file is what it was in all but its text, and whole whatever happens."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclops.env.lint.rewriting import rewrite
from ncclops.errors import UsageError
from tests.conftest import CompletedText

Ncclops = Callable[..., CompletedText]

BEFORE, AFTER = b"export NCCL_DEBUGG=INFO\n", b"export NCCL_DEBUG=INFO\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "launch.sh"
    path.write_bytes(BEFORE)
    return path


def test_mode_and_owner_are_kept(script: Path) -> None:
    if os.geteuid() == 0:
        os.chown(script, 12345, 54321)
    script.chmod(0o6754)
    old = script.stat()
    rewrite(str(script), BEFORE, AFTER)
    new = script.stat()
    assert script.read_bytes() == AFTER
    assert (new.st_mode, new.st_uid, new.st_gid) == (old.st_mode, old.st_uid, old.st_gid)
    assert [path.name for path in script.parent.iterdir()] == ["launch.sh"]


def test_a_symbolic_link_stays_one(script: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "to.sh"
    link.symlink_to("../launch.sh")
    rewrite(str(link), BEFORE, AFTER)
    assert link.readlink() == Path("../launch.sh")
    assert script.read_bytes() == AFTER
    assert [path.name for path in link.parent.iterdir()] == ["to.sh"]


def refused(script: Path, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        rewrite(str(script), BEFORE, AFTER)
    drafts = [path for path in script.parent.iterdir() if path.suffix == ".partial"]
    assert not drafts


def test_other_names_of_a_file_do_not_keep_the_old_text(script: Path, tmp_path: Path) -> None:
    (tmp_path / "other.sh").hardlink_to(script)
    refused(script, "2 hard links")
    assert script.read_bytes() == BEFORE


def test_what_somebody_has_changed_meanwhile_is_left_alone(script: Path) -> None:
    script.write_bytes(BEFORE + b"# mine\n")
    refused(script, "changed since it was read")
    assert script.read_bytes() == BEFORE + b"# mine\n"
    script.write_bytes(b"")
    refused(script, "changed since it was read")


def test_what_takes_its_place_while_the_draft_is_written_is_left_alone(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaced(fd: int) -> None:
        other = script.with_name("other")
        other.write_bytes(BEFORE)
        if script.exists():
            other.replace(script)

    monkeypatch.setattr(os, "fsync", replaced)
    refused(script, "changed since it was read")


def test_a_pipe_or_a_circle_of_links_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "no regular file")
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    refused(tmp_path / "a", "cannot be written")


@pytest.mark.slow
def test_a_crash_leaves_the_old_text(script: Path) -> None:
    """The process is killed where it would wait for the disk, and where it would rename."""
    for place in ("os.fsync", "Path.replace"):
        crash = (
            "import os, signal\nfrom pathlib import Path\n"
            "from ncclops.env.lint.rewriting import rewrite\n"
            f"{place} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
            f"rewrite({str(script)!r}, {BEFORE!r}, {AFTER!r})\n"
        )
        assert subprocess.run([sys.executable, "-c", crash], check=False).returncode == -9
        assert script.read_bytes() == BEFORE
        assert stat.S_ISREG(script.lstat().st_mode)


def test_text_that_is_not_utf_8_is_not_rewritten(ncclops_in_process: Ncclops, script: Path) -> None:
    text = b"# Gr\xfc\xdfe\n" + BEFORE
    script.write_bytes(text)
    done = ncclops_in_process("env", "lint", "--fix", str(script))
    assert done.returncode == 2
    assert "not UTF-8" in done.stderr
    assert script.read_bytes() == text


def test_a_file_named_twice_is_repaired_once(
    ncclops_in_process: Ncclops, script: Path, tmp_path: Path
) -> None:
    (tmp_path / "link.sh").symlink_to(script)
    done = ncclops_in_process("env", "lint", "--fix", str(script), str(tmp_path / "link.sh"))
    assert done.returncode == 0, done.stderr
    assert script.read_bytes() == AFTER
