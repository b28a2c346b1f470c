"""What a user of `ncclops launch` relies on, with real workers in real processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import (
    LIMIT_S,
    REPOSITORY,
    CompletedText,
    clean_environ,
    free_port,
    run_ncclops,
)
from tests.launch.conftest import Background, Run
from tests.restart.refusal import refuse_pidfds

Ncclops = Callable[..., CompletedText]
Script = Callable[..., Path]
OnlyRun = Callable[[], Run]

EXAMPLE = REPOSITORY / "docs" / "examples" / "train_ddp.py"

DUMP_ENVIRON = """
import json, os
with open(f"environ-{os.environ['RANK']}.json", "w") as file:
    json.dump(dict(os.environ), file)
"""


def environ_of(directory: Path, rank: int) -> dict[str, str]:
    environ: dict[str, str] = json.loads((directory / f"environ-{rank}.json").read_text())
    return environ


def test_the_example_trains_under_the_single_node_profile(
    ncclops: Ncclops, only_run: OnlyRun
) -> None:
    done = ncclops(
        "launch", "--profile", "single-node-h200", "--nproc-per-node", "2", EXAMPLE, "--steps", "60"
    )
    assert done.returncode == 0, done.stderr
    losses = [
        float(line.split(" loss ")[1].split()[0])
        for line in done.stdout.splitlines()
        if " loss " in line
    ]
    assert losses[-1] < losses[0] / 1.5
    assert "[rank0]: training finished" in done.stdout
    run = only_run()
    assert run.verdict["outcome"] == "completed"
    assert [worker["exit_code"] for worker in run.verdict["workers"]] == [0, 0]
    names = [record["event"] for record in run.events]
    assert names[:3] == ["run-started", "stack", "env-applied"]
    assert names.count("worker-started") == names.count("worker-exited") == 2
    assert names[-1] == "verdict"
    assert done.stderr.startswith("ncclops: torch ")


LEAKED = {"NCCL_NET": "IB", "NCCL_IB_TC": "106", "NCCL_TUNER_CONFIG_PATH": "/x"}
STALE = {"RANK": "7", "WORLD_SIZE": "99", "MASTER_ADDR": "elsewhere"}
# Of a run whose rank starts this one.
OUTER = {"NCCLOPS_RUN_DIR": "/outer", "NCCLOPS_STORE_PREFIX": "ncclops/outer/0"}
SECRET = "abc123def"
CHOICE = ["--profile", "single-node-h200", "--set", "A=b c", "--set", f"HF_TOKEN={SECRET}"]
CHOICE += ["--keep", "NCCL_IB_TC"]


@pytest.fixture(scope="module")
def dumped(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run of two workers, in an environment with leftovers, has dumped theirs."""
    directory = tmp_path_factory.mktemp("dumped")
    path = directory / "train.py"
    path.write_text(DUMP_ENVIRON)
    options = [*CHOICE, "--run-dir", "run", "--nproc-per-node", "2"]
    done = run_ncclops(directory, "launch", *options, path, env={**LEAKED, **STALE, **OUTER})
    assert done.returncode == 0, done.stderr
    return directory


def test_workers_get_exactly_what_env_diff_said(dumped: Path, ncclops_in_process: Ncclops) -> None:
    diff = ncclops_in_process("env", "diff", "--json", *CHOICE, env={**LEAKED, **STALE})
    changes = json.loads(diff.stdout)["changes"]
    assert {c["name"] for c in changes} >= {*LEAKED, "A", "NCCL_NVLS_ENABLE"}
    for rank in (0, 1):
        environ = environ_of(dumped, rank)
        rank_dir = str(dumped / "run" / "ranks" / str(rank))
        for change in changes:
            expected = change["after"] and change["after"].replace("{rank_dir}", rank_dir)
            assert environ.get(change["name"]) == expected, change
        untouched = set(clean_environ(LEAKED)) - {change["name"] for change in changes}
        untouched -= {"PYTEST_CURRENT_TEST"}  # names the phase of the test, too
        assert {k: environ.get(k) for k in untouched} == {
            k: v for k, v in clean_environ(LEAKED).items() if k in untouched
        }


