"""What a script reports ends up in the record, whatever happens to the script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ncclops
from ncclops.receipts import writer
from ncclops.receipts.judge import judge
from ncclops.receipts.sources import load
from ncclops.record import progress, shared_page
from ncclops.record.paths import RunPaths
from ncclops.record.progress import Warmup
from tests.conftest import LIMIT_S, CompletedText, clean_environ
from tests.lanes import IN_SCRIPT, LaneProcess, lanes
from tests.receipts.conftest import Rank, worker_environ

Report = Callable[[str], CompletedText]

TRAINING = """
from ncclops import receipt
with receipt.compile_warmup():
    pass
for n in range(4):
    receipt.step(n, tokens=100, loss=1.5)
print(receipt.peak_memory())
receipt.end()
"""


def test_a_script_with_receipts_is_healthy(report: Report, rank0: Rank) -> None:
    done = report(TRAINING)
    assert done.returncode == 0, done.stderr
    kinds = [record["kind"] for record in rank0.records]
    assert kinds == [
        *("start", "warmup-begin", "compile-warmup"),
        *["step"] * 4,
        *("peak-memory", "end"),
    ]
    receipt = judge(load(rank0.run_dir))
    assert receipt.verdict == "healthy"
    assert receipt.facts.first_real_step == 1
    assert receipt.facts.rate_unit == "tokens/s"
    (memory,) = rank0.named("peak-memory")
    assert memory["gib"] == pytest.approx(float(done.stdout), abs=1e-3)
    assert 0.001 < memory["gib"] < 10
    assert memory["source"] == "rss"


def test_what_is_no_number_of_a_step_is_refused_by_name(report: Report, rank0: Rank) -> None:
    done = report("""
from ncclops import receipt
for n in ("x", None, 2**63 - 1, 2**80, float("nan")):
    try:
        receipt.step(n)
    except ValueError as error:
        print(error)
for wrong in ({"tokens": [5]}, {"loss": "low"}, {"busy": 0.5}):
    try:
        receipt.step(0, **wrong)
    except TypeError as error:
        print(error)
