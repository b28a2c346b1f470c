"""Workers restart in place under `ncclops launch`: the default, and what it cannot recover from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CompletedText
from tests.lanes import IN_SCRIPT, lanes
from tests.launch.conftest import Run

Ncclops = Callable[..., CompletedText]
Script = Callable[..., Path]
OnlyRun = Callable[[], Run]

# Trains a running sum; FAULT=kind:rank happens once, at step 3, on the rank of the first start.
TRAINING = (
    IN_SCRIPT
    + """
import signal, sys, time
import torch.distributed as dist
kind, victim = os.environ["FAULT"].split(":")
dist.init_process_group(**lane)
first = not os.path.exists("faulted")
total = torch.zeros(1, device=device)
for step in range(6):
    dist.all_reduce(share := torch.ones(1, device=device) / dist.get_world_size())
    total += share
    if step == 3 and first and dist.get_rank() == int(victim):
        open("faulted", "w").close()
        if kind == "raise": raise RuntimeError("out of the blue")
        if kind == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exit": sys.exit(5)
if dist.get_world_size() == 2: time.sleep(2)  # the launcher shows another rank by then
print("total", round(total.item(), 3), "of", dist.get_world_size(), "pid", os.getpid(), flush=True)
dist.destroy_process_group()
"""
)


def launch(
    ncclops: Ncclops, path: Path, *options: str, nproc: int = 3, **env: str
) -> CompletedText:
    return ncclops(
        "launch", "--nproc-per-node", str(nproc), "--tee", "all", *options, path, env=env
    )


def test_an_exception_restarts_all_ranks_in_their_processes(
    ncclops: Ncclops, script: Script, only_run: OnlyRun
) -> None:
    done = launch(ncclops, script(TRAINING), FAULT="raise:1")
    assert done.returncode == 0, done.stderr
    run = only_run()
    assert run.verdict["outcome"] == "completed"
    assert run.verdict["attempts"] == 1
    pids = {record["rank"]: record["pid"] for record in run.named("worker-started")}
    for rank in range(3):
        assert run.stdout(rank) == f"total 6.0 of 3 pid {pids[rank]}\n"
    (fault,) = run.named("fault")
    assert (fault["rank"], fault["cause"]) == (1, "RuntimeError: out of the blue")
    (restart,) = run.named("restart")
    # Ranks that lose their peer may raise too, before they see the fault; it comes first.
    assert (restart["iteration"], restart["faulty_ranks"][0]) == (1, 1)
    phases = {"detect", "collect", "abort", "leave", "finalize"}
    phases |= {"health_check", "barrier", "grow", "assign", "enter"}
    assert set(restart["phases_ms"]) == phases
    assert list((run.path / "incidents").iterdir())


@lanes("nccl", extended=("gloo",))
@pytest.mark.parametrize(
    ("fault", "how"),
    [("kill:0", "SIGKILL"), pytest.param("exit:1", "code 5", marks=pytest.mark.extended)],
)
def test_a_rank_that_is_lost_does_not_end_the_job(
    fault: str, how: str, ncclops: Ncclops, script: Script, only_run: OnlyRun
) -> None:
    """Rank 0 is a rank like any other: the store is not in it, and another is shown instead."""
    done = ncclops("launch", "--nproc-per-node", "3", script(TRAINING), env={"FAULT": fault})
    assert done.returncode == 0, done.stderr
    run = only_run()
    assert how in run.verdict["reason"].partition(";")[0], "the loss comes first"
    assert f"ncclops: completed without rank {fault[-1]} after" in done.stderr
    survivors = {0, 1, 2} - {int(fault[-1])}
    for rank in survivors:
        assert run.stdout(rank).startswith("total 6.0 of 2 ")
    assert run.named("restart")[0]["ranks_lost"] == [int(fault[-1])]
    shown = min(survivors)
    assert ("rank 0 exited; now showing rank 1" in done.stderr) == (shown == 1)
    assert f"[rank{shown}]: total 6.0 of 2" in done.stdout
    assert "[rank2]" not in done.stdout


@pytest.mark.extended
def test_a_mistake_in_the_script_is_not_tried_again(
    ncclops: Ncclops, script: Script, only_run: OnlyRun
) -> None:
    source = (
        "import os\nprint('started', flush=True)\n"
        "if os.environ['RANK'] == '1':\n    {}['learning_rate']\n"
        "import time; time.sleep(300)\n"
    )
    done = launch(ncclops, script(source), nproc=2)
    assert done.returncode == 1
    run = only_run()
    assert run.stdout(1) == "started\n"
    verdict = run.verdict
    assert verdict["first_failure"]["rank"] == 1
    assert verdict["first_failure"]["message"] == "KeyError: 'learning_rate'"
    assert verdict["classification"]["class"] == "user-error"
    assert verdict["classification"]["decision"]["action"] == "stop"
    assert "ncclops/restart" not in done.stderr, "frames of ours in the user's traceback"
    assert run.named("retry") == []


@pytest.mark.extended
def test_classes_of_the_script_survive_multiprocessing(ncclops: Ncclops, script: Script) -> None:
    """Spawned children call the script `__mp_main__`, and pickle by that name."""
    source = (
        "import multiprocessing\n"
        "class Thing: pass\n"
        "def make(_): return Thing()\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print([type(thing) is Thing for thing in pool.map(make, range(2))])\n"
    )
    done = launch(ncclops, script(source), nproc=1)
    assert "[True, True]" in done.stdout, done.stderr


@pytest.mark.extended
def test_a_syntax_error_is_a_mistake_too(
    ncclops: Ncclops, script: Script, only_run: OnlyRun
) -> None:
    done = launch(ncclops, script("def broken(:\n"), nproc=1)
    assert done.returncode == 1
    assert "SyntaxError" in done.stderr
    assert len(only_run().named("restart")) == 1, "the decision to stop, and no second try"


def test_the_same_failure_again_and_again_ends_in_new_processes_and_then_in_a_stop(
    ncclops: Ncclops, script: Script, only_run: OnlyRun
) -> None:
    source = (
        "import os, time\n"
        "if os.environ['RANK'] == '1': time.sleep(300)\n"
        "print('started', flush=True)\n"
        "raise RuntimeError('CUDA out of memory')\n"
    )
    done = launch(ncclops, script(source), nproc=2)
    assert done.returncode == 1
    assert only_run().stdout(0) == "started\n" * 3 + "started\n", "once more in a new process"
    first, second = only_run().named("escalation")
    assert (first["to"], second["to"]) == ("respawn", "stop")
    assert "3 times at the same place without a new step" in first["reason"]
    assert "again in new processes" in second["reason"]


def test_each_iteration_finds_the_process_as_it_was(ncclops: Ncclops, script: Script) -> None:
    """Handlers, callbacks, children and variables of the run that ended do not pile up; what its
    imports have set is there, as they do not happen again."""
    script("import os, torch\nos.environ['SITE'] = 'a'\nos.environ['LEVEL'] = '1'\n", "site_.py")
    source = (
        "import atexit, gc, logging, multiprocessing, os, signal, sys, time, torch\n"
        "import site_\n"
        "print('site', os.environ['SITE'], os.environ['LEVEL'], torch.get_default_dtype())\n"
        "os.environ['LEVEL'] = '2'; torch.set_default_dtype(torch.float64)\n"
        "gc.disable()\n"
        "class Model:\n"
        "    def __del__(self, write=os.write): write(1, b'freed\\n')\n"
        "def main(): return model\n"
        "os.write(1, b'makes a model\\n'); model = Model()\n"
        "assert not hasattr(sys.modules['__main__'], 'seen'), 'globals are left over'\n"
        "seen = True\n"
        "here = os.path.dirname(os.path.abspath(sys.argv[0]))\n"
        "print('path', sys.path[0] == here, sys.argv[1:])\n"
        "print('handlers', len(logging.getLogger().handlers))\n"
        "print('children', len(multiprocessing.active_children()))\n"
        "print('usr1', signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL)\n"
        "print('cwd', os.path.basename(os.getcwd()) != 'elsewhere', flush=True)\n"
        "logging.basicConfig(force=False)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: model)\n"
        "multiprocessing.get_context('fork').Process(target=time.sleep, args=(300,)).start()\n"
        "os.makedirs('elsewhere', exist_ok=True); os.chdir('elsewhere'); sys.argv.append('x')\n"
        "atexit.register(lambda n=os.path.exists('../once'): print('exit', n))\n"
        "if not os.path.exists('../once'):\n"
        "    open('../once', 'w').close()\n"
        "    raise RuntimeError('once')\n"
        "for child in multiprocessing.active_children(): child.kill()\n"
    )
    path = script(source)
    done = launch(ncclops, path, nproc=1)
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("[rank0]: ") for line in done.stdout.splitlines()]
    once = ["path True []", "handlers 0", "children 0", "usr1 True", "cwd True"]
    start = ["site a 1 torch.float32", "makes a model"]
    assert sorted(lines) == sorted([*start, *once, "freed", *start, *once, "freed", "exit True"])
    assert lines.index("freed") < lines.index("makes a model", lines.index("makes a model") + 1)


REFUSED = (
    "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:1275, remote process exited or there was a"
    " network error\\nncclRemoteError: A call failed possibly due to a network error.\\nLast error:"
    "\\nsocketPollConnect: connect to 10.0.0.2<40123> returned Connection refused"
)


class TestRetry:
    @pytest.mark.parametrize(
        ("mode", "dies"),
        [
            pytest.param(
                *("in-process", "raise RuntimeError('ncclRemoteError')"),
                marks=pytest.mark.extended,
            ),
            ("process", "sys.exit(1)"),
        ],
    )
    def test_a_failure_to_start_is_retried_once_lazily(
        self, mode: str, dies: str, ncclops: Ncclops, script: Script, only_run: OnlyRun
    ) -> None:
        source = (
            "import os, sys\n"
            "asked = [os.environ.get(f'NCCLOPS_{n}') for n in ('NCCL_INIT', 'BOOTSTRAP_BARRIER')]\n"
            "print('asked', asked, flush=True)\n"
            "if not os.path.exists('once-' + os.environ['RANK']):\n"
            "    open('once-' + os.environ['RANK'], 'w').close()\n"
            f"    sys.stderr.write('{REFUSED}\\n')\n"
            f"    {dies}\n"
        )
        done = launch(ncclops, script(source), "--restart", mode, nproc=1)
        assert done.returncode == 0, done.stderr
        run = only_run()
        assert run.stdout(0) == "asked [None, None]\nasked ['lazy', 'skipped']\n"
        (classified,) = run.named("classified")
        assert classified["class"] == "bootstrap"
        (retry,) = run.named("retry")
        assert (retry["init"], retry["barrier"]) == ("lazy", "skipped")
        assert run.verdict["attempts"] == 2

    @pytest.mark.parametrize(
        ("profiles", "row"),
        [
            pytest.param(["local-cpu"], "['eager', 'standard']", marks=pytest.mark.extended),
            (["local-cpu", "expert-parallel"], "['lazy', 'skipped']"),
        ],
    )
    def test_other_retries_start_as_the_lane_says(
        self, profiles: list[str], row: str, ncclops: Ncclops, script: Script, only_run: OnlyRun
    ) -> None:
        """The first two rows of the matrix, for a restart that the operator has granted."""
        source = (
            "import os\n"
            "asked = [os.environ.get(f'NCCLOPS_{n}') for n in ('NCCL_INIT', 'BOOTSTRAP_BARRIER')]\n"
            "print('asked', asked, flush=True)\n"
            "os._exit(int(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))\n"
        )
        chosen = [word for name in profiles for word in ("--profile", name)]
        options = [*chosen, "--restart", "process", "--max-restarts", "1"]
        done = launch(ncclops, script(source), *options, nproc=1)
        assert done.returncode == 0, done.stderr
        assert only_run().stdout(0) == f"asked [None, None]\nasked {row}\n"

    def test_it_is_not_retried_twice(
        self, ncclops: Ncclops, script: Script, only_run: OnlyRun
    ) -> None:
        source = f"import sys\nsys.stderr.write('{REFUSED}\\n')\nsys.exit(1)\n"
        done = launch(ncclops, script(source), "--restart", "process", nproc=1)
        assert done.returncode == 1
        assert only_run().verdict["attempts"] == 2
        assert "class    bootstrap (" in done.stderr

    @pytest.mark.extended
    def test_a_job_that_the_scheduler_starts_again_gets_no_second_retry(
        self, ncclops: Ncclops, script: Script, tmp_path: Path
    ) -> None:
        path = script(f"import sys\nsys.stderr.write('{REFUSED}\\n')\nsys.exit(1)\n")
        for restarts, attempts in (("0", 2), ("1", 1)):
            slurm = {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": restarts}
            run = f"runs/{restarts}"
            options = ["--restart", "process", "--run-dir", run]
            done = launch(ncclops, path, *options, nproc=1, **slurm)
            assert done.returncode == 1
            assert Run(tmp_path / run).verdict["attempts"] == attempts

    def test_restart_none_means_none(
        self, ncclops: Ncclops, script: Script, only_run: OnlyRun
    ) -> None:
        source = f"import sys\nsys.stderr.write('{REFUSED}\\n')\nsys.exit(1)\n"
        done = launch(ncclops, script(source), "--restart", "none", nproc=1)
        assert done.returncode == 1
        assert only_run().verdict["attempts"] == 1