def test_a_run_started_from_a_rank_of_another_is_another_job(dumped: Path) -> None:
    environ = environ_of(dumped, 0)
    assert environ["NCCLOPS_RUN_DIR"] == str(dumped / "run")
    assert "NCCLOPS_STORE_PREFIX" not in environ


def test_no_record_of_a_run_has_a_secret_that_was_set(dumped: Path) -> None:
    assert environ_of(dumped, 0)["HF_TOKEN"] == SECRET
    records = [path for path in (dumped / "run").rglob("*") if path.is_file()]
    assert {"run.json", "events.jsonl", "environment.json"} <= {path.name for path in records}
    assert not [path for path in records if SECRET.encode() in path.read_bytes()]


def test_workers_are_identified_by_torchruns_variables(dumped: Path) -> None:
    theirs = torchrun_environ(dumped)
    for rank in (0, 1):
        ours = environ_of(dumped, rank)
        # Which port, which run and which file are each launcher's own affair.
        free = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "MASTER_ADDR"}
        expected = {
            k
            for k in theirs[rank]
            if "RANK" in k or "SIZE" in k or k.startswith(("TORCHEL", "MAST", "ROLE"))
        }
        # torchrun's own, for its workers' wrapper
        expected -= {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
        assert expected >= {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_NAME", "TORCHELASTIC_RUN_ID"}
        assert {k: ours.get(k) for k in expected - free} == {
            k: theirs[rank][k] for k in expected - free
        }
        assert expected <= set(ours)
        assert ours["MASTER_ADDR"] != STALE["MASTER_ADDR"]


def torchrun_environ(dumped: Path) -> list[dict[str, str]]:
    directory = dumped / "torchrun"
    directory.mkdir()
    subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            dumped / "train.py",
        ],
        cwd=directory,
        env=clean_environ(),
        check=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    return [environ_of(directory, rank) for rank in (0, 1)]


TORCHRUN_EXAMPLE = """
# After the shape of the public minimal examples: options of its own, env:// and one collective.
import argparse, os
import torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--total_epochs", type=int)
parser.add_argument("--batch_size", type=int, default=32)
args = parser.parse_args()
dist.init_process_group("gloo")
tensor = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(tensor)
print("sum", tensor.item(), args.total_epochs, args.batch_size, os.environ["LOCAL_RANK"])
dist.destroy_process_group()
"""


# Where the restart core has no part in what is shown: it imports torch in each worker.
WITHOUT_RESTART = ["--restart", "none"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("--standalone --nproc_per_node=2", marks=pytest.mark.extended),
        "--nnodes=1 --nproc_per_node=2 --rdzv_id=4 --rdzv_backend=c10d --rdzv_endpoint=localhost:0",
        pytest.param(
            "--nproc-per-node 2 --nnodes 1:1 --max_restarts=3 --monitor_interval=5 --tee 3",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_a_torchrun_line_runs_with_the_first_word_changed(
    options: str, ncclops: Ncclops, script: Script
) -> None:
    path = script(TORCHRUN_EXAMPLE)
    done = ncclops("launch", *options.split(), path, "--total_epochs", "3", "--batch_size=8")
    assert done.returncode == 0, done.stderr
    assert "[rank0]: sum 3.0 3 8 0" in done.stdout
    assert ("[rank1]: sum 3.0 3 8 1" in done.stdout) == ("--tee" in options)


def test_modules_and_programs_run_too(ncclops: Ncclops, tmp_path: Path) -> None:
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "__main__.py").write_text("import sys; print('module', sys.argv[1:])")
    options = [*WITHOUT_RESTART, "--nproc-per-node", "1"]
    done = ncclops("launch", *options, "-m", "trainer", "--lr", "1")
    assert "[rank0]: module ['--lr', '1']" in done.stdout, done.stderr
    done = ncclops("launch", "--no-python", "sh", "-c", 'echo "program $RANK"')
    assert "[rank0]: program 0" in done.stdout, done.stderr
    assert "no GPU found: starting 1 worker" in done.stderr
    assert "has become another program" not in done.stderr, "as asked"


class TestFailure:
    def test_the_end_names_rank_code_last_lines_and_log(
        self, ncclops: Ncclops, script: Script, only_run: OnlyRun
    ) -> None:
        source = (
            "import os, time\n"
            "if os.environ['RANK'] == '1':\n"
            "    raise KeyError('no such column')\n"
            "time.sleep(60)\n"
        )
        done = ncclops("launch", "--nproc-per-node", "2", script(source))
        assert done.returncode == 1
        (headline,) = [line for line in done.stderr.splitlines() if "failed after" in line]
        assert "rank 1 on " in headline
        assert "KeyError: 'no such column'" in done.stderr
        assert "ranks/1/stderr.log" in done.stderr
        assert "ncclops/worker" not in done.stderr, "frames of ours in the user's traceback"
        run = only_run()
        failure = run.verdict["first_failure"]
        assert (failure["rank"], failure["exit_code"]) == (1, 1)
        assert failure["message"] == "KeyError: 'no such column'"
        assert {record["rank"] for record in run.named("fault")} == {1}

    @pytest.mark.parametrize(
        ("source", "action", "code"),
        [
            ("raise KeyError('no such column')", "fix", 78),
            ("import os, signal; print('step 1 loss 2.0', flush=True); os.kill(os.getpid(), 6)",
             "unknown", 7),
            ("from ncclops import receipt; receipt.step(0); raise KeyError('x')", "unknown", 7),
            ("import torch; p = torch.ones(1, requires_grad=True); p.sum().backward();"
             " torch.optim.SGD([p], lr=0.1).step(); raise KeyError('x')", "unknown", 7),
        ],
    )  # fmt: skip
    def test_a_scheduler_sees_whether_another_start_may_help(
        self, source: str, action: str, code: int, ncclops: Ncclops, script: Script,
        only_run: OnlyRun,
    ) -> None:  # fmt: skip
        profile = script(
            'description = "here"\nextends = "local-cpu"\n[exit_codes]\nset = "scheduler"\n',
            "here.toml",
        )
        given = ("--profile", profile, "--exit-codes", "unknown=7", "--restart", "none")
        done = ncclops("launch", *given, script(source))
        assert done.returncode == code, done.stderr
        run = only_run()
        verdict = run.verdict
        assert (verdict["next_action"], verdict["exit_code"]) == (action, code)
        recorded = json.loads((run.path / "run.json").read_text())["exit_codes"]
        assert (recorded["retry"], recorded["unknown"]) == (75, 7)

    def test_a_signal_is_named(self, ncclops: Ncclops, script: Script, only_run: OnlyRun) -> None:
        source = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
        done = ncclops("launch", *WITHOUT_RESTART, "--nproc-per-node", "1", script(source))
        assert done.returncode == 1
        (headline,) = [line for line in done.stderr.splitlines() if "failed after" in line]
        assert "rank 0 on " in headline
        assert "SIGSEGV" in headline
        verdict = only_run().verdict
        assert verdict["first_failure"]["signal"] == "SIGSEGV"
        assert verdict["classification"]["class"] == "process-crash"

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            pytest.param(
                "raise ValueError('bad value\\nsecond line')",
                "ValueError: bad value",
                marks=pytest.mark.extended,
            ),
            ("import sys; sys.exit('config file missing: foo.yaml')", "config file missing"),
        ],
    )
    def test_the_headline_says_why(
        self, source: str, message: str, ncclops: Ncclops, script: Script
    ) -> None:
        done = ncclops("launch", *WITHOUT_RESTART, "--nproc-per-node", "1", script(source))
        (headline,) = [line for line in done.stderr.splitlines() if "failed after" in line]
        assert message in headline

    def test_a_script_of_errors_only_shows_its_own_traceback(
        self, ncclops: Ncclops, script: Script
    ) -> None:
        options = [*WITHOUT_RESTART, "--nproc-per-node", "1"]
        done = ncclops("launch", *options, script("def broken(:\n"))
        assert done.returncode == 1
        assert "SyntaxError" in done.stderr

    def test_quiet_leaves_out_what_went_as_it_should(
        self, ncclops: Ncclops, script: Script, only_run: OnlyRun
    ) -> None:
        """The second attempt ends well; that the first did not is shown."""
        source = (
            "import os, sys\n"
            "print('words of the script', file=sys.stderr)\n"
            "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n"
        )
        job = ["--restart", "process", "--nproc-per-node", "1", "--tee", "none", script(source)]
        failed = ncclops("launch", "-q", *job)
        first, *_, last = failed.stderr.splitlines()
        assert first.startswith("ncclops: failed after ")
        assert last == f"ncclops: verdict: runs/{only_run().path.name}/verdict.json"
        mended = ncclops("launch", "--max-restarts", "1", *job, env={"NCCLOPS_VERBOSE": "-1"})
        assert mended.returncode == 0, mended.stderr
        retried, last = mended.stderr.splitlines()
        assert retried.startswith("ncclops: attempt 2: retrying by --max-restarts")
        assert last.startswith("ncclops: verdict: runs/")

    def test_max_restarts_starts_all_workers_again(
        self, ncclops: Ncclops, script: Script, only_run: OnlyRun
    ) -> None:
        """The store is the agent's, so the second attempt must not meet the first one's keys."""
        source = (
            "import os, torch, torch.distributed as dist\n"
            "dist.init_process_group('gloo')\n"
            "dist.barrier()\n"
            "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
            "if attempt == '0' and dist.get_rank() == 0:\n"
            "    raise RuntimeError('first attempt')\n"
            "dist.barrier()\n"
            "print('attempt', attempt)\n"
        )
        done = ncclops("launch", "--nproc-per-node", "2", "--max-restarts", "2", script(source))
        assert done.returncode == 0, done.stderr
        run = only_run()
        assert "attempt 1" in run.stdout(0)
        assert run.verdict["attempts"] == 2
        assert len(run.named("retry")) == 1
        assert (run.path / "ranks" / "0" / "error-0.json").exists()

    @pytest.mark.extended
    def test_a_named_port_serves_every_attempt(
        self, ncclops: Ncclops, script: Script, only_run: OnlyRun
    ) -> None:
        port = str(free_port())
        source = (
            "import os, torch.distributed as dist\n"
            "dist.init_process_group('gloo')\n"
            "print('port', os.environ['MASTER_PORT'])\n"
            "os._exit(int(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))\n"
        )
        options = ["--nproc-per-node", "1", "--max-restarts", "1", "--master-port", port]
        done = ncclops("launch", *options, script(source))
        assert done.returncode == 0, done.stderr
        assert only_run().stdout(0) == f"port {port}\n" * 2

    def test_restart_none_stops_at_the_first_failure(
        self, ncclops: Ncclops, script: Script, only_run: OnlyRun
    ) -> None:
        options = ["--max-restarts", "2", "--restart", "none", "--nproc-per-node", "1"]
        assert ncclops("launch", *options, script("raise SystemExit(3)")).returncode == 1
        assert only_run().verdict["attempts"] == 1