receipt.step(0)
""")
    said = [f"receipt.step(n): n is the number of a step, not {what}" for what in (
        "'x'", "None", str(2**63 - 1), str(2**80), "nan"
    )]  # fmt: skip
    said += [
        "receipt.step(tokens): give a number, not [5]",
        "receipt.step(loss): give a number, not 'low'",
        "receipt.step(busy): give a datetime.timedelta, not 0.5",
    ]
    assert done.stdout.splitlines() == said, done.stderr
    assert [record["step"] for record in rank0.named("step")] == [0]


@pytest.mark.slow
def test_outside_launch_the_calls_do_nothing(tmp_path: Path) -> None:
    source = (
        TRAINING + "import threading, sys; print(threading.active_count(), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=tmp_path,
        env=clean_environ({"RANK": "0"}),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1 False"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_user_s_module_loads_nothing_heavy() -> None:
    source = "import sys; from ncclops import receipt; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], env=clean_environ(), capture_output=True)
    loaded = set(done.stdout.decode().split())
    assert not loaded & {"torch", "numpy", "pydantic", "psutil", "pynvml", "asyncio", "tomllib"}


@pytest.mark.slow
def test_receipts_health_and_record_load_nothing_heavy() -> None:
    root = Path(ncclops.__file__).parent
    modules = [
        f"ncclops.{package}.{path.stem}"
        for package in ("receipts", "health", "record")
        for path in (root / package).glob("*.py")
    ]
    source = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\n"
    source += "print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], env=clean_environ(), capture_output=True)
    loaded = set(done.stdout.decode().split())
    assert "ncclops.receipts.judge" in loaded
    assert not loaded & {"torch", "numpy", "pydantic", "psutil", "pynvml", "rich"}


def test_without_a_stated_warmup_the_first_step_shows_it(report: Report, rank0: Rank) -> None:
    report("from ncclops import receipt\nfor n in range(4): receipt.step(n)\nreceipt.end()")
    receipt = judge(load(rank0.run_dir))
    assert receipt.verdict == "healthy"
    assert receipt.facts.warmup_seconds is None
    assert rank0.named("peak-memory"), "end() reports the peak memory that the script has not"


def test_a_stated_warmup_time(report: Report, rank0: Rank) -> None:
    source = "from datetime import timedelta\nfrom ncclops import receipt\n"
    report(source + "receipt.compile_warmup(31.5)\nreceipt.compile_warmup(timedelta(minutes=2))")
    assert [record["seconds"] for record in rank0.named("compile-warmup")] == [31.5, 120.0]


def test_an_exception_in_warmup_is_no_warmup(report: Report, rank0: Rank) -> None:
    report("from ncclops import receipt\nwith receipt.compile_warmup(): raise ValueError('no')")
    assert rank0.named("compile-warmup") == []
    assert rank0.named("warmup-failed") != []
    assert judge(load(rank0.run_dir)).verdict == "compile-stall"


@pytest.mark.parametrize(
    "ending",
    [
        "raise ValueError('boom')",
        "import sys; sys.exit(3)",
        "import signal, sys, os\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "signal.pause()",
    ],
)
def test_nothing_is_lost_when_python_ends(report: Report, rank0: Rank, ending: str) -> None:
    done = report("from ncclops import receipt\nfor n in range(5000): receipt.step(n)\n" + ending)
    assert done.returncode != 0
    assert rank0.steps == list(range(5000))


def test_a_sigkill_loses_no_step_count(report: Report, rank0: Rank) -> None:
    """The records may be behind; the page is not."""
    done = report(
        "import os, signal\nfrom ncclops import receipt\n"
        "for n in range(5000): receipt.step(n)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert done.returncode == -signal.SIGKILL
    page = progress.read(RunPaths(rank0.run_dir).rank(0).progress)
    assert page is not None
    assert (page.step, page.steps, page.ended) == (4999, 5000, False)
    assert load(rank0.run_dir).last_step == 4999
    assert judge(load(rank0.run_dir)).verdict == "incomplete"
    assert rank0.steps == list(range(len(rank0.steps))), "whole lines, in order"
    settle_page(rank0)


def settle_page(rank: Rank) -> None:
    """What the agent does when a worker has ended; afterwards nothing is left in /dev/shm."""
    path = RunPaths(rank.run_dir).rank(0).progress
    before, target = progress.read(path), path.readlink()
    shared_page.settle(path)
    assert not target.exists()
    assert not path.is_symlink()
    assert progress.read(path) == before


def test_a_normal_end_leaves_nothing_in_shared_memory(report: Report, rank0: Rank) -> None:
    report(TRAINING)
    path = RunPaths(rank0.run_dir).rank(0).progress
    assert not path.is_symlink()
    page = progress.read(path)
    assert page is not None
    assert page.ended
    assert page.warmup is Warmup.OVER


def test_a_respawned_rank_appends(report: Report, rank0: Rank) -> None:
    report("from ncclops import receipt\nfor n in range(3): receipt.step(n)")
    report("from ncclops import receipt\nfor n in range(2, 6): receipt.step(n)\nreceipt.end()")
    assert len(rank0.named("start")) == 2
    receipt = judge(load(rank0.run_dir))
    assert receipt.verdict == "healthy"
    assert receipt.facts.steps == 6


CHILDREN = """
import multiprocessing, os, subprocess, sys
from ncclops import receipt
def child(n):
    receipt.step(n)
    receipt.end()
if __name__ == "__main__":
    {first}
    for method in ("fork", "spawn"):
        process = multiprocessing.get_context(method).Process(target=child, args=(77,))
        process.start()
        process.join()
        assert process.exitcode == 0
    if os.fork() == 0:
        receipt.step(78)
        sys.exit(0)
    os.wait()
    receipt.step(1)
    program = "from ncclops import receipt; receipt.step(79)"
    subprocess.run([sys.executable, "-c", program], check=True)
    receipt.end()
"""


@pytest.mark.parametrize("first", ["receipt.step(0)", "pass"])
def test_children_of_a_worker_do_not_write(
    report: Report, rank0: Rank, tmp_path: Path, first: str
) -> None:
    """Forked, spawned, or a program that inherits the variables; one of them while no other has
    written yet is the only case that cannot be distinguished from the worker itself.
    """
    script = tmp_path / "children.py"
    script.write_text(CHILDREN.format(first=first))
    done = report(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')")
    assert done.returncode == 0, done.stderr
    assert rank0.steps == ([0, 1] if first != "pass" else [1])
    assert len(rank0.named("end")) == 1


def test_iterations_and_listeners(report: Report, rank0: Rank) -> None:
    """What the worker entry hooks into: steps, the end of warm-up in each iteration."""
    done = report("""
