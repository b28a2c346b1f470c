"""Where a node is in its job, from what Slurm, Open MPI and Kubernetes give a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclops.errors import UsageError
from ncclops.launch.launch_config import place
from ncclops.schedulers.hostlist import expand
from ncclops.schedulers.node_options import NodeOptions
from ncclops.schedulers.placement import find_placement

# Recorded in the second task of a real step: Slurm 22.05, sbatch -N2, srun --ntasks-per-node=1.
RECORDED = Path(__file__).with_name("slurm_step.env").read_text().splitlines()
STEP = dict(line.split("=", 1) for line in RECORDED) | {
    "SLURM_GPUS_ON_NODE": "8",  # that machine had none
    "SLURM_CONF": "/etc/slurm/slurm.conf",
}
POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "4",
    "RANK": "2",
}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[08-10,12],x", ["gpu08", "gpu09", "gpu10", "gpu12", "x"]),
        ("a[1-2]b[3-4]", ["a1b3", "a1b4", "a2b3", "a2b4"]),
        ("r1n[1,3]-ib,login", ["r1n1-ib", "r1n3-ib", "login"]),
    ],
)
def test_lists_of_hosts_are_written_out(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize("text", ["n[1-3", "n[a-b]", "n]1["])
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="list of hosts"):
        expand(text)


@pytest.mark.parametrize("text", ["n[1-999999999]", "n[1-90000]m[1-90000]", f"n[1-{'9' * 5000}]"])
def test_a_list_of_more_hosts_than_there_are_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="more than 100,000 hosts"):
        expand(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_STEP_NODELIST", "[[["),
        ("SLURM_STEP_NODELIST", "n[1-999999999]"),
        ("SLURM_STEP_NUM_TASKS", "x"),
        ("SLURM_STEP_NUM_NODES", "1e9"),
        ("SLURM_STEP_NUM_NODES", "\u00b2"),
        ("SLURM_NODEID", "-1"),
    ],
)
def test_a_damaged_variable_of_slurm_is_named(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=name):
        find_placement(STEP | {name: value})


@pytest.mark.parametrize("name", ["SLURM_NNODES", "SLURM_STEP_NUM_NODES"])
@pytest.mark.parametrize(
    "step", [{}, {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}], ids=["script", "step"]
)
def test_a_damaged_number_of_nodes_has_the_name_it_was_read_by(
    name: str, step: dict[str, str]
) -> None:
    with pytest.raises(UsageError, match=f"^{name}=1e9 "):
        find_placement({"SLURM_JOB_ID": "1", name: "1e9", **step})


def test_a_rank_without_a_number_of_nodes_is_refused() -> None:
    """Else each host would train for itself, unnoticed."""
    with pytest.raises(UsageError, match="--nnodes"):
        place(NodeOptions(node_rank=1, master_addr="n1"), environ={})
    with pytest.raises(UsageError, match="--nnodes"):
        place(NodeOptions(node_rank=1, nnodes="1"), environ={})
    assert place(NodeOptions(node_rank=0), environ={}).rendezvous is None
    assert place(NodeOptions(node_rank=1), environ={}, standalone=True).rendezvous is None


def test_a_slurm_step_needs_no_option() -> None:
    placed = place(NodeOptions(), environ=STEP)
    rendezvous = placed.rendezvous
    assert rendezvous is not None
    assert (rendezvous.backend, rendezvous.active, rendezvous.most, rendezvous.rank) == (
        "static",
        2,
        2,
        1,
    )
    assert rendezvous.host == "gpu08"
    assert rendezvous.expected == ("gpu08", "gpu09")
    assert placed.nproc == "8"
    assert placed.remarks == ("Slurm step 1.0: 2 nodes, this is node 1",)


def test_all_nodes_of_a_step_derive_the_same_port_and_other_steps_another_one() -> None:
    ports = {
        name: found.options.master_port
        for name, found in {
            "node 0": find_placement(STEP | {"SLURM_NODEID": "0"}),
            "node 1": find_placement(STEP),
            "next step": find_placement(STEP | {"SLURM_STEP_ID": "1"}),
            "next job": find_placement(STEP | {"SLURM_JOB_ID": "2"}),
        }.items()
        if found is not None
    }
    assert ports["node 0"] == ports["node 1"]
    assert len(set(ports.values())) == 3


def test_the_command_line_comes_before_the_step() -> None:
    placed = place(NodeOptions(nnodes="1:2", rdzv_endpoint="store:29400", nproc="4"), environ=STEP)
    assert placed.rendezvous is not None
    assert (placed.rendezvous.backend, placed.rendezvous.host) == ("c10d", "store")
    assert (placed.rendezvous.active, placed.rendezvous.most, placed.rendezvous.rank) == (
        1,
        2,
        None,
    )
    assert placed.rendezvous.job_id == "slurm-1.0.0"
    assert placed.nproc == "4"


def test_standalone_is_one_node_wherever_it_runs() -> None:
    assert place(NodeOptions(), standalone=True, environ=STEP).rendezvous is None
    with pytest.raises(UsageError, match=r"--standalone is one node: .* --nnodes 2"):
        place(NodeOptions(nnodes="2"), standalone=True, environ={})


def test_a_task_per_gpu_is_refused_with_what_to_write_instead() -> None:
    with pytest.raises(UsageError, match="--ntasks-per-node=1"):
        place(NodeOptions(), environ=STEP | {"SLURM_STEP_NUM_TASKS": "16"})
    with pytest.raises(UsageError, match="-npernode 1"):
        place(
            NodeOptions(), environ={"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
        )


def test_the_batch_script_of_several_nodes_runs_on_one_and_says_so() -> None:
    batch = {k: v for k, v in STEP.items() if "STEP" not in k}
    placed = place(NodeOptions(), environ=batch)
    assert placed.rendezvous is None
    assert "srun --ntasks-per-node=1" in placed.remarks[0]


def test_gpus_are_counted_from_a_list_where_slurm_gives_no_number() -> None:
    step = {k: v for k, v in STEP.items() if k != "SLURM_GPUS_ON_NODE"}
    assert place(NodeOptions(), environ=step | {"SLURM_STEP_GPUS": "0-2,5"}).nproc == "4"
    assert place(NodeOptions(), environ=step).nproc == "auto"


def test_open_mpi_gives_number_rank_and_mpiruns_own_address() -> None:
    placed = place(
        NodeOptions(),
        environ={
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            "OMPI_MCA_orte_hnp_uri": "123.0;tcp://10.1.2.3,192.168.0.3:40001",
        },
    )
    assert placed.rendezvous is not None
    assert (placed.rendezvous.active, placed.rendezvous.rank) == (4, 3)
    assert placed.rendezvous.address == "10.1.2.3:29500"


def test_a_pod_of_a_pytorchjob_is_a_node() -> None:
    placed = place(NodeOptions(), environ=POD)
    assert placed.rendezvous is not None
    assert (placed.rendezvous.active, placed.rendezvous.rank) == (4, 2)
    assert placed.rendezvous.address == "train-master-0:23456"


@pytest.mark.parametrize(
    ("name", "asked"),
    [("MASTER_ADDR", "--master-addr"), ("RANK", "RANK="), ("MASTER_PORT", "MASTER_PORT=")],
)
def test_a_pod_that_is_told_half_of_its_place_is_no_job_of_its_own(name: str, asked: str) -> None:
    with pytest.raises(UsageError, match=asked):
        place(NodeOptions(), environ=POD | {name: ""})
    single = place(NodeOptions(), environ=POD | {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": ""})
    assert single.rendezvous is None


def test_those_names_mean_nothing_outside_a_pod_or_inside_another_launchers_worker() -> None:
    shell = {k: v for k, v in POD.items() if k != "KUBERNETES_SERVICE_HOST"}
    assert place(NodeOptions(), environ=shell).rendezvous is None
    assert place(NodeOptions(), environ=POD | {"LOCAL_RANK": "0"}).rendezvous is None


def test_torchruns_own_variables_come_first() -> None:
    placed = place(
        NodeOptions(),
        environ=POD
        | {
            "PET_NNODES": "2:3",
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ENDPOINT": "train-master-0:29400",
            "PET_RDZV_ID": "train",
            "PET_NPROC_PER_NODE": "8",
            "PET_MAX_RESTARTS": "2",
        },
    )
    assert placed.rendezvous is not None
    assert (placed.rendezvous.backend, placed.rendezvous.active, placed.rendezvous.most) == (
        "c10d",
        2,
        3,
    )
    assert (placed.rendezvous.job_id, placed.nproc, placed.max_restarts) == ("train", "8", 2)


def test_location_variables_survive_every_shipped_profile() -> None:
    from ncclops.env import Overrides, PlanContext, compute_plan
    from ncclops.profiles import list_profiles, load_profiles

    lanes = [each.name for each in list_profiles() if each.kind == "lane"]
    assert lanes
    for name in lanes:
        plan = compute_plan(load_profiles([name]), STEP, Overrides(), PlanContext())
        assert plan.apply(STEP, {"run_dir": "r", "rank_dir": "r"}).items() >= STEP.items()
