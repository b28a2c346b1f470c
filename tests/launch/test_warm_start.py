"""Workers that are forked from a process which has imported torch already."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CompletedText
from tests.launch.conftest import Run

pytestmark = pytest.mark.slow

Ncclops = Callable[..., CompletedText]
Script = Callable[..., Path]

# What a script can see of its process, but for names and numbers of the run itself.
LOOK = """
import json, os, sys, threading
from pathlib import Path
import __main__
proc = Path("/proc/self")
of_the_run = (
    "NCCLOPS_RUN", "NCCLOPS_STARTED", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR"
)
json.dump({
    "environ": {name: value.replace(os.environ["NCCLOPS_RUN_DIR"], "RUN")
                for name, value in os.environ.items() if not name.startswith(of_the_run)},
    "argv": sys.argv, "path": sys.path, "flags": str(sys.flags),
    "main": sorted(name for name in vars(__main__) if name.startswith("__")) + [__main__.__file__],
    "leads a session": os.getsid(0) == os.getpid(),
    "parent": "ncclops" in Path(f"/proc/{os.getppid()}/cmdline").read_text(),
    "cmdline": (proc / "cmdline").read_text(),
    "signals": [line for line in (proc / "status").read_text().splitlines()
                if line.startswith(("SigBlk", "SigIgn", "SigCgt"))],
    "threads": sorted(thread.name for thread in threading.enumerate()),
    "streams": [Path(os.readlink(proc / "fd" / str(number))).name for number in range(3)],
    "files": len(list((proc / "fd").iterdir())),
}, open(f"{sys.argv[1]}-{os.environ['RANK']}.json", "w"))
"""


def launch(ncclops: Ncclops, run: Path, *arguments: str | Path, **env: str) -> Run:
    done = ncclops(
        *("launch", "--profile", "local-cpu", "--nproc-per-node", "2", "--run-dir", run),
        *arguments,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    return Run(run)


def forked(run: Run) -> list[bool]:
    return [record["forked"] for record in run.named("worker-started")]


def agent_log(run: Run) -> str:
    return (run.path / "agent.log").read_text()


def test_a_script_sees_what_it_sees_in_a_process_that_is_started_afresh(
    ncclops: Ncclops, script: Script, tmp_path: Path
) -> None:
    path = script(LOOK)
    warm = launch(ncclops, tmp_path / "a", "--warm-start", path, "in-one", "--more")
    cold = launch(ncclops, tmp_path / "b", "--no-warm-start", path, "in-two", "--more")
    assert (forked(warm), forked(cold)) == ([True, True], [False, False])
    for rank in range(2):
        seen: list[dict[str, Any]] = [
            json.loads((tmp_path / f"{kind}-{rank}.json").read_text().replace(kind, "KIND"))
            for kind in ("in-one", "in-two")
        ]
        assert seen[0] == seen[1]


@pytest.mark.extended
def test_ranks_draw_different_random_numbers(
    ncclops: Ncclops, script: Script, tmp_path: Path
) -> None:
    """numpy's generator is the one that a fork copies, once it is imported."""
    path = script("import numpy, random; print(numpy.random.rand(), random.random())")
    run = launch(ncclops, tmp_path / "run", "--warm-start", path)
    assert forked(run) == [True, True]
    first, second = (run.stdout(rank).split() for rank in range(2))
    assert not set(first) & set(second)


@pytest.mark.extended
def test_threads_of_numpy_are_no_reason_against_a_fork(
    ncclops: Ncclops, script: Script, tmp_path: Path
) -> None:
    """OpenBLAS has one for each core but the first, unless it is told otherwise."""
    path = script("import numpy; print((numpy.ones((300, 300)) @ numpy.ones((300, 300))).sum())")
    run = launch(ncclops, tmp_path / "run", "--warm-start", path, OMP_NUM_THREADS="4")
    assert forked(run) == [True, True]
    assert run.stdout(0) == "27000000.0\n"


def test_how_a_forked_worker_ended_is_known(
    ncclops: Ncclops, script: Script, tmp_path: Path
) -> None:
    """And all are forked again where new processes are asked for, from the same server."""
    source = """
import os, signal
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1": os.kill(os.getpid(), signal.SIGKILL)
    import time; time.sleep(600)
"""
    run = launch(
        ncclops,
        tmp_path / "run",
        *("--restart", "process", "--warm-start", "--max-restarts", "1"),
        script(source),
    )
    assert forked(run) == [True] * 4
    ends = {
        (each["rank"], each["exit_code"], each["signal"]) for each in run.named("worker-exited")
    }
    assert {(1, None, "SIGKILL"), (0, 0, None), (1, 0, None)} <= ends
    assert agent_log(run).count("is ready") == 1
    # So is the store, anew for each attempt.
    assert (run.path / "store.log").read_text().count("serving on port") == 2
    assert "started afresh" not in agent_log(run)


