"""A file system that gives errors in mid-run (ESTALE of an NFS server, EIO): the run goes on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ncclops.record.lines import RecordReader, encode_line
from ncclops.record.regular_file import is_there
from tests.conftest import LIMIT_S, clean_environ

TRAIN = """
import os, pathlib
from torch import distributed
from ncclops import receipt

distributed.init_process_group("gloo")
once = pathlib.Path(os.environ["STALE_ONCE"])
again = once.exists()
for step in range(4):
    receipt.step(step)
    print("step", step)
    distributed.barrier()
    if step == 1 and not again and distributed.get_rank() == 1:
        once.touch()
        raise RuntimeError("a fault, from which all begin anew")
distributed.barrier()
distributed.destroy_process_group()
"""


def test_records_that_cannot_be_read_any_more_are_none(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(encode_line({"a": 1}))
    reader = RecordReader(path, lambda line: line)
    assert len(list(reader.new())) == 1
    directory = os.open(tmp_path, os.O_RDONLY)
    os.dup2(directory, reader._lines._file.fileno())  # its reads fail from now on
    os.close(directory)
    assert list(reader.new()) == []
    reader.close()


def test_what_cannot_be_looked_for_is_not_there(tmp_path: Path) -> None:
    assert is_there(tmp_path)
    assert not is_there(tmp_path / ("x" * 300))  # an error other than that nothing is there


@pytest.mark.slow
def test_a_run_whose_files_cannot_be_read_any_more_is_trained_to_its_end(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("no C compiler for the stand-in of a failed file system, or another machine")
    library = tmp_path / "stale_files.so"
    source = Path(__file__).with_name("stale_files.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=120)
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "ncclops", "launch", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run"), "train.py"],
        cwd=tmp_path,
        env=clean_environ(
            {
                "LD_PRELOAD": str(library),
                "STALE_BELOW": str(tmp_path / "run"),
                "STALE_ONCE": str(tmp_path / "failed"),
            }
        ),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "failed").exists()
    assert "2 workers exited 0" in done.stderr
    assert "verdict: cannot be written (Stale file handle)" in done.stderr
    assert "Traceback" not in done.stderr
    assert "internal error" not in done.stderr
