"""The story of real failures: the right rank, its own line, and the same words everywhere."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ncclops.diagnose.story import complete, tell
from ncclops.record import event_log
from ncclops.record.events import EscalationEvent, WorkerExitedEvent, WorkerStartedEvent
from ncclops.record.verdict_record import VERDICT, FirstFailure, VerdictRecord
from tests.conftest import CompletedText, run_ncclops

Ncclops = Callable[..., CompletedText]

# The rank that fails does so within code of torch.
SHAPES = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())

def step(width):
    return model(torch.ones(2, width)).sum()

for number in range(4):
    dist.all_reduce(step(9 if number == 2 and dist.get_rank() == 1 else 8).detach())
"""
# Rank 1 never comes to a reduction; it is rank 0 that fails, by the group's own timeout.
ABSENT = """
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")

def load_batch():
    time.sleep(1000)

for number in range(6):
    if number == 5 and dist.get_rank() == 1:
        load_batch()
    dist.all_reduce(torch.ones(4))
"""


def launch(directory: Path, source: str, *options: str, ranks: int = 2) -> CompletedText:
    (directory / "train.py").write_text(source)
    done = run_ncclops(
        directory, "launch", "--run-dir", "run", "--nproc-per-node", str(ranks), *options,
        "train.py",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    return done


PEER_GONE = {
    "class": "peer-exit", "confidence": 0.72, "summary": "a peer closed its connection", "rank": 0,
    "remedy": ["read the log of the peer"], "evidence": [],
}  # fmt: skip
FAILED = FirstFailure(
    rank=0, pid=1, exit_code=1, seconds=1.0, asked_to_stop=False, message="RuntimeError: closed",
    tail=[], log="stderr.log", host="n1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("exits", "told"),
    [
        (
            [(1, 0), (0, 1), (2, 1)],
            "rank 1 on n1 had ended with exit code 0 while others still needed it: rank 0 on n1",
        ),
        (
            [(1, 0), (2, 0), (0, 1)],
            "ranks 1, 2 had ended with exit code 0 while others still needed them: rank 0 on n1",
        ),
        ([(0, 1), (1, 0)], ""),  # it had not
        ([(1, 3), (0, 1)], ""),  # it is the first failure itself
    ],
)
def test_who_had_left_without_an_error_is_named_where_a_peer_was_missed(
    exits: list[tuple[int, int]], told: str, tmp_path: Path
) -> None:
    for at, rank in enumerate(range(3)):
        event_log.append(tmp_path / "events.jsonl", WorkerStartedEvent(ts=at, rank=rank, node="n1"))
    for at, (rank, code) in enumerate(exits, start=10):
        ended = WorkerExitedEvent(ts=at, rank=rank, node="n1", exit_code=code)
        event_log.append(tmp_path / "events.jsonl", ended)
    story = tell(tmp_path, None, FAILED, PEER_GONE, node="n1", attempt=0)
    assert story is not None
    assert story.what.startswith(told or "rank 0 on n1")
    assert story.rank == (1 if told.startswith("rank 1 ") else 0)
    assert ("done before the others" in story.next_steps[0]) is bool(told)
    assert "read the log of the peer" in story.next_steps


@pytest.mark.parametrize(("class_", "is_guessed"), [("preempted", False), ("host-oom", True)])
def test_the_oom_killer_is_not_guessed_where_the_kernel_rules_it_out(
    class_: str, is_guessed: bool, tmp_path: Path
) -> None:
    killed = msgspec.structs.replace(FAILED, exit_code=None, signal="SIGKILL", message="")
    story = tell(tmp_path, None, killed, PEER_GONE | {"class": class_}, node="n1", attempt=0)
    assert story is not None
    assert ("out-of-memory" in story.what) is is_guessed


@pytest.mark.slow
def test_who_has_left_too_early_is_blamed_with_the_line_of_its_exit(tmp_path: Path) -> None:
    source = """
import os, sys, time
from pathlib import Path

def train(rank):
    if rank == "1":
        Path("pid").write_text(str(os.getpid()))
        Path("pid").rename("left")
        sys.exit(0)
    while not Path("left").exists() or Path("/proc", Path("left").read_text()).exists():
        time.sleep(0.05)
    raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:4528")

train(os.environ["RANK"])
"""
    done = launch(tmp_path, source, "--restart", "process")
    verdict = verdict_of(tmp_path)
    assert verdict.story is not None and verdict.first_failure is not None
    assert (verdict.first_failure.rank, verdict.first_failure.caused_by) == (0, 1)
    (line,) = verdict.story.code
    assert (line.line, line.function, line.text) == (9, "train", "sys.exit(0)")
    assert "had ended with exit code 0 while others still needed it" in done.stderr


@pytest.mark.slow
def test_what_a_script_ends_itself_with_is_its_class(tmp_path: Path) -> None:
    source = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    sys.exit('the data set /data/c4 is not there')\n"
        "time.sleep(600)\n"
    )
    done = launch(tmp_path, source, "--restart", "process")
    verdict = verdict_of(tmp_path)
    assert verdict.classification is not None and verdict.story is not None
    assert verdict.classification.class_ == verdict.story.class_ == "user-error"
    assert verdict.classification.signature == "script-ended-itself"
    assert "rank 1" in verdict.story.what
    assert "ended: the data set /data/c4 is not there at " in verdict.story.what
    assert "SystemExit" not in done.stderr


