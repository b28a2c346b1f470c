"""Whatever a rank writes into its records, the agent goes on, and says how the run ended."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import LIMIT_S, CompletedText, clean_environ
from tests.launch.test_kill import wait_until

pytestmark = pytest.mark.slow

DEEP = "'[' * 200_000"
WAYS = {
    "a message without text": 'error.write_text(\'{"message": ""}\')',
    "an error file of 200,000 levels": f"error.write_text({DEEP})",
    "an error file of 3 GB": "os.truncate(os.open(error, os.O_CREAT | os.O_RDWR), 3 << 30)",
    "an error file that is a pipe": "os.mkfifo(error)",
    "a line of 200,000 levels": f"add(worker, {DEEP}); add(receipt, {DEEP})",
    "values of other types": """
for kind in ("fault", "restart", "escalation", "phase", "group-timeout", "retry", "xid"):
    for value in ({}, [], [[]], "x", -1, 1e308, None, 2**70):
        fields = ("rank", "of_rank", "ranks", "cause", "ts", "iteration", "to", "reason", "seconds")
        add(worker, json.dumps({"ts": 1.0, "event": kind} | dict.fromkeys(fields, value)))
for kind in ("start", "step", "phase-begin", "phase-end", "end", "compile-warmup"):
    for value in ({}, [], "x", -1, 1e308, None, 2**70):
        fields = ("ts", "step", "seconds", "phase", "limit_s", "iteration", "loss")
        add(receipt, json.dumps({"ts": 1.0, "kind": kind} | dict.fromkeys(fields, value)))
""",
    "pipes in the place of its records": """
for path in (worker, receipt, rank / "progress", rank / "environment.json"):
    path.unlink(missing_ok=True)
    os.mkfifo(path)
""",
    "no rank directory": "shutil.rmtree(rank)",
    "random numbers in its progress page": "(rank / 'progress').write_bytes(os.urandom(4096))",
    "one line of 20 MB": "sys.stderr.write('\\x1b[2J' * (5 << 20)); sys.stderr.flush()",
}


# Of these only the file's content matters, which `test_error_file.py` has without a run.
CONTENTS = ("a message without text", "an error file of 200,000 levels")


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=pytest.mark.extended if way in CONTENTS else ()) for way in WAYS],
)
def test_the_verdict_is_written(
    way: str, ncclops: Callable[..., CompletedText], tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text(f"""
import json, os, shutil, sys, time
from pathlib import Path
from ncclops import receipt as receipts

def add(path, line):
    with path.open("a") as file:
        file.write(line + "\\n")

receipts.step(0)
rank = Path(os.environ["NCCLOPS_RUN_DIR"]) / "ranks" / os.environ["RANK"]
worker, receipt = rank / "worker.jsonl", rank / "receipt.jsonl"
error = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
if os.environ["RANK"] == "1":
    {WAYS[way].strip().replace(chr(10), chr(10) + "    ")}
    time.sleep(0.5)
    os._exit(3)
time.sleep(1)
""")
    done = ncclops(
        "launch", "--restart", "none", "--nproc-per-node", "2", "--run-dir", "run", "bad.py"
    )
    assert done.returncode == 1, done.stderr
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert verdict["outcome"] == "failed"
    assert verdict["first_failure"]["rank"] == 1
    ours = [line for line in done.stderr.splitlines() if line.startswith("ncclops:")]
    assert "Traceback" not in done.stderr
    assert not any("internal error" in line for line in ours)
    assert max(map(len, ours)) < 3000


@pytest.mark.parametrize(
    "ways",
    [
        "shutil.rmtree(os.environ['NCCLOPS_RUN_DIR'])",
        # No thread can be started any more, and no address space is left for another stack.
        pytest.param(
            "resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))", marks=pytest.mark.extended
        ),
    ],
)
@pytest.mark.extended
def test_what_a_restart_needs_may_be_missing_and_the_run_ends_all_the_same(
    ways: str, ncclops: Callable[..., CompletedText], tmp_path: Path
) -> None:
    """The core's own log, for one, whose file is opened with the first restart."""
    (tmp_path / "bad.py").write_text(f"""
import os, resource, shutil
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if os.environ["RANK"] == "1":
    {ways}
    raise ConnectionError("again")
dist.all_reduce(torch.ones(1))
""")
    done = ncclops("launch", "--nproc-per-node", "2", "--run-dir", "run", "bad.py")
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert verdict["exit_code"] == done.returncode, done.stderr
    assert any(worker["rank"] == 1 and worker["exit_code"] == 1 for worker in verdict["workers"])
    assert "internal error" not in done.stderr and "monitor_thread.py" not in done.stderr


def test_a_rank_that_truncates_its_progress_page_is_told_so(
    ncclops: Callable[..., CompletedText], tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text("""
import os, time
from ncclops import receipt
rank = os.environ["RANK"]
if rank == "1":
    os.truncate(os.path.join(os.environ["NCCLOPS_RUN_DIR"], "ranks", rank, "progress"), 0)
for step in range(1000):
    receipt.step(step)
    time.sleep(0.1)
""")
    options = ("--restart", "none", "--nproc-per-node", "2", "--run-dir", "run")
    assert ncclops("launch", *options, "bad.py").returncode == 1
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    why = "run/ranks/1/progress was truncated"
    assert verdict["reason"] == f"rank 1 was killed by SIGBUS ({why})"


def test_a_run_ends_when_it_is_told_to_whatever_is_left_to_read_and_show(tmp_path: Path) -> None:
    """20 GB take minutes to classify, and to show; a scheduler's SIGKILL comes after seconds."""
    (tmp_path / "bad.py").write_text("""
import os, sys
from pathlib import Path
rank = Path(os.environ["NCCLOPS_RUN_DIR"]) / "ranks" / os.environ["RANK"]
os.truncate(rank / "stdout.log", 20 << 30)
sys.exit(3)
""")
    run = tmp_path / "run"
    command = [sys.executable, "-m", "ncclops", "launch", "--restart", "process"]
    launcher = subprocess.Popen(
        [*command, "--nproc-per-node", "1", "--run-dir", str(run), str(tmp_path / "bad.py")],
        cwd=tmp_path,
        env=clean_environ(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        events = run / "events.jsonl"
        wait_until(lambda: events.exists() and "worker-exited" in events.read_text(), "exit")
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=LIMIT_S)
    finally:
        launcher.kill()
        launcher.wait()
    assert json.loads((run / "verdict.json").read_text())["first_failure"]["exit_code"] == 3


def test_a_flood_that_nobody_has_read_ends_with_its_cause(
    ncclops: Callable[..., CompletedText], tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text("""
import os, sys
from pathlib import Path
rank = Path(os.environ["NCCLOPS_RUN_DIR"]) / "ranks" / os.environ["RANK"]
os.truncate(rank / "stdout.log", 20 << 30)
sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
""")
    options = ("--restart", "none", "--nproc-per-node", "1", "--run-dir", "run")
    done = ncclops("launch", *options, "--redirects", "1", "bad.py")
    assert done.returncode == 1, done.stderr[-2000:]
    assert re.search(r"MiB of run/ranks/0/stdout.log, from byte .* are not classified", done.stderr)
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert verdict["classification"]["class"] == "gpu-oom"
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    left_out = [json.loads(line) for line in events if '"output-passed-over"' in line]
    assert [event["file"] for event in left_out] == ["ranks/0/stdout.log"]
    assert left_out[0]["end"] - left_out[0]["begin"] > 19 << 30