class TestBadInput:
    """One line on stderr that says what and where; exit 2; no run directory left behind."""

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--profile", "single-nod-h200", "ok.py"], "single-node-h200"),
            (["--profile", "syntax.toml", "ok.py"], "syntax.toml"),
            (["--profile", "loop.toml", "ok.py"], "loop.toml"),
            (["--profile", "key.toml", "ok.py"], "kinds"),
            (["--profile", "duration.toml", "ok.py"], "stop_grace"),
            (["--profile", "multi-host-h200", "ok.py"], "several nodes"),
            (["missing.py"], "missing.py"),
            (["."], "directory"),
            (["unreadable.py"], "unreadable.py"),
            (["-m", "no_such_module_here"], "no_such_module_here"),
            (["--nproc-per-node", "0", "ok.py"], "--nproc-per-node"),
            (["--max-restarts", "-1", "ok.py"], "max-restarts"),
            (["--restart", "sometimes", "ok.py"], "restart"),
            (["--set", "A", "ok.py"], "--set"),
            (["--set", "RANK=3", "ok.py"], "RANK"),
            (["--set", "A=1", "--unset", "A", "ok.py"], "A is given"),
            (["--nnodes", "2", "ok.py"], "--master-addr"),
            (["--no-such-option", "ok.py"], "--no-such-option"),
            ([], "SCRIPT"),
        ],
    )
    def test_one_line_and_exit_2(
        self, arguments: list[str], says: str, ncclops_in_process: Ncclops, tmp_path: Path
    ) -> None:
        if "unreadable.py" in arguments and os.geteuid() == 0:
            pytest.skip("root reads everything")
        files = {
            "ok.py": "",
            "unreadable.py": "",
            "syntax.toml": "description = \n",
            "loop.toml": 'description = "a"\nkind = "lane"\nextends = "./loop.toml"\n',
            "key.toml": 'description = "a"\nkinds = "a"\nkind = "lane"\n',
            "duration.toml": 'description = "a"\nkind = "lane"\n[timeouts]\nstop_grace = "15"\n',
        }
        for name, content in files.items():
            (tmp_path / name).write_text(content)
        (tmp_path / "unreadable.py").chmod(0)
        self.refused(ncclops_in_process("launch", *arguments), says, tmp_path)

    @pytest.mark.parametrize(
        ("place", "says"), [("/proc/nowhere", "/proc/nowhere"), ("train.py", "run directory")]
    )
    def test_a_run_directory_that_cannot_be_made_is_refused(
        self, place: str, says: str, ncclops: Ncclops, script: Script, tmp_path: Path
    ) -> None:
        """By then the port of the store is taken, which only the end of the process gives back."""
        self.refused(ncclops("launch", "--run-dir", place, script("")), says, tmp_path)

    @staticmethod
    def refused(done: CompletedText, says: str, tmp_path: Path) -> None:
        assert done.returncode == 2
        assert done.stdout == ""
        errors = [line for line in done.stderr.splitlines() if line]
        assert errors[-1].startswith("ncclops: error: ")
        assert says in errors[-1]
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "runs").exists()

    def test_a_taken_port_is_reported_at_once(self, ncclops: Ncclops, script: Script) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            done = ncclops("launch", "--master-port", port, script(""))
        assert done.returncode == 2
        assert port in done.stderr


