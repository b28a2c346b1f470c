"""Jobs on torch's real ProcessGroupNCCL under `ncclops launch`, with the fake GPU below."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ncclops.diagnose import diagnose
from ncclops.diagnose.incident_report import report_incident
from ncclops.host.oom_kills import OomKills
from tests.conftest import CompletedText, free_port, run_ncclops
from tests.fakegpu.host import Host
from tests.fakegpu.place import Place
from tests.launch.conftest import Run

# The loss falls by a quarter with each step, whatever the number of ranks is. FAULT is a list of
# kind:rank, each of which happens once, two steps after the one before.
TRAINING = """
import ctypes, glob, os, signal, sys, time
import torch, torch.distributed as dist
STEPS = 20
faults, before = os.environ.get("FAULT", "").split(), len(glob.glob("faulted*"))
kind, victim = faults[before].split(":") if before < len(faults) else ("none", -1)

def set_rules(*lines):
    with open(f"rules{os.getpid()}", "w") as file:
        file.writelines(f"{line}\\n" for line in lines)
    os.replace(file.name, os.environ["FAKEGPU_CONTROL"])

def fail():
    open(f"faulted{before}", "w").close()
    if kind == "raise": raise RuntimeError("out of the blue")
    if kind == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if kind == "late":
        time.sleep(1)  # the others wait for the device
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang": time.sleep(1000)
    if kind == "gil": ctypes.PyDLL(None).sleep(1000)
    if kind == "exit": os._exit(3)
    if kind.endswith("Error"): set_rules(f"comm:* rank={victim} times=1 error={kind}")
    if kind == "nccl": set_rules(f"comm:* rank={victim} times=1 error=ncclRemoteError")
    if kind == "lost":
        set_rules(f"gpu {victim} lost=1 xid=79", f"device:* rank={victim} error=cudaErrorUnknown")
    if kind == "ecc":
        set_rules(
            f"gpu {victim} ecc_uncorrected=2 xid=95",
            f"device:* rank={victim} error=cudaErrorECCUncorrectable",
        )
    if kind == "abort":
        set_rules("ncclCommAbort rank=0 times=1 hang=forever")
        raise RuntimeError("an abort hangs")
    if kind == "held":
        while not os.path.exists("held"): time.sleep(0.01)
        raise RuntimeError("an abort hangs, and holds the main thread")

if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    set_rules()  # what struck the first processes is over
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
eagerly = {"device_id": device} if "EAGER" in os.environ else {}
dist.init_process_group(os.environ.get("BACKEND", "nccl"), **eagerly)
rank, world = dist.get_rank(), dist.get_world_size()
groups = [None]
if world == 4:  # pairs of tensor parallelism, and pipelines across them
    for members in ([0, 1], [2, 3], [0, 2], [1, 3]):
        group = dist.new_group(members)
        groups += [group] if rank in members else []
if kind == "pair" and rank == int(victim):
    time.sleep(1)  # the others come into NCCL
    open(f"faulted{before}", "w").close()
    raise RuntimeError("before the pairs are made")
if kind == "pair":
    for group in groups:
        dist.all_reduce(torch.ones(1, device=device), group=group)
begin, loss = torch.load("checkpoint") if os.path.exists("checkpoint") else (0, 8.0)
weight = torch.tensor([loss], device=device)
for step in range(begin, STEPS):
    if kind == "held" and rank == 0 and step == 2 + 2 * before:
        set_rules("ncclCommAbort rank=0 hang=forever", "device:allreduce rank=0 hang=forever")
        open("held", "w").close()
    if step == 2 + 2 * before and rank == int(victim):
        fail()
    gradient = weight * 0.25
    for group in groups:
        dist.all_reduce(gradient, group=group)
        gradient /= dist.get_world_size(group)
    weight = weight - gradient
    loss = weight.item()
    if rank == 0:
        torch.save((step + 1, loss), "checkpoint-new")
        os.replace("checkpoint-new", "checkpoint")