def verdict_of(directory: Path) -> VerdictRecord:
    verdict = VERDICT.read(directory / "run" / "verdict.json")
    assert verdict is not None
    return verdict


def rows(text: str, *, after: str) -> list[str]:
    """The lines of a story, as they are indented everywhere, without the labels' padding."""
    lines = [line.removeprefix("ncclops: ") for line in text.splitlines()]
    begin = next(number for number, line in enumerate(lines) if after in line)
    told = [line.split() for line in lines[begin + 1 :] if line.startswith("  ")]
    return [" ".join(line) for line in told]


@pytest.fixture(scope="module")
def mismatched(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, once = tmp_path_factory.mktemp("mismatched"), ("--restart", "none", "--warm-start")
    (directory / "said").write_text(launch(directory, SHAPES, *once).stderr)
    return directory


def test_the_last_lines_show_the_users_own_line_and_no_frame_of_torch(mismatched: Path) -> None:
    said = (mismatched / "said").read_text()
    end = said[said.index("ncclops: failed after") :]
    assert "rank 1 on " in end.splitlines()[0]
    assert "mat1 and mat2 shapes cannot be multiplied" in end.splitlines()[0]
    assert "train.py:7 in step: return model(torch.ones(2, width)).sum()" in end
    assert "frames in torch" in end
    assert "/torch/nn/" not in end
    assert end.count("mat1 and mat2") == 1
    assert len(end.splitlines()) < 20


def test_terminal_verdict_diagnose_and_report_say_the_same(mismatched: Path) -> None:
    story = verdict_of(mismatched).story
    assert story is not None
    assert (story.rank, story.class_, story.code[-1].line) == (1, "user-error", 7)
    shown = run_ncclops(mismatched, "diagnose", "run").stdout
    said = (mismatched / "said").read_text()
    assert rows(shown, after="rank 1 on ") == rows(said, after="failed after")
    document = json.loads(run_ncclops(mismatched, "diagnose", "run", "--json").stdout)
    assert (
        document["story"] == json.loads((mismatched / "run" / "verdict.json").read_text())["story"]
    )
    assert document["what"] == story.what
    page = run_ncclops(mismatched, "report", "run", "-o", "-").stdout
    assert "return model(torch.ones(2, width)).sum()" in page


def test_the_next_command_can_be_typed_as_it_stands(mismatched: Path) -> None:
    story = verdict_of(mismatched).story
    assert story is not None
    program, *arguments = story.next_command.split()
    assert program == "ncclops"
    assert "step" in run_ncclops(mismatched, *arguments).stdout


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_rank_that_did_not_come_is_blamed_and_not_the_one_that_waited(
    starts_processes: None, tmp_path: Path, ranks: int
) -> None:
    done = launch(
        tmp_path, ABSENT, "--restart", "none", "--timeout", "process_group=6s", ranks=ranks
    )
    verdict = verdict_of(tmp_path)
    assert verdict.story is not None
    assert verdict.story.rank == 1
    assert verdict.first_failure is not None
    assert verdict.first_failure.rank != verdict.first_failure.caused_by == 1
    assert verdict.story.class_ == "watchdog-timeout"
    assert "load_batch" in verdict.story.what
    assert verdict.story.code[-1].text == "time.sleep(1000)"
    (headline,) = (line for line in done.stderr.splitlines() if "ncclops: failed after" in line)
    assert "rank 1 on " in headline


LATE_FOR_BARRIER = """
import datetime, os, time
import torch.distributed as dist

def load_batch():
    if os.environ["RANK"] == "1":
        time.sleep(1000)

dist.init_process_group("gloo")
dist.monitored_barrier()
load_batch()
dist.monitored_barrier(timeout=datetime.timedelta(seconds=3))
"""


@pytest.mark.slow
def test_of_a_monitored_barrier_neither_who_waits_in_it_nor_who_is_cut_off_is_blamed(
    starts_processes: None, tmp_path: Path
) -> None:
    """Rank 0 waits for the others, and says who has not come when rank 2 has failed, maybe."""
    launch(tmp_path, LATE_FOR_BARRIER, "--restart", "none", ranks=3)
    verdict = verdict_of(tmp_path)
    assert verdict.first_failure is not None and verdict.story is not None
    assert verdict.first_failure.rank != verdict.first_failure.caused_by == verdict.story.rank == 1
    assert "did not come to monitored_barrier" in verdict.story.what
    assert verdict.story.code[-1].text == "time.sleep(1000)"


@pytest.mark.slow
@pytest.mark.extended
def test_a_hang_that_restarts_do_not_mend_is_told_as_one(
    starts_processes: None, tmp_path: Path
) -> None:
    limits = ["soft=4s", "hard=8s", "process_group=30s"]
    done = launch(tmp_path, ABSENT, *(word for limit in limits for word in ("--timeout", limit)))
    verdict = verdict_of(tmp_path)
    assert verdict.classification is not None
    assert verdict.classification.class_ == "watchdog-timeout"
    story = verdict.story
    assert story is not None
    assert story.what.startswith("rank 1 on ")
    assert "never entered all_reduce" in story.what
    assert story.code[-1].function == "load_batch"
    assert any(step.kind == "restart" for step in story.tried)
    assert story.stopped
    assert "peer-exit" not in done.stderr


@pytest.mark.parametrize(
    ("words", "why", "expected"),
    [
        ("2 times at the same place", "{reason}", "2 times at the same place"),
        ("peer-exit, which no new start changes: it had ended", "peer-exit is not retried: look",
         "peer-exit is not retried: look"),
        ("2 times at the same place", "peer-exit is not retried: look",
         "2 times at the same place; peer-exit is not retried: look"),
    ],
    ids=["the policy repeats the workers", "both speak of the class", "two reasons"],
)  # fmt: skip
def test_why_it_stopped_says_each_thing_once(
    tmp_path: Path, words: str, why: str, expected: str
) -> None:
    told = tell(tmp_path, None, None, PEER_GONE, node="n0", attempt=0)
    assert told is not None
    reason = f"OSError: gone (f.py:1): {words}"
    asked = EscalationEvent(to="stop", reason=reason, failure=("OSError: gone", "f.py:1"))
    whole = complete(told, [asked], [], node="n0", ended="", why=why.format(reason=reason))
    assert whole.stopped == expected


def test_a_run_of_an_older_version_is_told_from_what_it_left(mismatched: Path) -> None:
    """Such a verdict has no story: diagnose makes it, of the same incident."""
    told = verdict_of(mismatched).story
    older = mismatched / "older"
    subprocess.run(["cp", "-r", mismatched / "run", older], check=True)
    document = json.loads((older / "verdict.json").read_text())
    del document["story"]
    (older / "verdict.json").write_text(json.dumps(document))
    again = json.loads(run_ncclops(mismatched, "diagnose", "older", "--json").stdout)["story"]
    assert told is not None
    assert (again["what"], again["rank"], again["class"]) == (told.what, 1, told.class_)


@pytest.mark.parametrize("class_", ["unknown", "no-failure-seen", "benign"])
def test_where_the_output_shows_nothing_the_story_is_how_the_run_ended(
    tmp_path: Path, class_: str
) -> None:
    """As on a node whose ranks were ended since another node's launcher was killed.

    Of one that had made steps it was "failed: no failure seen".
    """
    empty = {
        "class": class_, "confidence": 0.0, "summary": "the input is empty", "rank": None,
        "remedy": [], "evidence": [],
    }  # fmt: skip
    told = tell(tmp_path, None, None, empty, node="n0", attempt=0)
    assert told is not None
    ended = "the launcher was killed on n1; the agent stopped the workers"
    whole = complete(told, [], [], node="n0", ended=ended, why="")
    assert whole.what == ended
    # Neither the class of an output without a failure, nor advice on how to classify it.
    assert (whole.class_, whole.proof) == (None, [])
    assert ["dmesg -T" in step for step in whole.next_steps] == [True]
    assert whole.next_command == f"ncclops bundle {tmp_path}"
    assert complete(told, [], [], node="n0", ended="", why="").what == "the input is empty"