class TestOutput:
    def test_many_megabytes_and_long_lines_arrive_whole(
        self, ncclops: Ncclops, script: Script, only_run: OnlyRun
    ) -> None:
        """No line is lost, cut or mixed with another, on the terminal and in the files."""
        source = (
            "import os, sys\n"
            "rank = os.environ['RANK']\n"
            "out = sys.stdout\n"
            "for n in range(8):\n"
            "    out.write(f'{rank} {n} ' + 'x' * (1 << 20) + ' end\\n')\n"
            "    for small in range(2000):\n"
            "        out.write(f'{rank} small {n} {small} ' + 'y' * 500 + ' end\\n')\n"
        )
        options = [*WITHOUT_RESTART, "--tee", "all", "--nproc-per-node", "2"]
        done = ncclops("launch", *options, script(source))
        assert done.returncode == 0, done.stderr
        shown: dict[str, list[str]] = {"0": [], "1": []}
        for line in done.stdout.splitlines():
            assert line.startswith("[rank")
            shown[line[5]].append(line[len("[rank0]: ") :])
        for rank in (0, 1):
            in_file = only_run().stdout(rank).splitlines()
            assert len(in_file) == 8 * 2001
            assert all(line.startswith(f"{rank} ") and line.endswith(" end") for line in in_file)
            assert shown[str(rank)] == in_file

    def test_a_last_line_without_an_end_is_shown(self, ncclops: Ncclops, script: Script) -> None:
        source = "import sys; sys.stdout.write('no newline'); sys.stderr.write('here neither')"
        done = ncclops("launch", *WITHOUT_RESTART, "--nproc-per-node", "1", script(source))
        assert done.stdout == "[rank0]: no newline\n"
        assert "[rank0]: here neither\n" in done.stderr

    def test_json_prints_the_verdict_and_nothing_else(
        self, ncclops: Ncclops, script: Script
    ) -> None:
        options = [*WITHOUT_RESTART, "--json", "--nproc-per-node", "1"]
        done = ncclops("launch", *options, script("print('hello')"))
        assert json.loads(done.stdout)["outcome"] == "completed"
        assert "[rank0]: hello" in done.stderr

    def test_a_reader_that_leaves_does_not_end_the_run(
        self, background: Callable[..., Background], script: Script, only_run: OnlyRun
    ) -> None:
        path = script("for n in range(30_000): print('line', n)\nprint('done')")
        options = [*WITHOUT_RESTART, "--nproc-per-node", "1"]
        process = background("launch", *options, path, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(LIMIT_S) == 0
        assert only_run().stdout(0).endswith("done\n")

    def test_a_dry_run_starts_nothing(
        self, ncclops: Ncclops, script: Script, tmp_path: Path
    ) -> None:
        path = script("open('started', 'w')")
        done = ncclops("launch", "--dry-run", "--json", "--nproc-per-node", "3", path, "--lr", "1")
        document: dict[str, Any] = json.loads(done.stdout)
        assert document["schema"] == "ncclops.dry-run/1"
        assert document["world_size"] == 3
        assert document["command"][-3:] == [str(path), "--lr", "1"]
        assert "NCCL_NVLS_ENABLE" not in {row["name"] for row in document["plan"]}, "local-cpu"
        for_people = ncclops("launch", "--dry-run", path).stdout
        assert "TORCH_FR_BUFFER_SIZE" in for_people
        assert not (tmp_path / "runs").exists()
        assert not (tmp_path / "started").exists()


def refused(directory: Path, *before: str, preexec_fn: Callable[[], None] | None = None) -> str:
    """The one line of a ``launch``, behind the command ``before``, that has begun nothing."""
    (directory / "train.py").touch()
    launch = [sys.executable, "-m", "ncclops", "launch", "--nproc-per-node", "1", "train.py"]
    done = subprocess.run(
        [*before, *launch],
        cwd=directory,
        env=clean_environ(),
        preexec_fn=preexec_fn,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert not (directory / "runs").exists()
    return done.stderr


@pytest.mark.slow
def test_a_container_that_refuses_pidfds_is_told_of_before_anything_starts(tmp_path: Path) -> None:
    if (
        b"refused"
        not in subprocess.run(
            [sys.executable, "-m", "tests.restart.refusal"], cwd=REPOSITORY, capture_output=True
        ).stdout
    ):
        pytest.skip("no seccomp filter can be set here")
    said = refused(tmp_path, preexec_fn=refuse_pidfds)
    assert "pidfd_open is refused here (Operation not permitted)" in said
    assert "seccomp profile" in said


@pytest.mark.slow
def test_a_container_without_proc_is_told_of_before_anything_starts(tmp_path: Path) -> None:
    unshare = ["unshare", "--mount", "--propagation", "private"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs mount namespaces")
    in_namespace = [*unshare, "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    assert "no processes are to be seen in /proc: mount it" in refused(tmp_path, *in_namespace)


@pytest.mark.extended
def test_two_nodes_by_torchruns_static_options(
    background: Callable[..., Background], script: Script, tmp_path: Path
) -> None:
    path = script(TORCHRUN_EXAMPLE)
    port = str(free_port())
    job = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    agents = [
        background(
            "launch", "--run-dir", f"node-{rank}", "--nproc-per-node", "2", *job,
            "--node-rank", str(rank), path, "--total_epochs", "1",
        )
        for rank in (1, 0)
    ]  # fmt: skip
    assert [agent.wait(LIMIT_S) for agent in agents] == [0, 0]
    assert "sum 10.0 1 32 1" in Run(tmp_path / "node-1").stdout(3)


@pytest.mark.extended
def test_runs_of_the_same_second_do_not_collide(
    background: Callable[..., Background], script: Script, tmp_path: Path
) -> None:
    options = [*WITHOUT_RESTART, "--nproc-per-node", "1"]
    runs = [background("launch", *options, script("")) for _ in range(4)]
    assert [run.wait(LIMIT_S) for run in runs] == [0] * 4
    assert len(list((tmp_path / "runs").iterdir())) == 4


TRAINER = """
print("compile_warmup 12.5s")
for step in range(5):
    print(f"step {step:05d} loss {3.0 - step / 10:.4f} tok/s 1,000")
print("peak memory 10.50 GiB")
print("training finished")
"""


class TestReceipt:
    def test_a_run_is_judged_by_what_it_printed(
        self, ncclops: Ncclops, script: Script, only_run: OnlyRun
    ) -> None:
        done = ncclops("launch", "--require-receipt", "--nproc-per-node", "1", script(TRAINER))
        assert done.returncode == 0, done.stderr
        assert "receipt: healthy (5 steps reported, warm-up 12.50s" in done.stderr
        receipt = only_run().verdict["receipt"]
        assert (receipt["verdict"], receipt["peak_memory_gib"]) == ("healthy", 10.5)

    def test_a_run_without_an_end_is_no_success_where_a_receipt_is_required(
        self, ncclops: Ncclops, script: Script, only_run: OnlyRun
    ) -> None:
        source = TRAINER.replace('print("training finished")', "")
        options = [*WITHOUT_RESTART, "--require-receipt", "--nproc-per-node", "1"]
        done = ncclops("launch", *options, script(source))
        assert done.returncode == 4
        assert "receipt: incomplete" in done.stderr
        verdict = only_run().verdict
        assert (verdict["outcome"], verdict["exit_code"]) == ("no-receipt", 4)

    def test_a_mistake_of_ncclops_is_recorded_and_is_no_missing_receipt(
        self, ncclops: Ncclops, script: Script, only_run: OnlyRun, tmp_path: Path
    ) -> None:
        """Made by what Python runs first in each process."""
        (tmp_path / "mistake").mkdir()
        (tmp_path / "mistake" / "sitecustomize.py").write_text(
            "from ncclops.receipts import judge\n"
            "judge.judge = lambda facts: facts.no_such_attribute\n"
        )
        options = [*WITHOUT_RESTART, "--require-receipt", "--nproc-per-node", "1"]
        path = os.pathsep.join([str(tmp_path / "mistake"), clean_environ()["PYTHONPATH"]])
        done = ncclops("launch", *options, script(TRAINER), env={"PYTHONPATH": path})
        assert done.returncode == 70, done.stderr
        run = only_run()
        assert (run.verdict["outcome"], run.verdict["receipt"]) == ("no-receipt", None)
        assert "the receipt could not be judged" in run.verdict["reason"]
        error = run.named("internal-error")[0]
        assert error["doing"] == "judging the receipt"
        assert error["error"].startswith("AttributeError: ")
        log = (run.path / "agent.log").read_text()
        assert "Traceback" in log
        assert "AttributeError" in log
        assert "internal error in judging the receipt" in done.stderr
        assert "Traceback" not in done.stderr
