"""A run is watched while it runs: stalls, steps, warm-up and stragglers are events at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CompletedText
from tests.launch.conftest import Run

Ncclops = Callable[..., CompletedText]
Script = Callable[[str], Path]
OnlyRun = Callable[[], Run]

SHORT_WINDOWS = """
description = "For tests: short windows."
extends = "local-cpu"
[watch]
startup = "500ms"
"""


@pytest.fixture
def short_windows(tmp_path: Path) -> Path:
    path = tmp_path / "short.toml"
    path.write_text(SHORT_WINDOWS)
    return path


def launch(ncclops: Ncclops, *arguments: str | Path, nproc: int = 1) -> CompletedText:
    options = ("--restart", "none", "--nproc-per-node", str(nproc))
    return ncclops("launch", *options, *arguments)


PRINTS = """
import time
print("loading", flush=True)
time.sleep({pause})
print("compile_warmup 1.25s")
for n in range(6):
    print(f"step {{n:05d}} loss 1.0 tok/s 10")
print("peak memory 1.0 GiB")
print("training finished")
"""


def test_a_script_that_only_prints_is_watched_and_judged(
    ncclops: Ncclops, script: Script, only_run: OnlyRun
) -> None:
    done = launch(ncclops, "--profile", "local-cpu", script(PRINTS.format(pause=0)), nproc=2)
    assert done.returncode == 0, done.stderr
    run = only_run()
    assert [record["step"] for record in run.named("step")] == [0, 5]
    assert {record["rank"]: record["seconds"] for record in run.named("compile-warmup")} == {
        0: 1.25,
        1: 1.25,
    }
    receipt = run.verdict["receipt"]
    assert receipt["verdict"] == "healthy"
    # Both ranks reported the same; which was read first is chance.
    assert re.match(r"ranks/[01]/stdout.log:9: peak memory", receipt["rules"][3]["evidence"])
    checked = ncclops("receipt", "check", run.path, "--json")
    assert f'"steps": {receipt["steps"]}' in checked.stdout, "the same from the files"


def test_a_window_that_passes_is_an_event_while_the_run_goes_on(
    ncclops: Ncclops, script: Script, only_run: OnlyRun, short_windows: Path
) -> None:
    done = launch(ncclops, "--profile", short_windows, script(PRINTS.format(pause=2)))
    assert done.returncode == 0, done.stderr
    names = [record["event"] for record in only_run().events]
    (stall,) = only_run().named("startup-stall")
    assert stall["window_s"] == 0.5
    assert names.index("startup-stall") < names.index("step")
    assert "ncclops: startup-stall: the startup window of 500ms has passed" in done.stderr


def test_a_progress_bar_is_read_while_it_is_drawn(
    ncclops: Ncclops, script: Script, only_run: OnlyRun
) -> None:
    """It has no newline until training is over, and this one dies first."""
    source = r"""
import os, sys, time
from pathlib import Path
for n in range(3):
    print(f"step {n} loss 2.0", end="\r", flush=True)
events = Path(os.environ["NCCLOPS_RUN_DIR"], "events.jsonl")
deadline = time.monotonic() + 60
while '"step": 0' not in events.read_text() and time.monotonic() < deadline:
    time.sleep(0.02)
os._exit(3 if time.monotonic() < deadline else 4)
"""
    done = launch(ncclops, "--profile", "local-cpu", script(source))
    assert done.returncode == 1
    assert only_run().verdict["first_failure"]["exit_code"] == 3


def test_a_rank_that_is_slow_by_itself_is_named(
    ncclops: Ncclops, script: Script, only_run: OnlyRun
) -> None:
    source = """
import os, time
from datetime import timedelta
from ncclops import receipt
busy = timedelta(milliseconds=13 if os.environ["RANK"] == "1" else 10)
for n in range(60):
    time.sleep(0.005)
    receipt.step(n, busy=busy)
"""
    done = launch(ncclops, "--profile", "local-cpu", script(source), nproc=3)
    assert done.returncode == 0, done.stderr
    (slow,) = only_run().named("straggler")
    assert (slow["rank"], slow["kind"], slow["ratio"]) == (1, "chronic", 1.3)
    assert slow["host"]
    assert "ncclops: straggler: rank 1 on" in done.stderr
    assert "Swap the GPU" in done.stderr


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ('name = "ours"', "form ours: pattern has to be an array of tables"),
        ('name = "ours"\n[[watch.trainers.pattern]]\nkind = "stop"', "'stop' is none of"),
    ],
)
def test_a_profile_s_form_that_is_none_is_refused_in_one_line(
    ncclops: Ncclops, script: Script, tmp_path: Path, form: str, message: str
) -> None:
    profile = tmp_path / "bad.toml"
    profile.write_text(f'description = "bad"\nextends = "local-cpu"\n[[watch.trainers]]\n{form}\n')
    done = launch(ncclops, "--profile", profile, "--dry-run", script(""))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_profile_s_own_lines_make_receipts(
    ncclops: Ncclops, script: Script, only_run: OnlyRun, tmp_path: Path
) -> None:
    profile = tmp_path / "ours.toml"
    profile.write_text(
        """
description = "With lines of our own."
extends = "local-cpu"
[[watch.trainers]]
name = "ours"
[[watch.trainers.pattern]]
kind = "step"
contains = ["<<"]
regex = '<<(?P<step>\\d+)>>'
"""
    )
    launch(ncclops, "--profile", profile, script("for n in range(5): print(f'<<{n}>>')"))
    assert only_run().verdict["receipt"]["steps"] == 5
    assert [record["step"] for record in only_run().named("step")] == [0, 4]