dist.barrier()
dist.destroy_process_group()
print(f"loss {loss:.6f} of {world}", flush=True)
"""
pytestmark = pytest.mark.timeout(320)
LOSS = f"loss {8 * 0.75**20:.6f}"


@pytest.fixture
def launch(fake_gpu_place: Place, host: Host, tmp_path: Path) -> Callable[..., CompletedText]:
    """``launch(*options, **variables)`` runs the training with the CUDA build of torch."""
    script = tmp_path / "train.py"
    script.write_text(TRAINING)

    def run(*options: str, **variables: str) -> CompletedText:
        environment = host.environment | variables
        arguments = ["launch", "--run-dir", "run", *options, str(script)]
        python = fake_gpu_place.python
        return run_ncclops(tmp_path, *arguments, env=environment, python=python, limit_s=300)

    return run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def name_of(gpu: int) -> str:
    """What people find a fake GPU by."""
    uuid = f"GPU-66616b65-6770-7500-0000-{gpu:012}"
    return f"GPU {gpu} ({uuid}, PCI 0000:{gpu + 1:02x}:00.0)"


HOST = socket.gethostname()
ECC = (
    f"{name_of(1)} on node {HOST}: uncorrectable ECC error encountered, Xid 95 (uncontained memory"
    f" error), 2 uncorrectable ECC errors; replace node {HOST}"
)


def check_names(run: Run, done: CompletedText, faults: dict[int, str]) -> None:
    """All that a person reads of the run names the GPUs of these ranks, and the node."""
    said = [f"rank {rank}: {fault}" for rank, fault in faults.items()]
    assert done.stderr.splitlines()[-1].endswith("; ".join(["", *said]).lstrip())
    events = {event["rank"]: event["fault"] for event in run.named("gpu-fault")}
    assert list(events.values()) == run.verdict["gpu_faults"]
    assert list(events) == list(faults)
    for rank, fault in events.items():
        words = f"{fault['device']} on node {fault['node']}: {fault['what']}"
        assert f"{words}; replace node {fault['node']}" == faults[rank]
    diagnosis = diagnose(run.path)
    report = report_incident(run.path, None)
    for rank, fault in events.items():
        assert faults[rank] in diagnosis.what
        assert report.sentence.startswith(f"rank {rank}: {faults[rank]}; ")
        advice = f"replace node {HOST}: rank {rank}'s {fault['device']}"
        assert advice == diagnosis.next_steps[0] == report.next_steps[0]


def blames(run: Run) -> list[tuple[str, int]]:
    """Kind and rank of the fault that each restart in place was for."""
    paths = sorted(run.path.glob("incidents/*/incident.json"), key=lambda p: int(p.parent.name))
    records = [json.loads(path.read_text()) for path in paths]
    return [(record["cause"], record["first_faulty_rank"]) for record in records]


def test_faults_of_all_kinds_one_after_the_other(
    launch: Callable[..., CompletedText], run: Run
) -> None:
    """No profile; groups over CPUs and GPUs, tensor and pipeline pairs."""
    done = launch(
        *("--nproc-per-node", "4", "--timeout", "soft=6s", "--timeout", "hard=10s"),
        BACKEND="cpu:gloo,cuda:nccl",
        FAULT="raise:1 nccl:2 hang:3 abort:1 gil:3 kill:0",
    )
    assert done.returncode == 0, done.stderr
    assert "driver 580.95.05 | GPU 8 × NVIDIA H200" in done.stderr
    assert "profile single-node-h200 (chosen: 1 node, 8 GPUs)" in done.stderr
    found = blames(run)
    # The agent and the restart core see it in the same second, with a soft timeout this short.
    assert found[2] in [("hung", 3), ("soft-timeout", 3)]
    assert found == [
        ("exception", 1),
        ("nccl-error", 2),
        found[2],
        ("exception", 1),
        ("died", 3),
        ("died", 0),
    ]
    events = [(event["kind"], event["rank"]) for event in run.named("fault")]
    assert events == blames(run)
    assert run.verdict["outcome"] == "completed"
    assert run.verdict["attempts"] == 1
    assert run.verdict["ranks_lost"] == [0, 3]
    assert "finished without ranks 0, 3" in done.stderr
    assert "rank 3 was killed by SIGTERM (hard timeout: no Python thread" in done.stderr
    assert [run.stdout(rank) for rank in (1, 2)] == [f"{LOSS} of 2\n"] * 2
    assert "abort is not done after" in run.worker_log(0)
    # The others wait for rank 0's abort, longer than a hang takes.
    (hung_abort,) = (each["ts"] for each in run.named("restart") if each["iteration"] == 4)
    assert not [each for each in run.named("hang") if 0 < hung_abort - each["ts"] < 5]


@pytest.mark.extended
def test_an_abort_that_hangs_ends_its_rank_long_before_the_hard_timeout(
    launch: Callable[..., CompletedText], run: Run
) -> None:
    done = launch("--nproc-per-node", "3", "--timeout", "abort=2s", FAULT="held:1")
    assert done.returncode == 0, done.stderr
    assert blames(run) == [("exception", 1)]
    assert (run.verdict["attempts"], run.verdict["ranks_lost"]) == (1, [0])
    assert [run.stdout(rank) for rank in (1, 2)] == [f"{LOSS} of 2\n"] * 2
    assert "rank 0 was killed by SIGTERM (the abort of its process groups has not" in done.stderr


@pytest.mark.parametrize("how", ["lazily", pytest.param("eagerly", marks=pytest.mark.extended)])
def test_a_communicator_that_does_not_come_up_costs_no_rank(
    launch: Callable[..., CompletedText], run: Run, host: Host, how: str
) -> None:
    """One rank fails in ncclCommInitRank; the other waits there, and no abort frees it."""
    host.set("ncclCommInitRank* rank=1 times=1 error=ncclSystemError")
    variables = {"EAGER": "1"} if how == "eagerly" else {}
    done = launch("--nproc-per-node", "2", **variables)
    assert done.returncode == 0, done.stderr
    (retry,) = run.named("retry")
    assert retry["reason"].startswith("new processes: rank 0 waited in NCCL")
    assert retry["changes"]["NCCLOPS_NCCL_INIT"] == "lazy"
    assert retry["reason"] + "\n" in (done.stderr)
    assert "watchdog acts after" not in run.stderr(0), "no timeout is in the way"
    assert blames(run)[0] == ("exception", 1)
    assert (run.verdict["attempts"], run.verdict["ranks_lost"]) == (2, [])
    assert [run.stdout(rank) for rank in (0, 1)] == [f"{LOSS} of 2\n"] * 2


@pytest.mark.extended
def test_a_communicator_that_never_comes_up_costs_no_rank(
    launch: Callable[..., CompletedText], run: Run, host: Host
) -> None:
    """One rank hangs in ncclCommInitRank, and the others with it: none is left to tell of it."""
    host.set("ncclCommInitRank* rank=1 times=1 hang=forever")
    done = launch("--nproc-per-node", "3", "--timeout", "soft=6s", "--timeout", "hard=60s")
    assert done.returncode == 0, done.stderr
    (retry,) = run.named("retry")
    assert "waited in NCCL for a communicator that did not come up" in retry["reason"]
    assert retry["changes"]["NCCLOPS_NCCL_INIT"] == "lazy"
    assert (run.verdict["attempts"], run.verdict["ranks_lost"]) == (2, [])
    assert [run.stdout(rank) for rank in (0, 1, 2)] == [f"{LOSS} of 3\n"] * 3


@pytest.mark.extended  # in the gate, the restart core's own tests have it on each lane
def test_exceptions_while_others_are_in_nccl_cost_no_rank(
    launch: Callable[..., CompletedText], run: Run, host: Host
) -> None:
    """The same exception is raised in the new processes, too, and mended by a restart in place."""
    done = launch("--nproc-per-node", "4", FAULT="pair:0 pair:3")
    assert done.returncode == 0, done.stderr
    (retry,) = run.named("retry")
    assert "waited in NCCL for a communicator that did not come up" in retry["reason"]
    assert ("exception", 0) in blames(run)
    assert ("exception", 3) in blames(run)
    assert (run.verdict["attempts"], run.verdict["ranks_lost"]) == (2, [])
    assert [run.stdout(rank) for rank in range(4)] == [f"{LOSS} of 4\n"] * 4


@pytest.mark.extended
def test_ranks_that_an_exception_finds_in_nccl_are_replaced_where_lost_ranks_come_back(
    launch: Callable[..., CompletedText], run: Run
) -> None:
    """The rank that raised keeps its process, and waits for nobody in vain."""
    done = launch("--nproc-per-node", "4", "--restart", "in-process:grow", FAULT="pair:3")
    assert done.returncode == 0, done.stderr
    (restart,) = run.named("restart")
    assert restart["ranks_returned"] == [0, 1, 2]
    assert (run.verdict["attempts"], run.verdict["ranks_lost"]) == (1, [])
    assert [run.stdout(rank) for rank in range(4)] == [f"{LOSS} of 4\n"] * 4


@pytest.mark.extended
def test_an_exception_while_the_other_nodes_are_in_nccl_is_told_on_all(
    launch: Callable[..., CompletedText], tmp_path: Path
) -> None:
    """Of the node that hosts the store, all ranks have to be ended: those elsewhere still tell."""
    port = free_port()

    def node(number: int) -> CompletedText:
        return launch(
            *("--run-dir", f"node-{number}", "--nnodes", "2", "--node-rank", str(number)),
            *("--master-addr", "127.0.0.1", "--master-port", str(port), "--nproc-per-node", "2"),
            FAULT="pair:3",
            CUDA_VISIBLE_DEVICES=f"{2 * number},{2 * number + 1}",
        )

    with ThreadPoolExecutor(2) as nodes:
        for done in nodes.map(node, range(2)):
            assert done.returncode == 0, done.stderr
            (why,) = [line for line in done.stderr.splitlines() if "attempt 2" in line]
            assert "waited in NCCL for a communicator that did not come up" in why
            assert why.endswith("after rank 3: RuntimeError: before the pairs are made")
    run = Run(tmp_path / "node-1")
    assert ("exception", 3) in blames(run)
    assert [run.stdout(rank) for rank in (2, 3)] == [f"{LOSS} of 4\n"] * 2


@pytest.mark.parametrize(
    ("fault", "cause", "kind", "retry"),
    [
        # In its first collective, of a communicator that had been made: no failure to start.
        pytest.param(
            "ncclRemoteError:1", (1, False), "peer-exit", "none", marks=pytest.mark.extended
        ),
        pytest.param(
            *("ncclSystemError:1", (1, True), "network-transport", "fix-config"),
            marks=pytest.mark.extended,
        ),
        pytest.param(
            *("ncclInternalError:1", (1, False), "network-transport", "none"),
            marks=pytest.mark.extended,
        ),
        pytest.param(
            *("exit:1", (1, True), "peer-exit", "none"),
            marks=pytest.mark.extended,
        ),
        # Where the kernel's counters of OOM kills can be read.
        pytest.param(
            *("kill:1", (1, True), "preempted", "retry-after-cooldown"),
            marks=[
                pytest.mark.extended,
                pytest.mark.skipif(not OomKills().are_ruled_out, reason="nothing counts OOM kills"),
            ],
        ),
    ],
)
def test_what_a_whole_run_is_classified_as(
    launch: Callable[..., CompletedText],
    run: Run,
    fault: str,
    cause: tuple[int, bool],
    kind: str,
    retry: str,
) -> None:
    """Ranks that torch's watchdog ends, not ours; the log is NCCL's whole one."""
    done = launch(
        *("--nproc-per-node", "2", "--restart", "none", "--warm-start"),
        FAULT=fault,
        FAKEGPU_NCCL_TRANSPORT="socket",
        NCCL_DEBUG="INFO",
        TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="1000",  # the watchdog waits a minute otherwise
    )
    assert done.returncode == 1, done.stderr
    classification = run.verdict["classification"]
    assert (classification["class"], classification["retry"]["policy"]) == (kind, retry)
    assert (classification["rank"], classification["rank_began_it"]) == cause


def test_a_corrupted_context_leads_to_new_processes(
    launch: Callable[..., CompletedText], run: Run, host: Host
) -> None:
    host.set("device:allreduce rank=1 nth=3 error=cudaErrorIllegalAddress")
    done = launch("--nproc-per-node", "2")
    assert done.returncode == 0, done.stderr
    (retry,) = run.named("retry")
    what = "an illegal memory access was encountered"
    reason = f"the CUDA context of rank 1 is corrupted: {what}, on {name_of(1)} on {HOST}"
    assert retry["reason"] == f"new processes: {reason}"
    assert f"the CUDA context on {name_of(1)} on {HOST} is lost" in run.stderr(1)
    (classified,) = run.named("classified")
    assert (classified["class"], classified["rank"]) == ("cuda-error", 1)
    assert run.verdict["gpu_faults"] == []
    assert blames(run)[0] == ("exception", 1)
    assert (run.verdict["attempts"], run.verdict["ranks_lost"]) == (2, [])
    assert [run.stdout(rank) for rank in (0, 1)] == [f"{LOSS} of 2\n"] * 2


def test_a_gpu_that_is_lost_costs_its_rank_alone(
    launch: Callable[..., CompletedText], run: Run
) -> None:
    done = launch("--nproc-per-node", "3", FAULT="lost:1")
    assert done.returncode == 0, done.stderr
    assert blames(run) == [("exception", 1)]
    assert run.verdict["attempts"] == 1
    assert run.verdict["ranks_lost"] == [1]
    assert [run.stdout(rank) for rank in (0, 2)] == [f"{LOSS} of 2\n"] * 2
    lost = "the GPU does not answer: GPU is lost"
    assert f"GpuUnusable: {name_of(1)} on {HOST}: {lost}" in run.stderr(1)
    what = f"Xid 79 (GPU has fallen off the bus), {lost}"
    check_names(run, done, {1: f"{name_of(1)} on node {HOST}: {what}; replace node {HOST}"})
    (xid,) = run.named("xid")
    assert (xid["rank"], xid["xid"], xid["device"]) == (1, 79, name_of(1))


@pytest.mark.extended
def test_a_gpu_with_an_ecc_error_costs_its_rank_alone(
    launch: Callable[..., CompletedText], run: Run
) -> None:
    done = launch("--nproc-per-node", "3", FAULT="ecc:1")
    assert done.returncode == 0, done.stderr
    assert run.verdict["attempts"] == 1
    assert run.verdict["ranks_lost"] == [1]
    assert [run.stdout(rank) for rank in (0, 2)] == [f"{LOSS} of 2\n"] * 2
    check_names(run, done, {1: ECC})


@pytest.mark.parametrize(
    "how",
    [pytest.param("process", marks=pytest.mark.extended), "in-process, all ranks are needed"],
)
@pytest.mark.extended
def test_no_process_is_started_on_a_broken_gpu_again(
    launch: Callable[..., CompletedText], run: Run, tmp_path: Path, how: str
) -> None:
    options = ["--nproc-per-node", "2", "--max-restarts", "2", "--restart", how.partition(",")[0]]
    if "needed" in how:
        profile = tmp_path / "all.toml"
        profile.write_text(
            'description = "For tests: no rank may be missing."\nkind = "lane"\nnodes = "any"\n'
            'extends = "single-node-h200"\n[restarts]\nmin_world_size = 0\n'
        )
        options += ["--profile", str(profile)]
    done = launch(*options, FAULT="ecc:1")
    assert done.returncode == 1, done.stderr
    assert run.verdict["attempts"] == 1
    assert run.named("retry") == []
    assert run.verdict["classification"]["class"] == "gpu-hardware"
    check_names(run, done, {1: ECC})
    assert run.verdict["reason"].endswith(ECC)


@pytest.mark.extended
def test_without_nvml_the_gpu_has_the_number_that_the_rank_was_given(
    launch: Callable[..., CompletedText], run: Run, host: Host
) -> None:
    host.set(
        "nvmlInit* error=NVML_ERROR_DRIVER_NOT_LOADED",
        "device:allreduce rank=1 nth=3 error=cudaErrorECCUncorrectable",
    )
    done = launch("--nproc-per-node", "2", "--restart", "process", CUDA_VISIBLE_DEVICES="3,5")
    assert done.returncode == 1, done.stderr
    what = "uncorrectable ECC error encountered"
    check_names(run, done, {1: f"GPU 5 on node {HOST}: {what}; replace node {HOST}"})


@pytest.mark.parametrize("recorder", [pytest.param("2000", marks=pytest.mark.extended), "0"])
def test_no_rank_goes_on_with_what_an_abort_has_left(
    launch: Callable[..., CompletedText], run: Path, recorder: str
) -> None:
    """The others are in an all_reduce: what it has not summed comes into no checkpoint.

    Also where the flight recorder keeps nothing, and cannot tell that it is pending.
    """
    done = launch(
        *("--nproc-per-node", "3", "--restart", "process", "--max-restarts", "1", "--warm-start"),
        FAULT="late:1",
        TORCH_FR_BUFFER_SIZE=recorder,
    )
    assert done.returncode == 0, done.stderr
    assert f"{LOSS} of 3" in done.stdout