from ncclops import receipt
from ncclops.receipts import recorder
seen = []
current = recorder.current()
current.on_step(lambda n: seen.append(n))
current.on_warmup_end(lambda taken: seen.append("warm" if taken is None else taken.seconds))
for n in range(3): receipt.step(n); current.update()
current.begin_iteration(1)
receipt.compile_warmup(seconds=9)
for n in range(2, 5): receipt.step(n)
current.update()
print(seen)
""")
    assert done.stdout.strip() == "[0, 1, 'warm', 2, 9, 2, 3, 4]", done.stderr
    steps = rank0.named("step")
    assert [record["iteration"] for record in steps] == [0, 0, 0, 1, 1, 1]
    assert [n for n, record in enumerate(steps) if "first" in record] == [0, 3]
    assert rank0.named("iteration")[0]["iteration"] == 1
    page = progress.read(RunPaths(rank0.run_dir).rank(0).progress)
    assert page is not None
    assert (page.updates, page.updates_before) == (1, 3)


def test_a_declared_phase_is_seen_and_left_out_of_the_rate(report: Report, rank0: Rank) -> None:
    done = report("""
import os, time
from datetime import timedelta
from pathlib import Path
from ncclops import receipt
from ncclops.receipts import recorder
from ncclops.record import progress
from ncclops.record.paths import RunPaths
look = lambda: progress.read(RunPaths(Path(os.environ["NCCLOPS_RUN_DIR"])).rank(0).progress)
for n in range(4):
    receipt.step(n)
with receipt.phase("checkpoint", limit="30m"):
    page = look()
    print(page.phase, page.phase_limit, page.phase_began_ns > 0)
    with receipt.phase("upload"):
        print(look().phase)
    print(look().phase)
    time.sleep(0.2)
print(look().phase)
receipt.step(4)
receipt.step(5)
with receipt.phase("evaluation"):
    recorder.current().begin_restart(timedelta(minutes=9))
    print(look().phase, look().phase_limit)
recorder.current().begin_iteration(1)
print(look().phase)
""")
    assert done.stdout.split("\n")[:6] == [
        "checkpoint 0:30:00 True",
        "upload",
        "checkpoint",
        "None",
        "restart in place 0:09:00",
        "None",
    ], done.stderr
    disturbed = [record["step"] for record in rank0.named("step") if "phase_s" in record]
    assert disturbed == [4]
    rate = load(rank0.run_dir).steady_rate
    assert rate is not None
    assert rate > 50, "the 0.2 s of the phase are in no rate"


def test_what_cannot_be_called_at_a_stop_is_refused_even_outside_launch() -> None:
    from ncclops import receipt

    with pytest.raises(TypeError, match=r"on_stop\(callback\): give a function, not 3"):
        receipt.on_stop(3)  # type: ignore[type-var]


def test_a_wrong_limit_is_refused_even_outside_launch() -> None:
    from ncclops import receipt

    with pytest.raises(ValueError, match="12 parsecs"):
        receipt.phase("eval", limit="12 parsecs")
    with pytest.raises(TypeError, match=r"give text with a unit, as '90s', .* not 90$"):
        receipt.phase("eval", limit=90)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be positive, not 0s"):
        receipt.phase("eval", limit="0s")


def test_decorators_without_parentheses_are_told_what_lacks() -> None:
    from ncclops import receipt

    def evaluate() -> None: ...

    with pytest.raises(TypeError, match=r"it has parentheses: @receipt\.compile_warmup\(\)"):
        receipt.compile_warmup(evaluate)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"give it a name, as in receipt\.phase\('eval'\)"):
        receipt.phase(evaluate)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_warm_up_of_no_time_is_refused(seconds: float) -> None:
    from ncclops import receipt

    with pytest.raises(ValueError, match=f"no time is {seconds} long"):
        receipt.compile_warmup(seconds)
    with pytest.raises(TypeError, match=r"a number of seconds or a datetime\.timedelta, not '3s'"):
        receipt.compile_warmup("3s")  # type: ignore[arg-type]


def test_a_loss_that_is_no_number_stays_valid_json(report: Report, rank0: Rank) -> None:
    report("from ncclops import receipt\nreceipt.step(0, loss=float('nan'))")
    assert rank0.named("step")[0]["loss"] == "nan"


def train(run_dir: Path, program: str = TRAINING) -> subprocess.CompletedProcess[str]:
    """``program`` as a worker of the run in ``run_dir``, to its end."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env=worker_environ(run_dir),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.slow
