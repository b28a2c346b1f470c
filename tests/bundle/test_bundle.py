"""`ncclops bundle` on runs that `ncclops launch` made."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CompletedText, run_ncclops

Ncclops = Callable[..., CompletedText]

SECRET = "hf_thisShallNeverLeave123"
# No rule knows its shape; what gives it away is the name of its variable.
PASSWORD = "correct.horse=battery"
SCRIPT = f"""
import os, pathlib, sys
print("logging in with {SECRET}", flush=True)
print("HUB_TOKEN=" + os.environ["HUB_TOKEN"], file=sys.stderr)
print("with", [os.environ["STORE_PASSWORD"]], "at", os.environ["STORE_PASSWORD"] + ",", flush=True)
pathlib.Path(os.environ["NCCLOPS_RUN_DIR"], "model.bin").write_bytes(b"weights")
"""


@pytest.fixture(scope="module")
def finished(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended, for copies of it."""
    directory = tmp_path_factory.mktemp("finished")
    (directory / "train.py").write_text(SCRIPT)
    result = run_ncclops(
        directory,
        *("launch", "--profile", "local-cpu", "--restart", "none", "--run-dir", "run"),
        *("train.py", "--api-key", SECRET),
        env={"HUB_TOKEN": SECRET, "STORE_PASSWORD": PASSWORD},
    )
    assert result.returncode == 0, result.stderr
    return directory / "run"


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("http.sock"))
    return tmp_path / "run"


def contents(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as tar:
        files = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        return {
            name: file.read().decode(errors="replace")
            for name, file in files.items()
            if file is not None
        }


def manifest(files: dict[str, str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(files["run/bundle.json"])
    return document


def test_a_bundle_holds_the_records_and_no_secret(
    ncclops_in_process: Ncclops, run_dir: Path
) -> None:
    result = ncclops_in_process("bundle", "run")
    assert result.returncode == 0, result.stderr
    files = contents(run_dir.with_name("run.tar.gz"))
    assert {"run/run.json", "run/events.jsonl", "run/verdict.json", "run/ranks/0/stdout.log"} <= (
        files.keys()
    )
    assert not [name for name, text in files.items() if SECRET in text or PASSWORD in text]
    assert "logging in with <redacted>" in files["run/ranks/0/stdout.log"]
    assert json.loads(files["run/run.json"])["run_id"]
    document = manifest(files)
    assert document["schema"] == "ncclops.bundle/1"
    assert sum(document["redactions"].values()) >= 2
    assert {"path": "model.bin", "why": "not a record of the run"} in document["left_out"]
    assert "secrets taken out: " in result.stdout
    assert run_dir.with_name("run.tar.gz").stat().st_mode & 0o777 == 0o600


def test_json_is_the_manifest(ncclops_in_process: Ncclops, run_dir: Path) -> None:
    result = ncclops_in_process("bundle", "run", "-o", "ticket.tar.gz", "--json")
    document = json.loads(result.stdout)
    assert document["archive"] == "ticket.tar.gz"
    archive = contents(run_dir.with_name("ticket.tar.gz"))
    assert {f"ticket/{file['path']}" for file in document["files"]} == (
        archive.keys() - {"ticket/bundle.json"}
    )


def test_a_long_log_is_cut_in_the_middle(ncclops_in_process: Ncclops, run_dir: Path) -> None:
    lines = [f"line {number}\n" for number in range(300_000)]
    (run_dir / "ranks" / "0" / "stdout.log").write_text("".join(lines))
    ncclops_in_process("bundle", "run", "--max-file", "1")
    files = contents(run_dir.with_name("run.tar.gz"))
    text = files["run/ranks/0/stdout.log"]
    assert text.startswith("line 0\nline 1\n")
    assert text.endswith("line 299999\n")
    assert text.count("bytes left out here") == 1
    assert len(text) <= (1 << 20) + 100
    assert set(text.splitlines(keepends=True)) - set(lines) == {
        line for line in text.splitlines(keepends=True) if "left out" in line
    }
    cut = [file["path"] for file in manifest(files)["files"] if file["cut"]]
    assert cut == ["ranks/0/stdout.log"]


def test_links_and_broken_records_do_no_harm(
    ncclops_in_process: Ncclops, run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside.log").write_text("not yours")
    (run_dir / "ranks" / "0" / "link.log").symlink_to(tmp_path / "outside.log")
    with (run_dir / "events.jsonl").open("ab") as events:
        events.write(b'{"broken": \xff "token=abcdefg123"')
    assert ncclops_in_process("bundle", "run").returncode == 0
    files = contents(tmp_path / "run.tar.gz")
    assert "run/ranks/0/link.log" not in files
    assert "abcdefg123" not in files["run/events.jsonl"]


def test_what_all_ranks_leave_out_is_one_line(ncclops_in_process: Ncclops, run_dir: Path) -> None:
    for rank in range(3):
        path = run_dir / "ranks" / str(rank) / "core.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(100))
    (run_dir / "ranks" / "2" / "other.bin").write_bytes(bytes(100))
    result = ncclops_in_process("bundle", "run")
    lines = [line.strip() for line in result.stdout.splitlines() if "left out" in line]
    assert "left out: ranks/*/core.bin (3 files: not text)" in lines
    assert "left out: ranks/2/other.bin (not text)" in lines


def test_what_cannot_be_packed_is_one_line(ncclops_in_process: Ncclops, run_dir: Path) -> None:
    def fails(*arguments: str, words: str) -> None:
        result = ncclops_in_process("bundle", *arguments)
        assert result.returncode == 2
        assert words in result.stderr
        assert result.stderr.count("\n") == 1

    run_dir.with_name("taken.tar.gz").touch()
    fails(".", words="holds no run")
    fails("nothing", words="no run 'nothing'")
    fails("run", "-o", "taken.tar.gz", words="taken.tar.gz exists")
    assert ncclops_in_process("bundle", "run", "-o", "taken.tar.gz", "--force").returncode == 0
    assert contents(run_dir.with_name("taken.tar.gz"))
    fails("run", "-o", "nowhere/x.tar.gz", words="cannot write nowhere/x.tar.gz")
    fails("run", "-o", "-", words="name a file")
    assert not run_dir.with_name("-").exists()


def test_the_rules_can_be_read(ncclops_in_process: Ncclops) -> None:
    assert "url-password" in ncclops_in_process("bundle", "--rules").stdout