@pytest.mark.extended
def test_children_of_multiprocessing_are_waited_for_before_only_the_end_is_left(
    ncclops: Ncclops, script: Script, tmp_path: Path
) -> None:
    """From then on the agent ends a process that stays. One that uploads in a child may."""
    source = """
import os
from multiprocessing.util import Finalize
from pathlib import Path

own = Path(os.environ["NCCLOPS_RUN_DIR"], "ranks", os.environ["RANK"], "worker.jsonl")
# multiprocessing runs it where it joins the children.
Finalize(None, lambda: print(own.exists() and '"exiting"' in own.read_text()), exitpriority=1)
"""
    for start in ("--warm-start", "--no-warm-start"):
        run = launch(ncclops, tmp_path / start, start, script(source))
        assert forked(run) == [start == "--warm-start"] * 2
        assert run.stdout(0) == "False\n"
        assert '"exiting"' in (run.path / "ranks" / "0" / "worker.jsonl").read_text()


@pytest.mark.parametrize(
    ("module", "said"),
    [
        pytest.param(
            "import threading, time\n"
            "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
            "the imports have started threads: python",
            marks=pytest.mark.extended,
        ),
        pytest.param("import os\nos._exit(3)", "it has ended", marks=pytest.mark.extended),
        pytest.param(
            "import os\nos.chdir('/')",
            "the imports have changed the current directory",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
            "its imports hang, or it was stopped",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
            "it has ended",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_where_a_fork_is_not_safe_workers_are_started_afresh(
    module: str, said: str, ncclops: Ncclops, script: Script, tmp_path: Path
) -> None:
    script(module, name="unsafe.py")
    profile = warm_profile(tmp_path, "unsafe")
    run = launch(
        ncclops,
        tmp_path / "run",
        "--profile",
        profile,
        script("print('ran')"),
        PYTHONPATH=str(tmp_path),
    )
    assert forked(run) == [False, False]
    assert f"workers are started afresh: the fork server: {said}" in agent_log(run)
    assert run.stdout(1) == "ran\n"


def test_variables_that_an_import_sets_reach_the_workers(
    ncclops: Ncclops, script: Script, tmp_path: Path
) -> None:
    """The script's own import of it does nothing any more."""
    script("import os\nos.environ['OF_THE_IMPORT'] = 'set'", name="sets.py")
    source = "import os, sets; print(os.environ['OF_THE_IMPORT'])"
    profile = warm_profile(tmp_path, "sets")
    run = launch(
        *(ncclops, tmp_path / "run", "--profile", profile, script(source)),
        PYTHONPATH=str(tmp_path),
    )
    assert forked(run) == [True, True]
    assert run.stdout(1) == "set\n"


@pytest.mark.extended
def test_a_module_that_is_not_there_is_told_and_costs_nothing_else(
    ncclops: Ncclops, script: Script, tmp_path: Path
) -> None:
    profile = warm_profile(tmp_path, "not_there_at_all")
    run = launch(ncclops, tmp_path / "run", "--profile", profile, script("print('ran')"))
    assert forked(run) == [True, True]
    assert "cannot import not_there_at_all: ModuleNotFoundError" in agent_log(run)


@pytest.mark.extended
def test_a_server_that_does_not_answer_is_given_up(
    ncclops: Ncclops, script: Script, tmp_path: Path
) -> None:
    """A rank stops it, as the out-of-memory killer or a debugger may."""
    source = """
import os, re, signal
from pathlib import Path
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":  # the last one to be forked
        log = Path(os.environ["NCCLOPS_RUN_DIR"], "agent.log").read_text()
        os.kill(int(re.search(r"fork server \\(pid (\\d+)\\)", log)[1]), signal.SIGSTOP)
    raise RuntimeError("again")
"""
    run = launch(
        ncclops,
        tmp_path / "run",
        *("--restart", "process", "--warm-start", "--max-restarts", "1"),
        script(source),
    )
    assert forked(run) == [True, True, False, False]
    assert "the fork server: it did not answer within" in agent_log(run)


def test_a_stop_before_the_workers_are_there_starts_none(
    ncclops: Ncclops, script: Script, tmp_path: Path
) -> None:
    """They would only be killed, and the verdict say that ranks did not exit cleanly."""
    (tmp_path / "stops_the_run.py").write_text(
        "import os, signal, psutil\n"
        "os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGTERM)\n"  # of the agent: launch
        "while True: pass\n"
    )
    profile = warm_profile(tmp_path, "stops_the_run")
    done = ncclops(
        *("launch", "--profile", "local-cpu", "--profile", profile, "--nproc-per-node", "2"),
        *("--run-dir", tmp_path / "run", script("")),
        env={"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert done.returncode == 143, done.stderr
    run = Run(tmp_path / "run")
    assert run.verdict["reason"] == "stopped by SIGTERM"
    assert (run.verdict["workers"], run.named("worker-started")) == ([], [])


def warm_profile(tmp_path: Path, module: str) -> Path:
    path = tmp_path / "warm.toml"
    path.write_text(
        'description = "For tests."\nkind = "overlay"\n'
        f'[warm_start]\nenabled = true\nimports = ["{module}"]\n'
    )
    return path