def test_a_run_directory_that_cannot_be_written_does_not_stop_training(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    done = train(blocked)
    assert done.returncode == 0
    assert "no receipts from rank 0" in done.stderr


@pytest.mark.slow
def test_a_disk_that_fills_up_does_not_stop_training(tmp_path: Path) -> None:
    """Files may have no more than one page here."""
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    done = train(tmp_path, f"{full}\n{TRAINING.replace('range(4)', 'range(400)')}")
    assert done.returncode == 0
    assert done.stderr.count("receipts are no longer written: File too large") == 1


def test_nothing_is_written_into_what_has_taken_the_number_of_our_file(tmp_path: Path) -> None:
    """Programs that become daemons close all descriptors, and a checkpoint may get the next."""
    (fd, theirs) = (os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("a", "b"))
    written = writer.Writer(fd, lambda: None)
    written.start()
    written.put_now({"n": 1})
    assert written.flush()
    os.dup2(theirs, fd)
    written.put_now({"n": 2})
    written.close()
    assert os.pread(fd, 99, 0) == b""  # and it is open still
    assert (tmp_path / "a").read_text() == '{"n": 1}\n'
    os.close(fd)
    os.close(theirs)


def test_without_shared_memory_the_page_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_page, "_SHARED_MEMORY", tmp_path / "missing")
    path = tmp_path / "ranks" / "0" / "progress"
    page = progress.ProgressPage.create(path)
    page.numbers[progress.STEP] = 8
    assert not path.is_symlink()
    seen = progress.read(path)
    assert seen is not None
    assert seen.step == 7


@pytest.mark.slow
def test_interpreter_progress_stops_with_the_interpreter(tmp_path: Path) -> None:
    """The tick is the proof that Python code can run; a thread that keeps the GIL ends it."""
    source = """
import ctypes, sys
from ncclops import receipt
receipt.step(0)
print("ready", flush=True)
sys.stdin.readline()
print("holding", flush=True)
ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the GIL
"""
    worker = subprocess.Popen(
        [sys.executable, "-c", source],
        env=worker_environ(tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        assert worker.stdout.readline() == b"ready\n"
        first = ticks(tmp_path)
        while ticks(tmp_path) == first:  # no event says that memory has changed
            time.sleep(0.05)
        worker.stdin.write(b"go\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == b"holding\n"
        while ticks(tmp_path) != (last := ticks_after_a_while(tmp_path)):
            assert last, "ends with the test's own time limit if the ticks go on"
    finally:
        worker.kill()
        worker.communicate()
        shared_page.settle(RunPaths(tmp_path).rank(0).progress)


def ticks_after_a_while(run_dir: Path) -> int:
    time.sleep(2.5 * writer.TICK.total_seconds())
    return ticks(run_dir)


def ticks(run_dir: Path) -> int:
    page = progress.read(RunPaths(run_dir).rank(0).progress)
    assert page is not None
    return page.tick_ns


@pytest.mark.extended
@pytest.mark.slow
@lanes("nccl")
def test_the_peak_memory_of_a_rank_with_a_gpu_is_the_gpus(
    rank0: Rank, lane_process: LaneProcess
) -> None:
    """As torch has allocated it; what was freed since is in it."""
    source = """
from ncclops import receipt
gradients = torch.ones(2**28, dtype=torch.uint8, device=device)
del gradients
torch.ones(2**20, dtype=torch.uint8, device=device)
receipt.peak_memory()
"""
    environment = worker_environ(rank0.run_dir) | lane_process.environment | {"LOCAL_RANK": "0"}
    done = subprocess.run(
        [lane_process.python, "-c", IN_SCRIPT + source],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    (memory,) = rank0.named("peak-memory")
    assert (memory["source"], memory["gib"]) == ("cuda", 0.25)
